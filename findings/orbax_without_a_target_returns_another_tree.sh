#!/usr/bin/env bash
# What: Restored without a target, a tree comes back as another: optimizer states are dicts and None,
# integer keys strings.
#
# Version: orbax-checkpoint==0.12.8, jax==0.11.2, optax==0.2.8; a CPU, Python 3.12 or newer.
# Expected: The structure that was saved, since Orbax stores it, or an error that asks for a target.
# Seen: optax.adam's (ScaleByAdamState, EmptyState) becomes [dict, None], {3: ...} becomes {'3':
#   ...}.
# In jaxfused: examples/training.py restores into the tree that init makes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile orbax-checkpoint==0.12.8 jax==0.11.2 optax==0.2.8

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import pathlib
import tempfile

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

saved = {"state": optax.adam(1.0).init(jnp.zeros(2)), "layers": {3: jnp.ones(1)}}
with tempfile.TemporaryDirectory() as folder:
    path, checkpointer = pathlib.Path(folder) / "saved", ocp.StandardCheckpointer()
    checkpointer.save(path, saved)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(path)
print({name: type(value).__name__ for name, value in restored.items()}, restored["layers"].keys())
assert isinstance(restored["state"], list) and isinstance(restored["state"][0], dict) and restored["state"][1] is None
assert list(restored["layers"]) == ["3"]
PYTHON
