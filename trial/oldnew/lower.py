"""lower.py BUILD FOLDER: exports quantized_matmul for an H200 in this tree."""
import sys, pickle
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import jaxfused
from jaxfused import dispatch
H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
ANY = jax.export.DisabledSafetyCheck.custom_call("ALL")
SHAPES = [(5120, 13824), (3584, 18944), (8192, 8192), (4096, 14336), (4096, 4096)]
FORMATS = {"int8": ("int8", {}), "float8": ("float8_e4m3fn", {}), "int4_128": ("int4", {"group_size": 128}), "int4_64": ("int4", {"group_size": 64})}
cases = [(m, k, n, f) for m in (1, 16, 64) for k, n in SHAPES for f in FORMATS] + [(m, 4096, 14336, f) for m in (2, 4, 8, 24, 32, 48) for f in ("int8", "int4_128")]
build, folder = sys.argv[1:]
done = {}
for m, k, n, f in cases:
    dtype, options = FORMATS[f]
    w = jax.eval_shape(lambda: jaxfused.quantize(jnp.zeros((k, n), jnp.bfloat16), dtype, axis=0, **options))
    leaves, tree = jax.tree.flatten(w)
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    def run(x, *leaves): return jaxfused.quantized_matmul(x, jax.tree.unflatten(tree, leaves))
    with dispatch.assume(H200):
        e = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[ANY])(x, *leaves)
    done[(m, k, n, f)] = ([(str(l.dtype), l.shape) for l in leaves], e.serialize())
    print(build, m, k, n, f, flush=True)
pickle.dump(done, open(f"{folder}/{build}.pickle", "wb"))
