#!/usr/bin/env bash
# What: optax.adam takes 1 - b2**t in float32, so that the closer b2 is to 1, the longer the first steps.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The first step of Adam is the learning rate, for every b2.
# Seen: 0.99999 at b2 0.999, 1.00008 at 0.9999, 1.00068 at 0.99999, for a learning rate and a
#   gradient of 1.
# In jaxfused: jaxfused/optim/adam.py takes it by expm1.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import optax

steps = []
for b2 in (0.999, 0.9999, 0.99999):
    adam, parameter = optax.adam(1.0, b2=b2), jnp.float32(0)
    update, _ = adam.update(jnp.float32(1), adam.init(parameter), parameter)
    steps.append(-float(update))
print(steps)
errors = [abs(step - 1) for step in steps]
assert 3e-6 < errors[0] < 2e-5 and 5e-5 < errors[1] < 2e-4 and 5e-4 < errors[2] < 1e-3
PYTHON
