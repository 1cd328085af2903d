import sys, time, statistics
import jax, jax.numpy as jnp, numpy as np
import jaxfused
small = jax.default_backend() == "cpu"
N, D, V, F = (64, 32, 64, 96) if small else (8192, 2048, 32000, 5632)
if small:
    from jaxfused.fusion.recognisers import cross_entropy
    cross_entropy.FEWEST_LOGITS = 1
def picked(z, y): return jnp.take_along_axis(z, y[..., None], -1)[..., 0]
def z_loss(z, y):
    lse = jax.nn.logsumexp(z, -1); return (lse - picked(z, y) + 1e-4 * lse**2).mean()
def smoothed(z, y):
    l = jax.nn.log_softmax(z); return (-0.9 * picked(l, y) - 0.1 * l.mean(-1)).mean()
def cut(z, y): return -picked(jax.nn.log_softmax(z)[:-64 if not small else -8], y[:-64 if not small else -8]).mean()
def capped(z, y): return z_loss(30.0 * jnp.tanh(z / 30.0), y)
def of(loss): return lambda x, w, y: loss((x @ w).astype(jnp.float32), y)
def of_true(loss): return lambda x, w, y: loss(jnp.dot(x, w, precision="highest"), y)
k = jax.random.split(jax.random.key(0), 6)
x = jax.random.normal(k[0], (N, D), jnp.bfloat16); w = (jax.random.normal(k[1], (D, V)) * D**-0.5).astype(jnp.bfloat16)
y = jax.random.randint(k[2], (N,), 0, V)
def rel(a, b):
    a, b = (np.asarray(t, np.float64) for t in (a, b)); return float(np.linalg.norm(a - b) / np.linalg.norm(b))
def milliseconds(f, *args):
    jax.block_until_ready(f(*args)); took = []
    for _ in range(2 if small else 8):
        t = time.perf_counter(); jax.block_until_ready(f(*args)); took.append(time.perf_counter() - t)
    return 1e3 * statistics.median(took)
def compiled(f, args, argnums):
    c = jax.jit(jax.value_and_grad(f, argnums)).lower(*args).compile(); m = c.memory_analysis()
    return c, (m.temp_size_in_bytes if m else 0) / 2**20
gu = (jax.random.normal(k[3], (D, 2 * F)) * D**-0.5).astype(jnp.bfloat16); dn = (jax.random.normal(k[4], (F, D)) * F**-0.5).astype(jnp.bfloat16)
def interleaved(x, gu, dn):
    h = x @ gu; return ((jax.nn.silu(h[..., ::2]) * h[..., 1::2]) @ dn).astype(jnp.float32).sum()
for rows in (64,) if small else (8192, 4096):
    args = (x[:rows], gu, dn)
    for name, f in (("fused", jaxfused.fuse(interleaved)), ("plain", interleaved)):
        forward = jax.jit(f).lower(*args).compile(); c, mib = compiled(f, args, (0, 1, 2))
        print(f"gates of {rows} rows, {name}: forward"
              f" {milliseconds(forward, *args):.3f} ms, with gradients {milliseconds(c, *args):.3f} ms", flush=True)
