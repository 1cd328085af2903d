#!/usr/bin/env bash
# What: One infinite gradient under global_clipnorm makes every parameter of a Keras model NaN; so does a
# norm that overflows float32.
#
# Version: keras==3.15.1, jax==0.11.2, optax==0.2.8; a CPU, Python 3.12 or newer.
# Expected: As Optax's and torch's: the infinite entry is NaN and all others stop, since they are
#   divided by an infinite norm.
# Seen: Gradients [inf, 1]: Keras [NaN, NaN], Optax [NaN, 0]. Gradients [3e19, 4e19], whose squares
#   overflow: Keras NaN, Optax 0.
# In jaxfused: docs/operators/optimizers.md: step(max_norm=...) is Optax's clipping.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile keras==3.15.1 jax==0.11.2 optax==0.2.8

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import keras
import numpy as np
import optax

clip = optax.clip_by_global_norm(1.0)
seen = []
for gradient in (jnp.array([jnp.inf, 1.0]), jnp.array([3e19, 4e19])):
    parameter = keras.Variable(jnp.zeros(2))
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    optimizer.build([parameter])
    optimizer.apply([gradient], [parameter])
    seen.append((np.asarray(parameter.value).tolist(), np.asarray(clip.update(gradient, clip.init(gradient))[0]).tolist()))
print("keras and optax", seen)
assert all(np.isnan(of_keras).all() for of_keras, _ in seen)
assert np.isnan(seen[0][1][0]) and seen[0][1][1] == 0 and seen[1][1] == [0, 0]
PYTHON
