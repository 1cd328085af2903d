#!/usr/bin/env bash
# What: np.frombuffer(packed, ml_dtypes.int4) reads one value from each byte and ignores its upper half.
#
# Version: ml_dtypes==0.6.0, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: int4 takes half a byte, so that two bytes of a packed checkpoint are four values.
# Seen: Bytes 0x21 0x43 give [1, 3]: 2 and 4 are lost, nothing is raised. An int4 array of 8 has 8
#   bytes, in JAX too.
# In jaxfused: jaxfused/runtime/quantized_array.py: int4 is packed as uint8 of two nibbles, and
#   its docstring gives their order.
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

read = np.frombuffer(bytes([0x21, 0x43]), ml_dtypes.int4)
print("read", read, "bytes of 8 values", jnp.ones(8, jnp.int4).nbytes)
assert read.astype(int).tolist() == [1, 3] and jnp.ones(8, jnp.int4).nbytes == 8
PYTHON
