"""Layers of Flax NNX that resample images, without parameters."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from jaxfused.dispatch import Implementation
from jaxfused.ops.pool import blur_pool, pixel_shuffle, resize
from jaxfused.ops.pool.blur_pool import PadMode
from jaxfused.ops.pool.pixel_shuffle import ChannelOrder
from jaxfused.ops.pool.resize import ResizeMethod
from jaxfused.runtime.checks import python_numbers


class Resize(nnx.Module):
    r"""Images of another size: `jaxfused.resize`, without parameters.

    .. math:: y = \operatorname{resize}(x)

    Args:
      size: of the result, one int for all spatial axes or one for each; None where there is a factor.
      factor: what to multiply sizes by; None where there is a size.
      method: "nearest", "nearest_floor", "bilinear", "bicubic", "lanczos3" or "lanczos5".
      align_corners: whether the first and the last result are the first and the last value.
      antialias: whether windows grow by the factor by which an axis shrinks.
      dtype: of x and the result; None for x's.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.Resize(size=(12, 5))(jnp.ones((2, 8, 8, 8))).shape
      (2, 12, 5, 8)

    Source: `jaxfused.resize`.
    """

    @python_numbers
    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        *,
        factor: float | Sequence[float] | None = None,
        method: ResizeMethod = "bilinear",
        align_corners: bool = False,
        antialias: bool = False,
        dtype: Dtype | None = None,
        implementation: Implementation | None = None,
    ):
        self.size = tuple(size) if isinstance(size, Sequence) else size
        self.factor = tuple(factor) if isinstance(factor, Sequence) else factor
        self.method = method
        self.align_corners = align_corners
        self.antialias = antialias
        self.dtype = dtype
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, *spatial, C].

        Args:
          x: [B, *spatial, C].

        Returns:
          [B, *size, C].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        return resize.resize(
            jnp.asarray(x, self.dtype),
            size=self.size,
            factor=self.factor,
            method=self.method,
            align_corners=self.align_corners,
            antialias=self.antialias,
            implementation=self.implementation,
        )


class _ByFactor(nnx.Module):
    """Base of `PixelShuffle` and `PixelUnshuffle`: channels become blocks of pixels, or the reverse."""

    function: ClassVar[Callable[..., jax.Array]]

    @python_numbers
    def __init__(
        self,
        factor: int | Sequence[int] = 2,
        *,
        order: ChannelOrder = "channel_first",
        dtype: Dtype | None = None,
        implementation: Implementation | None = None,
    ):
        self.factor = tuple(factor) if isinstance(factor, Sequence) else factor
        self.order = order
        self.dtype = dtype
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, *spatial, C].

        Args:
          x: [B, *spatial, C].

        Returns:
          [B, *spatial', C'], the sizes multiplied or divided by the factor, the channels the other way.

        Raises:
          ValueError: x does not fit, as the function says.
        """
        return type(self).function(
            jnp.asarray(x, self.dtype),
            factor=self.factor,
            order=self.order,
            implementation=self.implementation,
        )


class PixelShuffle(_ByFactor):
    r"""Images whose channels become pixels: `jaxfused.pixel_shuffle`, without parameters.

    .. math:: y_{b, f i + p, c} = x_{b, i, c P + p}

    Args:
      factor: f, one int for all spatial axes or one for each.
      order: of the channels, "channel_first" or "pixel_first".
      dtype: of x and the result; None for x's.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.PixelShuffle(2)(jnp.ones((2, 8, 8, 8))).shape
      (2, 16, 16, 2)

    Source: `torch.nn.PixelShuffle`.
    """

    function = staticmethod(pixel_shuffle.pixel_shuffle)


class PixelUnshuffle(_ByFactor):
    r"""Images whose pixels become channels: `jaxfused.pixel_unshuffle`, without parameters.

    .. math:: y_{b, i, c P + p} = x_{b, f i + p, c}

    Args:
      factor: f, one int for all spatial axes or one for each; it divides their sizes.
      order: of the channels, "channel_first" or "pixel_first".
      dtype: of x and the result; None for x's.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.PixelUnshuffle(2)(jnp.ones((2, 8, 8, 8))).shape
      (2, 4, 4, 32)

    Source: `torch.nn.PixelUnshuffle`.
    """

    function = staticmethod(pixel_shuffle.pixel_unshuffle)


class BlurPool(nnx.Module):
    r"""Images blurred by binomial weights, then thinned: `jaxfused.blur_pool`, without parameters.

    .. math:: y_{b, i, c} = 2^{1 - k} \sum_{j=0}^{k-1} \binom{k - 1}{j} \, x_{b, s i + j - p, c}

    Args:
      strides: s, one int for all spatial axes or one for each.
      filter_size: k; 3 has the weights 1/4, 1/2, 1/4.
      padding_mode: "reflect", "edge" or "zeros".
      dtype: of x and the result; None for x's.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.BlurPool(2)(jnp.ones((2, 8, 8, 8))).shape
      (2, 4, 4, 8)

    Source: `jaxfused.blur_pool`.
    """

    @python_numbers
    def __init__(
        self,
        strides: int | Sequence[int] = 2,
        *,
        filter_size: int = 3,
        padding_mode: PadMode = "reflect",
        dtype: Dtype | None = None,
        implementation: Implementation | None = None,
    ):
        self.strides = tuple(strides) if isinstance(strides, Sequence) else strides
        self.filter_size = filter_size
        self.padding_mode = padding_mode
        self.dtype = dtype
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, *spatial, C].

        Args:
          x: [B, *spatial, C].

        Returns:
          [B, *spatial', C].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        return blur_pool.blur_pool(
            jnp.asarray(x, self.dtype),
            strides=self.strides,
            filter_size=self.filter_size,
            padding_mode=self.padding_mode,
            implementation=self.implementation,
        )
