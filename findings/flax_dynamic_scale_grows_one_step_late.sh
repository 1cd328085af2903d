#!/usr/bin/env bash
# What: flax.training.dynamic_scale.DynamicScale(growth_interval=2000) doubles its scale at the 2,001st
# good step.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: At the 2,000th, as torch's GradScaler with the same two numbers, so that runs can be
#   compared step by step.
# Seen: 2,001 calls until 65,536 becomes 131,072.
# In jaxfused: jaxfused/optim/transformation.py: after growth_interval good steps, so at the
#   2,000th.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
from flax.training.dynamic_scale import DynamicScale

scale, steps = DynamicScale(growth_interval=2000), 0
step = jax.jit(lambda scale: scale.value_and_grad(lambda x: x * 1.0)(1.0)[0])
while float(scale.scale) == 65536:
    scale, steps = step(scale), steps + 1
print("grows at step", steps, "to", float(scale.scale))
assert steps == 2001
PYTHON
