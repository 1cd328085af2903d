#!/usr/bin/env bash
# What: Linen's partitioned parameters and with_logical_constraint raise under jax.set_mesh(jax.make_mesh(...)), and do nothing,
# in silence, under `with mesh:`.
#
# Version: flax==0.12.12, jax==0.11.2, jaxlib==0.11.2; a CPU, Python 3.12 or newer.
# Expected: Kernels and activations split as annotated, or an error that names the axis type.
# Seen: jax.make_mesh makes Explicit axes unless told otherwise; under them Linen asserts a split that the fresh kernel does
#   not have, so that init, jax.eval_shape of it and nn.unbox raise AssertionError. `with mesh:`, in which the docstring of
#   nn.Partitioned runs its example, is no mesh to it: all stays on one device. Only jax.set_mesh of a mesh with Auto axes
#   splits, and even there parameters made before it raise TypeError in nn.unbox outside of jax.jit. nnx splits under set_mesh
#   with either type, and raises ValueError under `with mesh:`.
# In jaxfused: jaxfused/linen/ draws its kernels as Flax does; docs/sharding.md; jaxfused/quantization/layers.py opens boxes without
#   a constraint.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile flax==0.12.12 jax==0.11.2 jaxlib==0.11.2

JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

x = jnp.ones((4, 8))
key = jax.random.key(0)
kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
dense = nn.Dense(8, use_bias=False, kernel_init=kernel_init)
made_before = dense.init(key, x)


class Constrained(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.with_logical_constraint(nn.Dense(8)(x), (None, "mlp"))


def split_nnx():
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    return nnx.state(nnx.Linear(8, 8, use_bias=False, kernel_init=kernel_init, rngs=nnx.Rngs(0)))


def devices(call):
    """Returns over how many devices the columns of the only array are split, or the error's name."""
    try:
        (array,) = jax.tree.leaves(call())
    except (AssertionError, TypeError, ValueError) as error:
        return type(error).__name__
    return 8 // array.sharding.shard_shape(array.shape)[1]


seen = {}
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,))
    for how, context in (("set_mesh", jax.set_mesh), ("with", lambda mesh: mesh)):
        with context(mesh), nn.logical_axis_rules((("mlp", "model"),)):
            results = {
                "init": devices(lambda: jax.jit(lambda: nn.unbox(dense.init(key, x)))()),
                "constraint": devices(lambda: jax.jit(lambda x: Constrained().init_with_output(key, x)[0])(x)),
                "unbox": devices(lambda: nn.unbox(made_before)),
                "nnx": devices(split_nnx),
            }
        print(kind.name, how, results)
        seen[kind.name, how] = tuple(results.values())
assert jax.make_mesh((2,), ("model",)).axis_types == (AxisType.Explicit,)
assert seen == {
    ("Explicit", "set_mesh"): ("AssertionError", "AssertionError", "AssertionError", 2),
    ("Explicit", "with"): (1, 1, 1, "ValueError"),
    ("Auto", "set_mesh"): (2, 2, "TypeError", 2),
    ("Auto", "with"): (1, 1, 1, "ValueError"),
}
PYTHON
