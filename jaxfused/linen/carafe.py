"""CARAFE for Flax Linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer

import jaxfused.linen
from jaxfused.dispatch import Implementation
from jaxfused.modules.resample import encoder_channels, reassembled
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class CARAFE(linen.Module):
    r"""Images enlarged by kernels that a small network makes of them (content-aware reassembly).

    .. math:: y = \operatorname{carafe}(x, \text{softmax}(\text{shuffle}(\text{encode}(z)))), \quad
              z = \text{compress}(x)

    Parameters: those of two convolutions, `compress` of 1 x 1 and `encode`.

    Attributes:
      factor: by which both axes grow.
      kernel_size: rows and columns that a new pixel reads, odd.
      groups: into how many groups of kernels the channels are split.
      encoder_size: rows and columns of the window of `encode`.
      compressed_features: channels of the result of `compress`.
      dtype: of the computation and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels.
      implementation: None or "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.CARAFE()
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 4, 4, 8)))[0].shape
      (2, 8, 8, 8)

    Source: Wang et al., "CARAFE: Content-Aware ReAssembly of FEatures", 2019,
    https://arxiv.org/abs/1905.02188; the parameters are those of mmcv's `CARAFEPack`.
    """

    factor: int = 2
    kernel_size: int = 5
    groups: int = 1
    encoder_size: int = 3
    compressed_features: int = 64
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, H, W, I].

        Args:
          x: [B, H, W, I].

        Returns:
          [B, factor * H, factor * W, I].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        shared: dict[str, Any] = dict(
            dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=self.kernel_init
        )
        channels = encoder_channels(self.kernel_size, self.groups, self.factor)
        window = (self.encoder_size, self.encoder_size)
        y = jaxfused.linen.Conv(self.compressed_features, (1, 1), name="compress", **shared)(x)
        return reassembled(
            jnp.asarray(x, self.dtype),
            jaxfused.linen.Conv(channels, window, name="encode", **shared)(y),
            factor=self.factor,
            kernel_size=self.kernel_size,
            groups=self.groups,
            implementation=self.implementation,
        )
