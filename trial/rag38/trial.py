"""trial.py new|old: right or wrong first, then microseconds by kernel."""
import sys, time, functools
import numpy as np, jax, jax.numpy as jnp, jaxfused
from jaxfused.tuning.timing import interleaved
T0 = time.time()
which = sys.argv[1]
say = functools.partial(print, flush=True)
N, K, H = 32, 8, 128
try:
    from jaxfused.ops.serving import ragged_stages
    choose = ragged_stages._by_two_kernels
except ImportError:
    ragged_stages = None

def make(counts, keys, page=64, rows=None, layout="KPSH", nan=True, seed=0, n=None, heads=N, kh=K, dtype=jnp.bfloat16, size=H):
    rng = np.random.default_rng(seed)
    counts, keys = np.array(counts), np.array(keys)
    n = n or -(-keys.max() // page)
    each = -(-keys // page)
    pages = int(each.sum()) + 3
    perm = rng.permutation(pages).astype(np.int32)
    table, at = np.full((len(keys), n), 2**30, np.int32), 0
    for b, e in enumerate(each):
        table[b, :e] = perm[at:at + e]; at += e
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = rows or int(cu[-1])
    k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(k1, (rows, heads, size), dtype)
    shape = (kh, pages, page, size) if layout == "KPSH" else (pages, page, kh, size)
    k, v = (jax.random.normal(x, shape, dtype) for x in (k2, k3))
    if nan:  # what lies beyond a length must not count
        bad = np.zeros((pages, page), bool)
        for b, e in enumerate(each):
            left = int(keys[b] - (e - 1) * page)
            if e and left < page: bad[table[b, e - 1], left:] = True
        bad = jnp.asarray(bad)
        bad = bad[None, :, :, None] if layout == "KPSH" else bad[:, :, None, None]
        k, v = (jnp.where(bad, jnp.nan, x) for x in (k, v))
    return [q, k, v, jnp.asarray(keys, jnp.int32), jnp.asarray(table), jnp.asarray(cu)]

def op(q, k, v, *t, **o):
    o = dict(sm_scale=q.shape[-1] ** -0.5, layout="KPSH") | o
    return jaxfused.ragged_paged_attention(q, (k, v), *t, **o)

def truth(args, window=None, sinks=None, cap=None, layout="KPSH"):
    """float32, one sequence after the other, in one program for all of them."""
    q, k, v, keys, table, cu = args
    cu, keys, table = map(np.asarray, (cu, keys, table))
    page = k.shape[2] if layout == "KPSH" else k.shape[1]
    T, n = int(np.diff(cu).max()), -(-int(keys.max()) // page)
    @functools.partial(jax.jit, compiler_options=dict(xla_gpu_autotune_level=0) if jax.default_backend() == "gpu" else None)
    def f(q, k, v, a, first, ids, length):
        kk, vv = ((x[:, ids].reshape(x.shape[0], -1, x.shape[-1]) if layout == "KPSH" else x[ids].reshape(-1, *x.shape[2:]).transpose(1, 0, 2)) for x in (k, v))
        kk, vv = (jnp.where(jnp.arange(kk.shape[1])[:, None] < length, x, 0) for x in (kk, vv))
        qq = jnp.take(q, a + jnp.arange(T), axis=0, mode="clip")
        return _plain(qq, kk, vv, jnp.minimum(first + jnp.arange(T), length - 1), window, sinks, cap)
    out = np.zeros(q.shape, np.float32)
    for b in range(len(keys)):
        a, e, L = int(cu[b]), int(cu[b + 1]), int(keys[b])
        if e <= a or L == 0: continue
        ids = np.where(np.arange(n) < -(-L // page), np.resize(table[b], n) if table.shape[1] < n else table[b, :n], 0)
        out[a:e] = np.asarray(f(q, k, v, a, L - (e - a), ids.astype(np.int32), L))[: e - a]
    return out

def _plain(q, k, v, pos, window, sinks, cap):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    g = q.shape[1] // k.shape[0]
    q = q.reshape(q.shape[0], -1, g, q.shape[-1])
    s = jnp.einsum("tkgh,ksh->kgts", q, k, precision="highest") * q.shape[-1] ** -0.5
    if cap is not None: s = cap * jnp.tanh(s / cap)
    key = jnp.arange(k.shape[1])
    ok = key <= pos[:, None]
    if window is not None: ok &= key > pos[:, None] - window
    s = jnp.where(ok, s, -jnp.inf)
    m = s.max(-1, keepdims=True)
    if sinks is not None:
        m = jnp.maximum(m, sinks.reshape(k.shape[0], g, 1, 1))
    p = jnp.exp(s - m); den = p.sum(-1, keepdims=True)
    if sinks is not None: den = den + jnp.exp(sinks.reshape(k.shape[0], g, 1, 1) - m)
    return jnp.einsum("kgts,ksh->tkgh", p / den, v, precision="highest").reshape(pos.size, -1, v.shape[-1])

ok = True
def check(name, args, **o):
    global ok
    w = {x: o.get(y) for x, y in (("window", "sliding_window"), ("sinks", "sinks"), ("cap", "soft_cap"))}
    want = truth(args, layout=o.get("layout", "KPSH"), **w)
    f = jax.jit(lambda *a: op(*a, **o))
    got = f(*args); again = f(*args)
    got, again = np.asarray(got, np.float32), np.asarray(again, np.float32)
    bad = ~(np.abs(got - want) < 2e-2 + 1e-2 * np.abs(want))
    err = np.abs(got - want).max()
    good = bool(not bad.any() and np.array_equal(got, again))
    ok &= good
    where = "" if good else f" rows {np.unique(np.where(bad)[0])[:12]} repeats {np.array_equal(got, again)}"
    say(f"{'right' if good else 'WRONG'} {name}: max error {err:.2e}{where} at {time.time() - T0:.0f} s")

cases = dict(
    mixed=(make([1] * 64 + [2048], [1024] * 64 + [4096], nan=False, n=64), {}),
    decodes=(make([1] * 64, [1024] * 64, nan=False), {}),
    decodes_with_room=(make([1] * 64, [1024] * 64, nan=False, rows=2112), {}),
    chunk=(make([2048], [4096], nan=False), {}),
    four_chunks=(make([512] * 4, [2048] * 4, nan=False), {}),
    sixteen_each=(make([16] * 64, [1024] * 64, nan=False), {}),
    four_each=(make([4] * 64, [1024] * 64, nan=False), {}),
    chunk_of_128=(make([128], [8192], nan=False), {}),
)
def copies(args):
    size = sum(a.nbytes for a in args)
    return [args] + [[a + 0 for a in args] for _ in range(max(1, min(3, int(300e6 // size))))]
def tell(name, found):
    for form, s in found.items():
        small = [t for _, t in s.kernels if t < 4]
        big = [(k.replace("_mosaic_gpu_kernel", "").replace("_ZN52_GLOBAL__N__34ba0215_19_", "")[:34], round(t, 1)) for k, t in s.kernels if t >= 4]
        say(f"{which} {name} {form}: {np.median(s.microseconds):.1f} us; {len(small)} small {sum(small):.1f}; {big}")
def force(yes, f):
    """Jits f with the choice of two kernels forced (True), refused (False), or as it is (None)."""
    def run(*a):
        if ragged_stages is not None and yes is not None:
            def chosen(options, implementation, device, arrays):
                from jaxfused.runtime.runner import Runner
                d = Runner(None, device).choice(ragged_stages.InPages(options), *ragged_stages._decodes(arrays))
                return ragged_stages.DecodesAndChunks(options, d.implementation) if yes else None
            ragged_stages._by_two_kernels = chosen
        try: return f(*a)
        finally:
            if ragged_stages is not None: ragged_stages._by_two_kernels = choose
    return jax.jit(run)
def two_calls(q, k, v, l, t, c):
    call = functools.partial(jaxfused.paged_attention, scale=H ** -0.5)
    return call(q[:64], k, v, l[:-1], t[:-1, :16]), call(q[None, 64:], k, v, l[-1:], t[-1:])
def with_config(config, scale):
    """Another scale is another stage, so that no program of another config is taken from a cache."""
    from pallas_kernels.attention import chunks
    def f(*a):
        before = chunks.candidates
        chunks.candidates = lambda sizes: (config,)
        try: return op(*a, sm_scale=scale)
        finally: chunks.candidates = before
    return jax.jit(f)
for name, (args, o) in cases.items():
    if which == "old" and name == "mixed": continue  # measured in the first call
    try:
        forms = {"as it is": force(None, op)}
        if which == "new":
            if name == "mixed":
                from pallas_kernels.attention import chunks
                forms["two calls"] = jax.jit(two_calls)
                forms["blocks of 64"] = with_config(chunks.ForwardConfig(key_block=64, stages=4), 0.088)
                forms["turns"] = with_config(chunks.ForwardConfig(takes_turns=True), 0.0881)
            elif name in ("four_each", "chunk_of_128"):
                forms["two kernels"] = force(True, op)
            elif name == "sixteen_each":
                forms["one kernel"] = force(False, op)
        sets = copies(args)
        outs = {form: jax.block_until_ready(f(*args)) for form, f in forms.items()}
        if "two calls" in outs:
            a, b = outs["as it is"], outs["two calls"]
            worst = max(float(jnp.abs(a[:64].astype(jnp.float32) - b[0].reshape(64, N, H)).max()), float(jnp.abs(a[64:].astype(jnp.float32) - b[1][0]).max()))
            ok &= worst < 2e-2
            say(f"{'right' if worst < 2e-2 else 'WRONG'} mixed beside two calls: {worst:.1e} at {time.time() - T0:.0f} s")
        tell(name, interleaved(forms, sets, 0.4))
    except Exception as e:
        say(f"{which} {name} failed: {str(e)[:300]}")
def checks():
    sinks = jnp.asarray(np.random.default_rng(1).normal(size=N), jnp.float32)
    check("PSKH, page 16, cap", make([5, 1, 600, 1, 90], [5, 900, 700, 33, 333], page=16, layout="PSKH"), layout="PSKH", soft_cap=20.0)
    check("heads of 64, page 128, group 8", make([5, 1, 900, 1, 90], [5, 900, 1700, 33, 333], page=128, heads=64, kh=8, size=64))
    check("float16, group 1", make([130, 1, 900], [150, 900, 1700], heads=8, kh=8, dtype=jnp.float16))
    mixed = make([0, 300, 1, 7, 0, 33, 1, 0, 400, 1], [0, 301, 77, 7, 50, 1000, 1, 0, 2048, 999], rows=800)
    check("uneven, empty, rows of none, page 64", mixed)
    check("the same with window and sinks", mixed, sliding_window=100, sinks=sinks)
    check("decodes and a chunk", make([1] * 64 + [700], [1024] * 64 + [1900]))
checks()
say(f"{which} ends at {time.time() - T0:.0f} s; {'all right' if ok else 'WRONG'}")
