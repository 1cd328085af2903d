"""BatchNorm for Flax NNX: Flax's own parameters and running averages, this package's operator."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jaxfused.dispatch import Implementation
from jaxfused.modules.batch_norm import infer, train
from jaxfused.modules.fallback import call_flax, why_complex, why_given
from jaxfused.runtime.checks import python_numbers


class BatchNorm(nnx.BatchNorm):
    r"""`flax.nnx.BatchNorm` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}\Bigl(\frac{x - \text{mean}}{\sqrt{\text{var} + \epsilon}}
              \cdot \text{scale} + \text{bias} + \text{residual}\Bigr)

    with the mean and the variance of the batch in training, and their running averages otherwise.

    Constructor, parameters, running averages, their names and the use of `rngs` are Flax's, so a
    checkpoint of one loads into the other and gives the same output. Differences:

    - Scale, bias and running averages enter in the dtype in which they are stored. No gradient
      flows into the running averages.
    - The variance is always the mean of squared deviations, regardless of `use_fast_variance`.
    - Over devices (`axis_name`) the statistics of a mask are those of all values that it keeps; Flax
      averages the devices' means as if each kept as many.
    - Another `axis` than the last, a `promote_dtype` other than Flax's and complex numbers run Flax's
      code. Together with `residual` or a named kernel such a call raises an error.

    Args:
      num_features: C.
      use_running_average: whether the running averages normalise and stay as they are.
      axis: as in Flax.
      momentum: the share of the old running average in the new one.
      epsilon: is added to the variance.
      dtype: of the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      use_bias: whether there is a bias [C].
      use_scale: whether there is a scale [C].
      bias_init: initialises the bias.
      scale_init: initialises the scale.
      axis_name: the mapped axis over which the batch is spread, as in Flax.
      axis_index_groups: groups of devices along it that share statistics.
      use_fast_variance: see above.
      promote_dtype: as in Flax.
      rngs: gives the initialisers their keys.
      bias_metadata: of the bias's `nnx.Param`.
      scale_metadata: of the scale's `nnx.Param`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> norm = jaxfused.nnx.BatchNorm(8, activation="relu", rngs=nnx.Rngs(0))
      >>> norm.train()
      >>> norm(jnp.ones((2, 4, 4, 8))).shape
      (2, 4, 4, 8)

    Source: `jaxfused.batch_norm`.
    """

    @python_numbers
    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
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
            use_running_average=use_running_average,
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
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
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises x [..., C], and in training moves the running averages.

        Args:
          x: [..., C].
          use_running_average: as in Flax; takes precedence over the constructor's.
          mask: broadcastable to x: the values of which statistics are taken, as in Flax.
          residual: like x, is added before the activation.

        Returns:
          y [..., C].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        return self._run(x, use_running_average, mask=mask, residual=residual)

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
        use_running_average = first_from(
            use_running_average,
            self.use_running_average,
            error_msg="BatchNorm: use_running_average is None; pass it to the constructor or the call.",
        )
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        mean, var = self.mean[...], self.var[...]
        reason = why_given(
            axis=self.axis not in (-1, x.ndim - 1),
            promote_dtype=self.promote_dtype is not dtypes.promote_dtype,
        ) or why_complex(x.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.nnx.BatchNorm",
                reason,
                lambda: super(BatchNorm, self).__call__(x, use_running_average, mask=mask),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        dtype = dtypes.canonicalize_dtype(x, mean, var, scale, bias, dtype=self.dtype)
        if dtype != x.dtype:
            # The statistics are those of x before rounding, and are computed again after it.
            x, statistics = x.astype(dtype), None
        options: dict[str, Any] = dict(
            epsilon=self.epsilon,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
        if use_running_average:
            return infer(x, scale, bias, mean, var, **options)
        y, new_mean, new_var = train(
            x,
            scale,
            bias,
            mean,
            var,
            momentum=self.momentum,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            mask=mask,
            mask_gradient=mask_gradient,
            statistics=statistics,
            **options,
        )
        self.mean[...], self.var[...] = new_mean.astype(mean.dtype), new_var.astype(var.dtype)
        return y
