#!/usr/bin/env bash
# What: JAX converts float64 to float16 through float32, and ml_dtypes float64 to bfloat16 and float8: one value in 16,000 is
# another float16 than NumPy's.
#
# Version: jax==0.11.2, ml_dtypes==0.6.0, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The nearest number of the narrow type, as IEEE 754 asks of a conversion and as NumPy's float16 has it.
# Seen: A value a little above (below) the middle of two neighbours is that middle in float32, and goes to the even one:
#   1 + 2**-11 + 2**-40 becomes 1.0 in float16. astype on the CPU does so for float16 and bfloat16 and is right for float8;
#   ml_dtypes under NumPy does so for bfloat16 and float8. So jnp.asarray(x, jnp.float16) and jnp.asarray(x).astype(jnp.float16)
#   of one float64 array of NumPy differ, with and without jax_enable_x64.
# In jaxfused: tests/support/tolerances.py compares results with float64 itself, never with float64 rounded to 16 bits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile \
  jax==0.11.2 ml_dtypes==0.6.0 numpy==2.5.5

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np


def nearest(x, bits):
    """Rounds x in [1, 2) to a fraction of that many bits, ties to even; both products are exact."""
    return np.ldexp(np.rint(np.ldexp(x, bits)), -bits)


def wrong(rounded, right):
    return int((np.asarray(rounded).astype(np.float64) != right).sum())


random = np.random.default_rng(0).uniform(1, 2, 1 << 20)
narrow = wrong(jnp.asarray(random).astype(jnp.float16), nearest(random, 10))
print("a million float64, astype(float16) without x64:", narrow, "are not the nearest")
assert 40 < narrow < 100 and wrong(jnp.asarray(random, jnp.float16), nearest(random, 10)) == 0

jax.config.update("jax_enable_x64", True)
seen = {}
for dtype, bits in ((jnp.float16, 10), (jnp.bfloat16, 7), (jnp.float8_e4m3fn, 3)):
    # A little more than half of a unit above 1, and a little less than half of one below 1 + two units.
    close = np.array([1 + 2.0 ** -(bits + 1) + 2.0**-40, 1 + 3 * 2.0 ** -(bits + 1) - 2.0**-40])
    cast = jax.jit(lambda x, dtype=dtype: x.astype(dtype))
    seen[jnp.dtype(dtype).name] = {
        "numpy": wrong(close.astype(dtype), nearest(close, bits)),
        "jax": wrong(cast(close), nearest(close, bits)),
    }
    print(jnp.dtype(dtype).name, "wrong of two:", seen[jnp.dtype(dtype).name], cast(close))
    print("  of a million:", wrong(random.astype(dtype), nearest(random, bits)), wrong(cast(random), nearest(random, bits)))
assert seen == {
    "float16": {"numpy": 0, "jax": 2},
    "bfloat16": {"numpy": 2, "jax": 2},
    "float8_e4m3fn": {"numpy": 2, "jax": 0},
}
PYTHON
