#!/usr/bin/env bash
# What: A flax.nnx.Param can be passed to jax.numpy and jax.nn but neither to jax.lax nor to jnp.where's
# comparison.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: What has __jax_array__ is taken everywhere, or nowhere.
# Seen: jnp.sin and jax.nn.softmax take it; lax.sin, lax.add, lax.dot raise 'Triggering
#   __jax_array__() during abstractification'; param > 0 is a TypeError.
# In jaxfused: jaxfused/runtime/checks.py turns every operand into an array first.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx

param = nnx.Param(jnp.ones(3))
calls = {
    "jnp.sin": lambda: jnp.sin(param),
    "softmax": lambda: jax.nn.softmax(param),
    "lax.sin": lambda: jax.lax.sin(param),
    "lax.add": lambda: jax.lax.add(param, param),
    "lax.dot": lambda: jax.lax.dot(param, param),
    "greater": lambda: jnp.where(param > 0, 1, 0),
}
seen = {}
for name, call in calls.items():
    try:
        call()
        seen[name] = "works"
    except Exception as error:
        seen[name] = type(error).__name__
print(seen)
assert list(seen.values()) == ["works"] * 2 + ["ValueError"] * 3 + ["TypeError"]
PYTHON
