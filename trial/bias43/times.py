"""times.py TAG [CASE ...]: kernel times of attention with a bias or a score_mod, forward and with gradients."""
import functools, statistics, sys, time

import jax, jax.numpy as jnp

import jaxfused

TAG, START = sys.argv[1], time.time()
ON_GPU = jax.default_backend() == "gpu"
CUT = 1 if ON_GPU else 16


def us(call, sets):
    if not ON_GPU:
        jax.block_until_ready(call(*sets[0]))
        return 0.0, []
    from benchmarks.run import timing

    samples = timing.cupti(call, sets, 20)
    return statistics.median(samples.microseconds), samples.kernels


def alibi(score, b, h, q, k):
    return score - 0.01 * (h + 1.0) * (q - k)


CASES = [  # name, B, T, S, N, K, H, shape of the bias, options
    ("swin", 256, 49, 49, 12, 12, 32, (1, 12, 49, 49), {}),
    ("own", 4, 1024, 1024, 16, 16, 64, (4, 16, 1024, 1024), {}),
    ("t5", 4, 1024, 1024, 16, 16, 64, (1, 16, 1024, 1024), {}),
    ("own128", 4, 1024, 1024, 16, 16, 128, (4, 16, 1024, 1024), {}),
    ("vit196", 64, 196, 196, 12, 12, 64, (1, 12, 196, 196), {}),
    ("mask", 4, 4096, 4096, 16, 16, 128, (4, 1, 1, 4096), {}),
    ("decode", 16, 1, 8192, 16, 4, 128, (16, 1, 1, 8192), {}),
    ("alibi 4x4096", 4, 4096, 4096, 16, 16, 128, None, dict(score_mod=alibi, is_causal=True)),
    ("alibi 8x8192", 8, 8192, 8192, 16, 16, 128, None, dict(score_mod=alibi, is_causal=True)),
    ("tanh score", 4, 2048, 2048, 16, 16, 128, None, dict(score_mod=lambda s, b, h, q, k: 20 * jnp.tanh(s / 20))),
]
CHOSEN = sys.argv[2:]
for name, b, t, s, n, k, h, bias, options in CASES:
    if CHOSEN and name not in CHOSEN:
        continue
    if not ON_GPU:
        b, t, s = 1, min(t, 64), min(s, 64)
        bias = bias and (1, bias[1], *(min(x, 64) for x in bias[2:]))

    def arrays(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, h), *([bias] if bias else []))
        return tuple(jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes))

    f = functools.partial(jaxfused.dot_product_attention, implementation="pallas" if ON_GPU else None, **options)

    def both(*args):
        out, vjp = jax.vjp(f, *args)
        return vjp(out)

    try:
        sets = [arrays(i) for i in range(3)]
        # The second line shows the forward's kernels too.
        for what, call in (("forward", jax.jit(f)), ("with gradients", jax.jit(both)))[name != "swin" :]:
            value, kernels = us(call, sets)
            shown = ", ".join(f"{k.replace('_mosaic_gpu_kernel', '').replace('attention_', '')[-24:]} {v:.0f}" for k, v in kernels if v > 4)
            print(f"{time.time() - START:5.1f}s {TAG:6} {name:13} {what:14} {value:9.1f} us  {shown}", flush=True)
    except Exception as error:
        print(TAG, name, "FAILED", str(error).splitlines()[0][:200], flush=True)
