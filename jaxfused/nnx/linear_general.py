"""LinearGeneral for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import DotGeneralT, Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import (
    call_flax,
    changes_dtype,
    is_stock_product,
    resharded,
    why_complex,
    why_given,
    why_intercepted,
    why_sharded,
)
from jaxfused.modules.linear_general import linear_general, why_not_a_matrix
from jaxfused.runtime.checks import python_numbers


class LinearGeneral(nnx.LinearGeneral):
    r"""`flax.nnx.LinearGeneral` as one product of matrices, with bias and activation in its kernel.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one
    loads into the other and gives the same output. Differences:

    - The bias is added in float32, before the one rounding of the result.
    - Axes other than the last ones, `batch_axis`, a `dot_general`, `dot_general_cls`, `promote_dtype` or
      `preferred_element_type` other than Flax's, `out_sharding` where no mesh axis is Explicit, and
      complex numbers run Flax's code. Together with `residual` or a named kernel such a call raises an
      error.

    Args:
      in_features: the sizes of the axes that are summed over.
      out_features: the sizes of the result's last axes.
      axis: the axes that are summed over.
      batch_axis: as in Flax.
      use_bias: whether there is a bias.
      dtype: of the product and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: initialises the kernel as a matrix.
      bias_init: initialises the bias as a vector.
      precision: of the product, as in Flax.
      promote_dtype: as in Flax.
      dot_general: as in Flax.
      dot_general_cls: as in Flax.
      preferred_element_type: as in Flax.
      rngs: gives the initialisers their keys.
      kernel_metadata: of the kernel's `nnx.Param`.
      bias_metadata: of the bias's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.LinearGeneral(32, (4, 8), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 32))).shape
      (2, 5, 4, 8)

    Source: `jaxfused.linear`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = MappingProxyType({}),
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        dot_general: DotGeneralT | None = None,
        dot_general_cls: Any = None,
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
            axis=axis,
            batch_axis=batch_axis,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            precision=precision,
            promote_dtype=promote_dtype,
            dot_general=dot_general,
            dot_general_cls=dot_general_cls,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation
        self.implementation = implementation

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Multiplies the axes `axis` of the inputs by the kernel.

        Args:
          inputs: [..., *in_features].
          out_sharding: as in Flax.
          residual: [..., *out_features], is added last.

        Returns:
          [..., *out_features], of the residual's dtype where there is one.

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        preferred = self.preferred_element_type
        reason = (
            why_intercepted()
            or why_given(
                dot_general=not is_stock_product(self.dot_general),
                dot_general_cls=self.dot_general_cls is not None,
                promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
                preferred_element_type=changes_dtype(
                    preferred, inputs, kernel, bias, dtype=self.dtype
                ),
            )
            or why_sharded(out_sharding, inputs, kernel)
            or why_complex(inputs.dtype, self.dtype, kernel.dtype)
            or why_not_a_matrix(inputs, self.axis, len(self.batch_axis))
        )
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.LinearGeneral",
                reason,
                lambda: super(LinearGeneral, self).__call__(inputs, out_sharding),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        y = linear_general(
            inputs,
            kernel,
            bias,
            contracted=len(self.axis),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            implementation=self.implementation,
        )
        return resharded(y, out_sharding)
