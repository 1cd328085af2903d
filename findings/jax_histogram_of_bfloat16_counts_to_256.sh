#!/usr/bin/env bash
# What: jnp.histogram of a bfloat16 array counts at most 256 numbers in a bin, on a CPU.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Counts, as of the same numbers in float32: 5,001 normal numbers have 1,410 in their fullest bin.
#   Counts are whole numbers, whatever the type of what is counted.
# Seen: No bin above 256, since counts are added up in the type of the data, and come back in it: of 5,001 numbers
#   1,636 are counted. density=True divides by that sum, so that its result looks like a distribution, a flat one.
#   Histograms of activations and gradients, by which one sets clipping thresholds and quantisation ranges, are
#   taken of just such arrays. float16 rounds from 2,048 on.
# In jaxfused: jaxfused/quantization/calibrate.py takes percentiles of magnitudes by NumPy, no histograms.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.sort(np.random.RandomState(0).randn(5001)), jnp.bfloat16)
narrow, edges = jnp.histogram(x, bins=10)
wide, _ = np.histogram(np.asarray(x, np.float32), bins=np.asarray(edges, np.float32))
print("bfloat16", narrow.dtype, np.asarray(narrow, int), "sum", int(narrow.astype(jnp.float32).sum()))
print("float32 ", wide, "sum", wide.sum())
assert wide.sum() == len(x) and wide.max() > 1000
assert narrow.max() == 256 and (np.asarray(narrow, int) == 256).sum() >= 5
PYTHON
