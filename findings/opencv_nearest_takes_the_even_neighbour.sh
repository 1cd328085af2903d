#!/usr/bin/env bash
# What: cv2.remap and cv2.warpAffine with INTER_NEAREST round half a pixel to the even neighbour.
#
# Version: opencv-python-headless==5.0.0.93, scipy==1.18.1, numpy==2.5.5; a CPU, Python 3.12 or
#   newer.
# Expected: Half up everywhere, as SciPy: a mask moved by half a pixel is moved by one.
# Seen: 10 12 12 14 14 16 16 for a row of 10, 11, 12 ... read at 0.5, 1.5, 2.5 ...: every second
#   label is lost. SciPy gives 11 12 13 14 15 16 17.
# In jaxfused: upsample by nearest repeats pixels by whole factors (docs/operators/images.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile opencv-python-headless==5.0.0.93 scipy==1.18.1 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import cv2
import numpy as np
from scipy import ndimage

labels = np.arange(10, 20, dtype=np.uint8)[None].repeat(3, 0)
x = (np.arange(7, dtype=np.float32) + 0.5)[None].repeat(3, 0)
y = np.ones_like(x)
remapped = cv2.remap(labels, x, y, cv2.INTER_NEAREST)[1]
warped = cv2.warpAffine(labels, np.float32([[1, 0, 0.5], [0, 1, 0]]), (7, 3), flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP)[1]
scipy = ndimage.map_coordinates(labels, [y[1], x[1]], order=0)
print("opencv", remapped, "scipy", scipy)
assert remapped.tolist() == warped.tolist() == [10, 12, 12, 14, 14, 16, 16] and scipy.tolist() == [11, 12, 13, 14, 15, 16, 17]
PYTHON
