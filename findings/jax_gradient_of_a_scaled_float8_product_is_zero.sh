#!/usr/bin/env bash
# What: Differentiated by JAX, a product of scaled float8 operands has a gradient of zeros under a loss that is a mean,
# because cotangents of float8 numbers are rounded to float8 too, without a scale.
#
# Version: jax==0.11.2, jaxlib==0.11.2, and so in 0.12.0.1; a CPU, Python 3.12 or newer.
# Expected: The gradient of the product in float32, within the few percent of the operands' rounding, or an error.
# Seen: The product is right within 4 %. Its gradient is 0 everywhere, without a word, for 256 rows, and for 8, as the
#   cotangents are below half of float8_e4m3fn's smallest number, 2**-9. Under a sum of 1,000 times as much it is within
#   5 %, and a larger cotangent, 1e6 for weights scaled by 2 / 448, becomes NaN. A weight that is rounded
#   to float8 and back loses a cotangent of 0.1 likewise. Forward mode rounds tangents in the same places.
# In jaxfused: jaxfused/ops/linear/linear_fp8.py and jaxfused/ops/fp8/ scale cotangents;
#   jaxfused/runtime/kernel_gradient.py refuses second derivatives, which JAX would compute like this.
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


def scaled(x):
    """Returns x / scale in float8, and the scale at which the largest number is 448."""
    scale = jax.lax.stop_gradient(jnp.abs(x).max()) / 448
    return (x / scale).astype(jnp.float8_e4m3fn), scale


def product(x, w):
    (x, x_scale), (w, w_scale) = scaled(x), scaled(w)
    return jnp.dot(x, w, preferred_element_type=jnp.float32) * (x_scale * w_scale)


def gradient(product, reduction):
    return jax.jit(jax.grad(lambda w, x: reduction((product(x, w) - 1) ** 2)))


def distance(found, right):
    return float(jnp.linalg.norm(found - right) / jnp.linalg.norm(right))


random = np.random.default_rng(0)
w = random.standard_normal((64, 64)).astype(np.float32) / 8
for rows in (8, 256):
    x = random.standard_normal((rows, 64)).astype(np.float32)
    found, right = gradient(product, jnp.mean)(w, x), gradient(jnp.dot, jnp.mean)(w, x)
    print(rows, "rows: the product is off by", distance(product(x, w), x @ w))
    print("  mean: gradient up to", jnp.abs(found).max(), "where float32 has", jnp.abs(right).max())
    assert distance(product(x, w), x @ w) < 0.05
    assert not found.any() and jnp.abs(right).max() > 1e-4

    (found, right) = (gradient(f, lambda y: 1000 * y.sum())(w, x) for f in (product, jnp.dot))
    print("  1,000 times the sum: off by", distance(found, right))
    assert distance(found, right) < 0.1


def rounded(w):
    values, scale = scaled(w)
    return values.astype(jnp.float32) * scale


_, pullback = jax.vjp(rounded, jnp.full(1, 2.0))
cotangents = np.array([0.1, 1, 100, 1e6], np.float32)
gradients = np.concatenate([pullback(jnp.full(1, cotangent))[0] for cotangent in cotangents])
print("cotangents", cotangents, "come back as", gradients)
assert gradients[0] == 0 and abs(gradients[1] - 1) > 0.1 and np.isnan(gradients[3])
PYTHON
