"""GroupNorm for Flax Linen: Flax's own parameters, this package's operator."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.fallback import call_flax, why_complex, why_given
from jaxfused.modules.group_norm import normalise
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.promotion import common_dtype


@python_number_fields
class GroupNorm(linen.GroupNorm):
    r"""`flax.linen.GroupNorm` with a modulation of images, a residual and an activation in one kernel.

    .. math:: y = \text{activation}\Bigl(\frac{x - \operatorname{mean}_g(x)}
              {\sqrt{\operatorname{var}_g(x) + \epsilon}} \cdot \text{scale} + \text{bias}
              + \text{residual}\Bigr)

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other
    and gives the same output. Differences:

    - The variance is always the mean of squared deviations in float32: neither `use_fast_variance`
      nor `force_float32_reductions` changes that.
    - Masks, `axis_name`, `reduction_axes` and complex numbers run Flax's code. Together with
      `residual` or a named kernel such a call raises an error.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    The other attributes are those of `flax.linen.GroupNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> norm = jaxfused.linen.GroupNorm(num_groups=2, activation="silu")
      >>> norm.init_with_output(jax.random.key(0), jnp.ones((2, 4, 4, 8)))[0].shape
      (2, 4, 4, 8)

    Source: `jaxfused.group_norm`.
    """

    activation: str | None = None
    implementation: Implementation | None = None

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        image_scale: jax.Array | None = None,
        image_shift: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises x [B, ..., C].

        Args:
          x: [B, ..., C].
          mask: broadcastable to x, as in Flax.
          residual: like x, is added before the activation.
          image_scale: [B, C], modulates each image, as an offset from 1.
          image_shift: [B, C], is added after `image_scale`.

        Returns:
          y [B, ..., C].

        Raises:
          ValueError: `residual`, a modulation or a named kernel in a call that Flax has to serve.
        """
        x = jnp.asarray(x)
        reason = why_given(
            mask=mask is not None,
            axis_name=self.axis_name is not None,
            reduction_axes=self.reduction_axes is not None,
        ) or why_complex(x.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.GroupNorm",
                reason,
                lambda: flax_call(GroupNorm)(self, x, mask=mask),
                residual=residual,
                image_scale=image_scale,
                image_shift=image_shift,
                activation=self.activation,
                implementation=self.implementation,
            )
        return normalised(
            self,
            x,
            num_groups=self.num_groups,
            group_size=self.group_size,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
        )


def normalised(
    module: Any,
    x: jax.Array,
    *,
    num_groups: int | None,
    group_size: int | None,
    residual: jax.Array | None,
    image_scale: jax.Array | None,
    image_shift: jax.Array | None,
) -> jax.Array:
    """Creates the parameters of a GroupNorm or InstanceNorm, and runs `jaxfused.group_norm`."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, (x.shape[-1],), module.param_dtype)
    if module.use_bias:
        bias = module.param("bias", module.bias_init, (x.shape[-1],), module.param_dtype)
    result_dtype = canonicalize_dtype(x, scale, bias, dtype=module.dtype)
    # Unlike NNX, Linen rounds to the result's dtype after the norm, not before it.
    x = x.astype(common_dtype(x.dtype, result_dtype))
    y = normalise(
        x,
        scale,
        bias,
        num_groups=num_groups,
        group_size=group_size,
        epsilon=module.epsilon,
        activation=module.activation,
        residual=residual,
        image_scale=image_scale,
        image_shift=image_shift,
        implementation=module.implementation,
    )
    return y.astype(result_dtype)
