#!/usr/bin/env bash
# What: sklearn.metrics.jaccard_score(average='macro') leaves a class out that is nowhere, and counts it
# as 0 once labels name it.
#
# Version: scikit-learn==1.9.1, numpy==2.5.5; a CPU, Python 3.12 or newer.
# Expected: Naming the classes does not change the score; a class without pixels is left out or
#   undefined.
# Seen: 0.655 without labels, 0.491 with labels=[0, 1, 2, 3] where class 3 is nowhere, 0.741 with
#   zero_division=1: three scores of one prediction.
# In jaxfused: examples/unet/train.py: sums over the data set, and 1 where nothing is there and
#   nothing is found.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile scikit-learn==1.9.1 numpy==2.5.5

 "$folder/venv/bin/python" - <<'PYTHON'
import warnings

from sklearn.metrics import jaccard_score

warnings.simplefilter("ignore")
truth = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 2, 2]
predicted = [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 0, 1]
options = ({}, {"labels": [0, 1, 2, 3]}, {"labels": [0, 1, 2, 3], "zero_division": 1})
scores = [round(float(jaccard_score(truth, predicted, average="macro", **option)), 4) for option in options]
print(scores)
assert scores == [0.6548, 0.4911, 0.7411]
PYTHON
