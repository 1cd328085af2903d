"""BatchNorm for Flax Linen: Flax's own parameters and running averages, this package's operator."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.batch_norm import infer, train
from jaxfused.modules.fallback import call_flax, why_complex, why_given
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.promotion import common_dtype


@python_number_fields
class BatchNorm(linen.BatchNorm):
    r"""`flax.linen.BatchNorm` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}\Bigl(\frac{x - \text{mean}}{\sqrt{\text{var} + \epsilon}}
              \cdot \text{scale} + \text{bias} + \text{residual}\Bigr)

    with the mean and the variance of the batch in training, and their running averages otherwise.

    Attributes, parameters, running averages and their names are Flax's, so a checkpoint of one loads
    into the other and gives the same output. Differences:

    - No gradient flows into the running averages.
    - The variance is always the mean of squared deviations, regardless of `use_fast_variance`.
    - Over devices (`axis_name`) the statistics of a mask are those of all values that it keeps; Flax
      averages the devices' means as if each kept as many.
    - Another `axis` than the last, `force_float32_reductions=False` and complex numbers run Flax's
      code. Together with `residual` or a named kernel such a call raises an error.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    The other attributes are those of `flax.linen.BatchNorm`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> norm = jaxfused.linen.BatchNorm(use_running_average=False, activation="relu")
      >>> x = jnp.ones((2, 4, 4, 8))
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, updates = norm.apply(variables, x, mutable=["batch_stats"])
      >>> y.shape
      (2, 4, 4, 8)

    Source: `jaxfused.batch_norm`.
    """

    axis: int | Sequence[int] = -1  # type: ignore[assignment]
    activation: str | None = None
    implementation: Implementation | None = None

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises x [..., C], and in training moves the running averages.

        Args:
          x: [..., C].
          use_running_average: as in Flax; either this or the attribute is given.
          mask: broadcastable to x: the values of which statistics are taken, as in Flax.
          residual: like x, is added before the activation.

        Returns:
          y [..., C].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        return self._run(x, use_running_average, mask=mask, residual=residual)

    @linen.compact
    def _run(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        mask_gradient: bool = True,
        statistics: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Implements `__call__`; `ConvNormAct` may pass x's statistics, or turn the relu's mask off."""
        x = jnp.asarray(x)
        reason = why_given(
            axis=self.axis not in (-1, x.ndim - 1),
            force_float32_reductions=not self.force_float32_reductions,
        ) or why_complex(x.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.BatchNorm",
                reason,
                lambda: flax_call(BatchNorm)(self, x, use_running_average, mask=mask),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        use_running_average = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        channels = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, channels, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, channels, self.param_dtype)
        result_dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        # Unlike NNX, Linen rounds to the result's dtype after the norm, not before it.
        x = x.astype(common_dtype(x.dtype, result_dtype))
        options: dict[str, Any] = dict(
            epsilon=self.epsilon,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
        if use_running_average:
            return infer(x, scale, bias, mean.value, var.value, **options).astype(result_dtype)
        # The running averages do not change while parameters are initialised, and `axis_name` need
        # not be mapped then.
        initializing = self.is_initializing()
        y, new_mean, new_var = train(
            x,
            scale,
            bias,
            mean.value,
            var.value,
            momentum=self.momentum,
            axis_name=None if initializing else self.axis_name,
            axis_index_groups=None if initializing else self.axis_index_groups,
            mask=mask,
            mask_gradient=mask_gradient,
            statistics=statistics,
            **options,
        )
        if not initializing:
            mean.value, var.value = new_mean, new_var
        return y.astype(result_dtype)
