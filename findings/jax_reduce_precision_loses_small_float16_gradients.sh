#!/usr/bin/env bash
# What: jax.lax.reduce_precision to float16's bits makes numbers below 6.1e-5 zero, and its gradient does so too.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The numbers that a conversion to float16 and back gives, which keeps multiples of 6e-8, and a gradient
#   that is passed on as it is, or as the conversions pass it on.
# Seen: 0 for every number below float16's smallest normal one, 2**-14. The cotangent is reduced likewise, so a
#   gradient of 1e-5, usual in training in float16, becomes 0. JAX advises this function where XLA would leave out
#   a conversion to a narrower dtype and back.
# In jaxfused: jaxfused/ops/norm/layer_norm_xla.py (_rounded), tests/ops/norm/test_layer_norm.py.
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

x = jnp.array([1.0, 1e-4, 5e-5, 1e-5, 1e-7], jnp.float32)
converted = np.asarray(x).astype(np.float16).astype(np.float32)


def reduced(x):
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


print("converted", converted)
print("reduced  ", reduced(x))
np.testing.assert_array_equal(reduced(x), np.where(x < 2.0**-14, 0, converted))
assert (converted > 0).all()

_, pullback = jax.vjp(reduced, jnp.ones_like(x))
(gradient,) = pullback(x)
print("gradient ", gradient, "of a cotangent of", x)
np.testing.assert_array_equal(gradient, np.where(x < 2.0**-14, 0, converted))
PYTHON
