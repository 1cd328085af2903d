#!/usr/bin/env bash
# What: optax.contrib.muon hands its nesterov, on by default, to the Adam that takes biases and norms:
# their first step is 1.47 learning rates.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: AdamW for all that is no matrix, as described: a first step of one learning rate.
# Seen: -1.4737 for a gradient of 1 and a learning rate of 1.
# In jaxfused: jaxfused/optim/muon.py: adam_nesterov, off by default, is an argument of its own.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

parameters = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}
gradients = jax.tree.map(jnp.ones_like, parameters)
first = {}
for name, muon in (("default", optax.contrib.muon(1.0)), ("nesterov=False", optax.contrib.muon(1.0, nesterov=False))):
    updates, _ = muon.update(gradients, muon.init(parameters), parameters)
    first[name] = float(updates["bias"][0])
print(first)
assert abs(first["default"] + 1.4737) < 1e-3 and abs(first["nesterov=False"] + 1) < 1e-4
PYTHON
