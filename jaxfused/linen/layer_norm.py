"""LayerNorm and RMSNorm for Flax Linen: Flax's own parameters, this package's operator."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.fallback import call_flax
from jaxfused.modules.layer_norm import why_flax
from jaxfused.modules.promotion import floating
from jaxfused.ops.norm import layer_norm
from jaxfused.ops.norm.layer_norm import Output
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.promotion import common_dtype


@python_number_fields
class LayerNorm(linen.LayerNorm):
    r"""`flax.linen.LayerNorm` in one kernel, with the residual sum before it and an activation after it.

    .. math:: y = \text{activation}\Bigl(\frac{h - \operatorname{mean}(h)}
              {\sqrt{\operatorname{var}(h) + \epsilon}} \cdot (\text{scale} + \text{scale\_offset})
              + \text{bias}\Bigr),
              \quad h = x + \text{pre\_bias} + \text{residual}

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other and
    gives the same output. Differences:

    - The variance is always the mean of squared deviations in float32: `use_fast_variance` and
      `force_float32_reductions` name forms that are faster in Flax and less accurate; neither holds
      here.
    - Masks, `axis_name`, complex numbers, and axes other than the last run Flax's code. Together
      with `residual`, `pre_bias` or a named kernel such a call raises an error.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".
      scale_offset: is added to the scale; 1.0 for checkpoints that store scale - 1, as Nemotron's do.
      round_before_scale: whether the normalised values are rounded to x's dtype before the scale, as in
        Llama's code; see `jaxfused.layer_norm`.

    The other attributes are those of `flax.linen.LayerNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> norm = jaxfused.linen.LayerNorm()
      >>> x, residual = jnp.array([1.0, 2.0]), jnp.array([0.0, 3.0])
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, stream = norm.apply(variables, x, residual=residual)
      >>> stream
      Array([1., 5.], dtype=float32)

    Source: `jaxfused.layer_norm`.
    """

    activation: str | None = None
    implementation: Implementation | None = None
    scale_offset: float = 0.0
    round_before_scale: bool = False

    @linen.compact
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
        reason = _why_flax(self, x, mask)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.LayerNorm",
                reason,
                lambda: flax_call(LayerNorm)(self, x, mask=mask),
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
        shape = (x.shape[-1],)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        result_dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        output = layer_norm.layer_norm(
            _widened(x, result_dtype),
            floating(scale, result_dtype),
            floating(bias, result_dtype),
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
        return _as_result(output, result_dtype)


@python_number_fields
class RMSNorm(linen.RMSNorm):
    r"""`flax.linen.RMSNorm` in one kernel, with the residual sum before it and an activation after it.

    .. math:: y = \text{activation}\Bigl(\frac{h}{\sqrt{\operatorname{mean}(h^2) + \epsilon}} \cdot
              (\text{scale} + \text{scale\_offset})\Bigr),
              \quad h = x + \text{pre\_bias} + \text{residual}

    The differences from Flax are those of `LayerNorm`.

    Attributes:
      scale_offset: is added to the scale; 1.0 for checkpoints that store scale - 1, as Gemma's do.
        `scale_init` is ones, as in Flax, whatever the offset.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".
      round_before_scale: whether the normalised values are rounded to x's dtype before the scale, as in
        Llama's code; see `jaxfused.layer_norm`.

    The other attributes are those of `flax.linen.RMSNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> norm = jaxfused.linen.RMSNorm(epsilon=0.0)
      >>> x = jnp.array([4.0, -4.0])
      >>> norm.apply(norm.init(jax.random.key(0), x), x).round(3)
      Array([ 1., -1.], dtype=float32)

    Source: `jaxfused.rms_norm`.
    """

    scale_offset: float = 0.0
    activation: str | None = None
    implementation: Implementation | None = None
    round_before_scale: bool = False

    @linen.compact
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
        """Normalises x [..., D] over its last axis; arguments and result are `LayerNorm`'s."""
        x = jnp.asarray(x)
        reason = _why_flax(self, x, mask)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.RMSNorm",
                reason,
                lambda: flax_call(RMSNorm)(self, x, mask=mask),
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
        scale = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype)
        result_dtype = canonicalize_dtype(x, scale, dtype=self.dtype)
        output = layer_norm.rms_norm(
            _widened(x, result_dtype),
            floating(scale, result_dtype),
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
        return _as_result(output, result_dtype)


def _why_flax(norm: LayerNorm | RMSNorm, x: jax.Array, mask: jax.Array | None) -> str | None:
    return why_flax(
        x,
        norm.dtype,
        norm.param_dtype,
        mask=mask,
        axis_name=norm.axis_name,
        reduction_axes=norm.reduction_axes,
        feature_axes=norm.feature_axes,
    )


def _widened(x: jax.Array, result_dtype: Any) -> jax.Array:
    """Returns x in the wider of its dtype and the result's: Linen rounds after the norm only."""
    return x.astype(common_dtype(x.dtype, result_dtype))


def _as_result(output: Output, result_dtype: Any) -> Output:
    if isinstance(output, tuple):
        y, next_residual = output
        return y.astype(result_dtype), next_residual
    return output.astype(result_dtype)
