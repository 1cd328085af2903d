"""Transforms against values that torchvision v2 gave, which tests/recorded/record_augment.py records.

uint8 values may differ by a level: torchvision floors where this package rounds, and weighs gray with
numbers whose sum is 0.9999.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import augment
from jaxfused.augment.policies import OPERATIONS
from tests.recorded import values
from tests.recorded.augment_images import BOXES, CROP, DISPLACEMENT, ENDS, POLICY, image, mask
from tests.support.grids import parametrize

WARP: Any = dict(degrees=30.0, x=2.0, y=-1.0, scale=1.2, across=10.0, down=5.0)
BOX = np.array([CROP[1], CROP[0], CROP[3], CROP[2]], np.float32)
GRAY = 2e-4
"""How far torchvision's weights of gray, which sum to 0.9999, may move a value of 0 to 1."""


@functools.cache
def recorded():
    return values.load("augment.npz")


def with_values(transform, drawn, batch, **options):
    """Returns the batch after a transform with these parameters."""
    chain = augment.Chain(transform, **options)

    @jax.jit
    def run(batch):
        [draw] = chain.sample(jax.random.key(0), batch)
        draw = draw._replace(on=jnp.ones_like(draw.on))
        if drawn is not None:
            draw = draw._replace(values=jax.tree.map(lambda v: jnp.asarray(v)[None], drawn))
        return chain.apply((draw,), batch)

    return run(batch)


class Elastic(augment.ElasticTransform):
    """A deformation by the recorded field."""

    def field(self, values, shape):
        return jnp.asarray(DISPLACEMENT, jnp.float32)


def jitter(**factors):
    return augment.ColorJitter(**{k: (v, v) for k, v in factors.items()})


CASES = {
    "affine": (augment.RandomAffine(), WARP, 2e-5),
    "rotate": (augment.RandomRotation((30, 30)), None, 2e-5),
    "perspective": (augment.RandomPerspective(), np.array(ENDS, np.float32), 5e-5),
    "elastic": (Elastic(), None, 2e-5),
    "crop bilinear": (augment.RandomResizedCrop((5, 6)), BOX, 2e-6),
    "crop bicubic": (augment.RandomResizedCrop((5, 6), interpolation="bicubic"), BOX, 2e-6),
    "larger crop bilinear": (augment.RandomResizedCrop((17, 16)), BOX, 2e-6),
    "larger crop bicubic": (
        augment.RandomResizedCrop((17, 16), interpolation="bicubic"),
        BOX,
        2e-6,
    ),
    "brightness": (jitter(brightness=1.4), None, 1e-6),
    "contrast": (jitter(contrast=0.6), None, GRAY),
    "saturation": (jitter(saturation=1.7), None, GRAY),
    "hue": (jitter(hue=0.2), None, 2e-6),
    "gamma": (augment.RandomGamma((1.4, 1.4), gain=0.9), None, 1e-6),
    "grayscale": (augment.RandomGrayscale(), None, GRAY),
    "invert": (augment.RandomInvert(), None, 1e-6),
    "posterize": (augment.RandomPosterize(3), None, 0),
    "solarize": (augment.RandomSolarize(100), None, 0),
    "equalize": (augment.RandomEqualize(), None, 0),
    "autocontrast": (augment.RandomAutocontrast(), None, 2e-6),
    "blur": (augment.GaussianBlur(5, 1.3), None, 1e-6),
    "sharpness": (augment.RandomAdjustSharpness(1.7), None, 1e-6),
    "normalize": (augment.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.25]), None, 2e-6),
}
EXACT = {"posterize", "solarize", "equalize", "invert"}


@parametrize("name", list(CASES), quick=[0, 4, 11, 17, 19])
def test_values(name):
    transform, drawn, tolerance = CASES[name]
    results = recorded()[name].results
    if "float32" in results:
        y = with_values(transform, drawn, image()[None] / np.float32(255))[0]
        np.testing.assert_allclose(y, results["float32"], atol=tolerance)
    if "uint8" in results:
        y = with_values(transform, drawn, image()[None])[0]
        difference = np.abs(np.asarray(y, np.int32) - results["uint8"])
        assert difference.max() <= (0 if name in EXACT else 1)


@parametrize("name", list(POLICY), quick=[0])
def test_operations_of_policies(name):
    chain = augment.Chain(augment.RandAugment(num_ops=1))
    kind = OPERATIONS.index(name)
    size = jnp.array([12, 13], jnp.float32)
    sign = jnp.float32(-1 if POLICY[name] < 0 else 1)
    drawn = chain.transforms[0].operation(kind, jnp.float32(0.3), sign, size)
    draws = jax.tree.map(lambda a: jnp.asarray(a)[None], drawn)
    y = np.asarray(jax.jit(chain.apply)(draws, image()[None])[0], np.int32)
    expected = recorded()[f"policy {name}"].results["uint8"]
    assert np.abs(y - expected).max() <= 1


def test_masks_move_as_images_do():
    batch = augment.Batch(image()[None], masks=mask()[None])
    y = with_values(augment.RandomAffine(), WARP, batch).masks[0]
    np.testing.assert_array_equal(y, recorded()["affine of a mask"].results["y"])


@parametrize(
    ("name", "transform", "drawn"),
    [
        ("affine", augment.RandomAffine(), WARP),
        ("rotate", augment.RandomRotation((30, 30)), None),
        ("crop", augment.RandomResizedCrop((5, 6)), BOX),
        ("flip", augment.RandomHorizontalFlip(), None),
    ],
    quick=[0],
)
def test_boxes_move_as_images_do(name, transform, drawn):
    batch = augment.Batch(image()[None], boxes=np.array(BOXES, np.float32)[None])
    result = with_values(transform, drawn, batch)
    expected = recorded()["boxes"].results[name]
    np.testing.assert_allclose(result.boxes[0], expected, atol=2e-5)
    assert result.valid.all() and ((result.visible > 0) & (result.visible <= 1)).all()
