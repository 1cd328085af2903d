"""LayerNorm and RMSNorm for Flax NNX: Flax's own parameters, this package's operator."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import call_flax
from jaxfused.modules.layer_norm import why_flax
from jaxfused.modules.promotion import floating
from jaxfused.ops.norm import layer_norm
from jaxfused.ops.norm.layer_norm import Output
from jaxfused.runtime.checks import python_numbers


class LayerNorm(nnx.LayerNorm):
    r"""`flax.nnx.LayerNorm` in one kernel, with the residual sum before it and an activation after it.

    .. math:: y = \text{activation}\Bigl(\frac{h - \operatorname{mean}(h)}
              {\sqrt{\operatorname{var}(h) + \epsilon}} \cdot (\text{scale} + \text{scale\_offset})
              + \text{bias}\Bigr),
              \quad h = x + \text{pre\_bias} + \text{residual}

    Constructor, parameters, their names and the use of `rngs` are Flax's, so a checkpoint of one loads
    into the other and gives the same output. Differences:

    - The result's dtype is Flax's, but scale and bias enter in the dtype in which they are stored
      rather than rounded to the result's.
    - The variance is always the mean of squared deviations: `use_fast_variance` names a form that is
      faster in Flax and less accurate; neither holds here.
    - Masks, `axis_name`, a `promote_dtype` other than Flax's, complex numbers, and axes other than
      the last run Flax's code. Together with `residual`, `pre_bias` or a named kernel such a call
      raises an error.

    Args:
      num_features: D, the size of the last axis.
      epsilon: is added to the variance.
      dtype: of the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      use_bias: whether there is a bias [D].
      use_scale: whether there is a scale [D].
      bias_init: initialises the bias.
      scale_init: initialises the scale.
      reduction_axes: as in Flax.
      feature_axes: as in Flax.
      axis_name: as in Flax.
      axis_index_groups: as in Flax.
      use_fast_variance: see above.
      promote_dtype: as in Flax.
      rngs: gives the initialisers their keys.
      bias_metadata: of the bias's `nnx.Param`.
      scale_metadata: of the scale's `nnx.Param`.
      scale_offset: is added to the scale; 1.0 for checkpoints that store scale - 1, as Nemotron's do.
      round_before_scale: whether the normalised values are rounded to x's dtype before the scale, as in
        Llama's code; see `jaxfused.layer_norm`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> norm = jaxfused.nnx.LayerNorm(2, rngs=nnx.Rngs(0))
      >>> y, stream = norm(jnp.array([1.0, 2.0]), residual=jnp.array([0.0, 3.0]))
      >>> stream
      Array([1., 5.], dtype=float32)

    Source: `jaxfused.layer_norm`.
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
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_offset: float = 0.0,
        round_before_scale: bool = False,
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
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )
        self.scale_offset = scale_offset
        self.round_before_scale = round_before_scale
        self.activation = activation
        self.implementation = implementation

    def __call__(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        pre_bias: jax.Array | None = None,
        image_scale: jax.Array | None = None,
        image_shift: jax.Array | None = None,
        gate: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> Output:
        """Normalises x [..., D] over its last axis.

        Args:
          x: [..., D].
          residual: [..., D], the residual stream, to which x is added first.
          pre_bias: [D], is added to x too: the bias of the projection that made x.
          image_scale: [*leading, D] for x [*leading, ..., D], modulates each image as an offset from 1.
          image_shift: like image_scale, is added last.
          gate: [D] or [*leading, D], multiplies what is added to the residual.
          mask: broadcastable to x, as in Flax.

        Returns:
          y [..., D]; with `residual`, (y, the next residual).

        Raises:
          ValueError: `residual`, `pre_bias` or a named kernel, in a call that only Flax's code
            can serve.
        """
        x = jnp.asarray(x)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        reason = _why_flax(self, x, scale, bias, mask=mask)
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.LayerNorm",
                reason,
                lambda: super(LayerNorm, self).__call__(x, mask=mask),
                residual=residual,
                pre_bias=pre_bias,
                image_scale=image_scale,
                image_shift=image_shift,
                gate=gate,
                scale_offset=self.scale_offset,
                round_before_scale=self.round_before_scale,
                activation=self.activation,
                implementation=self.implementation,
            )
        x = x.astype(dtypes.canonicalize_dtype(x, scale, bias, dtype=self.dtype))
        return layer_norm.layer_norm(
            x,
            floating(scale, x.dtype),
            floating(bias, x.dtype),
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            round_before_scale=self.round_before_scale,
            residual=residual,
            pre_bias=pre_bias,
            image_scale=image_scale,
            image_shift=image_shift,
            gate=gate,
            activation=self.activation,
            implementation=self.implementation,
        )


