#!/usr/bin/env bash
# What: optax.lars divides the norm of a parameter by that of gradient plus decay; the paper adds the two
# norms.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: |p| / (|g| + decay |p|), as written by You et al. and computed by timm.
# Seen: With |p| = |g| = 5, at right angles, and a decay of 0.1 the step is 9 % longer; nothing
#   tells of it at the usual decay of 1e-4.
# In jaxfused: It has no LARS; jaxfused/optim/lamb.py states its ratio.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import numpy as np
import optax

parameter, gradient, decay = jnp.array([3.0, 4.0]), jnp.array([4.0, -3.0]), 0.1
lars = optax.lars(1.0, weight_decay=decay, trust_coefficient=1.0, momentum=0.0)
update, _ = lars.update(gradient, lars.init(parameter), parameter)
direction = np.asarray(gradient + decay * parameter)
paper = -5 / (5 + decay * 5) * direction
of_sum = -5 / np.linalg.norm(direction) * direction
print("optax", update, "paper", paper)
assert np.allclose(update, of_sum, rtol=1e-5) and not np.allclose(update, paper, rtol=0.05)
PYTHON
