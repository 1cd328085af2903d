"""Transforms that set the size of images: crops and resizing."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxfused.augment.geometry import matrix
from jaxfused.augment.transform import Geometric, pair, transform, whole
from jaxfused.ops.augment.resample_xla import Interpolation

_TRIES = 10
"""Number of draws of a crop. If none fits the image, the crop is its middle, as in torchvision."""


class Crop(Geometric):
    """A part whose result is a box of the image, at its own size or resized."""

    crops: ClassVar[bool] = True
    upright: ClassVar[bool] = True
    size: int | Sequence[int]

    def result_size(self, size: jax.Array) -> jax.Array:
        return jnp.array(self.size, jnp.float32)

    def result_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        height, width = self.size  # type: ignore[misc]
        return height, width

    def inverse(self, values: Any, size: jax.Array) -> jax.Array:
        """Returns the map from the result to the box `values`: left, top, width, height of the image."""
        left, top, width, height = values
        across, down = width / self.size[1], height / self.size[0]  # type: ignore[index]
        return matrix(
            [[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5], [0, 0, 1]]
        )

    def _set_size(self) -> None:
        op, size = type(self).__name__, self.size
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        if len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(
                f"{op}: size is {size!r}, but images have a height and a width; pass one positive int"
                " for both, or two."
            )
        object.__setattr__(self, "size", sizes)


@transform
class RandomResizedCrop(Crop):
    """Resizes a random part of an image.

    Its area is a share of the image's, drawn evenly; the logarithm of its width over its height is drawn
    evenly too. A part that does not fit is drawn again, up to ten times; then the largest part in the
    middle is taken whose shape is in the range.

    Args:
      size: height and width of the result, or one int for both.
      scale: range of the area, as a share.
      ratio: range of width over height.
      interpolation: "bilinear", "bicubic" or "nearest".
      antialias: whether pixels are averaged where the image shrinks.

    Source: Szegedy et al., "Going deeper with convolutions", 2014, section 6,
    https://arxiv.org/abs/1409.4842; `torchvision.transforms.v2.RandomResizedCrop`.
    """

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        self._set_size()
        op = type(self).__name__
        object.__setattr__(self, "scale", pair(op, "scale", self.scale, around=None, least=1e-6))
        object.__setattr__(self, "ratio", pair(op, "ratio", self.ratio, around=None, least=1e-3))

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        area_key, ratio_key, x_key, y_key = jax.random.split(key, 4)
        height, width = size
        low, high = self.scale
        shares = jax.random.uniform(area_key, (_TRIES,), jnp.float32, low, high)
        logs = jnp.log(jnp.array(self.ratio, jnp.float32))
        ratios = jnp.exp(jax.random.uniform(ratio_key, (_TRIES,), jnp.float32, logs[0], logs[1]))
        areas = shares * height * width
        widths, heights = jnp.round(jnp.sqrt(areas * ratios)), jnp.round(jnp.sqrt(areas / ratios))
        fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
        first = jnp.argmax(fits)
        # No draw fits: the crop is the middle of the image, with the nearest allowed ratio.
        ratio = width / height
        least, most = self.ratio
        middle_width = jnp.where(ratio > most, jnp.round(height * most), width)
        middle_height = jnp.where(ratio < least, jnp.round(width / least), height)
        found = fits[first]
        w = jnp.where(found, widths[first], middle_width)
        h = jnp.where(found, heights[first], middle_height)
        left = jnp.where(found, whole(x_key, width - w + 1), jnp.floor((width - w) / 2))
        top = jnp.where(found, whole(y_key, height - h + 1), jnp.floor((height - h) / 2))
        return jnp.stack([left, top, w, h])

    def shrinks_by(self, shape: tuple[int, int]) -> float:
        sizes: Any = self.size
        return max(1.0, *(n / size for n, size in zip(shape, sizes, strict=True)))


@transform
class Resize(Crop):
    """Resizes an image, whole.

    Args:
      size: height and width of the result. (torchvision's one int for the shorter side would give
        images of different shapes.)
      interpolation: "bilinear", "bicubic" or "nearest".
      antialias: whether pixels are averaged where the image shrinks.

    Source: `torchvision.transforms.v2.Resize`.
    """

    size: Sequence[int]
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        self._set_size()

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        zero = jnp.zeros((), jnp.float32)
        return jnp.stack([zero, zero, size[1], size[0]])

    def shrinks_by(self, shape: tuple[int, int]) -> float:
        return max(1.0, *(n / size for n, size in zip(shape, self.size, strict=True)))


@transform
class RandomCrop(Crop):
    """Cuts a random part of a given size out of an image; smaller images are surrounded by `fill`.

    Args:
      size: height and width, or one int for both.
      padding: pixels of `fill` around the image that a part may have, at the most.
      fill: in the values of the images: one number, or one a channel.

    Source: `torchvision.transforms.v2.RandomCrop`.
    """

    size: int | Sequence[int]
    padding: int = 0
    fill: float | Sequence[float] = 0.0
    any_interpolation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._set_size()
        if self.padding < 0:
            raise ValueError(f"RandomCrop: padding is {self.padding}; pass 0 pixels or more.")

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        height, width = self.size  # type: ignore[misc]
        x_key, y_key = jax.random.split(key)

        def start(key, n, part):
            ends = jnp.stack([jnp.float32(-self.padding), n + self.padding - part])
            return ends.min() + whole(key, ends.max() - ends.min() + 1)

        ones = jnp.float32(width), jnp.float32(height)
        return jnp.stack([start(x_key, size[1], width), start(y_key, size[0], height), *ones])


@transform
class CenterCrop(Crop):
    """Cuts the middle of a given size out of an image; smaller images are surrounded by `fill`.

    Args:
      size: height and width, or one int for both.
      fill: in the values of the images: one number, or one a channel.

    Source: `torchvision.transforms.v2.CenterCrop`.
    """

    size: int | Sequence[int]
    fill: float | Sequence[float] = 0.0
    any_interpolation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._set_size()

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        height, width = self.size  # type: ignore[misc]

        def start(n, part):
            # The odd pixel around a smaller image comes behind it.
            return jnp.where(n < part, jnp.ceil((n - part) / 2), jnp.round((n - part) / 2))

        ones = jnp.float32(width), jnp.float32(height)
        return jnp.stack([start(size[1], width), start(size[0], height), *ones])
