#!/usr/bin/env bash
# What: qwix scales int4 by the largest magnitude over 7.5 and clips to 7, so that the largest weight of a
# channel comes back 6.7 % smaller.
#
# Version: qwix==0.1.8, jax==0.11.2, flax==0.12.12; a CPU, Python 3.12 or newer.
# Expected: The largest magnitude comes back as it is, as with the scale amax / 7.
# Seen: 1.0 becomes 0.9333; int8, by 127.5, shrinks it by 0.4 %.
# In jaxfused: quantize scales by amax / 7 and amax / 127 (docs/quantisation.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile qwix==0.1.8 jax==0.11.2 flax==0.12.12

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import qwix

weights = jnp.array([[1.0], [0.5], [0.25], [-0.125]])
largest = {}
for dtype in (jnp.int4, jnp.int8):
    array = qwix.quantize(weights, dtype, channelwise_axes=(1,))
    largest[jnp.dtype(dtype).name] = round(float(qwix.dequantize(array)[0, 0]), 4)
print(largest)
assert largest == {"int4": 0.9333, "int8": 0.9961}
PYTHON
