"""Operators on images that Explicit axes split have the numbers of one device, whichever axis is split.

Like tests/every_operator/test_shards.py, this file runs itself in a process with several devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from tests.support import eight_devices
from tests.support.eight_devices import DEVICES

on_eight_devices = pytest.mark.skipif(
    jax.device_count() != DEVICES or jax.default_backend() != "cpu",
    reason="runs in the process that test_on_eight_devices starts",
)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() == DEVICES, reason="this is that process")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not gpu")


def deform(groups, x, *arrays):
    return jaxfused.deform_conv(x, *arrays, feature_group_count=groups)


MAPS = (4, 8, 8, 8)
CASES = {
    "resize": (lambda x: jaxfused.resize(x, 13), MAPS),
    "resize of one axis": (lambda x: jaxfused.resize(x, (8, 3), method="bicubic"), MAPS),
    "upsample": (jaxfused.upsample, MAPS),
    "pixel_shuffle": (jaxfused.pixel_shuffle, MAPS),
    "pixel_unshuffle": (functools.partial(jaxfused.pixel_unshuffle, factor=4), MAPS),
    "blur_pool": (jaxfused.blur_pool, MAPS),
    "max_pool": (lambda x: jaxfused.max_pool(x, (3, 3), strides=(3, 3)), MAPS),
    "avg_pool": (lambda x: jaxfused.avg_pool(x, (3, 3), strides=(3, 3)), MAPS),
    "carafe": (jaxfused.carafe, MAPS, (4, 16, 16, 25)),
    "deform_conv": (functools.partial(deform, 1), MAPS, (3, 3, 8, 4), (4, 8, 8, 36), (4, 8, 8, 18)),
    "deform_conv in groups": (functools.partial(deform, 2), MAPS, (3, 3, 4, 4), (4, 8, 8, 18)),
    "conv": (functools.partial(jaxfused.conv, strides=3), MAPS, (3, 3, 8, 4)),
}


@on_eight_devices
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_one_device(name):
    f, *shapes = CASES[name]
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]

    def run(*arrays):
        every = tuple(range(len(arrays)))
        return f(*arrays), jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), every)(*arrays)

    wanted = jax.jit(run)(*arrays)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    of_x = (
        P("b"),
        P(None, "b"),
        P("b", None, "h"),
        P(None, None, None, "b"),
        P("b", None, None, "h"),
    )
    for spec in of_x:
        others = [P("b"), P(None, None, None, "h"), P(None, "h")]
        specs = [
            spec if i == 0 else next(o for o in others[i - 1 :] if _fits(o, shape))
            for i, shape in enumerate(shapes)
        ]
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(a, NamedSharding(mesh, s))
                for a, s in zip(arrays, specs, strict=True)
            ]
            actual = jax.jit(run)(*placed)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def _fits(spec, shape):
    """Whether mesh axes of 4 and 2 divide the axes that they split."""
    return all(size % 4 == 0 for name, size in zip(spec, shape, strict=False) if name)
