"""Transforms that rotate, move, bend and mirror images."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxfused.augment.transform import (
    Geometric,
    check_share,
    pair,
    transform,
    uniform,
    whole,
)
from jaxfused.ops.augment import filters_xla
from jaxfused.ops.augment.resample_xla import Interpolation, product


def matrix(rows: Any) -> jax.Array:
    """Returns a matrix from rows of numbers or scalar arrays."""
    return jnp.stack([jnp.stack([jnp.asarray(v, jnp.float32) for v in row]) for row in rows])


def moved_by(x: Any, y: Any) -> jax.Array:
    """Returns the 3 x 3 matrix of a translation by (x, y)."""
    return matrix([[1, 0, x], [0, 1, y], [0, 0, 1]])


def inverted(m: jax.Array) -> jax.Array:
    """Returns the inverse of a 3 x 3 matrix, by its cofactors."""
    rows = jnp.cross(m[jnp.array([1, 2, 0])], m[jnp.array([2, 0, 1])])
    return rows.T / (m[0] * rows[0]).sum()


def sine_and_cosine(degrees: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sine and cosine of an angle, exact for multiples of 90 degrees."""
    turns = jnp.round(degrees / 90)
    rest = jnp.deg2rad(degrees - 90 * turns)
    s, c = jnp.sin(rest), jnp.cos(rest)
    quarter = turns.astype(jnp.int32) % 4
    return jnp.stack([s, c, -s, -c])[quarter], jnp.stack([c, -s, -c, s])[quarter]


def middle(size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x, y) of the middle of an image of `size` [height, width], in pixels."""
    return (size[1] - 1) / 2, (size[0] - 1) / 2


def affine_inverse(
    degrees: Any, translation: tuple[Any, Any], scale: Any, shear: tuple[Any, Any], centre: Any
) -> jax.Array:
    """Returns the map from an affine warp's result to the image. The warp: shear, scale, turn, move."""
    s, c = sine_and_cosine(jnp.asarray(degrees, jnp.float32))
    across, down = (jnp.tan(jnp.deg2rad(jnp.asarray(angle, jnp.float32))) for angle in shear)
    # y points down, so the rotation is counter-clockwise on a screen. The shear of y follows that of x.
    sheared = matrix([[1, -across, 0], [-down, 1 + across * down, 0], [0, 0, 1]])
    turned = matrix([[scale * c, scale * s, 0], [-scale * s, scale * c, 0], [0, 0, 1]])
    x, y = centre
    forward = product(turned, sheared)
    away = moved_by(-x - translation[0], -y - translation[1])
    return product(moved_by(x, y), product(inverted(forward), away))


