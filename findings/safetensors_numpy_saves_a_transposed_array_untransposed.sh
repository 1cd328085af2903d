#!/usr/bin/env bash
# What: safetensors.numpy.save and save_file of a transposed array write its numbers in the order of memory under
# the transposed shape, so that other numbers come back.
#
# Version: safetensors==0.8.0, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: The array, as safetensors.numpy 0.7.0 saves it, or an error, as safetensors.torch gives for the same
#   tensor. The docstring does ask for contiguous arrays, but w.T and w[:, :n] are what one passes when weights go
#   from [in, out] to [out, in].
# Seen: [[0, 1, 2], [3, 4, 5]].T comes back as [[0, 1], [2, 3], [4, 5]], an array in Fortran order and a slice of
#   columns likewise, all of the right shape and dtype and without a word. A converted checkpoint loads and
#   generates nonsense.
# In jaxfused: jaxfused/quantization/checkpoints/safetensors_file.py writes its own files, of contiguous arrays.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile safetensors==0.8.0 numpy==2.5.5

"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors.numpy import load, save

w = np.arange(6, dtype=np.float32).reshape(2, 3)
for name, given in {"transposed": w.T, "Fortran order": np.asfortranarray(w), "columns": w[:, :2]}.items():
    read = load(save({"w": given}))["w"]
    print(f"{name}: given {given.tolist()}, read {read.tolist()}")
    assert read.shape == given.shape and read.dtype == given.dtype and not np.array_equal(read, given)
    repaired = load(save({"w": np.ascontiguousarray(given)}))["w"]
    assert np.array_equal(repaired, given)
PYTHON
