"""The choice of experts of a mixture, and the losses that balance it."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import resharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_finite,
    check_floating,
    check_shape,
    check_word,
    python_numbers,
)
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.serialization import exportable

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
Over = Literal["all", "chosen"]
BiasOn = Literal["score", "logit"]
GroupScore = Literal["top2", "max"]
Normalise = Literal["sum"]


@exportable
class Routes(NamedTuple):
    """The experts of each token."""

    weights: jax.Array
    """Weights [..., k], float32 (float64 for float64 logits)."""
    indices: jax.Array
    """Indices [..., k] of experts, int32, the greatest score first."""


@python_numbers
def router(
    logits: jax.Array,
    k: int,
    *,
    score: Score = "softmax",
    over: Over = "all",
    bias: jax.Array | None = None,
    bias_on: BiasOn = "score",
    groups: int = 1,
    groups_kept: int = 1,
    group_score: GroupScore = "top2",
    masked: float = float("-inf"),
    normalise: Normalise | None = None,
    epsilon: float = 0.0,
    floor: float = 0.0,
    scale: float = 1.0,
    expert_scale: jax.Array | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Routes:
    r"""The experts of each token and their weights, by the rule of any of today's mixtures.

    .. math::
        z &= \text{softcap} \tanh(\text{logit\_scale} \, \text{logits} / \text{softcap}) \\
        s &= \text{score}(z) \\
        e_1, \dots, e_k &= \text{the k greatest of } s + \text{bias}, \text{ in the groups kept} \\
        w_i &= \text{scale} \, \text{expert\_scale}_{e_i} \, s_{e_i}
               / (\max(\textstyle\sum_j s_{e_j}, \text{floor}) + \text{epsilon})

    where the division is for normalise="sum". The weights follow from the scores without the bias,
    which only affects the choice and has no gradient. Arithmetic is in float32 (float64 for float64
    logits).

    Args:
      logits: [..., E], any float dtype.
      k: experts of a token.
      score: of a logit: "softmax" over the experts, "sigmoid", or "sqrt_softplus", the root of softplus.
      over: whether the softmax is over "all" experts or the "chosen" ones.
      bias: [E], is added for the choice: the correction bias that balances the load.
      bias_on: whether the bias is added to the "score" or to the "logit".
      groups: number of groups of consecutive experts.
      groups_kept: groups whose experts may be chosen.
      group_score: by which groups are kept: the sum of a group's two greatest biased scores ("top2"),
        or the greatest ("max").
      masked: the biased score of the experts in the other groups; DeepSeek-V2 and Mistral have 0.
      normalise: "sum" divides the weights by their sum.
      epsilon: is added to that sum.
      floor: least value of that sum.
      scale: multiplies the weights.
      expert_scale: [E], multiplies each expert's weights.
      softcap: bounds the logits; None for no bound.
      logit_scale: multiplies the logits first.

    Returns:
      `Routes`: weights [..., k], and indices [..., k]. Among equal scores the lowest index comes first.

    Raises:
      ValueError: shapes, dtypes or options do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> routes = jaxfused.router(jnp.array([[2.0, 0.0, 1.0, -1.0]]), 2, normalise="sum")
      >>> routes.indices
      Array([[0, 2]], dtype=int32)
      >>> print(*(f"{w:.3f}" for w in routes.weights[0]))
      0.731 0.269

    Mixtral: normalise="sum". Qwen3-MoE: normalise="sum" if `norm_topk_prob`. gpt-oss and Granite:
    over="chosen". DeepSeek-V3 and GLM-4.5: score="sigmoid", bias=, groups=, groups_kept=,
    normalise="sum", epsilon=1e-20, scale=. Llama 4: score="sigmoid", and weights on the experts' inputs.

    Source: DeepSeek-AI, "DeepSeek-V3", 2024, https://arxiv.org/abs/2412.19437; Jiang et al., "Mixtral of
    Experts", 2024, https://arxiv.org/abs/2401.04088
    """
    op = "router"
    logits, bias, expert_scale = as_arrays(logits, bias, expert_scale)
    check_floating(op, dict(logits=logits, bias=bias, expert_scale=expert_scale))
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits have shape (); pass logits of shape [..., experts].")
    experts = logits.shape[-1]
    rule = f"logits have {experts} experts in their last axis"
    check_shape(op, "bias", bias, (experts,), rule)
    check_shape(op, "expert_scale", expert_scale, (experts,), rule)
    _check_counts(op, k, experts, groups, groups_kept)
    for name, number in dict(
        epsilon=epsilon, floor=floor, scale=scale, logit_scale=logit_scale
    ).items():
        check_finite(op, name, number)
    if epsilon < 0:
        raise ValueError(
            f"{op}: epsilon is {epsilon}, but it keeps a sum of weights above 0; pass 0 or more."
        )
    if not masked < float("inf"):
        raise ValueError(f"{op}: masked is {masked}; pass a number, or -inf.")
    words: dict[str, tuple[str, Any]] = dict(
        score=(score, Score),
        over=(over, Over),
        bias_on=(bias_on, BiasOn),
        group_score=(group_score, GroupScore),
    )
    if normalise is not None:
        words["normalise"] = (normalise, Normalise)
    for name, (value, known) in words.items():
        check_word(op, name, value, known)
    if over == "chosen" and score != "softmax":
        raise ValueError(
            f"{op}: over='chosen' was passed with score={score!r}, which is of each logit alone; pass"
            " score='softmax', or over='all'."
        )
    logits = resharding.unsplit(logits, [-1])
    z = logits.astype(accumulator_dtype(logits.dtype)) * logit_scale
    if softcap is not None:
        if not 0.0 < softcap < float("inf"):
            raise ValueError(f"{op}: softcap is {softcap}; pass a positive number, or None.")
        z = softcap * jnp.tanh(z / softcap)
    scores = z if over == "chosen" else _scores(score, z)
    choice = jax.lax.stop_gradient(z if bias_on == "logit" else scores)
    if bias is not None:
        choice = choice + jax.lax.stop_gradient(along_last_axis(bias, choice))
    if groups_kept < groups:
        choice = _in_kept_groups(choice, groups, groups_kept, group_score, masked)
    _, indices = jax.lax.top_k(choice, k)
    indices = indices.astype(jnp.int32)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if over == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if normalise == "sum":
        weights = _shares(weights, jnp.take_along_axis(z, indices, axis=-1), score, floor, epsilon)
    if expert_scale is not None:
        # A sum with zeros is split over devices as the scores are, unlike a broadcast.
        each = jnp.zeros_like(scores) + along_last_axis(expert_scale, scores)
        weights = weights * jnp.take_along_axis(each, indices, axis=-1)
    return Routes(weights * scale, indices)


def _check_counts(op: str, k: int, experts: int, groups: int, kept: int) -> None:
    if groups < 1 or experts % groups:
        raise ValueError(
            f"{op}: groups is {groups}, but the {experts} experts are in groups of one size; pass a"
            f" divisor of {experts}."
        )
    if not 1 <= kept <= groups:
        raise ValueError(
            f"{op}: groups_kept is {kept}, but there are {groups} groups; pass a number from 1 to"
            f" {groups}."
        )
    most = experts // groups * kept
    if not 1 <= k <= most:
        raise ValueError(
            f"{op}: k is {k}, but a token chooses among {most} experts; pass a number from 1 to {most}."
        )


def _scores(score: Score, z: jax.Array) -> jax.Array:
    if score == "softmax":
        return jax.nn.softmax(z, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(z)
    # The root's derivative is infinite where softplus rounds to 0. Below -40 the root equals exp(z / 2)
    # to full precision.
    root = jnp.sqrt(jax.nn.softplus(jnp.maximum(z, -40.0)))
    return jnp.where(z < -40.0, jnp.exp(0.5 * z), root)


def _shares(
    weights: jax.Array, z: jax.Array, score: Score, floor: float, epsilon: float
) -> jax.Array:
    """Returns the weights [..., k] of logits z, divided by their sum."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    tiny = float(jnp.finfo(z.dtype).tiny)
    if max(floor, epsilon) >= tiny:
        return weights / (jnp.maximum(total, floor) + epsilon)
    # Scores of logits far below 0 approach exp(exponents). Where their sum underflows, the normalised
    # weights are the softmax of these exponents.
    vanishes = total < tiny * 2**24
    exponents = 0.5 * z if score == "sqrt_softplus" else z
    shares = weights / jnp.where(vanishes, 1.0, total)
    return jnp.where(vanishes, jax.nn.softmax(exponents, axis=-1), shares)


