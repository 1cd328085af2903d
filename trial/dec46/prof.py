"""prof.py OUT SECONDS: steps of 8 layers of the 8 B Llama, by kernel, under other choices of append and norm."""
import collections, concurrent.futures as cf, dataclasses, json, re, sys, time, tempfile
from pathlib import Path
T0 = time.time(); out, limit = sys.argv[1], float(sys.argv[2])
import jax, jax.numpy as jnp
from benchmarks.whole import language_model as lm
from benchmarks.run import timing
from examples.lm import speed
from examples.lm.loading import quantized
from jaxfused.ops.norm import layer_norm_regimes as regimes
from jaxfused.ops.serving import append_stages
from jaxfused.runtime.estimate import Rule
TINY = "tiny" in sys.argv
D = 8
config = speed.SHAPES["llama-8b"]
config = dataclasses.replace(config, depth=D, windows=config.windows[:D], ropes=config.ropes[:D])
if TINY:
    from examples.lm.config import Rope
    config = dataclasses.replace(config, width=64, depth=2, heads=4, key_heads=2, head_size=16, hidden=128, vocabulary=264, scale=0.25, windows=(None,)*2, ropes=(Rope(16, 1e4),)*2)
models = {"float": speed.random_model(config, "bfloat16", "float")}
models["int4"] = quantized(models["float"], "int4")
from jaxfused.runtime import product_regimes
forward0, small0, estimate0, most0 = regimes.forward, regimes.Norm.is_small, append_stages.Append.estimate, product_regimes._MOST_WEIGHTS
def variant(append=False, norm=False, mlp=False):
    append_stages.Append.estimate = (lambda s, d, a, *o: Rule(("cuda",), "trial")) if append else estimate0
    regimes.Norm.is_small = property(lambda s: False) if norm else small0
    product_regimes._MOST_WEIGHTS = 1e6 if mlp else most0
    jax.clear_caches()
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1000000}
ON = jax.default_backend() == "gpu"
A = dict(append=ON)
variants = [  # name, variant, choices, compiler options, donate
    ("b1 int4", "no graphs", {}, NO_GRAPHS, 1),
    ("b1 int4", "today", {}, {}, 1),
    ("b1 int4", "tokens donated", {}, {}, (1, 2)),
    ("b1", "no graphs", {}, NO_GRAPHS, 1),
    ("b1", "today", {}, {}, 1),
    ("b1 int4", "append", A, {}, 1),
    ("b1 int4", "append norm", A | dict(norm=ON), {}, 1),
    ("b1", "append", A, {}, 1),
    ("b1", "append norm", A | dict(norm=ON), {}, 1),
    ("b1", "append norm mlp", A | dict(norm=ON, mlp=ON), {}, 1),
    ("b1 int4", "append norm no graphs", A | dict(norm=ON), NO_GRAPHS, 1),
    ("b16", "no graphs", {}, NO_GRAPHS, 1),
    ("b16", "today", {}, {}, 1),
    ("b16", "append", A, {}, 1),
    ("b16", "append mlp", A | dict(mlp=ON), {}, 1),
]
if not ON: variants = [(n, v, c, {}, d) for n, v, c, o, d in variants]
def profile(call):
    o = jax.profiler.ProfileOptions(); o.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=o): call()
        planes = [p for f in Path(folder).rglob("*.pb") for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    host = collections.Counter(e.name for p in planes for l in p.lines for e in l.events if "Launch" in e.name or "Graph" in e.name)
    kernels = collections.OrderedDict()
    for p in planes:
        if "GPU" not in p.name: continue
        for l in p.lines:
            if "tream" not in l.name: continue
            for e in l.events:
                key = re.sub(r"[._]?\d+$", "", e.name)
                n, t = kernels.get(key, (0, 0.0)); kernels[key] = n + 1, t + e.duration_ns / 1e3
    return dict(host.most_common(6)), {a: [n, round(t, 1)] for a, (n, t) in kernels.items()}
pool = cf.ThreadPoolExecutor(14)
jobs, lowered = {}, {}
for name, v, choices, options, donate in variants:
    p = lm._Program(lm.ROWS[name], models[lm.ROWS[name].format], TINY)
    try:
        key = name, tuple(sorted(choices.items())), donate
        if key not in lowered:
            variant(**choices)
            tokens = jax.ShapeDtypeStruct((p.batch,), jnp.int32)
            lowered[key] = jax.jit(p._step, donate_argnums=donate).lower(p._params, jax.eval_shape(p._cache), tokens)
        low = lowered[key]
        jobs[name, v] = p, pool.submit(lambda low=low, options=options: low.compile(compiler_options=options))
    except Exception as e: print(name, v, "lowering", repr(e)[:300], flush=True)
print("lowered", round(time.time() - T0), flush=True)
rows = {}
for (name, v), (p, future) in jobs.items():
    try:
        c = future.result()
        cache, tokens = jax.jit(p._cache)(), jnp.ones(p.batch, jnp.int32)
        cache, tokens, largest = c(p._params, cache, tokens)
        numbers = [float(x) for x in largest[:3]]
        state = [cache, tokens]
        def run(n):
            t = time.perf_counter()
            for _ in range(n): state[0], state[1], _m = c(p._params, *state)
            t = (time.perf_counter() - t) / n * 1e3
            jax.block_until_ready(state[1])
            return t
        run(3)
        ms, host = [], []
        for _ in range(4):
            t = time.perf_counter(); host.append(round(run(12), 3)); ms.append(round((time.perf_counter() - t) / 12e-3, 3))
        row = dict(ms=ms, host=host, largest=numbers)
        print(round(time.time() - T0), name, v, row, flush=True)
        if v in ("no graphs", "today", "append norm mlp", "append norm no graphs"):
            row["launches"], row["kernels"] = profile(lambda: run(1))
            row["sum"] = round(sum(t for _, t in row["kernels"].values()), 1)
            print("   ", row["launches"], row["sum"], sum(n for n, _ in row["kernels"].values()))
            for a, (n, t) in sorted(row["kernels"].items(), key=lambda x: -x[1][1])[:22]: print("     ", n, t, a[:60], flush=True)
    except Exception as e:
        row = dict(failed=repr(e)[:400]); print(name, v, row, flush=True)
    rows[f"{name} {v}"] = row
    json.dump(rows, open(out + "/dec46.json", "w"))
    if time.time() - T0 > limit: break
import os; os._exit(0)
