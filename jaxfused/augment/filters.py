"""Transforms whose pixels depend on the pixels around them, or on noise."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxfused.augment.transform import (
    Blurring,
    Drawn,
    Filter,
    pair,
    transform,
    uniform,
)
from jaxfused.ops.augment import filters_xla


@transform
class GaussianBlur(Blurring):
    """Blurs by samples of a Gaussian that sum to 1; borders are mirrored.

    Args:
      kernel_size: odd, of height and width, or one int for both.
      sigma: range of the standard deviation in pixels, or one number.
      p: probability.

    Source: `torchvision.transforms.v2.GaussianBlur`; images smaller than the kernel are mirrored again.
    """

    kernel_size: int | Sequence[int]
    sigma: float | Sequence[float] = (0.1, 2.0)
    p: float = 1.0
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        op, size = type(self).__name__, self.kernel_size
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        if len(sizes) != 2 or any(n < 1 or n % 2 == 0 for n in sizes):
            raise ValueError(
                f"{op}: kernel_size is {size!r}, but a kernel has a middle; pass an odd positive int, or"
                " two."
            )
        object.__setattr__(self, "kernel_size", sizes)
        sigma = (self.sigma, self.sigma) if isinstance(self.sigma, float) else self.sigma
        object.__setattr__(self, "sigma", pair(op, "sigma", sigma, around=None, least=1e-6))

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return uniform(key, *self.sigma)  # type: ignore[misc]

    @property
    def reach(self) -> tuple[int, int]:
        down, across = self.kernel_size  # type: ignore[misc]
        return down // 2, across // 2

    def weights(self, drawn: Drawn) -> jax.Array:
        parts = []
        for radius in self.reach:
            itself = jnp.zeros((2 * radius + 1,), jnp.float32).at[radius].set(1)
            parts.append(jnp.where(drawn.on, filters_xla.gaussian(drawn.values, radius), itself))
        return jnp.concatenate(parts)

    def filtered(self, values: Any, x: jax.Array, size: jax.Array | None) -> jax.Array:
        down, across = (filters_xla.gaussian(values.astype(x.dtype), n) for n in self.reach)
        return filters_xla.separable(x, down, across, size)


@transform
class RandomAdjustSharpness(Blurring):
    """Blends an image with its blur by 3 x 3 pixels; the outermost pixels stay.

    Args:
      sharpness_factor: 0 for blurred, 1 for unchanged, 2 for sharper; one number, or a range.
      p: probability.

    Source: Pillow's `ImageEnhance.Sharpness`, as `torchvision.transforms.v2.RandomAdjustSharpness`.
    """

    sharpness_factor: float | Sequence[float]
    p: float = 0.5
    sharpens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        op, factor = type(self).__name__, self.sharpness_factor
        limits = (factor, factor) if isinstance(factor, float) else factor
        limits = pair(op, "sharpness_factor", limits, around=None, least=0)
        object.__setattr__(self, "sharpness_factor", limits)

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return uniform(key, *self.sharpness_factor)  # type: ignore[misc]

    @property
    def reach(self) -> tuple[int, int]:
        return 1, 1

    def weights(self, drawn: Drawn) -> jax.Array:
        return jnp.where(drawn.on, drawn.values, 1)[None].astype(jnp.float32)

    def filtered(self, values: Any, x: jax.Array, size: jax.Array | None) -> jax.Array:
        return filters_xla.sharpened(x, values.astype(x.dtype), size)


@transform
class GaussianNoise(Filter):
    """Adds normal noise to values of 0 to 1, and clips them.

    Args:
      mean: of the noise.
      sigma: its standard deviation, one number or a range.
      clip: whether values stay in 0 to 1.
      p: probability.

    Source: `torchvision.transforms.v2.GaussianNoise`.
    """

    mean: float = 0.0
    sigma: float | Sequence[float] = 0.1
    clip: bool = True
    p: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        sigma = (self.sigma, self.sigma) if isinstance(self.sigma, float) else self.sigma
        object.__setattr__(self, "sigma", pair(op, "sigma", sigma, around=None, least=0))

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        own, amount = jax.random.split(key)
        return dict(key=own, sigma=uniform(amount, *self.sigma))  # type: ignore[misc]

    def of_frame(self, values: Any, frame: jax.Array) -> Any:
        """Returns the parameters of one frame of a video, since each frame has its own noise."""
        return values | dict(key=jax.random.fold_in(values["key"], frame))

    def filtered(self, values: Any, x: jax.Array, size: jax.Array | None) -> jax.Array:
        noise = jax.random.normal(values["key"], x.shape, x.dtype)
        y = x + self.mean + values["sigma"].astype(x.dtype) * noise
        return jnp.clip(y, 0, 1) if self.clip else y
