"""Transforms of each pixel on its own: colour, levels, erasing, normalization."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.augment.transform import Pointwise, check_share, pair, transform, uniform, whole
from jaxfused.ops.augment.steps_xla import Op, Steps
from jaxfused.runtime.checks import check_count


class _OneStep(Pointwise):
    """A pointwise part that consists of one step, applied to an image with probability `p`."""

    op: Op

    def operations(self) -> Steps:
        return ((self.op,),)

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        return [(self.op, values)]

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return jnp.zeros((1,), jnp.float32)


@transform
class ColorJitter(Pointwise):
    r"""Changes brightness, contrast, saturation and hue.

    With a factor f for each of the first three, and the shade g = 0.299 r + 0.587 g + 0.114 b:

    .. math:: x' = f x, \qquad x' = f x + (1 - f)\, \bar g, \qquad x' = f x + (1 - f)\, g

    clipped to the range of the image; the mean of g is that of one image. Hue is turned by a share of
    the circle.

    Args:
      brightness: range of the factor (low, high), or one number b for (max(0, 1 - b), 1 + b).
      contrast: the same.
      saturation: the same.
      hue: range of turns within -0.5 and 0.5, or one number for both sides of 0.
      order: "random" for each image, as in torchvision, or "fixed", as the arguments are.
      p: probability.

    Source: `torchvision.transforms.v2.ColorJitter`, with weights of gray that sum to 1 (Pillow's).
    """

    brightness: float | Sequence[float] = 0.0
    contrast: float | Sequence[float] = 0.0
    saturation: float | Sequence[float] = 0.0
    hue: float | Sequence[float] = 0.0
    order: Literal["random", "fixed"] = "random"
    p: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        for name in ("brightness", "contrast", "saturation"):
            factors = pair(op, name, getattr(self, name), around=1, least=0)
            object.__setattr__(self, name, factors)
        object.__setattr__(self, "hue", pair(op, "hue", self.hue, around=0, least=-0.5))
        if self.hue[1] > 0.5:  # type: ignore[index]
            raise ValueError(f"{op}: hue is {self.hue}, but it is turns; pass -0.5 to 0.5.")
        if self.order not in ("random", "fixed"):
            raise ValueError(f"{op}: order={self.order!r} is not known; pass 'random' or 'fixed'.")

    def _used(self) -> list[tuple[Op, Any]]:
        """Returns the operations that may change an image, each with the range of its parameter."""
        every = (
            (Op.BRIGHTNESS, self.brightness, 1),
            (Op.CONTRAST, self.contrast, 1),
            (Op.SATURATION, self.saturation, 1),
            (Op.HUE, self.hue, 0),
        )
        return [(op, limits) for op, limits, same in every if limits != (same, same)]

    def operations(self) -> Steps:
        used = tuple(op for op, _ in self._used())
        return (used,) * len(used) if self.order == "random" else tuple((op,) for op in used)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        used = self._used()
        order, *keys = jax.random.split(key, 1 + 4)
        amounts = [uniform(k, *limits) for k, (_, limits) in zip(keys, used, strict=False)]
        drawn = jnp.stack(amounts) if used else jnp.zeros((0,), jnp.float32)
        places = jnp.arange(len(used), dtype=jnp.int32)
        if self.order == "random" and used:
            places = jax.random.permutation(order, places)
        return dict(order=places, amounts=drawn)

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        ops = jnp.array([op for op, _ in self._used()], jnp.float32)
        return [
            (ops[values["order"][i]], values["amounts"][values["order"][i]][None])
            for i in range(len(ops))
        ]


@transform
class RandomGamma(_OneStep):
    r"""Raises values to a power: :math:`x' = g\, x^\gamma`, clipped.

    Args:
      gamma: range of the power; its logarithm is drawn evenly.
      gain: g.
      p: probability.

    Source: `torchvision.transforms.v2.functional.adjust_gamma`.
    """

    gamma: Sequence[float] = (0.7, 1.4)
    gain: float = 1.0
    p: float = 1.0
    op = Op.GAMMA

    def __post_init__(self) -> None:
        op = type(self).__name__
        limits = pair(op, "gamma", self.gamma, around=None, least=1e-3)
        object.__setattr__(self, "gamma", limits)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        drawn = jnp.exp(uniform(key, *(math.log(limit) for limit in self.gamma)))
        return jnp.stack([drawn, jnp.float32(self.gain)])


@transform
class RandomGrayscale(_OneStep):
    """Replaces colours by gray, in the same number of channels.

    Args:
      p: probability.

    Source: `torchvision.transforms.v2.RandomGrayscale`.
    """

    p: float = 0.1
    op = Op.SATURATION


@transform
class RandomInvert(_OneStep):
    """Replaces x by 1 - x (255 - x in uint8).

    Args:
      p: probability.

    Source: `torchvision.transforms.v2.RandomInvert`.
    """

    p: float = 0.5
    op = Op.INVERT


class _OfLevels(_OneStep):
    """A step whose parameter (the field named by `number`) counts levels or bits, from 0 to `most`."""

    number: ClassVar[str]
    most: ClassVar[int]
    rule: ClassVar[str]

    def __post_init__(self) -> None:
        op, value = type(self).__name__, getattr(self, self.number)
        if not 0 <= value <= self.most:
            raise ValueError(
                f"{op}: {self.number} is {value}, but {self.rule}; pass 0 to {self.most}."
            )

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return jnp.array([getattr(self, self.number)], jnp.float32)


@transform
class RandomPosterize(_OfLevels):
    """Keeps the highest bits of each of the 256 levels.

    Args:
      bits: the number of kept bits, 0 to 8.
      p: probability.

    Source: `torchvision.transforms.v2.RandomPosterize`; values of float images become levels first.
    """

    bits: int
    p: float = 0.5
    op = Op.POSTERIZE
    number, most, rule = "bits", 8, "a level has 8"


@transform
class RandomSolarize(_OfLevels):
    """Inverts the levels that are at least a threshold.

    Args:
      threshold: 0 to 256, a level of uint8 for images of any dtype; 256 inverts none.
      p: probability.

    Source: `torchvision.transforms.v2.RandomSolarize`.
    """

    threshold: float
    p: float = 0.5
    op = Op.SOLARIZE
    number, most, rule = "threshold", 256, "it is a level of uint8"


@transform
class RandomAutocontrast(_OneStep):
    """Stretches each channel to the whole range; one that is flat stays.

    Args:
      p: probability.

    Source: `torchvision.transforms.v2.RandomAutocontrast`.
    """

    p: float = 0.5
    op = Op.AUTOCONTRAST


@transform
class RandomEqualize(_OneStep):
    """Makes each of the 256 levels of each channel about as frequent as the others.

    Args:
      p: probability.

    Source: Pillow's `ImageOps.equalize`, as `torchvision.transforms.v2.RandomEqualize`.
    """

    p: float = 0.5
    op = Op.EQUALIZE


class _Erasing(Pointwise):
    """A part that fills a box with a colour; `values` are [top, left, bottom, right]."""

    bounded: ClassVar[bool] = False
    value: Any = 0.0

    def operations(self) -> Steps:
        return ((Op.ERASE,),)

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        filled = for_channels(type(self).__name__, "value", self.value, channels)
        levels = jnp.asarray(filled / (255 if is_uint8 else 1), jnp.float32)
        return [(Op.ERASE, jnp.concatenate([values, levels]))]


@transform
class RandomErasing(_Erasing):
    """Fills a random box.

    Args:
      p: probability.
      scale: range of its area, as a share.
      ratio: range of its height over its width, the logarithm of which is drawn evenly.
      value: in the values of the images where they are: one number, or one a channel.

    Source: Zhong et al., "Random erasing data augmentation", 2017, https://arxiv.org/abs/1708.04896;
    `torchvision.transforms.v2.RandomErasing`.
    """

    p: float = 0.5
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    value: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        object.__setattr__(self, "scale", pair(op, "scale", self.scale, around=None, least=0))
        object.__setattr__(self, "ratio", pair(op, "ratio", self.ratio, around=None, least=1e-3))
        check_share(op, "scale's larger number", self.scale[1])

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        areas = jax.random.uniform(keys[0], (10,), jnp.float32, *self.scale) * size[0] * size[1]
        low, high = (math.log(limit) for limit in self.ratio)
        ratios = jnp.exp(jax.random.uniform(keys[1], (10,), jnp.float32, low, high))
        heights, widths = jnp.round(jnp.sqrt(areas * ratios)), jnp.round(jnp.sqrt(areas / ratios))
        fits = (heights < size[0]) & (widths < size[1])
        first = jnp.argmax(fits)
        height = jnp.where(fits[first], heights[first], 0)
        width = jnp.where(fits[first], widths[first], 0)
        top = whole(keys[2], size[0] - height + 1)
        left = whole(keys[3], size[1] - width + 1)
        return jnp.stack([top, left, top + height, left + width])


@transform
class Cutout(_Erasing):
    """Fills a square of a fixed size, whose middle is anywhere in the image.

    Args:
      size: its side in pixels.
      p: probability.
      value: in the values of the images where they are: one number, or one a channel.

    Source: DeVries, Taylor, "Improved regularization of convolutional neural networks with cutout",
    2017, https://arxiv.org/abs/1708.04552
    """

    size: int = 16
    p: float = 1.0
    value: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        check_count(type(self).__name__, "size", self.size)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        keys = jax.random.split(key)
        first = [whole(k, n) - self.size // 2 for k, n in zip(keys, size, strict=True)]
        return jnp.stack([*first, *(place + self.size for place in first)])


@transform
class Normalize(Pointwise):
    r"""Subtracts a mean and divides by a standard deviation: :math:`x' = (x - m) / s`.

    Values of uint8 images are 0 to 1 here. The result is floating, of the chain's dtype.

    Args:
      mean: one number for each channel, or one for all.
      std: the same.

    Source: `torchvision.transforms.v2.Normalize`.
    """

    mean: float | Sequence[float]
    std: float | Sequence[float]
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        std, mean = np.asarray(self.std, np.float64), np.asarray(self.mean, np.float64)
        if not (std.size and mean.size and std.min() > 0):
            raise ValueError(
                f"{type(self).__name__}: mean is {self.mean!r} and std {self.std!r}, but values less the"
                " mean are divided by std; pass means, and stds above 0."
            )

    def operations(self) -> Steps:
        return ((Op.NORMALIZE,),)

    def rows(self, values: Any, channels: int, is_uint8: bool) -> list[tuple[Any, Any]]:
        op = type(self).__name__
        mean = for_channels(op, "mean", self.mean, channels)
        std = for_channels(op, "std", self.std, channels)
        room = np.zeros(max(channels, 4) - channels)
        constants = np.concatenate([1 / std, room, -mean / std, room])
        return [(Op.NORMALIZE, jnp.asarray(constants, jnp.float32))]


def for_channels(op: str, name: str, value: Any, channels: int) -> np.ndarray:
    """Returns one number for each channel from a sequence of as many or of one.

    Raises:
      ValueError: the sequence has another length.
    """
    numbers = np.asarray(value, np.float64).reshape(-1)
    if len(numbers) not in (1, channels):
        raise ValueError(
            f"{op}: {name} has {len(numbers)} numbers, but images have {channels} channels; pass one,"
            f" or {channels}."
        )
    return np.broadcast_to(numbers, (channels,))
