"""few.py OUT SECONDS: qkv_projection forward of few tiles, the kernel beside XLA; what main chooses."""
import concurrent.futures as cf, functools, json, random, statistics, sys, time
T0 = time.time(); out, limit = sys.argv[1], float(sys.argv[2])
import jax, jax.numpy as jnp, jaxfused
from jaxfused import dispatch
from benchmarks.run import timing
ON = jax.default_backend() == "gpu"
R = random.Random(36)
cases = [(1028, 1536, 3, 1, 128, "bias rope"), (2280, 1280, 2, 8, 80, "bias norm")]
while len(cases) < 64:
    m = R.choice((128, 197, 256, 400, 512, 785, 1028, 1576, 2048, 3152))
    k = R.choice((192, 384, 768, 1024, 1536, 2048, 2560))
    h = R.choice((64, 64, 128, 80, 96)); kv = R.choice((1, 2, 3, 4, 6, 8, 12)); g = R.choice((1, 1, 2, 4))
    n = (kv * g + 2 * kv) * h
    if not 100_000 < m * n < 3_000_000 or n > 4608: continue
    cases.append((m, k, kv, g, h, R.choice(("rope", "bias rope", "bias norm", "norm rope", "norm"))))
if not ON: cases = cases[:3]
def program(case, impl):
    m, k, kv, g, h, o = case
    x = jax.ShapeDtypeStruct((1, m, k), jnp.bfloat16); w = jax.ShapeDtypeStruct((k, (kv * g + 2 * kv) * h), jnp.bfloat16)
    more = {}
    if "bias" in o: more["bias"] = jax.ShapeDtypeStruct(w.shape[1:], jnp.bfloat16)
    if "norm" in o: more |= {n: jax.ShapeDtypeStruct((h,), jnp.bfloat16) for n in ("q_scale", "k_scale")}
    if "rope" in o: more |= {n: jax.ShapeDtypeStruct((m, h // 2), jnp.float32) for n in ("cos", "sin")}
    f = lambda x, w, more: jaxfused.qkv_projection(x, w, heads=kv * g, key_heads=kv, implementation=impl if ON else None, **more)
    return f, (x, w, more)
def chosen(case):
    f, a = program(case, None)
    f = lambda x, w, more: jaxfused.qkv_projection(x, w, heads=case[2] * case[3], key_heads=case[2], **more)
    with dispatch.recorded() as choices: jax.jit(f).lower(*a)
    return [c.implementation for c in choices if "forward" in c.stage][:1]
choice = {c: chosen(c) for c in cases}
jobs = {}
pool = cf.ThreadPoolExecutor(14)
for c in cases:
    try:
        lows = {impl: (jax.jit(f).lower(*a), a) for impl in ("pallas", "xla") for f, a in [program(c, impl)]}
    except ValueError: continue
    for impl, (low, a) in lows.items(): jobs[c, impl] = pool.submit(low.compile), a
print("lowered", round(time.time() - T0, 1), flush=True)
cf.wait([j for j, _ in jobs.values()], timeout=limit - (time.time() - T0) - 20)
print("compiled", round(time.time() - T0, 1), flush=True)
def arrays(a, seed):
    leaves, tree = jax.tree.flatten(a); keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [jax.random.normal(key, l.shape, l.dtype) for key, l in zip(keys, leaves)])
rows = []
for c in cases:
    if time.time() - T0 > limit: break
    if (c, 'xla') not in jobs: continue
    t = {}
    for impl in ("pallas", "xla"):
        j, a = jobs[c, impl]
        if not j.done(): continue
        try:
            sets = [arrays(a, i) for i in range(3)]
            if not ON: jax.block_until_ready(j.result()(*sets[0])); t[impl] = 1.0; continue
            t[impl] = statistics.median(timing.cupti(j.result(), sets, 12).microseconds)
        except Exception as e: print(c, impl, repr(e)[:200], flush=True)
    if len(t) == 2:
        m, k, kv, g, h, o = c; n = (kv * g + 2 * kv) * h
        rows.append(dict(case=c, m=m, k=k, n=n, chosen=choice[c], **t))
        print(f"{t['xla'] / t['pallas']:.2f} pallas {t['pallas']:.1f} xla {t['xla']:.1f} chosen {choice[c]} m {m} k {k} n {n} tiles {-(-m//128) * -(-n//128)} elements {m*n:,} head {h} {o}", flush=True)
json.dump(rows, open(out + "/few.json", "w"))
import os; os._exit(0)
