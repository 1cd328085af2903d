#!/usr/bin/env bash
# What: keras.optimizers.Adafactor keeps a second moment of a parameter's full size beside the two factors
# that replace it.
#
# Version: keras==3.15.1, jax==0.11.2, optax==0.2.8; a CPU, Python 3.12 or newer.
# Expected: Rows plus columns: saving that memory is what Adafactor is for.
# Seen: For a kernel of 256 x 128 Keras holds 33,152 numbers, Optax 386 and a counter.
# In jaxfused: jaxfused/optim/adafactor.py holds factors alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile keras==3.15.1 jax==0.11.2 optax==0.2.8

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import keras
import optax

parameter = keras.Variable(jnp.zeros((256, 128)))
optimizer = keras.optimizers.Adafactor(1e-3)
optimizer.build([parameter])
of_keras = sum(int(jnp.size(variable.value)) for variable in optimizer.variables if variable.shape)
state = optax.adafactor(1e-3).init(jnp.zeros((256, 128)))
of_optax = sum(jnp.size(leaf) for leaf in jax.tree.leaves(state))
print("numbers held: keras", of_keras, "optax", of_optax)
assert of_keras == 256 * 128 + 256 + 128 and of_optax < 400
PYTHON
