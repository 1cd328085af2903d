#!/usr/bin/env bash
# What: torchmetrics' AUROC of logits above 17 is 0.5, also where they order the samples perfectly.
#
# Version: torchmetrics==1.9.0, torch==2.13.0, on a CPU; Python 3.12 or newer.
# Expected: 1.0: the area depends on the order alone, and the sigmoid that is documented to be applied to logits
#   keeps the order.
# Seen: 1.0 for logits from -30 to -20, 0.5 for the same ones plus 50, and the average precision falls from 1.0 to
#   0.495: the sigmoid of a float32 above 17 is 1, so that all samples tie. In bfloat16 it begins at 6. Logits of
#   a sharp classifier, or of one whose rare class is the negative one, are of this size; the better the model,
#   the worse its score.
# In jaxfused: It has no such metric; its losses read logits, never their sigmoids (jaxfused/ops/loss/).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.5.5

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

target = (torch.arange(200) > 100).long()
logits = torch.linspace(-30.0, -20.0, 200)
scores = {}
for shift in (0, 30, 50):
    area, precision = binary_auroc(logits + shift, target), binary_average_precision(logits + shift, target)
    scores[shift] = float(area), float(precision)
    print(f"logits {-30 + shift} to {-20 + shift}: AUROC {area:.4f}, average precision {precision:.4f}")
assert min(scores[0] + scores[30]) > 0.9999
assert scores[50][0] == 0.5 and scores[50][1] < 0.51
narrow = torch.linspace(6.3, 8.0, 200).bfloat16()
given, widened = float(binary_auroc(narrow, target)), float(binary_auroc(narrow.float(), target))
print(f"6.3 to 8 in bfloat16: AUROC {given:.4f}, the same numbers as float32 {widened:.4f}")
assert given == 0.5 and widened > 0.999
PYTHON
