#!/usr/bin/env bash
# What: jax.random.bernoulli of a bfloat16 probability rounds it up to a multiple of 1/128: 0.001 is drawn 8 times as often.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A rate of p, to the precision of bfloat16, which has 0.001 to 0.1 % of itself.
# Seen: Uniform numbers are drawn in p's dtype, so they are the 128 multiples of 1/128 below 1. Of 0.0001 and 0.001 the
#   rate is 0.0078, of 0.01 0.0156, of 0.05 0.0547; float16 has steps of 1/1024: 0.0001 becomes 0.00098. Of
#   255/256 in bfloat16 every draw is True. jax.random.choice draws likewise: of 1,000 equally likely items only 128 ever come.
#   mode="high", or p in float32, is right; the docstring speaks of 1e-7 in float32.
# In jaxfused: jaxfused/runtime/dropout.py compares 16 random bits with a threshold that is a whole number of 65536ths.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

COUNT = 1 << 20
key = jax.random.key(0)


def rate(probability, dtype, mode="low"):
    p = jnp.asarray(probability, dtype)
    drawn = jax.random.bernoulli(key, p, (COUNT,), mode=mode)
    return float(p), float(drawn.mean())


for probability in (0.0001, 0.001, 0.01, 0.05, 0.3):
    for dtype, steps in ((jnp.bfloat16, 128), (jnp.float16, 1024)):
        p, low = rate(probability, dtype)
        _, high = rate(probability, dtype, "high")
        _, wide = rate(p, jnp.float32)
        print(f"{jnp.dtype(dtype).name} p {p:.5f}: {low:.5f}, mode='high' {high:.5f}, as float32 {wide:.5f}")
        # Five standard errors of a mean of a million draws.
        assert abs(low - np.ceil(p * steps) / steps) < 5e-3 * low**0.5
        assert abs(high - p) < 5e-3 * p**0.5 and abs(wide - p) < 5e-3 * p**0.5
assert rate(255 / 256, jnp.bfloat16) == (255 / 256, 1.0)
for dtype, reached in ((jnp.bfloat16, 128), (jnp.float32, 1000)):
    items = jax.random.choice(key, 1000, (COUNT,), p=jnp.full(1000, 0.001, dtype))
    print("choice of 1,000 items,", jnp.dtype(dtype).name, "p:", np.unique(items).size, "come")
    assert np.unique(items).size == reached
assert rate(0.001, jnp.bfloat16)[1] > 7 * rate(0.001, jnp.float32)[1]
PYTHON
