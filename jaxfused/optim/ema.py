"""Decays that grow with the number of updates, for `init_step(ema_decay=...)`.

An average that starts at random parameters, with a decay of 0.9999, is still mostly random after a
thousand steps. With these decays it follows the parameters faster at first. Each is a function of the
number of updates that the average has had, from 0 up; a decay of 0 copies the parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime.checks import said

Decay = float | Callable[[jax.Array], Any]
"""A number in [0, 1), or a function (number of updates so far) -> decay."""


@dataclass(frozen=True)
class CopyFirst:
    r"""Copies the parameters at the first update and averages with one decay from then on.

    .. math::
        d_0 = 0, \quad d_t = \text{decay}

    As torch's `AveragedModel` with `get_ema_multi_avg_fn`, Keras' `use_ema` and timm's `ModelEmaV3` do.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.sgd(1.0)
      >>> params = jnp.zeros(1)
      >>> state = opt.init_step(params, ema_decay=jaxfused.optim.ema.CopyFirst(0.9))
      >>> for _ in range(2):
      ...     params, state = opt.step(jnp.array([-1.0]), state, params)
      >>> round(float(state.ema[0]), 4)
      1.1
    """

    decay: float
    """The decay in [0, 1)."""

    def __post_init__(self) -> None:
        check("CopyFirst: decay", self.decay)

    def __call__(self, updates: jax.Array) -> jax.Array:
        """Returns the decay of an average after `updates` updates."""
        return jnp.where(updates == 0, 0.0, self.decay)


@dataclass(frozen=True)
class PowerWarmup:
    r"""A decay that comes near its end as a power of the number of updates.

    .. math::
        d_t = \min(\text{decay}, 1 - (1 + t)^{-\text{power}})

    As timm's `ModelEmaV3` with `use_warmup` and diffusers' `EMAModel` with `use_ema_warmup` do. With a
    power of 2/3 the decay is 0.999 after 31 thousand updates, with 3/4 after 10 thousand.

    Example:
      >>> import jaxfused
      >>> decay = jaxfused.optim.ema.PowerWarmup(0.9999)
      >>> [round(float(decay(updates)), 3) for updates in (0, 1, 10, 1000)]
      [0.0, 0.37, 0.798, 0.99]
    """

    decay: float
    """The decay in [0, 1)."""
    power: float = 2 / 3

    def __post_init__(self) -> None:
        check("PowerWarmup: decay", self.decay)
        if not self.power > 0:
            raise ValueError(
                f"PowerWarmup: power is {self.power}, but the decay must grow; pass 2 / 3."
            )

    def __call__(self, updates: jax.Array) -> jax.Array:
        """Returns the decay of an average after `updates` updates."""
        return jnp.minimum(self.decay, -jnp.expm1(-self.power * jnp.log1p(updates)))


@dataclass(frozen=True)
class RationalWarmup:
    r"""A decay with which the average is at first about one of the last tenth of the updates.

    .. math::
        d_0 = 0, \quad d_t = \min\Bigl(\text{decay}, \frac{1 + t}{10 + t}\Bigr)

    As diffusers' `EMAModel` does by default, after TensorFlow's `ExponentialMovingAverage`.

    Example:
      >>> import jaxfused
      >>> decay = jaxfused.optim.ema.RationalWarmup(0.9999)
      >>> [round(float(decay(updates)), 3) for updates in (0, 1, 10, 1000)]
      [0.0, 0.182, 0.55, 0.991]
    """

    decay: float
    """The decay in [0, 1)."""

    def __post_init__(self) -> None:
        check("RationalWarmup: decay", self.decay)

    def __call__(self, updates: jax.Array) -> jax.Array:
        """Returns the decay of an average after `updates` updates."""
        growing = jnp.minimum(self.decay, (1 + updates) / (10 + updates))
        return jnp.where(updates == 0, 0.0, growing)


def check(what: str, decay: Any) -> None:
    """Checks that a decay is valid; `what` names it in messages."""
    if callable(decay):
        value = jax.eval_shape(decay, jax.ShapeDtypeStruct((), jnp.int32))
        leaves = jax.tree.leaves(value)
        if [jnp.shape(leaf) for leaf in leaves] != [()]:
            raise ValueError(
                f"{what} is a function that returns {value}, but a decay is one number; pass a"
                " function from the number of updates to a scalar in [0, 1]."
            )
    elif not isinstance(decay, (int, float, np.number, jax.Array)) or not 0 <= decay < 1:
        raise ValueError(
            f"{what} is {said(decay)}, but an average needs a decay in [0, 1);"
            " pass 0.999, or None for no average."
        )
