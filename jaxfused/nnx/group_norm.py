"""GroupNorm for Flax NNX: Flax's own parameters, this package's operator."""

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
from jaxfused.modules.group_norm import normalise
from jaxfused.runtime.checks import python_numbers


class GroupNorm(nnx.GroupNorm):
    r"""`flax.nnx.GroupNorm` with a modulation of images, a residual and an activation in one kernel.

    .. math:: y = \text{activation}\Bigl(\frac{x - \operatorname{mean}_g(x)}
              {\sqrt{\operatorname{var}_g(x) + \epsilon}} \cdot \text{scale} + \text{bias}
              + \text{residual}\Bigr)

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one
    loads into the other and gives the same output. Differences:

    - Scale and bias enter in the dtype in which they are stored.
    - The variance is always the mean of squared deviations, regardless of `use_fast_variance`.
    - Masks, `axis_name`, `reduction_axes`, a `promote_dtype` other than Flax's and complex numbers
      run Flax's code. Together with `residual` or a named kernel such a call raises an error.

    Args:
      num_features: C.
      num_groups: into how many groups the channels are split; None with `group_size`.
      group_size: the number of channels in a group.
      epsilon: is added to the variance.
      dtype: of the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      use_bias: whether there is a bias [C].
      use_scale: whether there is a scale [C].
      bias_init: initialises the bias.
      scale_init: initialises the scale.
      reduction_axes: as in Flax.
      axis_name: as in Flax.
      axis_index_groups: as in Flax.
      use_fast_variance: see above.
      promote_dtype: as in Flax.
      rngs: gives the initialisers their keys.
      bias_metadata: of the bias's `nnx.Param`.
      scale_metadata: of the scale's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> norm = jaxfused.nnx.GroupNorm(8, num_groups=2, activation="silu", rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 4, 4, 8))).shape
      (2, 4, 4, 8)

    Source: `jaxfused.group_norm`.
    """

    @python_numbers
    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes | None = None,
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
            num_groups,
            group_size,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
            reduction_axes=reduction_axes,
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
        return self._run(
            x, mask=mask, residual=residual, image_scale=image_scale, image_shift=image_shift
        )

    def _run(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        image_scale: jax.Array | None = None,
        image_shift: jax.Array | None = None,
        mask_gradient: bool = True,
    ) -> jax.Array:
        """Implements `__call__`; without `mask_gradient` y's readers apply the relu's mask instead."""
        x = jnp.asarray(x)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        reason = why_given(
            mask=mask is not None,
            axis_name=self.axis_name is not None,
            reduction_axes=self.reduction_axes is not None,
            promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
        ) or why_complex(x.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.GroupNorm",
                reason,
                lambda: super(GroupNorm, self).__call__(x, mask=mask),
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
            num_groups=self.num_groups,
            epsilon=self.epsilon,
            activation=self.activation,
            residual=residual,
            image_scale=image_scale,
            image_shift=image_shift,
            mask_gradient=mask_gradient,
            implementation=self.implementation,
        )
