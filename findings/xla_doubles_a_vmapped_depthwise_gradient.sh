#!/usr/bin/env bash
# What: XLA's partitioner doubles the weights' gradient of a depthwise convolution under jax.vmap.
#
# Version: jax 0.11.2, jaxlib 0.11.2, 8 virtual CPU devices in a mesh [4, 2] of Auto axes.
# Expected: an array's sharding changes no numbers beyond rounding.
# Seen: with images [entries, images, height, width, channels] whose second axis is split over the first
#   mesh axis and replicated over the other, jax.vmap over the entries of the gradient to shared weights is
#   exactly twice what one device computes, without a word. Split over both mesh axes, or along the entries
#   or channels, it is right; so are the value and the gradient to the images.
# In jaxfused: its kernels run on each device's images and sum over devices themselves; what
#   XLA runs of it is JAX's own convolution (tests/every_operator/test_shards.py leaves the case out).
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
x = random.standard_normal((4, 8, 16, 16, 64)).astype(np.float32)
w = random.standard_normal((3, 3, 1, 64)).astype(np.float32)


def loss(w, x):
    names = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=64
    )
    return jnp.sum(jnp.sin(y))


gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
right = np.asarray(gradient(w, x))
mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    for spec, factor in ((P(None, "d"), 2.0), (P(None, ("d", "e")), 1.0), (P("d"), 1.0)):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        found = np.asarray(gradient(w, placed))
        ratio = np.vdot(found, right) / np.vdot(right, right)
        print(f"split by {spec}: {ratio:.4f} of the gradient on one device")
        assert abs(ratio - factor) < 1e-3, (spec, ratio)
PYTHON
