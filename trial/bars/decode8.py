"""decode.py FOLDER_OF_LIBRARIES SECONDS: decode over caches by each library, held against float32, then timed."""
import ctypes, functools, statistics, sys, time
from pathlib import Path
BEGIN = time.perf_counter()
import jax, jax.numpy as jnp, numpy as np

folder, seconds, platform = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "CUDA"
small = platform == "cpu"
names = [(n, f"decode_{n}") for n in ("today", "three", "pairs")]
if small:
    names = [("new", "jaxfused_cached_attention")]
NAMES = [name for name, _ in names]
LIBRARY = ctypes.CDLL(str(next(folder.glob("*.so"))))
for name, symbol in names:
    jax.ffi.register_ffi_target(f"decode_{name}", jax.ffi.pycapsule(getattr(LIBRARY, symbol)), platform=platform)
KINDS = {"bfloat16": 0, "int8": 1, "float8_e4m3fn": 2}
MULTIPROCESSORS = 4 if small else 132


def said(*words):
    print(f"{time.perf_counter() - BEGIN:5.1f} s", *words, flush=True)


@functools.partial(jax.jit, static_argnames=("name", "kind", "window", "cap"))
def attend(query, key, value, key_scale, value_scale, lengths, table, *, name, kind, window=0, cap=0.0):
    batch, tokens, key_heads, group, size = query.shape
    rows = tokens * group
    units, unit_rows = key_heads * -(-rows // 16), min(rows, 16)
    slots = max(1, MULTIPROCESSORS * 16 // units)
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((slots + batch, units, unit_rows, size), jnp.float32),
        jax.ShapeDtypeStruct((slots + batch, units, unit_rows, 2), jnp.float32),
    )
    none = lambda dtype: jnp.zeros((0,), dtype)
    return jax.ffi.ffi_call(f"decode_{name}", results)(
        query, key, value,
        none(jnp.float32) if key_scale is None else key_scale,
        none(jnp.float32) if value_scale is None else value_scale,
        none(jnp.int32) if table is None else table,
        lengths, lengths - tokens, none(jnp.int32), none(jnp.float32), none(jnp.int32),
        heads_first=np.bool_(False), kind=np.int32(KINDS[kind]), layer_pages=np.int32(key.shape[0]),
        window=np.int32(window), scale=np.float32(size**-0.5), cap=np.float32(cap),
    )[0]


@functools.partial(jax.jit, static_argnames=("window", "cap"))
def truth(query, key, value, key_scale, value_scale, lengths, table, window=0, cap=0.0):
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    if key_scale is not None:
        key, value = key * key_scale[..., None], value * value_scale[..., None]
    if table is not None:
        key, value = (a[table].reshape(table.shape[0], -1, *a.shape[2:]) for a in (key, value))
    tokens = query.shape[1]
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("btkgh,bskh->btkgs", query.astype(jnp.float32), key) * query.shape[-1] ** -0.5
        if cap:
            logits = cap * jnp.tanh(logits / cap)
        place = (lengths[:, None] - tokens + jnp.arange(tokens))[:, :, None]
        at = jnp.arange(key.shape[1])
        seen = at <= place
        if window:
            seen &= at > place - window
        p = jax.nn.softmax(jnp.where(seen[:, :, None, None], logits, -jnp.inf), axis=-1)
        return jnp.einsum("btkgs,bskh->btkgh", p, value)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6, 7))
