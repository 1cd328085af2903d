#!/usr/bin/env bash
# What: cv2.GaussianBlur with a kernel size of (0, 0) chooses 3 sigma for uint8 and 4 sigma for other
# types.
#
# Version: opencv-python-headless==5.0.0.93, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The size follows from sigma: uint8 gives the rounded result of float32.
# Seen: At sigma 2 a line spreads over 13 pixels in uint8 and over 17 in float32 and uint16; the
#   results differ by 1.13 of 255.
# In jaxfused: No operator of it blurs; references of tests are computed in float64.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile opencv-python-headless==5.0.0.93 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import cv2
import numpy as np

line = np.zeros((41, 41), np.uint8)
line[:, 20] = 255
rows = {str(t.__name__): cv2.GaussianBlur(line.astype(t) * f, (0, 0), 2.0)[20] for t, f in ((np.uint8, 1), (np.uint16, 257), (np.float32, 1))}
widths = {name: int((row > 0).sum()) for name, row in rows.items()}
difference = float(np.abs(rows["float32"] - rows["uint8"]).max())
print(widths, "largest difference", difference)
assert widths == {"uint8": 13, "uint16": 17, "float32": 17} and difference > 1
PYTHON
