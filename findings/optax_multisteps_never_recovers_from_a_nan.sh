#!/usr/bin/env bash
# What: One NaN gradient poisons optax.MultiSteps for good: its sums are cleared by a product with 0.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The group of micro-steps with the NaN is lost, the next group starts from zero.
# Seen: With k = 2 and gradients NaN, 1, 1, 1, 1, 1 every update is NaN, also the ones between,
#   which should be 0.
# In jaxfused: jaxfused/optim/transformation.py: skip_nonfinite and loss scales leave state and
#   parameters as they were.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

steps, parameter = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2), jnp.zeros(1)
state, updates = steps.init(parameter), []
for gradient in (jnp.nan, 1.0, 1.0, 1.0, 1.0, 1.0):
    update, state = steps.update(jnp.full(1, gradient), state, parameter)
    updates.append(float(update[0]))
print(updates)
assert all(update != update for update in updates)
PYTHON
