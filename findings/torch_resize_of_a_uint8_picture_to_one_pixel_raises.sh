#!/usr/bin/env bash
# What: torch.nn.functional.interpolate of a uint8 picture of three channels to 1 x 1 fails an internal assertion,
# in "bilinear" and "bicubic", with antialias or without.
#
# Version: torch==2.14.1, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: One pixel, as for one or four channels, for floats, for sizes 1 x 2 and 2 x 1, and for channels_last.
# Seen: "num_channels == unpacked_output.size(0) INTERNAL ASSERT FAILED". The result of one pixel counts as
#   channels_last already, so that it is not unpacked. torchvision's resize of uint8 pictures raises the same.
# In jaxfused: jaxfused/augment/crops.py resizes to one pixel as to any size (jaxfused/ops/augment/resample_xla.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile torch==2.14.1 numpy==2.5.5

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import interpolate


def raises(picture, size, **options):
    try:
        interpolate(picture, size, **options)
    except RuntimeError as error:
        assert "num_channels == unpacked_output.size(0)" in str(error)
        return True
    return False


picture = torch.arange(60, dtype=torch.uint8).reshape(1, 3, 4, 5)
for mode in ("bilinear", "bicubic"):
    for antialias in (False, True):
        options = dict(mode=mode, antialias=antialias)
        assert raises(picture, (1, 1), **options)
        assert not raises(picture, (1, 2), **options)
        assert not raises(picture.float(), (1, 1), **options)
        assert not raises(picture[:, :1], (1, 1), **options)
        assert not raises(picture.contiguous(memory_format=torch.channels_last), (1, 1), **options)
        print(mode, "antialias" if antialias else "", "raises for 3 channels of uint8 to 1 x 1 alone")
PYTHON
