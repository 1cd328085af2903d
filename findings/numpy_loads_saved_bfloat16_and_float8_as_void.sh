#!/usr/bin/env bash
# What: np.save takes arrays of ml_dtypes, and np.load returns raw bytes of type void in their place.
#
# Version: numpy==2.5.5, ml_dtypes==0.6.0; a CPU, Python 3.12 or newer.
# Expected: The dtype that was saved, or an error when it is saved.
# Seen: bfloat16 comes back as V2, float8_e4m3fn and int4 as V1, without a warning; view() restores
#   the numbers.
# In jaxfused: Checkpoints of examples/training.py are Orbax's.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile numpy==2.5.5 ml_dtypes==0.6.0

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import io

import ml_dtypes
import numpy as np

loaded = {}
for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
    file = io.BytesIO()
    np.save(file, np.ones(2, dtype))
    file.seek(0)
    array = np.load(file)
    loaded[np.dtype(dtype).name] = str(array.dtype)
    assert (array.view(dtype) == np.ones(2, dtype)).all()
print(loaded)
assert loaded == {"bfloat16": "|V2", "float8_e4m3fn": "|V1", "int4": "|V1"}
PYTHON
