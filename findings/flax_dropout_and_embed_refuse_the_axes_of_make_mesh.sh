#!/usr/bin/env bash
# What: jax.make_mesh makes Explicit axes unless told otherwise, and under them Linen's Dropout and both
# Embeds raise for a split batch.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Stock layers work with the mesh of the stock function; nnx.Dropout and Linear do.
# Seen: ShardingTypeError from linen.Dropout, linen.Embed and nnx.Embed.
# In jaxfused: docs/sharding.md; its operators take Auto and Explicit axes
#   (tests/every_operator/test_shards.py).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2

XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

mesh = jax.make_mesh((2,), ("data",))
assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
jax.set_mesh(mesh)
batch = jax.NamedSharding(mesh, jax.P("data"))
x, ids = jax.device_put(jnp.ones((4, 8)), batch), jax.device_put(jnp.zeros((4, 3), int), batch)
key = jax.random.key(0)
layers = {
    "linen.Dropout": lambda: nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key}),
    "linen.Embed": lambda: nn.Embed(4, 8).init_with_output(key, ids)[0],
    "nnx.Embed": lambda: nnx.Embed(4, 8, rngs=nnx.Rngs(0))(ids),
    "nnx.Dropout": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x),
    "nnx.Linear": lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))(x),
}
seen = {}
for name, layer in layers.items():
    try:
        layer()
        seen[name] = "works"
    except Exception as error:
        seen[name] = type(error).__name__
print(seen)
assert list(seen.values()) == ["ShardingTypeError"] * 3 + ["works"] * 2
PYTHON
