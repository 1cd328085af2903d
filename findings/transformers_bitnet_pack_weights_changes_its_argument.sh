#!/usr/bin/env bash
# What: transformers' pack_weights for BitNet adds 1 to the weights that it is given, in place.
#
# Version: transformers==5.23.0, torch==2.13.0, on a CPU; Python 3.12 or newer.
# Expected: A function that returns packed weights leaves its argument as it was.
# Seen: Weights of -1, 0 and 1 are 0, 1 and 2 after the call. Packed twice from one tensor, the second result is
#   another one, and it holds the number 3, which no ternary weight has.
# In jaxfused: tests/formats/write_transformers.py packs a copy; jaxfused/quantization/checkpoints/bitnet.py only reads.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile \
  transformers==5.23.0 torch==2.13.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers.integrations.bitnet import pack_weights, unpack_weights

weights = torch.tensor([[-1, 0, 1, 1]] * 8).to(torch.int8)
before = weights.clone()
packed = pack_weights(weights)
print("before", before[0].tolist(), "after", weights[0].tolist())
assert torch.equal(weights, before + 1)
assert torch.equal(unpack_weights(packed, torch.float32), before.float())
again = unpack_weights(pack_weights(weights), torch.float32)
print("read back after the second packing", again[0].tolist())
assert not torch.equal(again, before.float())
PYTHON
