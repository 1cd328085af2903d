"""InstanceNorm for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import call_flax, why_complex, why_given
from jaxfused.modules.group_norm import normalise, why_flax_normalises_instances
from jaxfused.runtime.checks import python_numbers


class InstanceNorm(nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` with a modulation of each image, a residual and an activation.

    It is `jaxfused.nnx.GroupNorm` with a group for each channel, and differs from Flax's in the same:
    scale and bias enter in the dtype in which they are stored, and the variance is always the mean of
    squared deviations. Masks, `axis_name`, `feature_axes` other than the last, a `promote_dtype` other
    than Flax's and complex numbers run Flax's code.

    Args:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    The other arguments are those of `flax.nnx.InstanceNorm`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> norm = jaxfused.nnx.InstanceNorm(8, activation="relu", rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 4, 4, 8))).shape
      (2, 4, 4, 8)

    Source: `jaxfused.group_norm`.
    """

    @python_numbers
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: str | None = None,
        implementation: Implementation | None = None,
    ):
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )
        self.activation = activation
        self.implementation = implementation

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        image_scale: jax.Array | None = None,
        image_shift: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises x [B, ..., C]; the arguments are those of `jaxfused.nnx.GroupNorm`."""
        x = jnp.asarray(x)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        reason = (
            why_flax_normalises_instances(x, mask, self.axis_name, self.feature_axes)
            or why_given(promote_dtype=self.promote_dtype is not dtypes.promote_dtype)
            or why_complex(x.dtype, self.dtype, self.param_dtype)
        )
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.InstanceNorm",
                reason,
                lambda: super(InstanceNorm, self).__call__(x, mask=mask),
                residual=residual,
                image_scale=image_scale,
                image_shift=image_shift,
                activation=self.activation,
                implementation=self.implementation,
            )
        x = x.astype(dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype))
        return normalise(
            x,
            scale,
            bias,
            num_groups=None,
            group_size=1,
            epsilon=self.epsilon,
            activation=self.activation,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
            implementation=self.implementation,
        )
