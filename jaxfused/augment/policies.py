"""Transforms that apply others at random: RandomApply, RandomChoice, RandAugment, TrivialAugmentWide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.augment.filters import RandomAdjustSharpness
from jaxfused.augment.geometry import affine_inverse, middle
from jaxfused.augment.transform import (
    Drawn,
    Geometric,
    Mixing,
    Part,
    Pointwise,
    Transform,
    check_share,
    check_transform,
    transform,
    uniform,
    whole,
)
from jaxfused.ops.augment.resample_xla import Interpolation
from jaxfused.ops.augment.steps_xla import Op, Steps
from jaxfused.runtime.checks import check_count, check_finite


class _Several(Transform):
    """A transform that consists of others, some of which it turns off for each image."""

    transforms: tuple[Transform, ...]

    def _check(self, transforms: Sequence[Any]) -> tuple[Transform, ...]:
        op = type(self).__name__
        for t in transforms:
            check_transform(op, t)
            for part in t.parts:
                if getattr(part, "crops", False) or isinstance(part, Mixing):
                    raise ValueError(
                        f"{op}: {type(part).__name__} cannot be left out of some images, because it"
                        " sets their size or mixes them; put it into the chain itself."
                    )
        if not transforms:
            raise ValueError(f"{op}: there are no transforms; pass one or more.")
        return tuple(transforms)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for t in self.transforms for part in t.parts)

    def _drawn(
        self, keys: Sequence[jax.Array], size: jax.Array, on: Sequence[Any]
    ) -> tuple[Drawn, ...]:
        return tuple(
            Drawn(drawn.on & on[i], drawn.values)
            for i, t in enumerate(self.transforms)
            for drawn in t.draw(keys[i], size)
        )


@dataclass(frozen=True, init=False)
class RandomApply(_Several):
    """Applies all of its transforms, or none of them.

    Args:
      transforms: in their order.
      p: probability that they are applied.

    Source: `torchvision.transforms.v2.RandomApply`.
    """

    transforms: tuple[Transform, ...]
    p: float

    def __init__(self, *transforms: Transform, p: float = 0.5):
        op = type(self).__name__
        check_finite(op, "p", p)
        check_share(op, "p", p)
        object.__setattr__(self, "transforms", self._check(transforms))
        object.__setattr__(self, "p", float(p))

    def draw(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        own, *keys = jax.random.split(key, 1 + len(self.transforms))
        on = uniform(own) < self.p
        return self._drawn(keys, size, [on] * len(keys))


@dataclass(frozen=True, init=False)
class RandomChoice(_Several):
    """Applies one of its transforms.

    Args:
      transforms: the transforms; each image gets one of them.
      p: the weight of each in the draw, divided by their sum; None for equal weights.

    Source: `torchvision.transforms.v2.RandomChoice`.
    """

    transforms: tuple[Transform, ...]
    p: tuple[float, ...]

    def __init__(self, *transforms: Transform, p: Sequence[float] | None = None):
        op = type(self).__name__
        object.__setattr__(self, "transforms", self._check(transforms))
        weights = (1.0,) * len(transforms) if p is None else tuple(map(float, p))
        if len(weights) != len(transforms) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ValueError(
                f"{op}: p is {p!r}, but it has a weight for each of {len(transforms)} transforms; pass"
                " as many finite numbers of 0 or more."
            )
        object.__setattr__(self, "p", weights)

    def draw(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        own, *keys = jax.random.split(key, 1 + len(self.transforms))
        ends = np.cumsum(self.p) / np.sum(self.p)
        chosen = (uniform(own) >= jnp.asarray(ends[:-1], jnp.float32)).sum()
        return self._drawn(keys, size, [chosen == i for i in range(len(keys))])


# --- policies -------------------------------------------------------------------------------------

_WARPS = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_COLOURS = {
    "Brightness": Op.BRIGHTNESS,
    "Color": Op.SATURATION,
    "Contrast": Op.CONTRAST,
    "Posterize": Op.POSTERIZE,
    "Solarize": Op.SOLARIZE,
    "AutoContrast": Op.AUTOCONTRAST,
    "Equalize": Op.EQUALIZE,
}
OPERATIONS = ("Identity", *_WARPS, *_COLOURS, "Sharpness")
"""Operations that RandAugment and TrivialAugmentWide draw from, all with the same probability."""


@dataclass(frozen=True)
class _Warp(Geometric):
    """The geometric operations of RandAugment and TrivialAugmentWide; the matrix [3, 3] is drawn."""

    interpolation: Interpolation
    fill: Any

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        return values


class _Colour(Pointwise):
    """The colour operations of the policies below: an operation's index and its amount are drawn."""

    def operations(self) -> Steps:
        return (tuple(_COLOURS.values()),)

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        return [(values[0], values[1:])]


