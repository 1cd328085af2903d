"""Lock of the GPU, timing and small helpers."""
import contextlib, fcntl, os, statistics, sys, time
START = float(os.environ.get("M48_START", time.time()))
import jax, jax.numpy as jnp, numpy as np

ON_GPU = jax.default_backend() == "gpu"
TAG = os.environ.get("M48_TAG", "")

def say(*words):
    line = " ".join(map(str, words))
    print(f"{time.time() - START:5.1f}s {TAG}{line}", flush=True)

@contextlib.contextmanager
def gpu():
    with open("/tmp/m48.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield

def us(call, sets, samples=10):
    """(microseconds, [(kernel, us)])."""
    if not ON_GPU:
        jax.block_until_ready(call(*sets[0]))
        return 0.0, []
    from benchmarks.run import timing
    s = timing.cupti(call, sets, samples)
    return statistics.median(s.microseconds), s.kernels

def short(kernels, least=8.0):
    out = []
    for name, t in kernels:
        if t >= least:
            name = name.replace("attention_", "").replace("mosaic_gpu_", "")[:34]
            out.append(f"{name} {t:.0f}")
    return ", ".join(out) + f" ({len(kernels)} kernels)"

def normal(seed, *shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes))

def err(a, t):
    a, t = (np.asarray(x, np.float32) for x in (a, t))
    return float(np.abs(a - t).max() / np.abs(t).max()), float(np.sqrt(((a - t) ** 2).mean() / (t ** 2).mean()))

def guarded(f, *args):
    try:
        return f(*args)
    except Exception as e:
        lines = str(e).strip().splitlines() or [""]
        say("FAILED", f.__name__, args[:1], type(e).__name__, lines[0][:300])
