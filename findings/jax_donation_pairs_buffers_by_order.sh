#!/usr/bin/env bash
# What: Donated buffers go to results of the same shape in the order in which both are listed, not to the
# result computed from them.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: A step (state, parameters) -> (parameters, state), both donated, updates both in place.
# Seen: Each is written over the other's buffer, and XLA adds copies to make that possible; with the
#   results in the order of the arguments there are none.
# In jaxfused: jaxfused/optim/stepping.py: steps take and return parameters and state in one order.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp


def copies(step):
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(jnp.ones(1000), jnp.ones(1000)).compile()
    text = compiled.as_text()
    assert "{0}: (0, {}, may-alias), {1}: (1, {}, may-alias)" in text
    return text.count("copy(")


same = copies(lambda state, parameters: (state * 2, parameters + 1))
swapped = copies(lambda state, parameters: (parameters + 1, state * 2))
print("copies in the same order", same, "swapped", swapped)
assert same == 0 and swapped >= 2
PYTHON
