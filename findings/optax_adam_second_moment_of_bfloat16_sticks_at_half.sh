#!/usr/bin/env bash
# What: optax.adam keeps both moments of bfloat16 parameters in bfloat16, where the second one stops
# growing half way.
#
# Version: optax==0.2.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Moments in float32, or at least right for constant gradients: v of unit gradients tends
#   to 1, the step to the learning rate.
# Seen: v is 0.5 after 2,000 gradients of 1, and the step 1.289 learning rates; mu_dtype is an
#   option, nu_dtype is none.
# In jaxfused: jaxfused/optim/transformation.py: init_step(rounding_seed=...) rounds parameters and
#   moments in bfloat16 at random.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile optax==0.2.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

adam, parameter = optax.adam(1.0), jnp.zeros(1, jnp.bfloat16)
state, step = adam.init(parameter), jax.jit(adam.update)
for _ in range(2000):
    update, state = step(jnp.ones(1, jnp.bfloat16), state, parameter)
print("second moment", state[0].nu, "step", update)
assert float(state[0].nu[0]) == 0.5 and 1.25 < -float(update[0]) < 1.35
PYTHON