@transform
class RandomAffine(Geometric):
    r"""Turns, scales, shears and moves an image about its middle.

    .. math:: p' = s\, R(\theta)\, S\, (p - m) + m + t

    Args:
      degrees: range of angles (low, high), or one number for (-degrees, degrees); counter-clockwise.
        torchvision's affine turns clockwise, its rotate counter-clockwise.
      translate: largest movement (x, y) as shares of width and height; movements are whole pixels.
      scale: range of the scale.
      shear: range of angles of the shear along x, in degrees, one number for both sides of 0, or
        (low, high, low, high) for x and y; x' = x - tan(shear) y.
      interpolation: "bilinear", "bicubic" or "nearest" (torchvision's default).
      antialias: whether pixels are averaged where the image shrinks.
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.
      p: probability.

    Source: `torchvision.transforms.v2.RandomAffine`.
    """

    degrees: float | Sequence[float] = 0.0
    translate: Sequence[float] = (0.0, 0.0)
    scale: Sequence[float] = (1.0, 1.0)
    shear: float | Sequence[float] = 0.0
    interpolation: Interpolation = "bilinear"
    antialias: bool = False
    fill: float | Sequence[float] = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        object.__setattr__(self, "degrees", pair(op, "degrees", self.degrees, around=0, least=None))
        object.__setattr__(self, "scale", pair(op, "scale", self.scale, around=None, least=1e-3))
        shear: Any = self.shear
        if isinstance(shear, (int, float)) or len(shear) == 2:
            shear = (*pair(op, "shear", shear, around=0, least=None), 0.0, 0.0)
        if len(shear) != 4 or not all(-90 < angle < 90 for angle in shear):
            raise ValueError(
                f"{op}: shear is {self.shear!r}, but it has two or four angles between -90 and 90"
                " degrees; pass (low, high) or (low, high, low, high)."
            )
        object.__setattr__(self, "shear", tuple(shear))
        translate: Any = self.translate
        if isinstance(translate, float) or len(translate) != 2:
            raise ValueError(
                f"{op}: translate is {translate!r}, but it has a share for x and one for y; pass two"
                " numbers."
            )
        for share in translate:
            check_share(op, "translate", share)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        keys = jax.random.split(key, 6)
        most = [share * size[1 - i] for i, share in enumerate(self.translate)]
        shear: Any = self.shear
        return dict(
            degrees=uniform(keys[0], *self.degrees),  # type: ignore[misc]
            x=jnp.round(uniform(keys[1], -most[0], most[0])),
            y=jnp.round(uniform(keys[2], -most[1], most[1])),
            scale=uniform(keys[3], *self.scale),
            across=uniform(keys[4], shear[0], shear[1]),
            down=uniform(keys[5], shear[2], shear[3]),
        )

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return affine_inverse(
            values["degrees"],
            (values["x"], values["y"]),
            values["scale"],
            (values["across"], values["down"]),
            middle(size),
        )

    def shrinks_by(self, shape: tuple[int, int]) -> float:
        shear: Any = self.shear
        sheared = 1 + max(abs(math.tan(math.radians(angle))) for angle in shear)
        return max(1.0, sheared / self.scale[0])


@transform
class RandomRotation(Geometric):
    """Turns an image about its middle; multiples of 90 degrees are exact.

    Args:
      degrees: range of angles (low, high), or one number for (-degrees, degrees); counter-clockwise.
      interpolation: "bilinear", "bicubic" or "nearest" (torchvision's default).
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.
      p: probability.

    Source: `torchvision.transforms.v2.RandomRotation`, without `expand`.
    """

    degrees: float | Sequence[float]
    interpolation: Interpolation = "bilinear"
    fill: float | Sequence[float] = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        object.__setattr__(self, "degrees", pair(op, "degrees", self.degrees, around=0, least=None))

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return uniform(key, *self.degrees)  # type: ignore[misc]

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return affine_inverse(values, (0, 0), 1, (0, 0), middle(size))


@transform
class RandomQuarterTurn(Geometric):
    """Turns a square image by 0, 90, 180 or 270 degrees, each as likely.

    Of images whose `sizes`, traced or on a GPU, are no squares, what is turned out of them is lost.

    Args:
      p: probability.
    """

    p: float = 1.0
    any_interpolation: ClassVar[bool] = True

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return 90 * whole(key, jnp.float32(4))

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return affine_inverse(values, (0, 0), 1, (0, 0), middle(size))

    def result_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        if shape[0] != shape[1]:
            raise ValueError(
                f"RandomQuarterTurn: images are {shape[0]} x {shape[1]}, but a quarter turn keeps the"
                " shape of squares only; crop them to squares before."
            )
        return shape


