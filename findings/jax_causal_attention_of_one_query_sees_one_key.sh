#!/usr/bin/env bash
# What: jax.nn.dot_product_attention(is_causal=True) aligns queries and keys at their first positions, so
# a decoding step sees one key.
#
# Version: jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The one query of a decoding step is the newest position and sees every key of the cache,
#   as in FlashAttention since 2.1.
# Seen: One query over three keys returns the first value, 0, and not the mean of all three, 1.
# In jaxfused: jaxfused/ops/attention/attention.py counts as JAX does, so that the import swap keeps numbers,
#   and its docstring says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

query, keys = jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 3, 1, 8))
values = jnp.broadcast_to(jnp.arange(3.0)[None, :, None, None], keys.shape)
causal = jax.nn.dot_product_attention(query, keys, values, is_causal=True)
every = jax.nn.dot_product_attention(query, keys, values)
print("causal", causal.ravel(), "without", every.ravel())
assert (causal == 0).all() and jnp.allclose(every, 1)
PYTHON
