#!/usr/bin/env bash
# What: Under jax.jit the maximum over the channels of a computed picture can equal none of the channels that it is
# the maximum of.
#
# Version: jax==0.11.2, jaxlib==0.11.2; an x86 CPU with fused multiply-add, Python 3.12 or newer.
# Expected: y.max(-1) is one of the values of y, bit for bit, as it is without jit.
# Seen: For y = x * std + mean with ImageNet's numbers, 4 % of pixels have no channel equal to y.max(-1): XLA
#   computes y once for the maximum and once for the comparison, of which one is rounded once and one twice. The
#   textbook's hue, which asks which channel is the largest by equality, is that of no branch there.
# In jaxfused: jaxfused/ops/augment/steps_xla.py compares channels with each other.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
x = np.random.default_rng(0).standard_normal((4, 224, 224, 3)).astype(np.float32)


def without_a_largest(x):
    y = x * std + mean
    largest = y.max(-1)
    return jnp.mean(~((largest == y[..., 0]) | (largest == y[..., 1]) | (largest == y[..., 2])))


eager, jitted = float(without_a_largest(x)), float(jax.jit(without_a_largest)(x))
print("pixels whose maximum is none of their channels: eager", eager, "under jit", jitted)
assert eager == 0 and jitted > 0.001
PYTHON
