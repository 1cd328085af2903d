"""trial.py OUT SECONDS SO: the CUDA C kernel of caches with another merge (SO) and as it is, beside equal splits: right?, us."""
import dataclasses, functools, json, os, statistics, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
T0 = time.time()
out, limit = sys.argv[1], float(sys.argv[2])
TINY = "tiny" in sys.argv
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import mosaic  # noqa: F401
from jaxfused.ops.serving import cached_attention_cuda
from jaxfused.tuning import timing
from pallas_kernels.attention import split_keys
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.split_keys import SplitForwardConfig
H, K, N, SMS = 128, 8, 32, 132
if TINY: from tests.support.lowering import kernels
def now(): return round(time.time() - T0)
def say(*a): print(now(), *a, flush=True)
def logits_of(t, s, window=None, counts=False, sinks=False, cap=None):
    mask = BlockMask(t, s, is_causal=t > 1, window=window, has_query_offset=t > 1 or window is not None, has_query_lengths=counts, has_key_lengths=True)
    return Logits(H**-0.5, mask, cap, has_sinks=sinks)
local, real_call = threading.local(), jax.ffi.ffi_call
if not TINY:
    import ctypes
    lib = ctypes.cdll.LoadLibrary(sys.argv[3])
    jax.ffi.register_ffi_target("jaxfused_cached_attention_new", jax.ffi.pycapsule(lib.jaxfused_cached_attention), platform="CUDA")
def ffi_call(name, *a, **k): return real_call(name + getattr(local, "suffix", ""), *a, **k)
jax.ffi.ffi_call = ffi_call
def equal(q, k, v, lengths, config=None):
    s = k.shape[1]
    logits = logits_of(1, s)
    ops = Operands(key_lengths=jnp.clip(lengths, 0, s))
    return split_keys.forward(q, k, v, ops, logits=logits, multiprocessors=SMS, config=config)[0]
