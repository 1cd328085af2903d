"""trial.py NAME OUT: causal attention with offsets of its queries in the jaxfused on the path: results kept, kernel microseconds."""
import sys, time, statistics
import numpy as np, jax, jax.numpy as jnp
import jaxfused
from jaxfused.tuning.timing import cupti
name, out = sys.argv[1:3]
CASES = [("none", 2, 4096, 4096, None), ("0", 2, 4096, 4096, 0), ("13", 2, 4083, 4096, 13), ("chunk", 1, 512, 32768, 32256), ("chunk 77", 4, 77, 8192, 5001), ("window", 2, 4096, 4096, 0)]
for label, b, t, s, offset in CASES:
    k = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(k[0], (b, t, 32, 128), jnp.bfloat16)
    key, value = (jax.random.normal(i, (b, s, 8, 128), jnp.bfloat16) for i in k[1:])
    given = {} if offset is None else {"query_offset": jnp.full(b, offset, jnp.int32)}
    if label == "window": given["local_window_size"] = (1024, 0)
    def f(q, key, value, given=given): return jaxfused.dot_product_attention(q, key, value, is_causal=True, **given)
    run = jax.jit(f).lower(q, key, value).compile()
    y = np.asarray(run(q, key, value).astype(jnp.float32))
    x = cupti(run, [(q, key, value)])
    x2 = cupti(run, [(q, key, value)])
    us = statistics.median(x.microseconds + x2.microseconds)
    path = f"{out}/{label.replace(' ', '_')}.npy"
    same = ""
    if name == "old": np.save(path, y)
    else:
        import os
        if os.path.exists(path): same = "same bits" if (np.load(path) == y).all() else "OTHER BITS"
    print(f"{name} {label} [{b}, {t}, {s}]: {us:.1f} us {same}", flush=True)
