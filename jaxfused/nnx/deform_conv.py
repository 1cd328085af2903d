"""DeformConv for Flax NNX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike

import jaxfused.nnx
from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32
from jaxfused.modules.resample import deformed, predicted_channels
from jaxfused.runtime.checks import python_numbers


class DeformConv(nnx.Module):
    r"""Deformable convolution, version 2: the layer computes from x where its windows read x.

    .. math:: y_p = \text{bias} + \sum_t W_t \, m_{p, t} \, x_{s p + d t + \Delta_{p, t}}

    A convolution called `offset`, whose kernel and bias begin as zeros, predicts the offsets and the
    logits of the masks m: `jaxfused.deform_conv` has their order, offsets first.

    Args:
      in_features: I.
      out_features: O.
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
      rngs: gives the initialisers their keys.
      implementation: None or "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.DeformConv(4, 8, 3, strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 8, 4))).shape
      (2, 4, 4, 8)

    Source: Zhu et al., "Deformable ConvNets v2: More Deformable, Better Results", 2018,
    https://arxiv.org/abs/1811.11168; the parameters are those of mmcv's `ModulatedDeformConv2dPack`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        feature_group_count: int = 1,
        offset_groups: int = 1,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
    ):
        size = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
        self.options: dict[str, Any] = nnx.static(
            dict(
                strides=strides,
                padding=padding,
                kernel_dilation=kernel_dilation,
            )
        )
        self.offset = jaxfused.nnx.Conv(
            in_features,
            predicted_channels(size, offset_groups),
            size,
            **self.options,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.zeros,
            rngs=rngs,
        )
        shape = (*size, in_features // feature_group_count, out_features)
        self.kernel = nnx.Param(in_float32(kernel_init)(rngs.params(), shape, param_dtype))
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype))
        self.feature_group_count = feature_group_count
        self.dtype = dtype
        self.precision = precision
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [B, H, W, I].

        Args:
          x: [B, H, W, I].

        Returns:
          [B, H', W', O].

        Raises:
          ValueError: x does not fit, as the function says.
        """
        return deformed(
            jnp.asarray(x),
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            self.offset(x),
            dtype=self.dtype,
            **self.options,
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            implementation=self.implementation,
        )
