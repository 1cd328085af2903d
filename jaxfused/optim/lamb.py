"""LAMB: AdamW whose step is scaled to the norm of each parameter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfused.optim.adam import adam_rule
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, fuse


def _scale_by_trust_ratio(direction, param):
    # `optax.safe_norm` has a gradient at 0, so that the update is differentiable.
    param_norm = optax.safe_norm(param, 0.0)
    direction_norm = optax.safe_norm(direction, 0.0)
    is_zero = (param_norm == 0) | (direction_norm == 0)
    one = jnp.ones([], param.dtype)
    # The branch that is not selected must not divide by zero either: `jax_debug_nans` would report
    # it.
    ratio = param_norm / jnp.where(direction_norm == 0, one, direction_norm)
    return direction * jnp.where(is_zero, one, ratio)


@checked_options
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> FusedTransformation:
    r"""LAMB: AdamW for large batches; the norm of each leaf's step is alpha times the leaf's norm.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        d &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t) + \text{eps\_root}} + \epsilon}
             + \lambda p \\
        u &= -\alpha_t \frac{\lVert p \rVert}{\lVert d \rVert} d

    The ratio of the norms is 1 where one of them is 0. The norms are those of a whole leaf.

    Arguments, state and, up to the rounding of :math:`1 - \beta^t` (see `adam`), numbers are those of
    `optax.lamb`.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added outside the square root.
      eps_root: is added inside the square root; needed to differentiate through an update.
      weight_decay: lambda, a constant or a schedule.
      mask: which leaves decay: a tree of booleans like the parameters or a prefix of them, or a
        function from such a tree to one. None for all.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      ValueError: `update` is called without params.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.lamb(0.5)
      >>> params = jnp.array([4.0, 0.0])
      >>> params, state = opt.step(jnp.array([1.0, 0.0]), opt.init(params), params)
      >>> [round(float(p), 4) for p in params]
      [2.0, 0.0]

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2019, https://arxiv.org/abs/1904.00962
    """
    return fuse(
        functools.partial(adam_rule, kernel="lamb"),
        (b1, b2, eps, eps_root),
        optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, mask),
        learning_rate,
        weight_decay=weight_decay,
        mask=mask,
        rescale=_scale_by_trust_ratio,
    )
