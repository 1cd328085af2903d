#!/usr/bin/env bash
# What: A byte of GGUF's MXFP4 holds elements i and i + 16 of its block of 32; in the MXFP4 of gpt-oss's
# own files it holds 2i and 2i + 1.
#
# Version: gguf==0.19.0, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: One named format with one order: the bytes of a checkpoint can be copied.
# Seen: The byte 0x21 at place 0 decodes to 0.5 at element 0 and 1 at element 16.
# In jaxfused: It reads no GGUF; jaxfused/runtime/quantized_array.py gives the order of its own
#   nibbles.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile gguf==0.19.0 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np
from gguf.quants import dequantize

block = np.zeros((1, 17), np.uint8)
block[0, :2] = 127, 0x21
values = dequantize(block, gguf.GGMLQuantizationType.MXFP4)[0]
print("element 0", values[0], "1", values[1], "16", values[16])
assert values[0] == 0.5 and values[16] == 1 and np.count_nonzero(values) == 2
PYTHON
