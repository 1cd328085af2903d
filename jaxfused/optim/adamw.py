"""AdamW: Adam whose weight decay is not scaled by the moments."""

import functools
from typing import Any

import jax
import optax

from jaxfused.optim.adam import Nesterov, adam_rule, check_nesterov
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, fuse


@checked_options
def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: Nesterov = False,
) -> FusedTransformation:
    r"""AdamW: Adam with decoupled weight decay.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= -\alpha_t \Bigl(\frac{m / (1 - \beta_1^t)}
             {\sqrt{v / (1 - \beta_2^t) + \text{eps\_root}} + \epsilon} + \lambda p \Bigr)

    With `nesterov` the numerator is one of those of `adam`. Arguments, state and, up to the rounding of
    :math:`1 - \beta^t` (see `adam`), numbers are those of `optax.adamw`.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added outside the square root.
      eps_root: is added inside the square root; needed to differentiate through an update.
      mu_dtype: dtype of the first moment; None for the parameter's.
      weight_decay: lambda, a constant or a schedule; it is multiplied by the learning rate.
      mask: which leaves decay: a tree of booleans like the parameters or a prefix of them, or a
        function from such a tree to one. None for all.
      nesterov: use Nesterov momentum: True for Optax's, or "timm", "torch" or "keras" for the one of
        timm's `NAdamW`, `torch.optim.NAdam` or `keras.optimizers.Nadam`.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      TypeError: mu_dtype is not a dtype.
      ValueError: nesterov is a name that is not known, or `update` is called without params.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.adamw(0.1, weight_decay=0.5, mask={"w": True, "b": False})
      >>> params = {"w": jnp.array([2.0]), "b": jnp.array([2.0])}
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([3.0])}
      >>> params, state = opt.step(grads, opt.init(params), params)
      >>> [round(float(params[name][0]), 4) for name in ("w", "b")]
      [1.8, 1.9]

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2017,
    https://arxiv.org/abs/1711.05101
    """
    check_nesterov("adamw", nesterov)
    return fuse(
        functools.partial(adam_rule, mu_dtype=mu_dtype, nesterov=nesterov),
        (b1, b2, eps, eps_root),
        optax.adamw(learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask),
        learning_rate,
        weight_decay=weight_decay,
        mask=mask,
    )
