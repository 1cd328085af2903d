"""Adam: the formula for one leaf, shared with adamw and lamb, and the optimizer."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxfused.ops.optimizer.optimizer_step import KernelRule, Scalars
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, LeafRule, Moments, Rule, fuse, stored

Nesterov = bool | Literal["timm", "torch", "keras"]
"""Library whose formula of Nesterov momentum is used; True is Optax's."""

_MOMENTUM_DECAYS = {"torch": 0.004, "keras": 1.0}
_WARMUP_STEPS = 512
"""Number of steps whose momentum factors are multiplied. After 512 steps torch's product of them is 0
in float32, and each further factor of Keras's product is 1."""


def adam_rule(
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    *,
    mu_dtype: Any = None,
    nesterov: Nesterov = False,
    kernel: str = "adam",
) -> Rule:
    """The formula of `adam` for one leaf, before the learning rate; the moments are (mu, nu)."""

    def at(count: jax.Array) -> LeafRule:
        bias1, bias2 = _bias(b1, count), _bias(b2, count)
        next_bias1 = _bias(b1, optax.safe_increment(count))
        weights = _weights(b1, count, nesterov)

        def numerator(g: jax.Array, m: jax.Array) -> jax.Array:
            if isinstance(nesterov, str):
                return (weights[0] * m + weights[1] * g).astype(m.dtype)
            # These are the weights of `_weights`, in the order of operations in which Optax rounds.
            if nesterov:
                return b1 * _divide(m, next_bias1) + (1 - b1) * _divide(g, bias1)
            return _divide(m, bias1)

        def leaf_rule(g: jax.Array, moments: Moments) -> tuple[jax.Array, Moments]:
            mu, nu = moments
            new_mu = (1 - b1) * g + b1 * mu
            new_nu = (1 - b2) * jnp.real(jnp.conj(g) * g) + b2 * nu
            root = jnp.sqrt(_divide(new_nu, bias2) + eps_root)
            direction = numerator(g, new_mu) / (root + eps)
            return direction, (stored(new_mu, mu, mu_dtype), new_nu.astype(nu.dtype))

        return leaf_rule

    def scalars(count: jax.Array) -> Scalars:
        moment_weight, gradient_weight = _weights(b1, count, nesterov)
        return Scalars(
            b1=b1,
            one_minus_b1=1 - b1,
            b2=b2,
            one_minus_b2=1 - b2,
            eps=eps,
            eps_root=eps_root,
            moment_weight=moment_weight,
            gradient_weight=gradient_weight,
            inverse_bias2=1 / _bias(b2, count),
        )

    return Rule(at, KernelRule(kernel, bool(nesterov), scalars))


def check_nesterov(op: str, nesterov: Nesterov) -> None:
    """Checks that the name of a Nesterov momentum is known."""
    if isinstance(nesterov, str) and nesterov not in ("timm", *_MOMENTUM_DECAYS):
        raise ValueError(
            f"{op}: nesterov is {nesterov!r}; pass True for Optax's, 'timm', 'torch', 'keras' or False."
        )


def _weights(b1: Any, count: jax.Array, nesterov: Nesterov) -> tuple[Any, Any]:
    """Returns the weights of the first moment and of the gradient in the numerator of a step."""
    bias = _bias(b1, count)
    if not nesterov:
        return 1 / bias, 0.0
    if nesterov == "timm":
        return b1 / bias, (1 - b1) / bias
    if not isinstance(nesterov, str):
        return b1 / _bias(b1, optax.safe_increment(count)), (1 - b1) / bias

    # Dozat's paper lets the momentum grow from b1 / 2 to b1; `lacking` is its missing fraction.
    def lacking(step: jax.Array) -> jax.Array:
        return 0.5 * 0.96 ** (_MOMENTUM_DECAYS[nesterov] * step)

    steps = jnp.arange(1, _WARMUP_STEPS + 1)
    product = (1 - bias) * jnp.prod(jnp.where(steps <= count, 1 - lacking(steps), 1.0))
    following = b1 * (1 - lacking(optax.safe_increment(count)))
    return following / (1 - product * following), (1 - b1 + b1 * lacking(count)) / (1 - product)


def _bias(decay: Any, count: jax.Array) -> jax.Array:
    """Returns 1 - decay^count, without cancellation where the power is near 1."""
    if isinstance(decay, (int, float)):
        return -jnp.expm1(count * math.log(decay)) if decay > 0 else 1 - decay**count
    near_one = decay > 0.5
    power = count * jnp.log(jnp.where(near_one, decay, 1))
    return jnp.where(near_one, -jnp.expm1(power), 1 - decay**count)


def _divide(moment: jax.Array, bias: jax.Array) -> jax.Array:
    # The bias 1 - decay^count comes in float32: in bfloat16 it could round to 0, and the quotient would
    # be infinite.
    return moment / bias.astype(moment.dtype)


@checked_options
def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: Nesterov = False,
) -> FusedTransformation:
    r"""Adam: gradients scaled by estimates of their first and second moments.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= -\alpha_t \frac{m / (1 - \beta_1^t)}
             {\sqrt{v / (1 - \beta_2^t) + \text{eps\_root}} + \epsilon}

    With `nesterov` the numerator is

    .. math::
        \frac{\beta_1 m}{1 - \beta_1^{t+1}} + \frac{(1 - \beta_1) g}{1 - \beta_1^t}
        &\quad \text{True, as in Optax} \\
        \frac{\beta_1 m + (1 - \beta_1) g}{1 - \beta_1^t} &\quad \text{"timm"} \\
        \frac{\mu_{t+1} m}{1 - \prod_{i=1}^{t+1} \mu_i} + \frac{(1 - \mu_t) g}{1 - \prod_{i=1}^t \mu_i},
        \quad \mu_t = \beta_1 (1 - 0.5 \cdot 0.96^{d t})
        &\quad \text{"torch", d = 0.004; "keras", d = 1}

    Arguments, state and, up to the rounding of :math:`1 - \beta^t`, numbers are those of `optax.adam`.
    Optax rounds :math:`\beta^t` first: 7e-6 of the first step is lost at a beta of 0.999, 7e-4 at
    0.99999. Here it is 3e-7 at any beta that is a Python number, and any step.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added outside the square root.
      eps_root: is added inside the square root; needed to differentiate through an update.
      mu_dtype: dtype of the first moment; None for the parameter's.
      nesterov: use Nesterov momentum: True for Optax's, or "timm", "torch" or "keras" for the one of
        timm's `NAdamW`, `torch.optim.NAdam` or `keras.optimizers.Nadam`.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      TypeError: mu_dtype is not a dtype.
      ValueError: nesterov is a name that is not known.

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
    check_nesterov("adam", nesterov)
    return fuse(
        functools.partial(adam_rule, mu_dtype=mu_dtype, nesterov=nesterov),
        (b1, b2, eps, eps_root),
        optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype),
        learning_rate,
    )