def cuda(q, k, v, lengths, suffix="", sinks=None):
    b, t, n, h = q.shape
    local.suffix = suffix
    cache = cached_attention_cuda.Cache(k, v, None, None, None)
    lengths = jnp.minimum(lengths, k.shape[1])
    o = cached_attention_cuda.forward(q.reshape(b, t, K, n // K, h), cache, lengths=lengths, offsets=lengths - t, counts=None, sinks=None if sinks is None else sinks.reshape(K, -1),
        heads_first=False, kept=k.dtype, layer_pages=None, window=None, scale=H**-0.5, soft_cap=None, multiprocessors=SMS)
    local.suffix = ""
    return o.reshape(q.shape)
new = functools.partial(cuda, suffix="_new")
def truth(q, k, v, lengths, window=None, sinks=None, counts=None, cap=None):
    """Float32 with exact products, a sequence at a time."""
    def one(q, k, v, length, count):
        t, s = q.shape[0], k.shape[0]
        with jax.default_matmul_precision("highest"):
            x = jnp.einsum("tkgh,skh->kgts", q.reshape(t, K, -1, H).astype(jnp.float32), k.astype(jnp.float32)) * H**-0.5
        if cap is not None: x = cap * jnp.tanh(x / cap)
        p = jnp.minimum(length, s) - count + jnp.arange(t) if window is None and t == 1 else length - count + jnp.arange(t)
        key = jnp.arange(s)
        seen = (key < jnp.minimum(length, s))[None] & (key[None] <= p[:, None])
        if window is not None: seen &= key[None] >= p[:, None] - window[0]
        x = jnp.where(seen, x, -jnp.inf)
        m = jnp.max(x, -1, keepdims=True)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        if sinks is not None: m = jnp.maximum(m, sinks.reshape(K, -1, 1, 1))
        e = jnp.exp(x - m)
        total = e.sum(-1, keepdims=True)
        if sinks is not None: total += jnp.exp(sinks.reshape(K, -1, 1, 1) - m)
        w = jnp.where(total > 0, e / jnp.where(total > 0, total, 1), 0)
        with jax.default_matmul_precision("highest"):
            o = jnp.einsum("kgts,skv->tkgv", w, jnp.where(seen.any(0)[:, None, None], v.astype(jnp.float32), 0))
        return jnp.where((jnp.arange(t) < count)[:, None, None, None], o, 0).reshape(t, -1, H)
    counts = jnp.full(q.shape[0], q.shape[1]) if counts is None else counts
    return jax.lax.map(lambda a: one(*a), (q, k, v, lengths, counts))
def drawn(b, s, t=1, seed=0, lengths=None):
    ks = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(ks[0], (b, t, N, H), jnp.bfloat16)
    k, v = (jax.random.normal(x, (b, s, K, H), jnp.bfloat16) for x in ks[1:])
    return q, k, v, jnp.full(b, s, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
results, pool = {}, ThreadPoolExecutor(8)
def keep(name, value):
    results[name] = value
    json.dump(results, open(out, "w"), indent=1)
def check(name, args, **options):
    if now() > limit: return
    q, k, v, lengths = args
    beyond = (jnp.arange(k.shape[1])[None] >= lengths[:, None])[..., None, None]
    k, v = (jnp.where(beyond, jnp.nan, x) for x in (k, v))
    def run(suffix): return np.asarray(jax.jit(functools.partial(truth, **options) if TINY else functools.partial(cuda, suffix=suffix, **options))(q, jnp.nan_to_num(k) if TINY else k, v, lengths), np.float64)
    if TINY: say(kernels(functools.partial(cuda, **options), *args))
    old, *both = run(""), run("_new"), run("_new")
    wanted = np.asarray(jax.jit(functools.partial(truth, **options))(q, jnp.nan_to_num(k), v, lengths), np.float64)
    error = np.abs(both[0] - wanted).max() / np.abs(wanted).max()
    word = "right" if error < 6e-3 and np.array_equal(*both) else "WRONG"
    say(word, name, f"error {error:.2e} of the largest, same bits twice {np.array_equal(*both)}, bits of the old one {np.array_equal(old, both[0])}")
    keep("check " + name, [word, float(error)])
def us(samples): return round(statistics.median(samples.microseconds), 2)
def short(samples): return [(n[:24], round(t, 2)) for n, t in samples.kernels]
def time_of(name, calls, args_sets, seconds=0.25, detail=("by length", "equal")):
    if now() > limit: return
    def prepare(f):
        try:
            if TINY: return kernels(f, *args_sets[0])
            f = jax.jit(f); jax.block_until_ready(f(*args_sets[0]))
            return f
        except Exception as e: return repr(e)[:200]
    ready = dict(zip(calls, pool.map(prepare, calls.values())))
    for label in [x for x in ready if isinstance(ready[x], str)]: say(name, label, "failed", ready.pop(label))
    if TINY: say(name, ready); return
    try: r = timing.interleaved(ready, args_sets, seconds)
    except Exception as e: say(name, "failed", repr(e)[:300]); return
    say(name, {k: us(x) for k, x in r.items()})
    for k in detail:
        if k in r: print("      ", k, short(r[k]), flush=True)
    keep(name, {k: [us(x), short(x)] for k, x in r.items()})
def sets(b, s, lengths=None):
    count = timing.input_sets(2 * b * s * K * H * 2)
    return [drawn(b, s, seed=i, lengths=lengths) for i in range(count)]
def check_equal(name, args, config):
    q, k, v, lengths = args
    f = jax.jit(functools.partial(truth if TINY else equal, **({} if TINY else dict(config=config))))
    if TINY: say(kernels(functools.partial(equal, config=config), *args))
    actual = [np.asarray(f(*args), np.float64) for _ in "ab"]
    wanted = np.asarray(jax.jit(truth)(*args), np.float64)
    error = np.abs(actual[0] - wanted).max() / np.abs(wanted).max()
    say("right" if error < 6e-3 and np.array_equal(*actual) else "WRONG", name, f"error {error:.2e}")
S = 256 if TINY else 8192
def one_long(b, s, short, first=0):
    x = [short] * b
    x[first] = s
    return x
check("one long of 40", drawn(40, S, lengths=one_long(40, S, 64, 7)))
check("lengths 0, over the end, sinks", drawn(8, S // 2, lengths=[S // 2, 5, 0, S // 2 + 99, 77, 130, 512, 64]), sinks=jnp.linspace(-1, 2, N))
check("4 tokens", drawn(5, S // 2, 4, lengths=[S // 2, 40, 130, 4, 7]))
check_equal("one part, written in bfloat16", drawn(8, S // 4, lengths=[S // 4, 5, 1, 64, 65, 200, 1, 77]), SplitForwardConfig(1))
def forty(q, k, v, config):
    return split_keys.forward(q, k, v, Operands(), logits=Logits(0.2, BlockMask(3, 304)), multiprocessors=SMS, config=config)[0]
for parts in (1, 3):
    try:
        q, k, v = (jax.random.normal(jax.random.key(i), (2, n, 4, 40), jnp.bfloat16) for i, n in ((0, 3), (1, 304), (2, 304)))
        f = functools.partial(forty, config=SplitForwardConfig(parts))
        if TINY: say(kernels(f, q, k, v)); continue
        o = np.asarray(jax.jit(f)(q, k, v), np.float64)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        x = np.exp(0.2 * np.einsum("btnh,bsnh->bnts", q, k)); w = np.einsum("bnts,bsnv->btnv", x / x.sum(-1, keepdims=True), v)
        say("right" if np.abs(o - w).max() < 1e-2 * np.abs(w).max() else "WRONG", f"heads of 40, {parts} parts", np.abs(o - w).max())
    except Exception as e: say("heads of 40 failed", repr(e)[:200])
B = 4 if TINY else 64
LONG, SHORT = (512, 128) if TINY else (32768, 512)
mean = (LONG + (B - 1) * SHORT) // B
OLD = dict(old=cuda, new=new)
def cache(b, s): return jax.jit(lambda: jax.lax.map(lambda i: jax.random.normal(jax.random.key(i), (s, K, H), jnp.bfloat16), jnp.arange(b)))()
if now() < limit:
    q, k, v = drawn(B, 64)[0], cache(B, LONG), cache(B, LONG)
    def of(lengths): return [(q, k, v, jnp.asarray(lengths, jnp.int32))]
    time_of("long one first", OLD, of(one_long(B, LONG, SHORT)), detail=("old", "new"))
    time_of("long one last", OLD, of(one_long(B, LONG, SHORT, B - 1)), detail=("new",))
    both = dict(OLD, equal=equal)
    time_of("even, mean", both, of([mean] * B), detail=("old", "new", "equal"))
    random = np.random.default_rng(0)
    time_of("random up to an eighth", both, of(random.integers(1, LONG // 8, B)), detail=("new",))
    time_of("random up to the end", both, of(random.integers(1, LONG, B)), detail=("new", "equal"))
    time_of("full", both, of([LONG] * B), seconds=0.4, detail=("new", "equal"))
    del k, v
for b, s in ((3, 256),) if TINY else ((16, 8192), (64, 8192), (64, 1024), (2, 32768), (16, 1024), (8, 8192), (64, 2048), (4, 1024), (1, 4096), (32, 128), (8, 512), (1, 1024), (1, 32768), (32, 512)):
    time_of(f"full {b} x {s}", dict(new=new, equal=equal), sets(b, s), detail=("new", "equal"))
    if b == 16 and s == 8192: time_of("16 x 8192, an eighth full", dict(new=new, equal=equal), sets(b, s, lengths=[1024] * 16), detail=())
def configs(splits, others):
    c = {f"{n} parts": functools.partial(equal, config=SplitForwardConfig(n)) for n in splits}
    for n, o in others: c[f"{n} {o}"] = functools.partial(equal, config=SplitForwardConfig(n, **o))
    return c
ONE, WIDE = dict(stages=3, ctas_per_multiprocessor=1), dict(key_block=128, stages=1, ctas_per_multiprocessor=2)
for b, s, splits, others in () if TINY else (
    (1, 32768, (33, 66, 48), [(16, ONE), (33, WIDE)]),
    (64, 1024, (1, 2), [(1, ONE), (1, WIDE)]),
    (4, 1024, (8, 4, 16), [(8, WIDE)]),
    (32, 128, (1, 2), [(1, WIDE)]),
    (1, 4096, (32, 16, 64), []),
):
    time_of(f"configs {b} x {s}", configs(splits, others), sets(b, s), detail=())
say("end")
os._exit(0)