def _in_kept_groups(
    choice: jax.Array, groups: int, kept: int, group_score: GroupScore, masked: float
) -> jax.Array:
    """Returns the scores [..., E], with `masked` for experts outside the best `kept` groups.

    A group is E / `groups` adjacent experts. Groups are ranked by their largest score if
    `group_score` is "max", else by the sum of their two largest.
    """
    size = choice.shape[-1] // groups
    in_groups = choice.reshape(*choice.shape[:-1], groups, size)
    greatest, _ = jax.lax.top_k(in_groups, 1 if group_score == "max" else min(2, size))
    _, chosen = jax.lax.top_k(jnp.sum(greatest, axis=-1), kept)
    is_kept = jnp.any(jax.nn.one_hot(chosen, groups, dtype=jnp.bool_), axis=-2)
    return jnp.where(is_kept[..., None], in_groups, masked).reshape(choice.shape)


@python_numbers
def load_balancing_loss(
    logits: jax.Array, indices: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    r"""Loss that makes a mixture's router use all experts equally often.

    .. math:: \ell = E \sum_e f_e P_e

    where f_e is the mean number of a token's choices of expert e, and P_e the mean of softmax(logits)
    over the tokens. The loss is k, the number of experts of a token, if all experts are used equally
    often, and E if all tokens choose one. The choices are those that ran, including the effect of a
    bias.

    Args:
      logits: [..., E], any float dtype; those of several layers may be stacked.
      indices: [..., k], the experts that were chosen. Those below 0 or from E on count as none.
      mask: [...], bool: which tokens count, whatever logits the others have; None for all.

    Returns:
      The loss, a scalar in float32 (float64 for float64 logits). Without tokens it is 0.

    Raises:
      ValueError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> logits = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> print(f"{jaxfused.load_balancing_loss(logits, jnp.array([[0], [1]])):.1f}")
      1.0

    Source: Fedus et al., "Switch Transformers", 2021, https://arxiv.org/abs/2101.03961
    """
    op = "load_balancing_loss"
    logits, indices, mask = as_arrays(logits, indices, mask)
    check_floating(op, dict(logits=logits))
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits have shape (); pass logits of shape [..., experts].")
    if not jnp.issubdtype(indices.dtype, jnp.integer) or indices.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"{op}: indices have shape {indices.shape} and dtype {indices.dtype}, but logits have"
            f" shape {logits.shape}; pass integers of shape {(*logits.shape[:-1], 'k')}."
        )
    check_shape(op, "mask", mask, logits.shape[:-1], f"logits have shape {logits.shape}")
    experts = logits.shape[-1]
    dtype = accumulator_dtype(logits.dtype)
    logits = logits.astype(dtype)
    tokens = tuple(range(logits.ndim - 1))
    indices = resharding.split_with(indices, logits)
    kept = jnp.ones(logits.shape[:-1], dtype)
    if mask is not None:
        kept = resharding.split_with(mask, logits, tokens).astype(dtype)
        logits = jnp.where(kept[..., None] != 0, logits, 0.0)
    probabilities = jax.nn.softmax(logits, axis=-1)
    # one_hot compares in the dtype of the indices, which may not hold the number of experts.
    indices = indices.astype(np.promote_types(indices.dtype, np.int32))
    chosen = jax.nn.one_hot(indices, experts, dtype=dtype).sum(axis=-2)
    count = jnp.maximum(jnp.sum(kept), 1)
    f = jnp.sum(chosen * kept[..., None], axis=tokens) / count
    p = jnp.sum(probabilities * kept[..., None], axis=tokens) / count
    return experts * jnp.sum(f * p)
