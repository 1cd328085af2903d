"""Gradient of a bias that batch entries share, in the short kernels: right, repeatable, and how long."""
import time, numpy as np, jax, jax.numpy as jnp
import jaxfused
from benchmarks.run import timing
print("device", jax.devices()[0].device_kind, flush=True)

def attend(q, k, v, b):
    return jaxfused.dot_product_attention(q, k, v, bias=b)

def plain(q, k, v, b):
    n = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, n, 2) for a in (k, v))
    z = jnp.einsum("bqhc,bkhc->bhqk", q * q.shape[-1] ** -0.5, k) + b
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(z, -1), v)

def gradients(f):
    return lambda dy, *a: jax.vjp(f, *a)[1](dy)

def norm(a):
    return float(jnp.linalg.norm(a.astype(jnp.float32).ravel()))

for B, T, S, N, K, H, shape in [
    (256, 256, 256, 4, 4, 32, (1, 4, 256, 256)),
    (256, 49, 49, 12, 12, 32, (1, 12, 49, 49)),
    (60, 70, 90, 8, 4, 32, (1, 8, 70, 90)),
    (40, 70, 90, 6, 6, 64, (40, 1, 70, 90)),
]:
    keys = jax.random.split(jax.random.key(B + T), 5)
    shapes = ((B, T, N, H), (B, T, N, H), (B, S, K, H), (B, S, K, H), shape)
    dy, q, k, v, b = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes))
    args = (dy, q, k, v, b)
    with jax.default_matmul_precision("highest"):
        truth = jax.jit(gradients(plain))(*(a.astype(jnp.float32) for a in args))
    stock = jax.jit(gradients(plain))(*args)
    line, times = [], []
    for least in (0.875,):
        run = jax.jit(gradients(attend)).lower(*args).compile()
        got, again = run(*args), run(*args)
        same = all(bool((x == y).all()) for x, y in zip(got, again))
        ours = [norm(g - t) / norm(t) for g, t in zip(got, truth)]
        theirs = [norm(g - t) / norm(t) for g, t in zip(stock, truth)]
        ok = all(o <= 2 * s + 2**-8 for o, s in zip(ours, theirs)) and same
        try:
            found = timing.kernels(lambda: run(*args))
            own = sum(t for _, t in found)
            back = sum(t for n, t in found if "short_backward" in n)
        except Exception as error:
            own = back = float("nan"); print(repr(error)[:200])
        line.append(f"{'summed' if least < 1 else 'before'}: {'right' if ok else 'WRONG'} dbias {ours[3]:.2e} (stock {theirs[3]:.2e}) kernels {own:.1f} us, backward {back:.1f}")
    print((B, T, S, N, K, H), shape, *line, sep="\n    ", flush=True)
