#!/usr/bin/env bash
# What: keras.ops.depth_to_space reads channels in another order for channels_first than for
# channels_last.
#
# Version: keras==3.15.1, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: One operation in two layouts: moving the axes of one result gives the other.
# Seen: 8 channels, blocks of 2: a pixel of channels_last reads channels 0 1, 2 3, 4 5, 6 7, of
#   channels_first 0 4, 1 5, 2 6, 3 7, as torch's pixel shuffle. Weights moved from one layout to
#   the other are silently wrong.
# In jaxfused: It has no such operator; jaxfused/ops/pool/upsample.py and conv_transpose enlarge.
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

channels = jnp.arange(8.0)
last = keras.ops.depth_to_space(channels.reshape(1, 1, 1, 8), 2, data_format="channels_last")
first = keras.ops.depth_to_space(channels.reshape(1, 8, 1, 1), 2, data_format="channels_first")
first = np.moveaxis(np.asarray(first), 1, -1)
print("channels_last", np.asarray(last).ravel(), "channels_first", first.ravel())
assert np.asarray(last).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and first.ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
PYTHON
