#!/usr/bin/env bash
# What: An nnx.Dropout wrapped by nnx.bridge.to_linen drops without any rngs, the same values at each
# call.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Linen's InvalidRngError: its own Dropout raises where no 'dropout' key is given.
# Seen: apply without rngs returns one and the same mask each time; with rngs masks differ. Training
#   goes on with it in silence.
# In jaxfused: jaxfused/linen/ holds Linen modules of its own, whose dropout asks make_rng for the
#   key (jaxfused/linen/attention.py).
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
from flax import nnx
from flax.nnx import bridge


class Drop(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


x = jnp.ones(64)
wrapped = bridge.to_linen(Drop)
variables = wrapped.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
first, second = wrapped.apply(variables, x), wrapped.apply(variables, x)
keyed = wrapped.apply(variables, x, rngs={"dropout": jax.random.key(5)})
try:
    nn.Dropout(0.5, deterministic=False).apply({}, x)
    linen = "no error"
except Exception as error:
    linen = type(error).__name__
print("dropped", int((first == 0).sum()), "same mask", bool((first == second).all()), "linen:", linen)
assert (first == 0).any() and (first == second).all() and (first != keyed).any() and linen == "InvalidRngError"
PYTHON
