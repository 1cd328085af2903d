#!/usr/bin/env bash
# What: float8_e4m3 is another format than float8_e4m3fn, which checkpoints and hardware call E4M3.
#
# Version: ml_dtypes==0.6.0; a CPU, Python 3.12 or newer.
# Expected: Two names of one format, as files say 'F8_E4M3' and papers E4M3.
# Seen: 14 of 256 codes differ: float8_e4m3 ends at 240 and has infinities, float8_e4m3fn ends at
#   448 and has none. 300 becomes inf or 288.
# In jaxfused: jaxfused/runtime/quantized_array.py names float8_e4m3fn alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile ml_dtypes==0.6.0

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

codes = np.arange(256, dtype=np.uint8)
ieee = codes.view(ml_dtypes.float8_e4m3).astype(np.float32)
finite = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
different = int((~((ieee == finite) | (np.isnan(ieee) & np.isnan(finite)))).sum())
of_300 = [float(np.float32(300).astype(dtype)) for dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn)]
print("codes that differ", different, "300 becomes", of_300)
assert different == 14 and of_300 == [np.inf, 288]
PYTHON
