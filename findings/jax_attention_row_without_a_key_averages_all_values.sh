#!/usr/bin/env bash
# What: A query whose keys are all masked gets the mean of every value from jax.nn.dot_product_attention,
# padding and future included.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: 0 or NaN; certainly nothing of the values that the mask hides, and no gradient to them.
# Seen: The mean 1 of the values 0, 1, 2, with a gradient of 1/3 to each, by a mask or by a length
#   of 0; NaN by a bias of -inf.
# In jaxfused: docs/operators/attention.md: such rows are 0 and have no gradient.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

query, keys = jnp.zeros((1, 1, 1, 8)), jnp.ones((1, 3, 1, 8))
values = jnp.broadcast_to(jnp.arange(3.0)[None, :, None, None], keys.shape)
nothing = jnp.zeros((1, 1, 1, 3), bool)


def attend(values, **options):
    return jax.nn.dot_product_attention(query, keys, values, **options)


masked = attend(values, mask=nothing)
no_length = attend(values, key_value_seq_lengths=jnp.array([0]))
infinite = attend(values, bias=jnp.full((1, 1, 1, 3), -jnp.inf))
gradient = jax.grad(lambda values: attend(values, mask=nothing).sum())(values)
print("mask", masked[0, 0, 0, 0], "length 0", no_length[0, 0, 0, 0], "bias", infinite[0, 0, 0, 0])
assert jnp.allclose(masked, 1) and jnp.allclose(no_length, 1) and jnp.isnan(infinite).all()
assert jnp.allclose(gradient, 1 / 3)
PYTHON