def drawn(seed, batch, length, key_heads, group, kind, tokens=1, page=0):
    keys = jax.random.split(jax.random.key(seed), 7)
    query = jax.random.normal(keys[0], (batch, tokens, key_heads, group, 128), jnp.bfloat16)
    shape = (batch, length, key_heads, 128) if not page else (batch * length // page, page, key_heads, 128)
    key, value = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[1:3])
    scales = (None, None)
    if kind != "bfloat16":
        factor = 30.0 if kind == "int8" else 100.0
        key, value = (jnp.clip(jnp.round(a * factor) if kind == "int8" else a * factor, -127 if kind == "int8" else -448, 127 if kind == "int8" else 448).astype(kind) for a in (key, value))
        scales = tuple(jnp.exp(jax.random.normal(k, shape[:3])) / factor for k in keys[3:5])
    table = jax.random.permutation(keys[5], shape[0]).astype(jnp.int32).reshape(batch, -1) if page else None
    return query, key, value, *scales, table


bad = 0
cases = [(3, 192, 2, 4, 1, 0, {}), (3, 192, 2, 4, 2, 64, {}), (2, 320, 1, 2, 3, 16, {}), (3, 192, 2, 4, 1, 0, dict(window=50)), (3, 192, 2, 4, 1, 0, dict(cap=5.0))]
if not small:
    cases = cases[:3]
for number, (batch, length, key_heads, group, tokens, page, options) in enumerate(cases):
    for kind in KINDS:
        arrays = drawn(number, batch, length, key_heads, group, kind, tokens, page)
        rng = np.random.default_rng(number)
        lengths = jnp.asarray(rng.integers(tokens, length + 1, batch).astype(np.int32)).at[0].set(length)
        arrays = (*arrays[:5], lengths, arrays[5])
        expected = np.asarray(truth(*arrays, **options), np.float32)
        scale = np.abs(expected).max()
        for name in NAMES:
            got, again = (np.asarray(attend(*arrays, name=name, kind=kind, **options)) for _ in range(2))
            error = np.abs(got.astype(np.float32) - expected).max() / scale
            if not error < 0.012 or (got != again).any():
                bad += 1
                said("WRONG", end := (number, kind, name, options), error, "repeats" if (got == again).all() else "does not repeat")
            elif number == 0:
                said("right", (batch, length, kind, name), f"{error:.4f}")
said("wrong cases:", bad)
if small:
    sys.exit(bad)

from benchmarks.run import timing


def table(batch, length, page, kinds):
    shape = (batch, length, page)
    for kind in kinds:
        size = batch * length * 8 * 128 * 2 * (2 if kind == "bfloat16" else 1)
        sets = []
        for seed in range(max(2, min(8, -(-260_000_000 // size)))):
            arrays = drawn(seed, batch, length, 8, 4, kind, 1, page)
            sets.append((*arrays[:5], jnp.full(batch, length, jnp.int32), arrays[5]))
        calls = {name: functools.partial(attend, name=name, kind=kind) for name in NAMES}
        outputs = {name: np.asarray(call(*sets[0]), np.float32) for name, call in calls.items()}
        first = outputs[NAMES[0]]
        again = {name: np.asarray(call(*sets[0]), np.float32) for name, call in calls.items()}
        said(shape, *(kind[:6], "largest difference from", NAMES[0], {name: (float(f"{np.abs(out - first).max() / np.abs(first).max():.4f}"), bool((out == again[name]).all())) for name, out in outputs.items()}))
        for name, s in timing.interleaved(calls, sets, 0.4).items():
            kernel = {k.split("attend_to_cache")[-1][:8] if "attend" in k else k.split("cu_")[-1][8:24]: round(t, 1) for k, t in s.kernels if t > 1.5}
            said(shape, *(kind[:6], name, round(statistics.median(s.microseconds), 1), kernel))
        del sets, calls, arrays


KIND = list(KINDS)
for batch, length, page, kinds in [(16, 8192, 0, KIND), (1, 32768, 0, KIND), (16, 8192, 64, KIND), (64, 8192, 0, KIND[1:]), (16, 8192, 16, KIND), (64, 1024, 0, KIND), (1, 1024, 0, KIND)]:
    if time.perf_counter() - BEGIN > seconds - 3:
        said("no time for", (batch, length, page))
        break
    table(batch, length, page, kinds)
