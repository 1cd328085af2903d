#!/usr/bin/env bash
# What: torch.nn.functional.interpolate(antialias=True) to a width of 1 repeats the first row in all rows,
# where the height changes too.
#
# Version: torch==2.14.1, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The mean of both columns at each height, as for a width of 2, or in two steps.
# Seen: Rows 0, 2, ... 14 of two equal columns, resized to 4 x 1, become four times the value of the first
#   result, in "bilinear" and "bicubic"; in two steps they are right.
# In jaxfused: jaxfused/ops/pool/resize_xla.py multiplies axis by axis; a single column is as any other.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile torch==2.14.1 numpy==2.5.5

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import interpolate

picture = torch.arange(8.0).mul(2).reshape(1, 1, 8, 1).repeat(1, 1, 1, 2)
for mode in ("bilinear", "bicubic"):
    at_once = interpolate(picture, (4, 1), mode=mode, antialias=True).ravel()
    rows = interpolate(picture, (4, 2), mode=mode, antialias=True)
    in_steps = interpolate(rows, (4, 1), mode=mode, antialias=True).ravel()
    print(mode, "at once", at_once.tolist(), "in two steps", in_steps.tolist())
    assert (at_once == at_once[0]).all()
    assert torch.allclose(in_steps, rows[0, 0, :, 0]) and in_steps[-1] - in_steps[0] > 10
PYTHON
