#!/usr/bin/env bash
# What: Orbax casts what it restores to the dtype of the target without a word, also where numbers do not
# fit.
#
# Version: orbax-checkpoint==0.12.8, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: An error, as for another shape, or at least a saturated value.
# Seen: 300.0 restored as int8 is 44 and 2.7 is 2.
# In jaxfused: examples/training.py restores into the states that it has just made, which have the
#   dtypes of the saved ones.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile orbax-checkpoint==0.12.8 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

with tempfile.TemporaryDirectory() as folder:
    path, checkpointer = pathlib.Path(folder) / "saved", ocp.StandardCheckpointer()
    checkpointer.save(path, {"scale": jnp.array([300.0, 2.7])})
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(path, {"scale": jax.ShapeDtypeStruct((2,), jnp.int8)})["scale"]
    try:
        checkpointer.restore(path, {"scale": jax.ShapeDtypeStruct((3,), jnp.float32)})
        other_shape = "restored"
    except Exception as error:
        other_shape = type(error).__name__
print("restored", restored, restored.dtype, "another shape:", other_shape)
assert restored.dtype == jnp.int8 and restored.tolist() == [44, 2] and other_shape == "ValueError"
PYTHON
