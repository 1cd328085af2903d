"""CARAFE for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer

import jaxfused.nnx
from jaxfused.dispatch import Implementation
from jaxfused.modules.resample import encoder_channels, reassembled
from jaxfused.runtime.checks import python_numbers


class CARAFE(nnx.Module):
    r"""Images enlarged by kernels that a small network makes of them (content-aware reassembly).

    .. math:: y = \operatorname{carafe}(x, \text{softmax}(\text{shuffle}(\text{encode}(z)))), \quad
              z = \text{compress}(x)

    Parameters: those of two convolutions, `compress` of 1 x 1 and `encode`.

    Args:
      in_features: I.
      factor: by which both axes grow.
      kernel_size: rows and columns that a new pixel reads, odd.
      groups: into how many groups of kernels the channels are split.
      encoder_size: rows and columns of the window of `encode`.
      compressed_features: channels of the result of `compress`.
      dtype: of the computation and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels.
      rngs: gives the initialisers their keys.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.CARAFE(8, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 4, 8))).shape
      (2, 8, 8, 8)

    Source: Wang et al., "CARAFE: Content-Aware ReAssembly of FEatures", 2019,
    https://arxiv.org/abs/1905.02188; the parameters are those of mmcv's `CARAFEPack`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        factor: int = 2,
        *,
        kernel_size: int = 5,
        groups: int = 1,
        encoder_size: int = 3,
        compressed_features: int = 64,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        shared: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.compress = jaxfused.nnx.Conv(in_features, compressed_features, (1, 1), **shared)
        channels = encoder_channels(kernel_size, groups, factor)
        window = (encoder_size, encoder_size)
        self.encode = jaxfused.nnx.Conv(compressed_features, channels, window, **shared)
        self.factor = factor
        self.kernel_size = kernel_size
        self.groups = groups
        self.dtype = dtype
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, H, W, I].

        Args:
          x: [B, H, W, I].

        Returns:
          [B, factor * H, factor * W, I].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        return reassembled(
            jnp.asarray(x, self.dtype),
            self.encode(self.compress(x)),
            factor=self.factor,
            kernel_size=self.kernel_size,
            groups=self.groups,
            implementation=self.implementation,
        )
