"""Stochastic gradient descent, with or without momentum."""

import functools
from typing import Any

import jax
import optax

from jaxfused.ops.optimizer.optimizer_step import KernelRule, Scalars
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, Moments, Rule, fuse, stored


def _sgd_rule(momentum: Any, nesterov: bool, accumulator_dtype: Any) -> Rule:
    def leaf_rule(g: jax.Array, moments: Moments) -> tuple[jax.Array, Moments]:
        if momentum is None:
            return g, moments
        (trace,) = moments
        new_trace = g + momentum * trace
        direction = g + momentum * new_trace if nesterov else new_trace
        return direction, (stored(new_trace, trace, accumulator_dtype),)

    scalars = Scalars(b1=0.0 if momentum is None else momentum)
    return Rule(lambda count: leaf_rule, KernelRule("sgd", nesterov, lambda count: scalars))


@checked_options
def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
) -> FusedTransformation:
    r"""Stochastic gradient descent, with momentum and Nesterov momentum.

    .. math::
        m &\leftarrow g + \mu m \\
        u &= \begin{cases}
             -\alpha_t g & \text{without momentum} \\
             -\alpha_t m & \text{with momentum} \\
             -\alpha_t (g + \mu m) & \text{with Nesterov momentum}
             \end{cases}

    Arguments, numbers and state are those of `optax.sgd`.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      momentum: mu; None for none, and then no state.
      nesterov: use Nesterov momentum.
      accumulator_dtype: dtype of m; None for the parameter's.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      TypeError: accumulator_dtype is not a dtype.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.sgd(0.5, momentum=0.5)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = opt.init(params)
      >>> for _ in range(2):
      ...     params, state = opt.step(jnp.array([1.0, -1.0]), state, params)
      >>> params
      Array([-0.25,  3.25], dtype=float32)

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, http://proceedings.mlr.press/v28/sutskever13.pdf
    """
    return fuse(
        functools.partial(_sgd_rule, nesterov=nesterov, accumulator_dtype=accumulator_dtype),
        (momentum,),
        optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype),
        learning_rate,
    )
