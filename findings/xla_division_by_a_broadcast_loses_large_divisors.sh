#!/usr/bin/env bash
# What: On a CPU, XLA divides by a broadcast array through its inverse, so x / x is 0 where |x| is above 8.51e37.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: a / b rounded once, as NumPy and as XLA itself where both operands have the full shape.
# Seen: Where b is broadcast along an axis, each row of a is multiplied by 1 / b. Above 2^126 the inverse is
#   subnormal and flushed to 0: 1e38 / 1e38 is 0, and so is a row divided by its own maximum. Below, a quotient may
#   differ from the correctly rounded one in its last bit: of rows divided by their maximum a quarter has no 1.
#   Scales of quantised rows and weights are divisions of this form.
# In jaxfused: jaxfused/ops/quantize/quantize_codes.py divides by a quarter of an NF4 scale above 1.
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

divide = jax.jit(jnp.divide)
for value in (8e37, 9e37, 3e38):
    full = jnp.full((3, 2), value, jnp.float32)
    one = jnp.full((1, 2), value, jnp.float32)
    print(value, "by a full array", divide(full, full)[0, 0], "by a broadcast one", divide(full, one)[0, 0])
    assert (divide(full, full) == 1).all()
    assert (divide(full, one) == (1 if value < 8.5e37 else 0)).all()

x = np.random.RandomState(0).rand(4096, 64).astype(np.float32)
largest = x.max(axis=1, keepdims=True)
ours = np.asarray(divide(x, largest))
print("quotients that differ from NumPy's:", (ours != x / largest).mean(), "rows without a 1:", (ours.max(1) != 1).mean())
assert (x / largest).max(1).min() == 1
assert (ours != x / largest).mean() > 0.1 and (ours.max(1) != 1).mean() > 0.05
PYTHON
