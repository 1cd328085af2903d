"""The trial's timing part on this CPU, with the emulator and no clock: mock2.py EMU_SO."""
import sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp
import trial
import benchmarks.sweep.judge as judge
from benchmarks.run import timing
trial.CHECKED = [(640, 36)]
trial.SHAPES = [(512, 144), (768, 96)]
for f in trial.ALL_WAYS: trial.ALL_WAYS[f] = [w for w in trial.ALL_WAYS[f] if w[2] == 4 and w[1] == 1][:2]
trial.TIMED = [(512, 144, 1, f) for f in ("int4_128", "mxfp4", "nf4")] + [(768, 96, 4, "int4_128"), (512, 144, 1, "zero_128"), (512, 144, 1, "int4_32")]
trial.ways = lambda f, m: trial.ALL_WAYS.get(f, trial.PLAIN[f])
trial.ProcessPoolExecutor = lambda n, c: ThreadPoolExecutor(1)
real = trial.plan
trial.plan = lambda *a: real(*a[:5], 4, 4)
def lower(job):
    name, fmt, m, k, n = job
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    if name == "bf16":
        return jax.jit(lambda x, w: x @ w).lower(x, jax.ShapeDtypeStruct((k, n), jnp.bfloat16))
    shapes = [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in trial.arrays(fmt, k, n)]
    return jax.jit(lambda x, v, *s: jnp.zeros((m, n))).lower(x, *shapes)
trial.lower = lower
judge.compile_module = lambda m: m.compile()
def interleaved(calls, sets, seconds):
    for c in calls.values(): jax.block_until_ready(c())
    return {n: timing.Samples([1.0, 2.0], [("k", 1.0)]) for n in calls}
timing.interleaved = interleaved
register = jax.ffi.register_ffi_target
jax.ffi.register_ffi_target = lambda n, c, platform: register(n, c, platform="cpu")
sys.argv = ["trial", sys.argv[1], sys.argv[1], "/tmp/x.json"]
trial.main()
