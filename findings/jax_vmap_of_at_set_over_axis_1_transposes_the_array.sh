#!/usr/bin/env bash
# What: jax.vmap over axis 1 of x.at[row].set(value) transposes the whole array to and fro, however little is
# set.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A donated array is changed in place, as by the same scatter written with two indices.
# Seen: One row for each of 32 sequences in a donated array of 64 MiB [positions, sequences, features]: a copy of
#   64 MiB for vmap(in_axes=1, out_axes=1), a few hundred bytes for x.at[rows, arange(32)].set(values).
# In jaxfused: jaxfused/ops/serving/kv_cache.py writes by the indices of sequence and place.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def one(x, row, value):
    return x.at[row].set(value)


def beside(function, shape):
    """Returns the bytes that `function` needs beside its donated array and its result."""
    x, rows = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
    values = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    memory = jax.jit(function, donate_argnums=0).lower(x, rows, values).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 64 << 20
    return memory.temp_size_in_bytes


by_axis_1 = beside(jax.vmap(one, (1, 0, 0), 1), (4096, 32, 128))
by_axis_0 = beside(jax.vmap(one), (32, 4096, 128))
by_indices = beside(lambda x, rows, values: x.at[rows, jnp.arange(32)].set(values), (4096, 32, 128))
print("vmap over axis 1", by_axis_1, "over axis 0", by_axis_0, "two indices", by_indices)
assert by_axis_1 >= 64 << 20 and by_axis_0 < 1 << 20 and by_indices < 1 << 20
PYTHON
