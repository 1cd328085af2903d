"""Base classes of transforms, one for each kind of part, and the type of a part's draws."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp

from jaxfused.ops.augment.resample_xla import Interpolation
from jaxfused.ops.augment.steps_xla import Steps
from jaxfused.runtime.checks import check_finite, python_number_fields


class Drawn(NamedTuple):
    """Random parameters of one part for one image."""

    on: jax.Array
    """Bool [], true if the transform is applied."""
    values: Any
    """Parameters of the part, a tree of arrays."""


class Transform:
    """A random change of one image.

    Its fields are the ranges of the drawn parameters; there is no other state. A transform consists of
    one or several `parts`, which a chain groups into passes. `draw` returns the parameters of each part.
    """

    def __post_init__(self) -> None:
        """Checks the fields."""

    @property
    def parts(self) -> "tuple[Part, ...]":
        """Parts of the transform in the order in which they run."""
        raise NotImplementedError

    def draw(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        """Draws what each part does with an image of `size`, [height, width] in float32."""
        raise NotImplementedError

    def result_size(self, size: jax.Array) -> jax.Array:
        """Returns [height, width] of the result for an image of `size`."""
        return size


class Part(Transform):
    """A transform that is its own only part."""

    p: float = 1.0

    @property
    def parts(self) -> "tuple[Part, ...]":
        return (self,)

    def draw(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        on, own = jax.random.split(key)
        return (Drawn(uniform(on) < self.p, self.values(own, size)),)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        """Draws the parameters for an image."""
        return ()


class Geometric(Part):
    """A part that moves pixels."""

    crops: ClassVar[bool] = False
    """True if pixels outside of the part's result are lost: later parts must not bring them back."""
    upright: ClassVar[bool] = False
    """True if the part maps rows of the image to rows, and columns to columns."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = False
    fill: float | Sequence[float] = 0.0
    any_interpolation: ClassVar[bool] = False
    """True if the part's positions are always pixel centres: interpolation and fill do not matter."""

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        """Returns the matrix [3, 3] that maps positions in the result to positions in the image."""
        raise NotImplementedError

    def result_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns height and width of the resulting arrays."""
        return shape

    def shrinks_by(self, shape: tuple[int, int]) -> float:
        """Returns the largest factor by which the part shrinks images in arrays of `shape`."""
        return 1.0


class Pointwise(Part):
    """A part that changes each pixel from its own value and perhaps from statistics of the image."""

    bounded: ClassVar[bool] = True
    """True if the part takes values of 0 to 1, and so must come before `Normalize`."""

    def operations(self) -> Steps:
        """Returns the operations that each step of the part may have."""
        raise NotImplementedError

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        """Returns the operation and the values of each step for one image."""
        raise NotImplementedError


class Filter(Part):
    """A part whose pixels depend on the pixels around them, or on noise."""

    bounded: ClassVar[bool] = True
    """True if the part takes values of 0 to 1, and so must come before `Normalize`."""

    def filtered(self, values: Any, x: jax.Array, size: jax.Array | None) -> jax.Array:
        """Returns an image [H, W, C] of values 0 to 1 after the filter.

        `size` is the image's height and width, or None if the image fills the array.
        """
        raise NotImplementedError


class Blurring(Filter):
    """A blur or a sharpening, which for uint8 images runs in the kernel of the pass before it."""

    sharpens: ClassVar[bool] = False
    """True if an image is blended with its blur by 3 x 3 pixels; false if the blur is the result."""

    @property
    def reach(self) -> tuple[int, int]:
        """Pixels on each side on which a result's pixel depends: (along columns, along rows)."""
        raise NotImplementedError

    def weights(self, drawn: Drawn) -> jax.Array:
        """Returns the weights along columns, then along rows; for sharpening one factor, [1].

        Where the filter is not applied, the weights are those of the identity.
        """
        raise NotImplementedError


class Mixing(Part):
    """A part that mixes each image of a batch with the image before it in the batch."""

    per_image: bool = False
    """True if each image has its own draw; false if all images of a batch share one."""
    cuts: ClassVar[bool] = False
    """True if each pixel comes from one image, so that masks can be mixed too."""
    axis_name: Any = None
    num_classes: int | None = None

    def shares(self, values: Any, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """Returns an image's weights in a mixture: of its pixels, [H, W] or [], and its label, []."""
        raise NotImplementedError


@dataclass_transform(frozen_default=True)
def transform[T](cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose fields are checked.

    They have the types of their annotations and are finite, and a probability `p` is from 0 to 1.
    """
    made: Any = dataclass(frozen=True)(cls)
    finish = made.__post_init__

    @functools.wraps(finish)
    def checked(self: Any) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float):
                    check_finite(type(self).__name__, name, number)
            if name == "p":
                check_share(type(self).__name__, name, value)
        finish(self)

    made.__post_init__ = checked
    return python_number_fields(made)


def public_name(part: Part) -> str:
    """Returns the name of the transform that a user passed for this part.

    RandAugment and TrivialAugmentWide consist of private parts, whose names begin with _.
    """
    name = type(part).__name__
    return "RandAugment or TrivialAugmentWide" if name.startswith("_") else name


def uniform(key: jax.Array, low: Any = 0.0, high: Any = 1.0) -> jax.Array:
    """Draws a float32 number from low to high, the same one where JAX's default is float64."""
    return jax.random.uniform(key, (), jnp.float32, low, high)


def whole(key: jax.Array, count: jax.Array) -> jax.Array:
    """Draws a whole number of 0 .. count - 1 as a float32; 0 where count is less than 1."""
    drawn = jnp.floor(uniform(key) * count)
    return jnp.clip(drawn, 0, jnp.maximum(count - 1, 0))


def pair(op: str, name: str, value: Any, *, around: float | None, least: float | None) -> Any:
    """Returns a range (low, high); one number n stands for `around` - n to `around` + n, cut at `least`.

    Raises:
      ValueError: the value is no range, or begins below `least`.
    """
    if isinstance(value, (int, float)):
        if around is None or value < 0:
            raise ValueError(
                f"{op}: {name} is {value!r}, but it is a range; pass (low, high)"
                + ("." if around is None else ", or one number of 0 or more.")
            )
        value = (around - value, around + value)
        if least is not None:
            value = (max(least, value[0]), value[1])
    low_high = tuple(float(number) for number in value)
    if len(low_high) != 2 or low_high[0] > low_high[1]:
        raise ValueError(
            f"{op}: {name} is {value!r}, but a range is (low, high) with low <= high; pass two numbers."
        )
    if least is not None and low_high[0] < least:
        raise ValueError(
            f"{op}: {name} is {value!r}, which begins below {least:g}; pass (low, high) from"
            f" {least:g} on."
        )
    return low_high


def check_share(op: str, name: str, value: float) -> None:
    """Checks that a number is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{op}: {name} is {value}, but it is a share; pass a number from 0 to 1.")


def check_transform(op: str, value: Any) -> None:
    """Checks that a value is a transform."""
    if not isinstance(value, Transform):
        raise ValueError(
            f"{op}: {value!r} is no transform; pass those of jaxfused.augment, and those of a list one"
            f" by one: {op}(*transforms)."
        )
