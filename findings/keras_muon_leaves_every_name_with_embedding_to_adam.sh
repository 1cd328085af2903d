#!/usr/bin/env bash
# What: keras.optimizers.Muon decides by name: any variable whose path has 'embedding' in it is stepped by
# AdamW.
#
# Version: keras==3.15.1, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Matrices get Muon; a projection called token_embedding_projection is one.
# Seen: Two equal gradients for 'kernel' and 'token_embedding_projection': the second moves by plus
#   or minus the learning rate, as in Adam.
# In jaxfused: jaxfused/optim/muon.py decides by shape and by the caller's dimension numbers, never
#   by name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile keras==3.15.1 jax==0.11.2

KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import keras
import numpy as np

parameters = [keras.Variable(jnp.zeros((64, 128)), name=name) for name in ("kernel", "token_embedding_projection")]
optimizer = keras.optimizers.Muon(1e-3)
optimizer.build(parameters)
optimizer.apply([jnp.asarray(np.random.RandomState(0).randn(64, 128))] * 2, parameters)
spread = [float(np.std(np.abs(np.asarray(p.value))) / np.mean(np.abs(np.asarray(p.value)))) for p in parameters]
print("spread of step lengths", spread)
assert spread[0] > 0.3 and spread[1] < 1e-3
PYTHON
