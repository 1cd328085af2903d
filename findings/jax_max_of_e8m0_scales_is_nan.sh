#!/usr/bin/env bash
# What: jnp.max and jnp.min of float8_e8m0fnu, the type of MX scales, are NaN, and jnp.argmax is 0,
# whatever is in the array.
#
# Version: jax==0.11.2, ml_dtypes==0.6.0; a CPU, Python 3.12 or newer.
# Expected: 8 and 2 for the scales 1, 2, 8, 4, as NumPy with ml_dtypes gives.
# Seen: max NaN, min NaN, argmax 0; right after astype(float32).
# In jaxfused: jaxfused/runtime/quantized_array.py reads such scales as float32.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 ml_dtypes==0.6.0

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np

scales = jnp.array([1, 2, 8, 4], jnp.float8_e8m0fnu)
print("jax", jnp.max(scales), jnp.min(scales), jnp.argmax(scales), "numpy", np.max(np.asarray(scales)))
assert np.isnan(float(jnp.max(scales))) and np.isnan(float(jnp.min(scales))) and int(jnp.argmax(scales)) == 0
assert float(np.max(np.asarray(scales))) == 8 and int(np.argmax(np.asarray(scales))) == 2
assert float(jnp.max(scales.astype(jnp.float32))) == 8
PYTHON
