#!/usr/bin/env bash
# What: Bicubic is one name for three kernels: Pillow's resize has the coefficient -0.5, Pillow's
# transform -1, OpenCV's resize -0.75.
#
# Version: pillow==13.0.0, opencv-python-headless==5.0.0.93, numpy==2.5.5; a CPU, Python 3.12 or
#   newer.
# Expected: The same enlargement by two gives the same numbers, at least within one library.
# Seen: Largest weight 0.867, 0.891 and 0.879, lowest -0.070, -0.141 and -0.105.
# In jaxfused: jaxfused/ops/pool/upsample.py is bilinear or nearest, of which there is one each;
#   jax.image.resize has -0.5.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile pillow==13.0.0 opencv-python-headless==5.0.0.93 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import cv2
import numpy as np
from PIL import Image

line = np.zeros((9, 9), np.float32)
line[:, 4] = 1
picture = Image.fromarray(line)
results = {
    "pillow resize": np.asarray(picture.resize((18, 9), Image.BICUBIC))[4],
    "pillow transform": np.asarray(picture.transform((18, 9), Image.AFFINE, (0.5, 0, 0, 0, 1, 0), Image.BICUBIC))[4],
    "opencv resize": cv2.resize(line, (18, 9), interpolation=cv2.INTER_CUBIC)[4],
}
extremes = {name: (round(float(row.max()), 3), round(float(row.min()), 3)) for name, row in results.items()}
print(extremes)
assert extremes == {"pillow resize": (0.867, -0.07), "pillow transform": (0.891, -0.141), "opencv resize": (0.879, -0.105)}
PYTHON