class RMSNorm(nnx.RMSNorm):
    r"""`flax.nnx.RMSNorm` in one kernel, with the residual sum before it and an activation after it.

    .. math:: y = \text{activation}\Bigl(\frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \cdot
              (\text{scale} + \text{scale\_offset})\Bigr),
              \quad h = x + \text{pre\_bias} + \text{residual}

    The differences from Flax are those of `LayerNorm`.

    Args:
      num_features: D, the size of the last axis.
      epsilon: is added to the mean square.
      dtype: of the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      use_scale: whether there is a scale [D].
      scale_init: initialises the scale, with ones as in Flax whatever `scale_offset` is.
      reduction_axes: as in Flax.
      feature_axes: as in Flax.
      axis_name: as in Flax.
      axis_index_groups: as in Flax.
      use_fast_variance: makes no difference to a mean square, here or in Flax.
      promote_dtype: as in Flax.
      rngs: gives the initialiser its key.
      scale_metadata: of the scale's `nnx.Param`.
      scale_offset: is added to the scale; 1.0 for checkpoints that store scale - 1, as Gemma's do.
      round_before_scale: whether the normalised values are rounded to x's dtype before the scale, as in
        Llama's code; see `jaxfused.layer_norm`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> jaxfused.nnx.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([4.0, -4.0])).round(3)
      Array([ 1., -1.], dtype=float32)

    Source: `jaxfused.rms_norm`.
    """

    @python_numbers
    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_offset: float = 0.0,
        round_before_scale: bool = False,
        activation: str | None = None,
        implementation: Implementation | None = None,
    ):
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init,
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            scale_metadata=scale_metadata,
        )
        self.scale_offset = scale_offset
        self.round_before_scale = round_before_scale
        self.activation = activation
        self.implementation = implementation

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        pre_bias: jax.Array | None = None,
        image_scale: jax.Array | None = None,
        image_shift: jax.Array | None = None,
        gate: jax.Array | None = None,
    ) -> Output:
        """Normalises x [..., D] over its last axis; arguments and result are `LayerNorm`'s."""
        x = jnp.asarray(x)
        scale = None if self.scale is None else self.scale[...]
        reason = _why_flax(self, x, scale, mask=mask)
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.RMSNorm",
                reason,
                lambda: super(RMSNorm, self).__call__(x, mask=mask),
                residual=residual,
                pre_bias=pre_bias,
                image_scale=image_scale,
                image_shift=image_shift,
                gate=gate,
                scale_offset=self.scale_offset,
                round_before_scale=self.round_before_scale,
                activation=self.activation,
                implementation=self.implementation,
            )
        x = x.astype(dtypes.canonicalize_dtype(x, scale, dtype=self.dtype))
        return layer_norm.rms_norm(
            x,
            floating(scale, x.dtype),
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            round_before_scale=self.round_before_scale,
            residual=residual,
            pre_bias=pre_bias,
            image_scale=image_scale,
            image_shift=image_shift,
            gate=gate,
            activation=self.activation,
            implementation=self.implementation,
        )


def _why_flax(
    norm: LayerNorm | RMSNorm, x: jax.Array, *parameters: jax.Array | None, mask: jax.Array | None
) -> str | None:
    if norm.promote_dtype is not dtypes.promote_dtype:
        return "promote_dtype is the caller's own"
    return why_flax(
        x,
        norm.dtype,
        *(p.dtype for p in parameters if p is not None),
        mask=mask,
        axis_name=norm.axis_name,
        reduction_axes=norm.reduction_axes,
        feature_axes=norm.feature_axes,
    )
