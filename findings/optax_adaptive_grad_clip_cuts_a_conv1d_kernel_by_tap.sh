#!/usr/bin/env bash
# What: optax.adaptive_grad_clip takes the norms of a 3-D kernel over its first axis alone, so of each
# pair of input and output channel.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Over all axes but the output channels, as for kernels with two and four axes and in the
#   paper.
# Seen: A gradient [3, 4, 5] is scaled by 20 different factors, one [3, 3, 4, 5] by 5.
# In jaxfused: It has no such clipping: step(max_norm=...) is of the whole tree
#   (docs/operators/optimizers.md).
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

clip = optax.adaptive_grad_clip(0.01)
factors = {}
for shape in ((3, 4, 5), (3, 3, 4, 5)):
    gradient = jnp.asarray(np.random.RandomState(0).randn(*shape), jnp.float32)
    update, _ = clip.update(gradient, clip.init(gradient), jnp.ones(shape))
    factors[shape] = np.unique(np.asarray(update / gradient).round(6)).size
print(factors)
assert factors == {(3, 4, 5): 20, (3, 3, 4, 5): 5}
PYTHON
