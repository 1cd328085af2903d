#!/usr/bin/env bash
# What: jnp.max and jnp.min of float32 with a NaN in it are numbers as soon as the array has 4,096 elements, on
# a CPU.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: NaN, as NumPy, jnp.argmax and shorter arrays of JAX itself have it, so that a NaN is seen.
# Seen: 4,095 elements give NaN and 4,096 the largest of the others; so do each row of a matrix of 64 x 64,
#   jnp.ptp, jnp.linalg.norm(x, jnp.inf) and max pooling. bfloat16 and float16 keep the NaN, and so does
#   float32 with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= set.
# In jaxfused: jaxfused/ops/fp8/fp8_xla.py takes largest magnitudes as integers of the same bits, or asks isnan
#   beside the maximum; jaxfused/optim/stepping.py finds gradients that are not finite by isfinite.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

x = np.linspace(-1, 1, 4096, dtype=np.float32)
x[7] = np.nan
short, matrix = x[:4095], x.reshape(64, 64)
print("jax", jnp.max(short), jnp.max(x), "numpy", np.max(x), "argmax", jnp.argmax(x))
assert np.isnan(jnp.max(short)) and np.isnan(np.max(x)) and int(jnp.argmax(x)) == 7
assert float(jnp.max(x)) == 1 and float(jnp.min(x)) == -1 and float(jnp.ptp(x)) == 2
assert float(jnp.linalg.norm(x, jnp.inf)) == 1
rows = np.isnan(jnp.max(matrix, axis=1))
print("rows without NaN", int((~rows).sum()), "numpy", int((~np.isnan(matrix.max(1))).sum()))
assert not rows.any() and np.isnan(matrix.max(1)).sum() == 1
pooled = jax.lax.reduce_window(jnp.asarray(x), -jnp.inf, jax.lax.max, (4096,), (1,), "VALID")
assert float(pooled[0]) == 1
assert np.isnan(jnp.max(jnp.asarray(x, jnp.bfloat16))) and np.isnan(jnp.max(jnp.asarray(x, jnp.float16)))
code = "import jax.numpy as jnp; print(jnp.max(jnp.zeros(4096).at[7].set(jnp.nan)))"
for flags, expected in (("", "0.0"), ("--xla_cpu_experimental_ynn_fusion_type=", "nan")):
    environment = {**os.environ, "XLA_FLAGS": flags}
    seen = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    print(f"XLA_FLAGS={flags!r}:", seen.strip())
    assert seen.strip() == expected
PYTHON
