"""Lion: the sign of an interpolated momentum."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfused.ops.optimizer.optimizer_step import KernelRule, Scalars
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, Moments, Rule, fuse, stored


def _lion_rule(b1: Any, b2: Any, mu_dtype: Any) -> Rule:
    def leaf_rule(g: jax.Array, moments: Moments) -> tuple[jax.Array, Moments]:
        (mu,) = moments
        direction = jnp.sign((1 - b1) * g + b1 * mu)
        return direction, (stored((1 - b2) * g + b2 * mu, mu, mu_dtype),)

    scalars = Scalars(b1=b1, one_minus_b1=1 - b1, b2=b2, one_minus_b2=1 - b2)
    return Rule(lambda count: leaf_rule, KernelRule("lion", False, lambda count: scalars))


@checked_options
def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> FusedTransformation:
    r"""Lion: steps of one size, in the direction of the sign of the momentum; half of Adam's state.

    .. math::
        u &= -\alpha_t \bigl(\operatorname{sign}(\beta_1 m + (1 - \beta_1) g) + \lambda p\bigr) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    Arguments, numbers and state are those of `optax.lion`.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value); 3 to 10 times smaller
        than AdamW's is usual.
      b1: weight of the momentum in the step.
      b2: decay of the momentum.
      mu_dtype: dtype of the momentum; None for the parameter's.
      weight_decay: lambda, a constant or a schedule; it is multiplied by the learning rate.
      mask: which leaves decay: a tree of booleans like the parameters or a prefix of them, or a
        function from such a tree to one. None for all.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      TypeError: mu_dtype is not a dtype.
      ValueError: `update` is called without params.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.lion(0.5, weight_decay=0.0)
      >>> params = jnp.array([1.0, 2.0])
      >>> params, state = opt.step(jnp.array([0.25, -3.0]), opt.init(params), params)
      >>> params
      Array([0.5, 2.5], dtype=float32)

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
    https://arxiv.org/abs/2302.06675
    """
    return fuse(
        functools.partial(_lion_rule, mu_dtype=mu_dtype),
        (b1, b2),
        optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask),
        learning_rate,
        weight_decay=weight_decay,
        mask=mask,
    )
