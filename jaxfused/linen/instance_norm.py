"""InstanceNorm for Flax Linen: Flax's own parameters, this package's operator."""

import jax
import jax.numpy as jnp
from flax import linen

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.linen.group_norm import normalised
from jaxfused.modules.fallback import call_flax, why_complex
from jaxfused.modules.group_norm import why_flax_normalises_instances
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class InstanceNorm(linen.InstanceNorm):
    """`flax.linen.InstanceNorm` with a modulation of each image, a residual and an activation.

    It is `jaxfused.linen.GroupNorm` with a group for each channel, and differs from Flax's in the same:
    the variance is always the mean of squared deviations in float32. Masks, `axis_name`, `feature_axes`
    other than the last and complex numbers run Flax's code.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    The other attributes are those of `flax.linen.InstanceNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> norm = jaxfused.linen.InstanceNorm(activation="relu")
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
        """Normalises x [B, ..., C]; the arguments are those of `jaxfused.linen.GroupNorm`."""
        x = jnp.asarray(x)
        reason = why_flax_normalises_instances(
            x, mask, self.axis_name, self.feature_axes
        ) or why_complex(x.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.InstanceNorm",
                reason,
                lambda: flax_call(InstanceNorm)(self, x, mask=mask),
                residual=residual,
                image_scale=image_scale,
                image_shift=image_shift,
                activation=self.activation,
                implementation=self.implementation,
            )
        return normalised(
            self,
            x,
            num_groups=None,
            group_size=1,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
        )
