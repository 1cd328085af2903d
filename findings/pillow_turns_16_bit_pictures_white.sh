#!/usr/bin/env bash
# What: Image.open(path).convert("RGB") of a grey PNG of 16 bits cuts all values above 255 off, so that the
# picture becomes white.
#
# Version: pillow==13.0.0, opencv-python-headless==5.0.0.93, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The upper eight bits, as cv2.imread gives by default and as Pillow itself gives for a PNG of three
#   16-bit channels.
# Seen: A ramp from 0 to 65,535 has two levels after convert("RGB") or convert("L"), and 255 of its 256 pixels are
#   white. convert("RGB") is the first line of most data sets' loaders, and microscopes, X-rays and depth cameras
#   write such files; training goes on with white pictures.
# In jaxfused: examples/images.py takes the upper eight bits of such a picture.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile pillow==13.0.0 opencv-python-headless==5.0.0.93 numpy==2.5.5

"$folder/venv/bin/python" - <<'PYTHON'
import io

import cv2
import numpy as np
from PIL import Image

ramp = (257 * np.arange(256, dtype=np.uint16)).reshape(16, 16)


def decoded(picture):
    content = cv2.imencode(".png", picture)[1].tobytes()
    image = Image.open(io.BytesIO(content))
    of_opencv = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    return image.mode, np.asarray(image.convert("RGB"))[..., 0].ravel(), of_opencv[..., 0].ravel()


mode, grey, of_opencv = decoded(ramp)
colour_mode, colour, _ = decoded(np.stack([ramp] * 3, axis=-1))
print("grey:", mode, np.unique(grey), (grey == 255).sum(), "white pixels; OpenCV", np.unique(of_opencv).size, "levels")
print("three channels:", colour_mode, np.unique(colour).size, "levels")
assert np.unique(grey).tolist() == [0, 255] and (grey == 255).sum() == 255
assert np.array_equal(of_opencv, np.arange(256)) and np.array_equal(colour, np.arange(256))
PYTHON
