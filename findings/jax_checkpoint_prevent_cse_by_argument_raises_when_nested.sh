#!/usr/bin/env bash
# What: jax.checkpoint(prevent_cse=(True, ..., False)), a flag for each argument, raises a ValueError of
# safe_zip within another jax.checkpoint whose policy saves something.
#
# Version: jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: the gradient, as with prevent_cse=True or without the outer jax.checkpoint.
# Seen: "safe_zip() argument 1 has length 5 but argument 0 has length 4": the outer rule adds the saved
#   values to the inner equation's operands, but no flags for them.
# In jaxfused: jaxfused/parallel/fsdp_layer.py passes no flags, so that what each layer's backward computes
#   from segment ids alone is computed once a layer.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

dots = jax.checkpoint_policies.dots_saveable
operands = jnp.ones((3, 3)), jnp.ones((2, 3)), jnp.arange(3)


def gradient(prevent_cse, nested):
    def layer(w, x, ids):
        return jnp.sin(jnp.sin(x @ w)) + ids

    layer = jax.checkpoint(layer, policy=dots, prevent_cse=prevent_cse)
    loss = lambda *operands: layer(*operands).sum()
    return jax.grad(jax.checkpoint(loss, policy=dots) if nested else loss)(*operands)


flags = True, True, False
wanted = gradient(True, nested=True)
assert (gradient(flags, nested=False) == wanted).all()
try:
    gradient(flags, nested=True)
    raise SystemExit("no error: the finding is out of date")
except ValueError as error:
    print(error)
    assert "safe_zip" in str(error)
PYTHON
