"""group_norm: validation and choice of implementation."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.kernel_call import reference_only
from jaxfused.ops.validation import (
    check_activation,
    check_constant,
    check_count,
    check_floating,
    check_shape,
)


def group_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    activation: str | None = None,
    residual: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Group normalisation of channels-last images, with what follows it in one pass.

    .. math::
        y = \text{activation}\Bigl(\frac{x - \operatorname{mean}_g(x)}
            {\sqrt{\operatorname{var}_g(x) + \epsilon}} \cdot \text{scale} + \text{bias}
            + \text{residual}\Bigr)

    The mean and the variance of a group g are taken over its channels and over all axes between the
    first (the batch) and the last (the channels), in float32 (float64 for float64 inputs); the
    variance is the mean of squared deviations.

    Args:
      x: [B, ..., C], any number of axes between batch and channels, float32, bfloat16 or float16
        (float64 with implementation "xla").
      scale: [C], multiplies the normalised values. Any float dtype, as for bias.
      bias: [C], is added after `scale`.
      num_groups: into how many groups of neighbouring channels C is split; 1 is layer
        normalisation over a whole image, C is instance normalisation. Exactly one of `num_groups`
        and `group_size` is given.
      group_size: the number of channels in a group.
      epsilon: is added to the variance.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu", after everything else.
      residual: [B, ..., C] like x, is added before the activation.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, of x's shape and dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, C is not a multiple of the groups, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[[1.0, 3.0, 0.0, 0.0], [5.0, 7.0, 2.0, 2.0]]])
      >>> jaxfused.group_norm(x, jnp.ones(4), jnp.zeros(4), num_groups=2, activation="relu").shape
      (1, 2, 4)

    Source: Wu, He, "Group Normalization", 2018, https://arxiv.org/abs/1803.08494
    """
    op = "group_norm"
    x, scale, bias, residual = jax.tree.map(jnp.asarray, (x, scale, bias, residual))
    num_groups = _validate(x, scale, bias, residual, num_groups, group_size)
    check_constant(op, "epsilon", epsilon)
    check_activation(op, activation)
    reference_only(op, implementation, x)
    return reference.group_norm.norm(
        x, scale, bias, residual, num_groups=num_groups, epsilon=epsilon, activation=activation
    )


def _validate(x, scale, bias, residual, num_groups, group_size) -> int:
    """Checks every argument, and returns the number of groups."""
    op = "group_norm"
    check_floating(op, dict(x=x, scale=scale, bias=bias, residual=residual))
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but it needs a batch axis and a last axis of at least one"
            " channel; pass x of shape [batch, ..., channels]."
        )
    channels = x.shape[-1]
    for name, array in dict(scale=scale, bias=bias).items():
        check_shape(op, name, array, (channels,), f"x has {channels} channels in its last axis")
    check_shape(op, "residual", residual, x.shape, f"x has shape {x.shape}")
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"{op}: num_groups={num_groups} and group_size={group_size} were passed, but exactly"
            " one of them says how the channels are grouped; pass the one and leave out the other."
        )
    name, divisor = ("group_size", group_size) if num_groups is None else ("num_groups", num_groups)
    check_count(op, name, divisor)
    if channels % divisor:
        raise ValueError(
            f"{op}: {name} is {divisor}, but it must divide the {channels} channels of x;"
            f" pass a divisor of {channels}."
        )
    return channels // divisor if num_groups is None else divisor
