#!/usr/bin/env bash
# What: A function that jit donates arguments of does not donate them any more once it is exported and
# called.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Exported.call frees or reuses the donated buffer, as the jitted function does.
# Seen: The argument of the exported call is still there, that of the jitted one is deleted: a
#   served update needs twice the memory.
# In jaxfused: Its steps are jitted, not exported (jaxfused/optim/stepping.py); jax.jit(call,
#   donate_argnums=0) around an exported call donates.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax import export

step = jax.jit(lambda x: x + 1, donate_argnums=0)
exported = export.export(step)(jnp.ones(1000))
kept, taken, again = jnp.ones(1000), jnp.ones(1000), jnp.ones(1000)
exported.call(kept)
step(taken)
jax.jit(exported.call, donate_argnums=0)(again)
print("deleted after export", kept.is_deleted(), "after jit", taken.is_deleted(), "jit of export", again.is_deleted())
assert not kept.is_deleted() and taken.is_deleted() and again.is_deleted()
PYTHON
