#!/usr/bin/env bash
# What: A jax.debug.callback of a value inside flax.linen.scan raises an error about broadcast variables.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: It prints for each layer, as inside jax.lax.scan.
# Seen: ValueError 'broadcasted variable has a data dependency on the scan body.';
#   check_constancy_invariants=False lets it through.
# In jaxfused: jaxfused/quantization/observe.py recognises the error and names the argument that
#   helps.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(4)(x)
        jax.debug.callback(lambda value: None, x)
        return x, None


def run(**options):
    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2, **options)
    try:
        stack().init(jax.random.key(0), jnp.ones((1, 4)), None)
    except ValueError as error:
        return str(error)


refused, taken = run(), run(check_constancy_invariants=False)
print(refused)
assert "data dependency on the scan body" in refused and taken is None
PYTHON
