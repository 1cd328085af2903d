"""SeparableConv for Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.nnx.conv import Conv
from jaxfused.ops.conv.conv_input import ConvInput
from jaxfused.runtime.checks import python_numbers


class SeparableConv(nnx.Module):
    r"""A convolution of each channel on its own, then one of all channels of each pixel.

    .. math:: y = \text{activation}(\text{depthwise activation}(\operatorname{depthwise}(x))
              \cdot \text{kernel} + \text{bias} + \text{residual})

    The parameters are those of a Flax module with one `Conv` called `depthwise`, whose
    `feature_group_count` is I, and one of 1 x 1 called `pointwise`.

    Args:
      in_features: I.
      out_features: O.
      kernel_size: of every spatial axis of the depthwise kernel.
      strides: as in Flax's `Conv`, and so are the next two; of the depthwise convolution.
      padding: as in Flax.
      kernel_dilation: as in Flax.
      channel_multiplier: how many channels the depthwise convolution makes of each.
      use_bias: whether both convolutions have a bias.
      depthwise_activation: of the depthwise convolution; its names are those of `activation`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      dtype: of the convolutions and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in Flax.
      kernel_init: initialises both kernels.
      bias_init: initialises both biases.
      rngs: gives the initialisers their keys.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.SeparableConv(
      ...     3, 8, (3, 3), strides=2, depthwise_activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 16, 3))).shape
      (2, 8, 8, 8)

    Source: Chollet, "Xception: Deep Learning with Depthwise Separable Convolutions", 2016,
    https://arxiv.org/abs/1610.02357
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = 1,
        channel_multiplier: int = 1,
        use_bias: bool = True,
        depthwise_activation: str | None = None,
        activation: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        shared: dict[str, Any] = dict(
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            implementation=implementation,
        )
        size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        between = in_features * channel_multiplier
        self.depthwise = Conv(
            in_features,
            between,
            size,
            strides,
            padding=padding,
            kernel_dilation=kernel_dilation,
            feature_group_count=in_features,
            activation=depthwise_activation,
            **shared,
        )
        ones = (1,) * len(size)
        self.pointwise = Conv(between, out_features, ones, activation=activation, **shared)

    def __call__(self, x: ConvInput, *, residual: jax.Array | None = None) -> jax.Array:
        """Convolves x [..., *spatial, I].

        Args:
          x: [..., *spatial, I], any number of batch axes.
          residual: of the result's shape, is added before the last activation.

        Returns:
          [..., *spatial', O].
        """
        return self.pointwise(self.depthwise(x), residual=residual)
