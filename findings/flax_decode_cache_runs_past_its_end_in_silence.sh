#!/usr/bin/env bash
# What: nn.MultiHeadDotProductAttention(decode=True) goes on past the length of its cache: each further
# token overwrites the last slot.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: An error, or NaN, at the first token that does not fit.
# Seen: A cache for 3 tokens takes 5; the index is 5 then, and the last slot holds the fifth key
#   while the first two slots are as they were.
# In jaxfused: jaxfused/linen/attention.py hands decoding to Flax's own code, so the caller has to
#   stop.
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

attention = nn.MultiHeadDotProductAttention(num_heads=1, decode=True)
tokens = jax.random.normal(jax.random.key(0), (1, 5, 4))
variables = attention.init(jax.random.key(1), tokens[:, :3])
parameters, cache = variables["params"], variables["cache"]
keys = []
for i in range(5):
    result, updated = attention.apply(
        {"params": parameters, "cache": cache}, tokens[:, i : i + 1], mutable=["cache"]
    )
    cache = updated["cache"]
    keys.append(cache["cached_key"].reshape(3, -1))
    assert jnp.isfinite(result).all()
print("slots", keys[4].shape[0], "index", int(cache["cache_index"]))
assert int(cache["cache_index"]) == 5 and (keys[4][:2] == keys[2][:2]).all() and (keys[4][2] != keys[2][2]).any()
PYTHON
