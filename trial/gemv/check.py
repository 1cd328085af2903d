"""check.py SO [few]: the kernel by the emulator on this CPU, against float64."""
import ctypes, sys
import numpy as np, jax, jax.numpy as jnp, ml_dtypes
lib = ctypes.cdll.LoadLibrary(sys.argv[1])
jax.ffi.register_ffi_target("few_rows", jax.ffi.pycapsule(lib.jaxfused_few_rows), platform="cpu")
import jaxfused
from jaxfused.runtime.packing import pack_words
HOW = {"bits": 0, "mixed": 1, "table": 2}
def call(x, v, s, z, book, how=0, warps=4, cluster=1, blocks=2, stages=4):

    return jax.ffi.ffi_call("few_rows", jax.ShapeDtypeStruct((x.shape[0], v.shape[0]), jnp.float32))(
        x, v, s, jnp.zeros((0,), jnp.int8) if z is None else z,
        codebook=np.asarray(book, np.float32), how=np.int64(how), warps=np.int64(warps), cluster=np.int64(cluster),
        blocks=np.int64(blocks), stages=np.int64(stages))
CASES = [  # m, k, n, format, group, warps, cluster, blocks, stages
    (1, 1024, 64, "int4", 128, 4, 1, 2, 4), (4, 1152, 84, "int4", 128, 4, 1, 3, 4), (2, 2304, 48, "int4", 0, 3, 2, 4, 4),
    (3, 1024, 48, "int4", 256, 4, 2, 2, 4), (1, 1152, 36, "int4", 32, 5, 1, 2, 4), (2, 1152, 36, "int4", 32, 2, 1, 2, 4),
    (4, 1152, 100, "int4", 32, 3, 1, 2, 4), (1, 640, 32, "int4z", 64, 2, 1, 1, 4), (3, 1152, 96, "int4z", 64, 2, 2, 4, 4), (2, 640, 32, "int4z", 64, 3, 1, 9, 4),
    (1, 1184, 80, "bits", 32, 2, 1, 2, 4), (2, 1184, 80, "bits", 32, 5, 1, 2, 4), (4, 1184, 48, "bits", 32, 2, 2, 4, 4),
    (1, 1152, 84, "nf4", 64, 4, 1, 2, 4), (2, 1152, 84, "nf4", 64, 2, 1, 2, 4), (4, 832, 36, "nf4", 64, 4, 1, 2, 4),
    (1, 1184, 80, "mixed", 32, 2, 1, 2, 4), (4, 1184, 80, "mixed", 32, 5, 1, 2, 4), (2, 1184, 80, "table", 32, 5, 1, 2, 4), (4, 1184, 80, "table", 32, 5, 1, 2, 4),
    (1, 768, 32, "int4z", 32, 3, 1, 1, 4), (4, 768, 32, "int4z", 32, 3, 1, 1, 4), (1, 1152, 32, "int4z", 128, 3, 1, 1, 4), (1, 1024, 80, "int4", 64, 4, 1, 2, 4),
    (2, 3264, 32, "nf4", 64, 13, 1, 1, 4), (1, 3264, 48, "mixed", 32, 13, 1, 1, 4), (1, 1024, 32, "int4", 128, 2, 4, 4, 4),
    (1, 1024, 80, "int4", 128, 4, 1, 2, 3), (2, 1152, 128, "int4", 128, 4, 1, 1, 6),
]
rng = np.random.default_rng(0)
only = sys.argv[2].split(",") if len(sys.argv) > 2 else None
for m, k, n, name, group, warps, cluster, blocks, stages in CASES:
    if only and name + str(group) not in only: continue
    if stages != 4 and "stages" not in sys.argv: continue
    g = group or k
    x = jnp.asarray(rng.normal(size=(m, k)) + (1 if m == 4 else 0), jnp.bfloat16)
    z, book = None, ()
    if name.startswith("int4"):
        q = rng.integers(-8, 8, (n, k))
        v = pack_words(jnp.asarray(q, jnp.int8))
        s = rng.uniform(.005, .02, (k // g, n)).astype(np.float32); s64 = s.astype(np.float64)
        if name == "int4z":
            z = rng.integers(-128, 128, (k // g, n)).astype(np.int8)
            q = q - np.repeat(z.astype(int), g, 0).T
        w = q.T.astype(np.float64)
    else:
        book = np.asarray(jaxfused.quantization.CODEBOOKS["nf4" if name == "nf4" else "e2m1"], np.float32)
        v = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        codes = np.stack([v & 15, v >> 4], -1).reshape(n, k)
        w = book.astype(ml_dtypes.bfloat16).astype(np.float64)[codes].T
        if name == "nf4":
            s = rng.uniform(.005, .02, (k // g, n)).astype(np.float32); s64 = s.astype(np.float64)
        else:
            s = rng.integers(118, 124, (k // g, n), dtype=np.uint8); s[0, 0], s[0, 1] = 0, 1
            s64 = 2.0 ** (s.astype(np.float64) - 127)
    w = w * np.repeat(s64, g, 0)
    true = np.asarray(x, np.float64) @ w
    y = np.asarray(call(x, jnp.asarray(v), jnp.asarray(s), None if z is None else jnp.asarray(z), book, HOW.get(name, 2), warps, cluster, blocks, stages), np.float64)
    e = np.abs(y - true).max() / np.abs(true).max()
    print("ok " if e < 1e-6 else "BAD", m, k, n, name, group, warps, cluster, blocks, stages, "error %.1e" % e, flush=True)
    if e > 1e-6: print(np.abs(y - true).max(0)[:40].round(3), np.abs(y - true).max(1))
