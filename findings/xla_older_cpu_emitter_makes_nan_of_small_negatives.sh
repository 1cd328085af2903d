#!/usr/bin/env bash
# What: With XLA's option that brings its older CPU emitter back, conversions to float8_e4m3fnuz make NaN of small negative numbers.
#
# Version: jax==0.11.2, jaxlib==0.11.2, ml_dtypes==0.6.0; a CPU, Python 3.12 or newer.
# Expected: 0, as ml_dtypes and the default emitter have it: types with "uz" in their name have no -0, whose byte is their NaN.
# Seen: The older emitter rounds the magnitude to 0 and sets the sign all the same: 0x80. -1e-4 becomes NaN in e4m3fnuz, -1e-6 in
#   e5m2fnuz and e4m3b11fnuz; -0.0 is treated apart and becomes 0. One of Flax's own tests of its float8 layers fails so.
#   xla_cpu_disable_new_fusion_emitters halves the compile time of many small programs, for which tests of programs set it.
# In jaxfused: Makefile sets the option for the tests; jaxfused/runtime/quantized_array.py takes float8_e4m3fn and e5m2, which have a -0.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile \
  jax==0.11.2 jaxlib==0.11.2 ml_dtypes==0.6.0

cat > "$folder/convert.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import numpy as np

is_older = sys.argv[1] == "older"
x = np.array([-0.0, -1e-6, -1e-4, -1.0, 1e-6], np.float32)
for name, lost in (("float8_e4m3fnuz", 2), ("float8_e5m2fnuz", 1), ("float8_e4m3b11fnuz", 1), ("float8_e4m3fn", 0)):
    dtype = jnp.dtype(name)
    converted = np.asarray(jax.jit(lambda x, dtype=dtype: x.astype(dtype))(x))
    print(sys.argv[1], name, converted.astype(np.float32))
    assert np.isnan(converted).sum() == (lost if is_older else 0)
    assert is_older and lost or np.array_equal(converted.view(np.uint8), x.astype(dtype).view(np.uint8))
PYTHON
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/convert.py" default
XLA_FLAGS=--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "$folder/venv/bin/python" "$folder/convert.py" older
