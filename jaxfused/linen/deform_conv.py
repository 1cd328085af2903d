"""DeformConv for Flax Linen."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike

import jaxfused.linen
from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32
from jaxfused.modules.resample import deformed, predicted_channels
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class DeformConv(linen.Module):
    r"""Deformable convolution, version 2: the layer computes from x where its windows read x.

    .. math:: y_p = \text{bias} + \sum_t W_t \, m_{p, t} \, x_{s p + d t + \Delta_{p, t}}

    A convolution called `offset`, whose kernel and bias begin as zeros, predicts the offsets and the
    logits of the masks m: `jaxfused.deform_conv` has their order, offsets first.

    Attributes:
      features: O.
      kernel_size: rows and columns of the window; one int for both.
      strides: steps between windows.
      padding: "SAME", "VALID" or how much, as in `jaxfused.deform_conv`.
      kernel_dilation: distance of neighbouring weights.
      feature_group_count: into how many groups channels are split.
      offset_groups: into how many groups channels are split that have offsets of their own.
      use_bias: whether there is a bias [O].
      dtype: of the computation and the result; None for what x and the kernel promote to.
      param_dtype: of the parameters. Those of 16 bits are drawn in float32 and rounded.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernel [*kernel_size, I / feature_group_count, O].
      bias_init: initialises the bias.
      implementation: None or "xla".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.DeformConv(8, 3, strides=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 4)))[0].shape
      (2, 4, 4, 8)

    Source: Zhu et al., "Deformable ConvNets v2: More Deformable, Better Results", 2018,
    https://arxiv.org/abs/1811.11168; the parameters are those of mmcv's `ModulatedDeformConv2dPack`.
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] = 1
    padding: PaddingLike = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    feature_group_count: int = 1
    offset_groups: int = 1
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros_init()
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, H, W, I].

        Args:
          x: [B, H, W, I].

        Returns:
          [B, H', W', O].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        size = self.kernel_size
        size = (size,) * 2 if isinstance(size, int) else tuple(size)
        options: dict[str, Any] = dict(
            strides=self.strides, padding=self.padding, kernel_dilation=self.kernel_dilation
        )
        predicted = jaxfused.linen.Conv(
            predicted_channels(size, self.offset_groups),
            size,
            **options,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=linen.initializers.zeros_init(),
            name="offset",
        )(x)
        shape = (*size, x.shape[-1] // self.feature_group_count, self.features)
        kernel = self.param("kernel", in_float32(self.kernel_init), shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return deformed(
            jnp.asarray(x),
            kernel,
            bias,
            predicted,
            dtype=self.dtype,
            **options,
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            implementation=self.implementation,
        )
