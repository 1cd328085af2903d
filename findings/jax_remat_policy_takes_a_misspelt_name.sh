#!/usr/bin/env bash
# What: save_only_these_names takes names that occur nowhere: a misspelt one saves nothing, and all is
# computed again.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: An error or a warning that no value of that name exists.
# Seen: With checkpoint_name 'hidden' the policy of 'hidden' leaves 2 sines in the program of the
#   gradient, that of 'hiden' 3, without a word.
# In jaxfused: docs/remat.md lists the names; jaxfused/remat_policies.py spells them once.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def loss(x):
    return jnp.sin(checkpoint_name(jnp.sin(x), "hidden")).sum()


def sines(name):
    policy = jax.checkpoint_policies.save_only_these_names(name)
    program = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(jnp.ones(3))
    return str(program).count(" sin ")


print("hidden", sines("hidden"), "hiden", sines("hiden"))
assert (sines("hidden"), sines("hiden")) == (2, 3)
PYTHON
