"""Einsum for Flax Linen: Flax's own parameters, this package's operator for products of matrices."""

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.einsum import Split, as_matrices
from jaxfused.modules.fallback import (
    call_flax,
    changes_dtype,
    why_complex,
    why_given,
    why_intercepted,
)
from jaxfused.modules.linear_general import linear_general, why_not_a_matrix
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class Einsum(linen.Einsum):
    """`flax.linen.Einsum` whose product of matrices takes its bias in the same kernel.

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other and
    gives the same output. The operator serves equations "rows inputs, inputs features -> rows features",
    such as "BTD,DNH->BTNH" and "...NH,NHD->...D"; any other one, a `promote_dtype` or a
    `preferred_element_type` other than Flax's and complex numbers run Flax's code.

    Attributes:
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    The other attributes are those of `flax.linen.Einsum`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.Einsum((32, 4, 8), "btd,dnh->btnh")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 4, 8)

    Source: `jaxfused.linear`.
    """

    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Multiplies the inputs by the kernel, as the equation says.

        Args:
          inputs: the first operand.
          einsum_str: the equation, where the constructor has none.

        Raises:
          ValueError: a named kernel in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        equation = linen.merge_param("einsum_str", self.einsum_str, einsum_str)
        split = as_matrices(equation, inputs.ndim, len(self.shape))
        preferred = self.preferred_element_type
        reason = (
            (split if isinstance(split, str) else None)
            or why_intercepted()
            or why_given(
                promote_dtype=self.promote_dtype is not promote_dtype,
                preferred_element_type=changes_dtype(
                    preferred, inputs, jnp.zeros((), self.param_dtype), dtype=self.dtype
                ),
            )
            or why_complex(inputs.dtype, self.dtype, self.param_dtype)
        )
        if isinstance(split, Split) and reason is None:
            axes = tuple(range(-split.contracted, 0))
            reason = why_not_a_matrix(inputs, axes, 0)
        if reason is not None or isinstance(split, str):
            return call_flax(
                "jaxfused.linen.Einsum",
                reason or "",
                lambda: flax_call(Einsum)(self, inputs, einsum_str),
                implementation=self.implementation,
            )
        w = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            features = tuple(self.shape[split.contracted :])
            bias = self.param("bias", self.bias_init, features, self.param_dtype)
        return linear_general(
            inputs,
            w,
            bias,
            contracted=split.contracted,
            dtype=self.dtype,
            precision=self.precision,
            implementation=self.implementation,
        )