@transform
class RandomPerspective(Geometric):
    r"""Moves the corners of an image inward, each on its own, by a projective map.

    .. math:: (x', y') = \left(\frac{a x + b y + c}{g x + h y + 1},
                               \frac{d x + e y + f}{g x + h y + 1}\right)

    An image of one row or column stays as it is.

    Args:
      distortion_scale: share of half the width and height by which corners move at most, by whole
        pixels.
      p: probability.
      interpolation: "bilinear", "bicubic" or "nearest".
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.

    Source: `torchvision.transforms.v2.RandomPerspective`.
    """

    distortion_scale: float = 0.5
    p: float = 0.5
    interpolation: Interpolation = "bilinear"
    fill: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        check_share(type(self).__name__, "distortion_scale", self.distortion_scale)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        """Draws the corners (x, y) of the result: top left, top right, bottom right, bottom left."""
        most = jnp.floor(self.distortion_scale * jnp.floor(size / 2)) + 1
        down, right = jnp.floor(jax.random.uniform(key, (2, 4), jnp.float32) * most[:, None])
        x, y = size[1] - 1, size[0] - 1
        return jnp.stack(
            [
                jnp.stack([right[0], x - right[1], x - right[2], right[3]]),
                jnp.stack([down[0], down[1], y - down[2], y - down[3]]),
            ],
            1,
        )

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        to_corners = _from_unit_square(values)
        back = inverted(to_corners)
        # The map counts pixels from their edges, but the corners are pixel centres, as in
        # torchvision.
        first = back[2, 0] * values[0, 0] + back[2, 1] * values[0, 1] + back[2, 2]
        scaled = matrix([[size[1] - 1, 0, 0], [0, size[0] - 1, 0], [0, 0, 1]])
        of_edges = product(scaled, back / first)
        map = product(moved_by(-0.5, -0.5), product(of_edges, moved_by(0.5, 0.5)))
        # Corners of one row or column span no area, and there is no map to them.
        return jnp.where(jnp.isfinite(map).all(), map, jnp.eye(3, dtype=map.dtype))


def _from_unit_square(corners: jax.Array) -> jax.Array:
    """Returns the projective map of (0, 0), (1, 0), (1, 1), (0, 1) to four corners [4, 2].

    Source: Heckbert, "Fundamentals of texture mapping and image warping", 1989, section 2.2.3.
    """
    p0, p1, p2, p3 = corners
    d1, d2, s = p1 - p2, p3 - p2, p0 - p1 + p2 - p3

    def cross(a, b):
        return a[0] * b[1] - b[0] * a[1]

    area = cross(d1, d2)
    g, h = cross(s, d2) / area, cross(d1, s) / area
    a, b = p1 - p0 + g * p1, p3 - p0 + h * p3
    return matrix([[a[0], b[0], p0[0]], [a[1], b[1], p0[1]], [g, h, 1]])


@transform
class ElasticTransform(Geometric):
    r"""Moves each pixel by a smooth random field.

    .. math:: d = \alpha \, (G_\sigma * u), \qquad u \sim \mathcal{U}(-1, 1)

    Args:
      alpha: what the blurred noise is multiplied by, in pixels. torchvision's alpha is twice this one.
      sigma: standard deviation of the blur, in pixels; displacements have a standard deviation of about
        0.163 alpha / sigma pixels.
      interpolation: "bilinear", "bicubic" or "nearest".
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.
      p: probability.

    Source: Simard et al., "Best practices for convolutional neural networks applied to visual document
    analysis", 2003; `torchvision.transforms.v2.ElasticTransform`.
    """

    alpha: float = 25.0
    sigma: float = 5.0
    interpolation: Interpolation = "bilinear"
    fill: float | Sequence[float] = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        if self.sigma <= 0:
            raise ValueError(
                f"ElasticTransform: sigma is {self.sigma}, but it is a width; pass a positive number."
            )

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return key

    def field(self, values: Any, shape: tuple[int, int]) -> jax.Array:
        """Returns the displacement (x, y) of each pixel in pixels, [H, W, 2]."""
        noise = jax.random.uniform(values, (*shape, 2), jnp.float32, -1, 1)
        return self.alpha * filters_xla.smoothed(noise, self.sigma)

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return jnp.eye(3, dtype=jnp.float32)


@transform
class RandomHorizontalFlip(Geometric):
    """Mirrors an image left to right.

    Args:
      p: probability.

    Source: `torchvision.transforms.v2.RandomHorizontalFlip`.
    """

    p: float = 0.5
    upright: ClassVar[bool] = True
    any_interpolation: ClassVar[bool] = True

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return matrix([[-1, 0, size[1] - 1], [0, 1, 0], [0, 0, 1]])


@transform
class RandomVerticalFlip(Geometric):
    """Mirrors an image top to bottom.

    Args:
      p: probability.

    Source: `torchvision.transforms.v2.RandomVerticalFlip`.
    """

    p: float = 0.5
    upright: ClassVar[bool] = True
    any_interpolation: ClassVar[bool] = True

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return matrix([[1, 0, 0], [0, -1, size[0] - 1], [0, 0, 1]])
