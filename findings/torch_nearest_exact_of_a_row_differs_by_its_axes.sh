#!/usr/bin/env bash
# What: torch's interpolate(mode="nearest-exact") gives a row other pixels as a 1-D signal than as a 2-D image.
#
# Version: torch==2.13.0 (2.14.1 too); an x86 CPU, Python 3.12 or newer.
# Expected: One pixel, whatever the number of axes that are not resized.
# Seen: Two values enlarged to 41: the result in the middle, at exactly 1.0 in values of the row, is the second one as
#   [1, 1, 2] and as [1, 1, 1, 1, 2], and the first one as [1, 1, 1, 2]. Of all sizes up to 128 thirteen pairs differ so,
#   by how the position is rounded in float32.
# In jaxfused: resize(method="nearest") has the pixels of 2-D images for any number of axes
#   (jaxfused/ops/pool/resize_taps.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile torch==2.13.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import interpolate

found = []
for axes in (1, 2, 3):
    row = torch.tensor([0.0, 1.0]).reshape(1, 1, *[1] * (axes - 1), 2)
    result = interpolate(row, size=[*[1] * (axes - 1), 41], mode="nearest-exact").flatten()
    found.append(int(result.sum()))
    print(f"{axes}-D: {41 - found[-1]} results of the first value, {found[-1]} of the second")
assert found == [21, 20, 21]
PYTHON
