#!/usr/bin/env bash
# What: checkify with index_checks raises for a function that reads x[i] inside jax.checkpoint.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: What it gives without jax.checkpoint: the result, and an error that says which index is out of range.
# Seen: "too many values to unpack (expected 0)", of checkify's own code, for each array of indices, in or out of range.
#   The other checks work, and so does a constant index. The rule for jax.checkpoint wants a checked program without
#   constants, and the check of an index has one.
# In jaxfused: jaxfused/ops/attention/attention_xla.py computes the softmax again by jax.checkpoint, so that attention whose
#   score_mod reads an array needs the other checks.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import checkify


def read(x, i):
    return x[i]


x = jnp.arange(4.0)
inside, outside = jnp.array([1, 2]), jnp.array([1, 9])
plain = checkify.checkify(read, errors=checkify.index_checks)
error, y = plain(x, inside)
assert error.get() is None and (y == x[1:3]).all()
assert "out-of-bounds" in plain(x, outside)[0].get()

for name in ("index_checks", "nan_checks", "div_checks", "user_checks"):
    again = checkify.checkify(jax.checkpoint(read), errors=getattr(checkify, name))
    try:
        error, y = again(x, inside)
    except ValueError as error:
        assert name == "index_checks" and str(error) == "too many values to unpack (expected 0)"
        print(name, "raises:", error)
    else:
        assert name != "index_checks" and error.get() is None and (y == x[1:3]).all()
        print(name, "works")
PYTHON
