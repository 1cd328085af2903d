#!/usr/bin/env bash
# What: jax.lax.conv_transpose, and with it flax.linen.ConvTranspose, does not flip its kernel; Keras on
# the same JAX does.
#
# Version: jax==0.11.2, keras==3.15.1; a CPU, Python 3.12 or newer.
# Expected: One name, one kernel, padding 'same', equal shapes: equal numbers, so that weights can
#   be moved.
# Seen: An impulse becomes 3 2 1 in JAX and 1 2 3 in Keras for the kernel 1 2 3;
#   transpose_kernel=True is Keras' and torch's way round.
# In jaxfused: jaxfused/ops/conv/conv_transpose.py has JAX's argument transpose_kernel, and says what it
#   flips.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 keras==3.15.1

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import keras

x, kernel = jnp.zeros((1, 5, 1)).at[0, 2, 0].set(1), jnp.array([1.0, 2, 3]).reshape(3, 1, 1)
layout = ("NWC", "WIO", "NWC")
plain = jax.lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=layout)
mirrored = jax.lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=layout, transpose_kernel=True)
of_keras = keras.ops.conv_transpose(x, kernel, strides=2, padding="same")
print("jax", plain.ravel(), "keras", of_keras.ravel())
assert plain.ravel()[4:7].tolist() == [3, 2, 1] and of_keras.ravel()[4:7].tolist() == [1, 2, 3]
assert (mirrored == of_keras).all()
PYTHON
