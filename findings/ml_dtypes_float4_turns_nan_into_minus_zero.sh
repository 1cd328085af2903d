#!/usr/bin/env bash
# What: Casting to float4_e2m1fn makes -0 of NaN and 6 of infinity, in ml_dtypes and in JAX.
#
# Version: ml_dtypes==0.6.0, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A broken weight stays visible, as in float8_e4m3fn, where both are NaN.
# Seen: NaN becomes -0.0, inf and 1e9 become 6.
# In jaxfused: jaxfused/ops/quantize/quantize.py makes int8, int4 and float8 only; float4_e2m1fn is
#   read, not made (docs/quantisation.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile ml_dtypes==0.6.0 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

weights = np.array([np.nan, np.inf, 1e9], np.float32)
narrow = weights.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
by_jax = np.asarray(jnp.asarray(weights).astype(jnp.float4_e2m1fn).astype(jnp.float32))
print("ml_dtypes", narrow, "jax", by_jax)
for result in (narrow, by_jax):
    assert result.tolist() == [0, 6, 6] and np.signbit(result[0])
assert np.isnan(weights.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
PYTHON
