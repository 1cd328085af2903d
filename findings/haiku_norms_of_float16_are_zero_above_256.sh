#!/usr/bin/env bash
# What: Haiku's norms of float16 activations return zeros as soon as these deviate by more than 256, whose square overflows.
#
# Version: dm-haiku==0.0.17, equinox==0.13.8, flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The normalised activations, as from Flax and Equinox, which take mean and variance in float32.
# Seen: hk.LayerNorm, RMSNorm, GroupNorm and BatchNorm hold the variance in the activations' dtype: above 65,504 it is infinite
#   and its inverse root 0. With deviations of 250 all is right; with 400 every number of LayerNorm and RMSNorm is 0, without an
#   error or a NaN. bfloat16 has the range.
# In jaxfused: jaxfused/ops/norm/ takes statistics in float32 and keeps them so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile \
  dm-haiku==0.0.17 equinox==0.13.8 flax==0.12.12 jax==0.11.2

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

key = jax.random.key(0)


def haiku(make):
    module = hk.transform_with_state(lambda x: make()(x))

    def call(x):
        parameters, state = module.init(key, x)
        return module.apply(parameters, state, key, x)[0]

    return call


NORMS = {
    "haiku LayerNorm": haiku(lambda: hk.LayerNorm(-1, True, True)),
    "haiku RMSNorm": haiku(lambda: hk.RMSNorm(-1)),
    "haiku GroupNorm": haiku(lambda: hk.GroupNorm(2)),
    "haiku BatchNorm": haiku(lambda: lambda x: hk.BatchNorm(True, True, 0.9)(x, True)),
    "flax LayerNorm": lambda x: nn.LayerNorm(dtype=x.dtype).init_with_output(key, x)[0],
    "equinox LayerNorm": jax.vmap(eqx.nn.LayerNorm(1024)),
    "equinox RMSNorm": jax.vmap(eqx.nn.RMSNorm(1024)),
}
# Half of the numbers of each row and of each column are the deviation, half its negative.
signs = np.where(np.add.outer(np.arange(64), np.arange(1024)) % 2, 1, -1)
for name, norm in NORMS.items():
    for deviation in (250, 400):
        y = np.asarray(norm(jnp.asarray(deviation * signs, jnp.float16)), np.float32)
        print(name, "deviation", deviation, "result", np.unique(y))
        is_lost = deviation == 400 and name.startswith("haiku")
        np.testing.assert_allclose(y, 0 * signs if is_lost else signs, atol=2e-3)
    y = norm(jnp.asarray(400 * signs, jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(y, np.float32), signs, atol=2e-2)
PYTHON
