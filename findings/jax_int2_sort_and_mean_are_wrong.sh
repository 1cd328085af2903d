#!/usr/bin/env bash
# What: jnp.sort of int2 values returns other values than it was given, and their mean is an integer, on a
# CPU.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A sort is a permutation, and the mean of integers a float, as for int8.
# Seen: [1, -2, 0, -1, 1, 1, 1, 1] sorts to other numbers in each run, [-2, -1, 1, -1, -1, -1, 1, 0]
#   in one, and has the mean -1 instead of 0.25; no error.
# In jaxfused: jaxfused/runtime/quantized_array.py refuses int2 and names jnp.int4, which holds
#   the same numbers.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np

values = [1, -2, 0, -1, 1, 1, 1, 1]
array = jnp.array(values, jnp.int2)
assert np.asarray(array, int).tolist() == values
print(jnp.sort(array), jnp.mean(array), jnp.mean(array).dtype)
assert np.asarray(jnp.sort(array), int).tolist() != sorted(values)
assert float(jnp.mean(array)) == -1 and jnp.mean(array).dtype == jnp.int2
assert np.asarray(jnp.sort(array.astype(jnp.int8)), int).tolist() == sorted(values)
assert float(jnp.mean(array.astype(jnp.int8))) == 0.25
PYTHON
