"""Einsum for Flax NNX: Flax's own parameters, this package's operator for products of matrices."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, EinsumT, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.einsum import Split, as_matrices
from jaxfused.modules.fallback import (
    call_flax,
    changes_dtype,
    resharded,
    why_complex,
    why_given,
    why_intercepted,
    why_sharded,
)
from jaxfused.modules.linear_general import linear_general, why_not_a_matrix
from jaxfused.runtime.checks import python_numbers


class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` whose product of matrices takes its bias in the same kernel.

    Parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one loads into the other
    and gives the same output. The operator serves equations "rows inputs, inputs features -> rows
    features", such as "BTD,DNH->BTNH" and "...NH,NHD->...D"; any other one, an `einsum_op`,
    `promote_dtype` or `preferred_element_type` other than Flax's, `out_sharding` where no mesh axis is
    Explicit, and complex numbers run Flax's code.

    Args:
      einsum_str: the equation.
      kernel_shape: of the kernel.
      bias_shape: of the bias, None for none.
      dtype: of the product and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the product, as in Flax.
      kernel_init: initialises the kernel.
      bias_init: initialises the bias.
      promote_dtype: as in Flax.
      einsum_op: as in Flax.
      preferred_element_type: as in Flax.
      rngs: gives the initialisers their keys.
      kernel_metadata: of the kernel's `nnx.Param`.
      bias_metadata: of the bias's `nnx.Param`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.Einsum("btd,dnh->btnh", (32, 4, 8), (4, 8), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 32))).shape
      (2, 5, 4, 8)

    Source: `jaxfused.linear`.
    """

    @python_numbers
    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        einsum_op: EinsumT = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        implementation: Implementation | None = None,
    ):
        super().__init__(
            einsum_str,
            kernel_shape,
            bias_shape,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            einsum_op=einsum_op,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.implementation = implementation

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Multiplies the inputs by the kernel, as the equation says.

        Args:
          inputs: the first operand.
          einsum_str: the equation, in place of the constructor's.
          out_sharding: as in Flax.

        Raises:
          ValueError: `implementation` names a kernel, but only Flax's code can serve the call.
        """
        inputs = jnp.asarray(inputs)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        split = as_matrices(einsum_str or self.einsum_str or "", inputs.ndim, kernel.ndim)
        preferred = self.preferred_element_type
        reason: str | None
        if isinstance(split, Split):
            reason = (
                why_intercepted()
                or why_given(
                    einsum_op=self.einsum_op is not jnp.einsum,
                    promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
                    preferred_element_type=changes_dtype(
                        preferred, inputs, kernel, bias, dtype=self.dtype
                    ),
                    bias_shape=bias is not None
                    and tuple(bias.shape) != tuple(kernel.shape[split.contracted :]),
                )
                or why_sharded(out_sharding, inputs, kernel)
                or why_complex(inputs.dtype, self.dtype, kernel.dtype)
                or why_not_a_matrix(inputs, tuple(range(-split.contracted, 0)), 0)
            )
        else:
            reason = split
        if reason is not None or not isinstance(split, Split):
            return call_flax(
                "jaxfused.nnx.Einsum",
                reason or "",
                lambda: super(Einsum, self).__call__(inputs, einsum_str, out_sharding),
                implementation=self.implementation,
            )
        y = linear_general(
            inputs,
            kernel,
            bias,
            contracted=split.contracted,
            dtype=self.dtype,
            precision=self.precision,
            implementation=self.implementation,
        )
        return resharded(y, out_sharding)
