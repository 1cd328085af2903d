"""Adam: the formula for one leaf, which adamw and lamb share, and the optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfused.ops.optimizer_step import KernelRule, Scalars
from jaxfused.optim.transformation import FusedTransformation, LeafRule, Moments, Rule, fuse, stored


def adam_rule(
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: Any = None,
    nesterov: bool = False,
    kernel: str = "adam",
) -> Rule:
    """The formula of `adam` for one leaf, before the learning rate; the moments are (mu, nu)."""

    def at(count: jax.Array) -> LeafRule:
        bias1, bias2 = 1 - b1**count, 1 - b2**count
        next_bias1 = 1 - b1 ** optax.safe_increment(count)

        def leaf_rule(g: jax.Array, moments: Moments) -> tuple[jax.Array, Moments]:
            mu, nu = moments
            new_mu = (1 - b1) * g + b1 * mu
            new_nu = (1 - b2) * jnp.real(jnp.conj(g) * g) + b2 * nu
            if nesterov:
                m = b1 * _divide(new_mu, next_bias1) + (1 - b1) * _divide(g, bias1)
            else:
                m = _divide(new_mu, bias1)
            direction = m / (jnp.sqrt(_divide(new_nu, bias2) + eps_root) + eps)
            return direction, (stored(new_mu, mu, mu_dtype), new_nu.astype(nu.dtype))

        return leaf_rule

    def scalars(count: jax.Array) -> Scalars:
        return Scalars(
            b1=b1,
            one_minus_b1=1 - b1,
            b2=b2,
            one_minus_b2=1 - b2,
            eps=eps,
            eps_root=eps_root,
            inverse_bias1=1 / (1 - b1**count),
            inverse_bias2=1 / (1 - b2**count),
            inverse_next_bias1=1 / (1 - b1 ** optax.safe_increment(count)),
        )

    return Rule(at, KernelRule(kernel, nesterov, scalars))


def _divide(moment: jax.Array, bias: jax.Array) -> jax.Array:
    # The bias itself is taken in float32: in bfloat16 it rounds to 0 and the quotient is infinite.
    return moment / bias.astype(moment.dtype)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> FusedTransformation:
    r"""Adam: gradients scaled by estimates of their first and second moments.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= -\alpha_t \frac{m / (1 - \beta_1^t)}
             {\sqrt{v / (1 - \beta_2^t) + \text{eps\_root}} + \epsilon}

    With `nesterov` the numerator is
    :math:`\beta_1 m / (1 - \beta_1^{t+1}) + (1 - \beta_1) g / (1 - \beta_1^t)`.

    Arguments, numbers and state are those of `optax.adam`.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added outside the square root.
      eps_root: is added inside the square root; needed to differentiate through an update.
      mu_dtype: dtype of the first moment; None for the parameter's.
      nesterov: use Nesterov momentum.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      TypeError: mu_dtype is not a dtype.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.adam(0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> params, state = opt.step(jnp.array([0.5, -3.0]), opt.init(params), params)
      >>> [round(float(p), 4) for p in params]
      [0.9, 2.1]

    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2014,
    https://arxiv.org/abs/1412.6980; with `nesterov`: Dozat, "Incorporating Nesterov Momentum into
    Adam", 2016, https://openreview.net/pdf?id=OM0jvwB8jIp57ZJjtNEZ
    """
    return fuse(
        adam_rule(b1, b2, eps, eps_root, mu_dtype, nesterov),
        optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        learning_rate,
    )
