"""SeparableConv for Flax Linen."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.conv import Conv
from jaxfused.ops.conv.conv_input import ConvInput
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class SeparableConv(linen.Module):
    r"""A convolution of each channel on its own, then one of all channels of each pixel.

    .. math:: y = \text{activation}(\text{depthwise activation}(\operatorname{depthwise}(x))
              \cdot \text{kernel} + \text{bias} + \text{residual})

    The parameters are those of a Flax module with one `Conv` called `depthwise`, whose
    `feature_group_count` is I, and one of 1 x 1 called `pointwise`.

    Attributes:
      features: O.
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
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.SeparableConv(8, (3, 3), strides=2, depthwise_activation="relu")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 16, 16, 3)))[0].shape
      (2, 8, 8, 8)

    Source: Chollet, "Xception: Deep Learning with Depthwise Separable Convolutions", 2016,
    https://arxiv.org/abs/1610.02357
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] | None = 1
    padding: PaddingLike = "SAME"
    kernel_dilation: int | Sequence[int] | None = 1
    channel_multiplier: int = 1
    use_bias: bool = True
    depthwise_activation: str | None = None
    activation: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros_init()
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: ConvInput, *, residual: jax.Array | None = None) -> jax.Array:
        """Convolves x [..., *spatial, I].

        Args:
          x: [..., *spatial, I], any number of batch axes.
          residual: of the result's shape, is added before the last activation.

        Returns:
          [..., *spatial', O].
        """
        shared: dict[str, Any] = dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            implementation=self.implementation,
        )
        size = self.kernel_size
        size = (size,) if isinstance(size, int) else tuple(size)
        depthwise = Conv(
            x.shape[-1] * self.channel_multiplier,
            size,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=x.shape[-1],
            activation=self.depthwise_activation,
            **shared,
            name="depthwise",
        )
        pointwise = Conv(
            self.features,
            (1,) * len(size),
            activation=self.activation,
            **shared,
            name="pointwise",
        )
        return pointwise(depthwise(x), residual=residual)
