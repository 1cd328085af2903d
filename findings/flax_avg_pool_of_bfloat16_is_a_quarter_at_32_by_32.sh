#!/usr/bin/env bash
# What: flax.linen.avg_pool of bfloat16 ones is 0.25 on a CPU where the window has 32 x 32 pixels.
#
# Version: flax==0.12.12, jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: 1, as jnp.mean over the same pixels gives: a sum of many numbers is taken in float32 and rounded once,
#   as jnp.sum, jax.lax.reduce, products and convolutions of bfloat16 do here.
# Seen: 0.89 at 17 x 17, 0.25 at 32 x 32: the sum of a window stops at 256, since jax.lax.reduce_window rounds it
#   after each pixel. A last average pool of 7 x 7 over random numbers in [0, 1) is off by up to 0.012, six times
#   what rounding the result costs. Beside scatter-adds this is a second way to lose a sum, in a layer that looks
#   like a mean.
# In jaxfused: jaxfused/ops/pool/ sums in float32 (avg_pool and global_avg_pool give 1).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def pooled(x):
    return nn.avg_pool(x, x.shape[1:3]).astype(jnp.float32)


ones = {n: float(pooled(jnp.ones((1, n, n, 1), jnp.bfloat16))[0, 0, 0, 0]) for n in (16, 17, 32)}
means = {n: float(jnp.ones((1, n, n, 1), jnp.bfloat16).mean((1, 2))[0, 0]) for n in (16, 17, 32)}
print("avg_pool of ones", ones, "jnp.mean", means)
assert ones[16] == 1 and ones[17] < 0.9 and ones[32] == 0.25 and set(means.values()) == {1.0}

x = jnp.asarray(np.random.RandomState(0).rand(1, 7, 7, 256), jnp.bfloat16)
exact = np.asarray(x, np.float64).mean((1, 2))
of_pool = np.abs(np.asarray(pooled(x), np.float64)[:, 0, 0] - exact).max()
of_mean = np.abs(np.asarray(x.mean((1, 2)), np.float64) - exact).max()
print(f"7 x 7 random numbers: avg_pool {of_pool:.4f} off, mean {of_mean:.4f}")
assert of_pool > 2.5 * of_mean
PYTHON
