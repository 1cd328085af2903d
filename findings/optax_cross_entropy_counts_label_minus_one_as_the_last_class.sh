#!/usr/bin/env bash
# What: optax.softmax_cross_entropy_with_integer_labels takes -1, the usual label of a place to ignore,
# for the last class.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: 0, NaN or an error: other libraries ignore -1 or -100 or raise.
# Seen: -1 has the loss and the gradient of class 2 of 3 and trains towards it; -100 and 3 are NaN.
# In jaxfused: jaxfused/ops/loss/label_values.py: NaN unless it is the ignore_index.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

logits = jnp.array([[0.0, 1.0, 2.0]] * 4)
loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([2, -1, -100, 3]))
print(loss)
assert loss[0] == loss[1] and jnp.isnan(loss[2:]).all()
PYTHON
