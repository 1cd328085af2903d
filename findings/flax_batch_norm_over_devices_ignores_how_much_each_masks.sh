#!/usr/bin/env bash
# What: flax.linen.BatchNorm(axis_name=...) with a mask averages the devices' means as if each had kept equally
# many places.
#
# Version: flax==0.12.12, jax==0.11.2; a CPU, Python 3.12 or newer.
# Expected: The mean and variance of the places that are kept in the whole batch, as one device computes of the
#   same batch and mask.
# Seen: A device that keeps 1 place of 4 counts as much as one that keeps all: the mean of the values 1, 1, 1, 1
#   and 6 is 3.5 in place of 2, the variance 6.25 in place of 4. A device whose places are all padding makes the
#   statistics and the results of every device NaN, and the running averages stay so. nnx.BatchNorm does the same.
#   Batches padded at the end are of this kind: their last shard is short.
# In jaxfused: jaxfused/linen/batch_norm.py and jaxfused/nnx/batch_norm.py divide the sum of the values that all
#   devices keep by their number, which is what one device computes of the whole batch.
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
from flax import nnx

x = jnp.array([[1.0, 1.0, 1.0, 1.0], [6.0, 0.0, 0.0, 0.0]])[..., None]
mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)[..., None]


def statistics(x, mask, axis_name=None):
    layer = nn.BatchNorm(use_running_average=False, momentum=0.0, axis_name=axis_name)
    variables = {
        "params": {"scale": jnp.ones(1), "bias": jnp.zeros(1)},
        "batch_stats": {"mean": jnp.zeros(1), "var": jnp.ones(1)},
    }
    _, state = layer.apply(variables, x, mask=mask, mutable="batch_stats")
    return state["batch_stats"]["mean"][0], state["batch_stats"]["var"][0]


def of_nnx(x, mask):
    layer = nnx.BatchNorm(1, use_running_average=False, momentum=0.0, axis_name="devices", rngs=nnx.Rngs(0))
    layer(x, mask=mask)
    return layer.mean[...][0], layer.var[...][0]


def over_devices(function, mask):
    mean, var = jax.vmap(function, axis_name="devices")(x, mask)
    return float(mean[0]), float(var[0])


whole = tuple(float(a) for a in statistics(x.reshape(8, 1), mask.reshape(8, 1)))
shared = over_devices(lambda a, m: statistics(a, m, "devices"), mask)
shared_nnx = over_devices(of_nnx, mask)
padded = over_devices(lambda a, m: statistics(a, m, "devices"), mask.at[1].set(False))
print("one device", whole, "two devices", shared, "nnx", shared_nnx, "one of them all padding", padded)
assert whole == (2.0, 4.0)
assert abs(shared[0] - 3.5) < 1e-5 and abs(shared[1] - 6.25) < 1e-4 and shared == shared_nnx
assert padded[0] != padded[0] and padded[1] != padded[1]
PYTHON
