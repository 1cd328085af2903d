#!/usr/bin/env bash
# What: nn.intercept_methods sees each call of linen.SelfAttention twice, as its __call__ calls the
# wrapped __call__ of its base class.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Once for each module and call: a counter of operations, or a quantiser, counts right.
# Seen: Two calls named __call__ of one SelfAttention, one of one MultiHeadDotProductAttention.
# In jaxfused: jaxfused/modules/fallback.py knows when modules are watched and hands them to Flax's
#   code, call by call.
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


def seen(module):
    names = []

    def count(next_function, arguments, options, context):
        if context.method_name == "__call__":
            names.append(type(context.module).__name__)
        return next_function(*arguments, **options)

    with nn.intercept_methods(count):
        module.init(jax.random.key(0), jnp.ones((1, 2, 4)))
    return names.count(type(module).__name__)


counts = seen(nn.SelfAttention(num_heads=1)), seen(nn.MultiHeadDotProductAttention(num_heads=1))
print("SelfAttention", counts[0], "MultiHeadDotProductAttention", counts[1])
assert counts == (2, 1)
PYTHON
