"""A few small cases for compute-sanitizer."""
import few_plugin, sys
import numpy as np, jax, jax.numpy as jnp
import jaxfused
rng = np.random.default_rng(0)
def run(m, k, n, kind, group):
    x = jnp.asarray(rng.normal(size=(m, k)).astype(np.float32)).astype(jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(k, n)).astype(np.float32))
    if kind == "int4": q = jaxfused.quantize(w, "int4", group_size=group, symmetric=False, layout="columns")
    else: q = jaxfused.QuantizedArray(jnp.asarray(rng.integers(0, 256, (n, k // 2)), jnp.uint8), jnp.asarray(rng.uniform(.01, .02, (k // group, n)), jnp.float32), None, -2, "columns", codebook=jaxfused.quantization.CODEBOOKS[kind])
    y = jax.jit(lambda x, q: jaxfused.quantized_matmul(x, q, implementation="cuda"))(x, q)
    true = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64)
    print(kind, m, k, n, group, "error %.1e" % (np.abs(np.asarray(y, np.float64) - true).max() / np.abs(true).max()), flush=True)
run(1, 1152, 80, "int4", 128); run(3, 4864, 84, "nf4", 64); run(4, 1184, 48, "nf4", 32)
