"""Conv for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import (
    ConvGeneralDilatedT,
    Dtype,
    Initializer,
    PaddingLike,
    PrecisionLike,
    PromoteDtypeFn,
)

from jaxfused.dispatch import Implementation
from jaxfused.modules.conv import convolve
from jaxfused.modules.fallback import call_flax, why_complex, why_given, why_intercepted
from jaxfused.ops.conv.conv import Convolved
from jaxfused.ops.conv.conv_input import ConvInput, as_array, as_input
from jaxfused.runtime.checks import python_numbers


class Conv(nnx.Conv):
    r"""`flax.nnx.Conv` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}(\operatorname{conv}(x, \text{kernel}) + \text{bias}
              + \text{residual})

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one
    loads into the other and gives the same output. Differences:

    - Bias, residual and activation are applied in float32 and the result is rounded then, where
      Flax rounds after every step.
    - A mask, a `conv_general_dilated`, `promote_dtype` or `preferred_element_type` other than
      Flax's, `out_sharding` and complex numbers run Flax's code, and `jaxfused.explain` lists the
      call. Together with `residual` or a named kernel such a call raises an error.
    - The kernel may be a `jaxfused.QuantizedKernel`, as `jaxfused.quantize_params` puts it there.

    Args:
      in_features: I.
      out_features: O.
      kernel_size: of every spatial axis.
      strides: as in Flax.
      padding: as in Flax.
      input_dilation: as in Flax.
      kernel_dilation: as in Flax.
      feature_group_count: as in Flax.
      use_bias: whether there is a bias [O].
      mask: as in Flax.
      dtype: of the convolution and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in Flax.
      kernel_init: initialises the kernel [*kernel_size, I / feature_group_count, O].
      bias_init: initialises the bias.
      conv_general_dilated: as in Flax.
      promote_dtype: as in Flax.
      preferred_element_type: as in Flax.
      rngs: gives the initialisers their keys.
      kernel_metadata: of the kernel's `nnx.Param`.
      bias_metadata: of the bias's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      padding_mode: with what to pad where `padding` says how much, as in `jaxfused.conv`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.Conv(3, 8, (3, 3), strides=2, activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 16, 3))).shape
      (2, 8, 8, 8)

    Source: `jaxfused.conv`.
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
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: ConvGeneralDilatedT = jax.lax.conv_general_dilated,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: str | None = None,
        padding_mode: str = "zeros",
        implementation: Implementation | None = None,
    ):
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
            feature_group_count=feature_group_count,
            use_bias=use_bias,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            conv_general_dilated=conv_general_dilated,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation
        self.padding_mode = padding_mode
        self.implementation = implementation

    def __call__(
        self,
        inputs: ConvInput,
        out_sharding: Any = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Convolves inputs [..., *spatial, I].

        Args:
          inputs: [..., *spatial, I], any number of batch axes.
          out_sharding: as in Flax.
          residual: of the result's shape, is added before the activation.

        Returns:
          [..., *spatial', O].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        return self._run(inputs, out_sharding, residual=residual).y

    def _run(
        self,
        inputs: ConvInput,
        out_sharding: Any = None,
        *,
        residual: jax.Array | None = None,
        return_input: bool = False,
        statistics: bool = False,
    ) -> Convolved:
        """Implements `__call__`; blocks also ask for x (`return_input`) and y's `statistics`."""
        inputs = as_input(inputs)
        intercepted = why_intercepted()
        kernel = self.kernel[...] if intercepted else self.kernel.get_value()
        bias = None if self.bias is None else self.bias[...]
        reason = (
            intercepted
            or why_given(
                mask=self.mask is not None,
                conv_general_dilated=self.conv_general_dilated is not jax.lax.conv_general_dilated,
                promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
                preferred_element_type=self.preferred_element_type is not None,
                out_sharding=out_sharding is not None,
            )
            or why_complex(
                inputs.dtype, self.dtype, kernel.dtype if isinstance(kernel, jax.Array) else None
            )
        )
        if reason is not None:
            x = as_array(inputs)
            y = call_flax(
                "jaxfused.nnx.Conv",
                reason,
                lambda: super(Conv, self).__call__(x, out_sharding),
                residual=residual,
                activation=self.activation,
                padding_mode=self.padding_mode,
                implementation=self.implementation,
                adds_first=True,
            )
            return Convolved(y, x, None)
        return convolve(
            inputs,
            kernel,
            bias,
            kernel_size=self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            padding_mode=self.padding_mode,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            dtype=self.dtype,
            precision=self.precision,
            return_input=return_input,
            statistics=statistics,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
