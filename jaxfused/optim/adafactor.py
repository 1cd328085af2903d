"""Adafactor: second moments as rows and columns of a matrix instead of all its elements."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfused.optim.transformation import FusedTransformation, from_optax


def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: jax.typing.ArrayLike = 0.8,
    decay_offset: jax.typing.ArrayLike = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    dtype_momentum: Any = jnp.float32,
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
) -> FusedTransformation:
    r"""Adafactor: a matrix's second moments are the product of its rows' and columns' means.

    .. math::
        r &\leftarrow \beta_t r + (1 - \beta_t) \operatorname{mean}_j (g_{ij}^2 + \epsilon) \\
        c &\leftarrow \beta_t c + (1 - \beta_t) \operatorname{mean}_i (g_{ij}^2 + \epsilon) \\
        u &= g / \sqrt{r c / \operatorname{mean}(r)}, \quad \beta_t = 1 - t^{-\text{decay\_rate}}

    and then clipping of the root mean square of u, the learning rate, the parameter's scale, momentum
    and decay. Arguments, numbers and state are those of `optax.adafactor`. There are no kernels of it
    yet: `step` runs in jax.numpy.

    Args:
      learning_rate: a constant or a schedule (step count -> value); None for 1.
      min_dim_size_to_factor: two axes of at least this size are factored.
      decay_rate: the exponent in beta.
      decay_offset: the step at which fine-tuning begins.
      multiply_by_parameter_scale: multiply by the root mean square of the parameter.
      clipping_threshold: the largest root mean square of u, at least 1; None for no clipping.
      momentum: decay of a momentum of the steps; None for none.
      dtype_momentum: dtype of the momentum.
      weight_decay_rate: a constant or a schedule, not multiplied by the learning rate; None for none.
      eps: is added to the squares.
      factored: whether to factor at all.
      weight_decay_mask: which leaves decay, as in `adamw`.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.adafactor(0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> params, state = opt.step(jnp.array([0.5, -3.0]), opt.init(params), params)
      >>> [round(float(p), 3) for p in params]
      [0.842, 2.158]

    Source: Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
    https://arxiv.org/abs/1804.04235
    """
    return from_optax(
        optax.adafactor(
            learning_rate,
            min_dim_size_to_factor,
            decay_rate,
            decay_offset,
            multiply_by_parameter_scale,
            clipping_threshold,
            momentum,
            dtype_momentum,
            weight_decay_rate,
            eps,
            factored,
            weight_decay_mask,
        )
    )
