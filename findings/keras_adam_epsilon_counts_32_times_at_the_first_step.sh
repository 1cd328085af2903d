#!/usr/bin/env bash
# What: Keras adds epsilon to the second moment's root before the bias correction, which multiplies it by
# 1 / sqrt(1 - b2**t).
#
# Version: keras==3.15.1, jax==0.11.2, optax==0.2.8; a CPU, Python 3.12 or newer.
# Expected: Adam with the same epsilon takes the same step in Keras and Optax.
# Seen: Gradient 1e-8, epsilon 1e-8, learning rate 1: Optax steps 0.5, Keras 0.031. Only gradients
#   near epsilon show it, and Keras' default of 1e-7 is ten times larger besides.
# In jaxfused: docs/operators/optimizers.md says it below the table of what equals what.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile keras==3.15.1 jax==0.11.2 optax==0.2.8

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import keras
import optax

parameter = keras.Variable(jnp.zeros(1))
optimizer = keras.optimizers.Adam(1.0, epsilon=1e-8)
optimizer.build([parameter])
optimizer.apply([jnp.full(1, 1e-8)], [parameter])
adam = optax.adam(1.0, eps=1e-8)
update, _ = adam.update(jnp.full(1, 1e-8), adam.init(jnp.zeros(1)))
of_keras, of_optax = -float(parameter.value[0]), -float(update[0])
print("keras", of_keras, "optax", of_optax)
assert abs(of_optax - 0.5) < 1e-3 and abs(of_keras - 1 / (1 + 1 / (1 - 0.999) ** 0.5)) < 1e-3
PYTHON
