#!/usr/bin/env bash
# What: Linen's dot_product_attention takes the softmax of bfloat16 inputs in bfloat16, nnx's in float32.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: One library, one function name, one result.
# Seen: Root mean square error against float64, 64 keys: Linen 9.3e-4, nnx 4.5e-4;
#   force_fp32_for_softmax=True brings Linen to 6.7e-4 only.
# In jaxfused: jaxfused/ops/attention/attention.py keeps float32 in the softmax for both
#   (docs/operators/attention.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

random = np.random.RandomState(0)
q, k, v = (jnp.asarray(random.randn(1, 64, 2, 32), jnp.bfloat16) for _ in range(3))
wide = [np.asarray(a, np.float32).astype(np.float64) for a in (q, k, v)]
logits = np.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) / np.sqrt(32)
weights = np.exp(logits - logits.max(-1, keepdims=True))
exact = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), wide[2])


def error(result):
    return float(np.sqrt(np.mean((np.asarray(result, np.float64) - exact) ** 2)))


linen, of_nnx = error(nn.dot_product_attention(q, k, v)), error(nnx.dot_product_attention(q, k, v))
forced = error(nn.dot_product_attention(q, k, v, force_fp32_for_softmax=True))
print(f"linen {linen:.2g} forced {forced:.2g} nnx {of_nnx:.2g}")
assert linen > 1.8 * of_nnx and of_nnx < forced < linen
PYTHON
