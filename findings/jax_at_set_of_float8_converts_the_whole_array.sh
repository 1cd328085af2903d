#!/usr/bin/env bash
# What: x.at[rows].set(values) of a float8 array converts the whole array to float16 and back on a CPU, however
# few rows are set.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A donated array is changed in place, as it is for bfloat16 and int8.
# Seen: 8 rows of a donated float8_e4m3fn array of 4 MiB take 8 MiB beside it, the whole array in float16; of
#   bfloat16 and int8 they take 32 bytes. Setting its bytes through lax.bitcast_convert_type takes 4 MiB, a copy.
# In jaxfused: jaxfused/ops/serving/kv_cache.py keeps float8 as uint8, and converts what it writes and reads.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def as_bytes(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def scatter(x, rows, values):
    return x.at[rows].set(values)


def scatter_bytes(x, rows, values):
    changed = as_bytes(x).at[rows].set(as_bytes(values))
    return jax.lax.bitcast_convert_type(changed, x.dtype)


def beside(function, dtype):
    """Returns the bytes that `function` needs beside its donated array and its result."""
    x, values = (jax.ShapeDtypeStruct((n, 1024), dtype) for n in (4096, 8))
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(function, donate_argnums=0).lower(x, rows, values).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 1024 * jnp.dtype(dtype).itemsize
    return memory.temp_size_in_bytes, " f16[4096,1024]" in compiled.as_text()


found = {dtype: beside(scatter, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "int8")}
found["float8_e4m3fn as bytes"] = beside(scatter_bytes, "float8_e4m3fn")
for name, (size, converts) in found.items():
    print(f"{name}: {size} bytes beside the array, all of it in float16: {converts}")
for name in ("float8_e4m3fn", "float8_e5m2"):
    assert found[name][0] >= 8 << 20 and found[name][1]
for name in ("bfloat16", "int8"):
    assert found[name][0] < 1024
assert 4 << 20 <= found["float8_e4m3fn as bytes"][0] < 5 << 20
PYTHON
