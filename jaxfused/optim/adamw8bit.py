"""AdamW whose moments have 8 bits: 2 bytes of state a parameter instead of 8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfused.optim import eight_bit
from jaxfused.optim.adam import Nesterov, adam_rule, check_nesterov
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, fuse

_SEED = 0x8B17


@checked_options
def adamw8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: Nesterov = False,
) -> FusedTransformation:
    r"""AdamW whose moments are stored in 8 bits, in blocks of 256 values that share a scale.

    .. math::
        m &= s_m \operatorname{sign}(c_m) (c_m / 127)^2 \\
        v &= s_v (c_v / 255)^4

    with codes c of 8 bits and a scale s for each block, its largest magnitude. The step is that of
    `adamw`. A moment is rounded at random to one of the two codes around it, such that the mean is the
    moment: moments of small gradients are not lost. The random bits depend on the step and on the
    element's index, so that a run can be repeated, however arrays are split over devices.

    Leaves of less than 4096 elements, or of a size that 256 does not divide, have `adamw`'s moments.
    The state is that of `optax.adamw`, with an `EightBitMoment` in the place of each other moment.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added outside the square root.
      eps_root: is added inside the square root.
      weight_decay: lambda, a constant or a schedule; it is multiplied by the learning rate.
      mask: which leaves decay: a tree of booleans like the parameters or a prefix of them, or a
        function from such a tree to one. None for all.
      nesterov: use Nesterov momentum: True for Optax's, or "timm", "torch" or "keras" for the one of
        timm's `NAdamW`, `torch.optim.NAdam` or `keras.optimizers.Nadam`.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      ValueError: nesterov is a name that is not known, or `update` is called without params.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.adamw8bit(0.1)
      >>> params = jnp.ones((16, 256))
      >>> state = opt.init(params)
      >>> state[0].mu.codes.dtype, state[0].mu.scales.shape
      (dtype('int8'), (16, 1))
      >>> params, state = opt.step(jnp.ones((16, 256)), state, params)
      >>> round(float(params[0, 0]), 4)
      0.9

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021,
    https://arxiv.org/abs/2110.02861, whose codes are others.
    """
    check_nesterov("adamw8bit", nesterov)
    like = optax.adamw(learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, mask=mask)

    def init(params: optax.Params) -> Any:
        def coded(moments: Any, signed: bool) -> Any:
            return jax.tree.map(
                lambda m: m if (z := eight_bit.zero_moment(m, signed=signed)) is None else z,
                moments,
            )

        first, *rest = like.init(params)
        moments = dict(mu=coded(first.mu, True), nu=coded(first.nu, False))
        return first._replace(**moments), *rest

    def coding(count: jax.Array) -> jax.Array:
        return jnp.stack([jnp.uint32(_SEED), count.astype(jnp.uint32)])

    return fuse(
        functools.partial(adam_rule, nesterov=nesterov),
        (b1, b2, eps, eps_root),
        optax.GradientTransformation(init, like.update),
        learning_rate,
        weight_decay=weight_decay,
        mask=mask,
        coding=coding,
    )
