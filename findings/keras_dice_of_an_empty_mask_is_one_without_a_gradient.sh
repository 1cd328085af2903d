#!/usr/bin/env bash
# What: keras.losses.Dice of a picture without foreground is 1 whatever is predicted, and has no gradient.
#
# Version: keras==3.15.1, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: 0 where nothing is predicted, and a gradient that lowers false alarms, as with a
#   smoothing term.
# Seen: 1.0 for predictions of 0, 0.5 and 1, gradient 0 everywhere; Tversky alike.
# In jaxfused: jaxfused/ops/loss/segmentation_loss.py: smooth=1 by default, 0 for an empty prediction.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile keras==3.15.1 jax==0.11.2

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import keras

empty = jnp.zeros((1, 4, 4, 1))
dice, tversky = keras.losses.Dice(), keras.losses.Tversky()
losses = [float(dice(empty, jnp.full(empty.shape, p))) for p in (0.0, 0.5, 1.0)]
gradient = jax.grad(lambda p: dice(empty, p))(jnp.full(empty.shape, 0.5))
print("dice", losses, "tversky", float(tversky(empty, empty)), "gradient", float(jnp.abs(gradient).max()))
assert losses == [1, 1, 1] and float(tversky(empty, empty)) == 1 and (gradient == 0).all()
PYTHON
