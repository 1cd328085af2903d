#!/usr/bin/env bash
# What: jax.export makes an Exported, but saving it needs flatbuffers, which installing jax does not
# bring.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: pip install jax is enough for every public function of jax.export.
# Seen: ImportError 'Please install flatbuffers in order to use Exported serialization' from
#   serialize().
# In jaxfused: Nothing of it exports; who exports a program of its operators installs flatbuffers
#   beside jax.
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

exported = export.export(jax.jit(lambda x: x + 1))(jnp.ones(4))
try:
    exported.serialize()
except ImportError as error:
    print(error)
    assert "flatbuffers" in str(error)
else:
    raise SystemExit("serialize() works without flatbuffers now")
PYTHON