class _Policy(Transform):
    """A transform that applies `layers` random operations to each image."""

    num_magnitude_bins: int
    interpolation: Interpolation
    fill: Any
    layers: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            _Warp(self.interpolation, self.fill),
            _Colour(),
            RandomAdjustSharpness(1.0, p=1.0),
        ) * self.layers

    def draw(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        keys = jax.random.split(key, self.layers)
        return tuple(drawn for k in keys for drawn in self._layer(k, size))

    def _share(self, key: jax.Array) -> jax.Array:
        """Draws an operation's magnitude as a fraction, 0 to 1, of the largest magnitude."""
        raise NotImplementedError

    def _most(self, size: jax.Array) -> dict[str, Any]:
        """Returns the largest amount of each warp by its name, of "factor" (colours) and of "bits".

        `size` is the image's [height, width].
        """
        raise NotImplementedError

    def _layer(self, key: jax.Array, size: jax.Array) -> tuple[Drawn, ...]:
        kind_key, share_key, sign_key = jax.random.split(key, 3)
        kind = whole(kind_key, jnp.float32(len(OPERATIONS))).astype(jnp.int32)
        sign = jnp.where(uniform(sign_key) <= 0.5, -1.0, 1.0)
        return self.operation(kind, self._share(share_key), sign, size)

    def operation(
        self, kind: jax.Array, share: jax.Array, sign: jax.Array, size: jax.Array
    ) -> tuple[Drawn, ...]:
        """Returns the draws for a layer's three parts; `kind` is an index in `OPERATIONS`."""
        most = self._most(size)

        def chosen(name: str) -> jax.Array:
            return kind == OPERATIONS.index(name)

        # A shear keeps the image's corner fixed, as in torchvision.
        corner = jnp.float32(-0.5), jnp.float32(-0.5)
        signed = {name: sign * share * most[name] for name in _WARPS}
        degrees = {name: jnp.rad2deg(jnp.arctan(signed[name])) for name in ("ShearX", "ShearY")}
        whole_pixels = {name: jnp.trunc(signed[name]) for name in ("TranslateX", "TranslateY")}
        maps = dict(
            ShearX=affine_inverse(0, (0, 0), 1, (degrees["ShearX"], 0), corner),
            ShearY=affine_inverse(0, (0, 0), 1, (0, degrees["ShearY"]), corner),
            TranslateX=affine_inverse(0, (whole_pixels["TranslateX"], 0), 1, (0, 0), corner),
            TranslateY=affine_inverse(0, (0, whole_pixels["TranslateY"]), 1, (0, 0), corner),
            Rotate=affine_inverse(signed["Rotate"], (0, 0), 1, (0, 0), middle(size)),
        )
        map = sum(jnp.where(chosen(name), maps[name], 0) for name in _WARPS)
        factor = 1 + sign * share * most["factor"]
        amounts = dict.fromkeys(_COLOURS, factor) | dict(
            Posterize=8 - jnp.round(share * most["bits"]),
            Solarize=255 * (1 - share),
        )
        op = sum(jnp.where(chosen(name), float(op), 0) for name, op in _COLOURS.items())
        amount = sum(jnp.where(chosen(name), amounts[name], 0) for name in _COLOURS)
        warps = (kind >= 1) & (kind <= len(_WARPS))
        return (
            Drawn(warps, map),
            Drawn(jnp.asarray(op > 0), jnp.stack([op, amount])),
            Drawn(chosen("Sharpness"), factor),
        )

    def _check(self) -> None:
        op = type(self).__name__
        if self.num_magnitude_bins < 2:
            raise ValueError(
                f"{op}: num_magnitude_bins is {self.num_magnitude_bins}, but magnitudes go from 0 to"
                " the largest; pass 2 or more."
            )


@transform
class RandAugment(_Policy):
    """Gives each image random operations of one magnitude.

    The operations are Identity, ShearX, ShearY, TranslateX, TranslateY, Rotate, Brightness, Color,
    Contrast, Sharpness, Posterize, Solarize, AutoContrast and Equalize. Magnitude m of n bins is the
    fraction m / (n - 1) of 0.3 for shears, of 150 / 331 of the side for translations, of 30 degrees, of
    0.9 for factors around 1, of 4 bits and of 255 levels below 255; signs are random.

    Args:
      num_ops: operations for each image, one after the other.
      magnitude: the bin, 0 to num_magnitude_bins - 1. (Magnitude 9 of timm's "rand-m9" is 9 of 11 bins,
        and its operations differ.)
      num_magnitude_bins: the number of bins.
      interpolation: of the warps; "nearest", as in torchvision, "bilinear" or "bicubic".
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.

    Source: Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search
    space", 2019, https://arxiv.org/abs/1909.13719; `torchvision.transforms.v2.RandAugment`.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        self._check()
        op = type(self).__name__
        check_count(op, "num_ops", self.num_ops)
        if not 0 <= self.magnitude < self.num_magnitude_bins:
            raise ValueError(
                f"{op}: magnitude is {self.magnitude}, but there are {self.num_magnitude_bins} bins;"
                f" pass 0 to {self.num_magnitude_bins - 1}."
            )

    @property
    def layers(self) -> int:  # type: ignore[override]
        """Number of operations for each image."""
        return self.num_ops

    def _share(self, key: jax.Array) -> jax.Array:
        return jnp.float32(self.magnitude / (self.num_magnitude_bins - 1))

    def _most(self, size: jax.Array) -> dict[str, Any]:
        height, width = (150 / 331 * n for n in size)
        shears = dict(ShearX=0.3, ShearY=0.3)
        return shears | dict(TranslateX=width, TranslateY=height, Rotate=30, factor=0.9, bits=4)


@transform
class TrivialAugmentWide(_Policy):
    """Gives each image one random operation of a random magnitude.

    The operations are those of `RandAugment`; the largest magnitudes are 0.99 for shears, 32 pixels, 135
    degrees, 0.99 for factors around 1, 6 bits and 255 levels.

    Args:
      num_magnitude_bins: how many magnitudes there are.
      interpolation: of the warps; "nearest", as in torchvision, "bilinear" or "bicubic".
      fill: of what comes in from outside, in the values of the images: one number, or one a channel.

    Source: Müller, Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation", 2021,
    https://arxiv.org/abs/2103.10158; `torchvision.transforms.v2.TrivialAugmentWide`.
    """

    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: float | Sequence[float] = 0.0
    layers: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        self._check()

    def _share(self, key: jax.Array) -> jax.Array:
        bins = self.num_magnitude_bins
        return whole(key, jnp.float32(bins)) / (bins - 1)

    def _most(self, size: jax.Array) -> dict[str, Any]:
        shears = dict(ShearX=0.99, ShearY=0.99)
        return shears | dict(TranslateX=32, TranslateY=32, Rotate=135, factor=0.99, bits=6)
