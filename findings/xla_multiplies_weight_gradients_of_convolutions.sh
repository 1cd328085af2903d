#!/usr/bin/env bash
# What: XLA's partitioner multiplies the weights' gradient of convolutions by devices that share no images.
#
# Version: jax 0.11.2, jaxlib 0.11.2, 8 virtual CPU devices in a mesh [4, 2] of Auto axes; the same with
#   Explicit axes, and with jax 0.12.0.1.
# Expected: an array's sharding changes no numbers beyond rounding.
# Seen: with images [images, height, width, channels] split over the first mesh axis and replicated over the
#   other, as in data parallel training beside a tensor axis, the gradient to shared weights is exactly twice
#   what one device computes, without a word: of depthwise and of grouped convolutions, and of dense ones if
#   the height of images is split in place of their number. Split over both mesh axes it is right; so are the
#   value, the gradient to the images, and that of dense convolutions whose number of images is split.
# In jaxfused: its kernels run on each device's images and sum over devices themselves; what XLA runs of it
#   states that gradient as a product for each tap, and gathers the height of images beforehand
#   (jaxfused/ops/conv/conv_xla.py, tests/every_operator/test_shards.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.11.2 jaxlib==0.11.2
JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

random = np.random.default_rng(0)
x = random.standard_normal((8, 16, 16, 64)).astype(np.float32)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def factor(groups, spec):
    """Returns the gradient on the mesh in units of that on one device."""
    w = random.standard_normal((3, 3, 64 // groups, 64)).astype(np.float32)

    def loss(w, x):
        names = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        return jnp.sum(jnp.sin(y))

    gradient = jax.jit(jax.grad(loss))
    right = np.asarray(gradient(w, x))
    with jax.set_mesh(mesh):
        found = np.asarray(gradient(w, jax.device_put(x, NamedSharding(mesh, spec))))
    return np.vdot(found, right) / np.vdot(right, right)


for groups, spec, seen in (
    (64, P("data"), 2.0),
    (2, P("data"), 2.0),
    (1, P("data"), 1.0),
    (1, P(None, "data"), 2.0),
    (64, P(("data", "model")), 1.0),
):
    ratio = factor(groups, spec)
    print(f"{groups} groups, images split by {spec}: {ratio:.4f} of the gradient on one device")
    assert abs(ratio - seen) < 1e-3, (groups, spec, ratio)
PYTHON
