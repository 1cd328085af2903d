#!/usr/bin/env bash
# What: GGUF's Q4_0 stores a negative scale wherever a block's largest magnitude is positive; of a block
# of zeros it is -0.
#
# Version: gguf==0.19.0, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: A scale is a positive number, the largest magnitude over the largest code.
# Seen: About half of the scales of normal weights are negative. Code that takes their logarithm, or
#   stores them in an unsigned format, is wrong in every second block.
# In jaxfused: jaxfused/runtime/quantized_array.py multiplies by the scale as it is, of either
#   sign.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile gguf==0.19.0 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import gguf
import numpy as np
from gguf.quants import dequantize, quantize

q4_0 = gguf.GGMLQuantizationType.Q4_0
weights = np.random.RandomState(0).randn(64, 256).astype(np.float32)
blocks = quantize(weights, q4_0)
scales = blocks.reshape(-1, 18)[:, :2].copy().view(np.float16)
largest = np.take_along_axis(b := weights.reshape(-1, 32), np.abs(b).argmax(1)[:, None], 1)
zero_scale = quantize(np.zeros((1, 32), np.float32), q4_0)[:, :2].copy().view(np.float16)
print("negative", (scales < 0).mean(), "of zeros", zero_scale)
assert 0.4 < (scales < 0).mean() < 0.6 and (np.sign(scales) == -np.sign(largest)).all() and np.signbit(zero_scale).all()
assert np.abs(dequantize(blocks, q4_0) - weights).max() < 0.4
PYTHON
