"""ConvTranspose for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.conv_transpose import transposed, why_flax
from jaxfused.modules.fallback import call_flax
from jaxfused.runtime.checks import python_numbers


class ConvTranspose(nnx.ConvTranspose):
    r"""`flax.nnx.ConvTranspose` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}(\operatorname{conv\_transpose}(x, \text{kernel}) + \text{bias}
              + \text{residual})

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one
    loads into the other and gives the same output. Differences:

    - Bias, residual and activation are applied in float32 and the result is rounded then, where
      Flax rounds after every step.
    - A mask, padding "CIRCULAR", a `promote_dtype` or `preferred_element_type` other than Flax's and
      complex numbers run Flax's code, and `jaxfused.explain` lists the call. Together with `residual`
      or a named kernel such a call raises an error.

    Args:
      in_features: I.
      out_features: O.
      kernel_size: of every spatial axis.
      strides: by how much each spatial axis is enlarged; None for 1.
      padding: as in Flax.
      kernel_dilation: as in Flax.
      use_bias: whether there is a bias [O].
      mask: as in Flax.
      dtype: of the convolution and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: as in Flax.
      kernel_init: initialises the kernel [*kernel_size, I, O], or with `transpose_kernel`
        [*kernel_size, O, I].
      bias_init: initialises the bias.
      transpose_kernel: as in Flax.
      promote_dtype: as in Flax.
      preferred_element_type: as in Flax.
      rngs: gives the initialisers their keys.
      kernel_metadata: of the kernel's `nnx.Param`.
      bias_metadata: of the bias's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 16, 8))).shape
      (2, 32, 32, 4)

    Source: `jaxfused.conv_transpose`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: str | None = None,
        implementation: Implementation | None = None,
    ):
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            kernel_dilation=kernel_dilation,
            use_bias=use_bias,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            transpose_kernel=transpose_kernel,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Enlarges inputs [..., *spatial, I].

        Args:
          inputs: [..., *spatial, I], any number of batch axes.
          residual: of the result's shape, is added before the activation.

        Returns:
          [..., *spatial', O].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        reason = why_flax(self, dtypes.promote_dtype, inputs.dtype, self.dtype, kernel.dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.ConvTranspose",
                reason,
                lambda: super(ConvTranspose, self).__call__(inputs),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
                adds_first=True,
            )
        return transposed(
            inputs,
            kernel,
            None if self.bias is None else self.bias[...],
            kernel_size=self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            dtype=self.dtype,
            precision=self.precision,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
