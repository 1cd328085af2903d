#!/usr/bin/env bash
# What: jax.scipy.ndimage.map_coordinates(mode='constant') blends a sample half a pixel outside with the
# fill; SciPy's returns the fill.
#
# Version: jax==0.11.2, scipy==1.18.1; a CPU, Python 3.12 or newer.
# Expected: The function of the same name and mode gives SciPy's numbers.
# Seen: At -0.5 of a row of 100s JAX gives 50 and SciPy 0; JAX's 'constant' is SciPy's
#   'grid-constant'.
# In jaxfused: No operator of it warps pictures; jaxfused/ops/pool/upsample.py continues a picture by its
#   edge.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 scipy==1.18.1

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from jax.scipy.ndimage import map_coordinates
from scipy import ndimage

row, at = np.full(4, 100, np.float32), [np.array([-0.5, 0, 3.5])]
jax_constant = np.asarray(map_coordinates(row, at, order=1, mode="constant"))
constant = ndimage.map_coordinates(row, at, order=1, mode="constant")
grid = ndimage.map_coordinates(row, at, order=1, mode="grid-constant")
print("jax", jax_constant, "scipy constant", constant, "scipy grid-constant", grid)
assert jax_constant.tolist() == [50, 100, 50] == grid.tolist() and constant.tolist() == [0, 100, 0]
PYTHON
