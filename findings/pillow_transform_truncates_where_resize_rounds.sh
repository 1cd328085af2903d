#!/usr/bin/env bash
# What: Pillow's bilinear transform cuts fractions of uint8 results off; its resize rounds them.
#
# Version: pillow==13.0.0, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The same rounding in both: 10.5 becomes 11 (or 10) in rotate, transform and resize.
# Seen: Half way between 10 and 11 transform gives 10 and resize 11, so that rotations darken a
#   picture by half a level on average.
# In jaxfused: examples/vit/data.py augments in floats.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile pillow==13.0.0 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from PIL import Image

picture = Image.fromarray(np.array([[10, 11] * 4] * 4, np.uint8))
moved = np.asarray(picture.transform((7, 4), Image.AFFINE, (1, 0, 0.5, 0, 1, 0), Image.BILINEAR))[1]
resized = np.asarray(picture.resize((4, 4), Image.BOX))[1]
print("transform", moved, "resize", resized)
assert (moved == 10).all() and (resized == 11).all()
PYTHON
