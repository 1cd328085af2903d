#!/usr/bin/env bash
# What: jax.image.resize of a uint8 picture with method 'cubic' returns float32 numbers below 0 and above
# 255.
#
# Version: jax==0.11.2, pillow==13.0.0; a CPU, Python 3.12 or newer.
# Expected: A uint8 picture, rounded and clipped, as Pillow returns for the same kernel.
# Seen: An edge between 0 and 255 becomes -17.9 to 272.9 in float32; Pillow's result lies in 0 to
#   255.
# In jaxfused: jaxfused/ops/pool/upsample.py is bilinear or nearest, neither of which overshoots.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 pillow==13.0.0

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

picture = np.array([[0, 0, 0, 255, 255, 255]] * 6, np.uint8)
resized = jax.image.resize(jnp.asarray(picture), (6, 12), "cubic")
pillow = np.asarray(Image.fromarray(picture).resize((12, 6), Image.BICUBIC))
print("jax", resized.dtype, resized.min(), resized.max(), "pillow", pillow.dtype, pillow.min(), pillow.max())
assert resized.dtype == jnp.float32 and resized.min() < -17 and resized.max() > 272
assert np.abs(np.clip(np.round(resized), 0, 255) - pillow).max() <= 1
PYTHON
