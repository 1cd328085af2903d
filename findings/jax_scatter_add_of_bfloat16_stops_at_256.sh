#!/usr/bin/env bash
# What: Adding up bfloat16 numbers by .at[].add, by jax.ops.segment_sum or by a BCOO product rounds every
# partial sum.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: As jnp.sum, which adds in float32: 4,096 ones are 4,096.
# Seen: 256 in all three, from where on 1 is less than half a step; jnp.sum of the same array gives
#   4,096.
# In jaxfused: No operator scatters its sums: jaxfused/ops/ adds by
#   reductions and products, which sum in float32.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import sparse

ones, rows = jnp.ones(4096, jnp.bfloat16), jnp.zeros(4096, int)
matrix = sparse.BCOO((ones, jnp.stack([rows, jnp.arange(4096)], 1)), shape=(1, 4096))
sums = {
    "sum": jnp.sum(ones),
    "at_add": jnp.zeros(1, jnp.bfloat16).at[rows].add(ones)[0],
    "segment_sum": jax.ops.segment_sum(ones, rows, 1)[0],
    "bcoo": (matrix @ jnp.ones((4096, 1), jnp.bfloat16))[0, 0],
}
sums = {name: float(value) for name, value in sums.items()}
print(sums)
assert sums == {"sum": 4096, "at_add": 256, "segment_sum": 256, "bcoo": 256}
PYTHON
