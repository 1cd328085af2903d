"""softmax_cross_entropy and linear_softmax_cross_entropy: validation, choice, gradient, reduction.

Each operator is a custom_vjp that returns one loss for each token, followed by the reduction. The
residuals for the backward determine how much memory a language model needs: the first operator saves its
logits, the second saves no logits at all, and both save two numbers for each token.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.kernel_call import reference_only
from jaxfused.ops.linear import check_affine
from jaxfused.ops.validation import check_constant, check_count, check_floating, check_shape
from jaxfused.reference.cross_entropy import Options, Statistics, counted, is_soft
from jaxfused.reference.promotion import common_dtype

Reduction = Literal["mean", "sum", "none"]

_CHUNK_LOGITS = 2**24
"""The logits that linear_softmax_cross_entropy holds at once by default: 64 MiB of float32."""


def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    reduction: Reduction = "mean",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Cross-entropy of the softmax of logits, whose backward saves nothing but the logits.

    .. math::
        \text{lse}_n &= \log \sum_v e^{z_{nv}} \\
        t_{nv} &= (1 - \text{label\_smoothing})\, q_{nv} + \text{label\_smoothing} / V \\
        \ell_n &= -\sum_v t_{nv} (z_{nv} - \text{lse}_n) + \text{z\_loss} \cdot \text{lse}_n^2

    where q is the distribution that the labels give. Arithmetic is in float32 (float64 for float64
    logits).

    Args:
      logits: [..., V], float32, bfloat16 or float16 (float64 with implementation "xla").
      labels: integers [...], one class a token; or soft labels [..., V] of a float dtype. Soft labels
        need not sum to 1, and get a gradient. A class outside 0 to V - 1 other than `ignore_index`
        makes the loss of its token NaN.
      label_smoothing: the share of the target that is spread evenly over all classes, 0 to 1.
      z_loss: the weight of the squared lse, which keeps logits from drifting.
      ignore_index: tokens with this label have loss 0 and gradient 0, and do not count for the mean.
        For integer labels.
      weights: [...], multiply the losses; 0 and 1 make a mask, `class_weights[labels]` weighs
        classes. They get a gradient.
      reduction: "mean" (the sum of weighted losses over the sum of the weights of the tokens that
        count; 0 if that is 0), "sum" or "none".
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      The loss in float32 (float64 for float64 logits): a scalar, or [...] for reduction "none".

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> logits = jnp.array([[0.0, 0.0], [9.0, -9.0], [0.0, 5.0]])
      >>> loss = jaxfused.softmax_cross_entropy(logits, jnp.array([0, -1, 0]), ignore_index=-1)
      >>> print(f"{loss:.3f}")
      2.850
      >>> jaxfused.softmax_cross_entropy(logits, jnp.array([0, 0, 1]), reduction="none").shape
      (3,)

    Gradients are of reverse mode, to any order.

    Source: Szegedy et al., "Rethinking the Inception Architecture", 2015 (label smoothing),
    https://arxiv.org/abs/1512.00567; Chowdhery et al., "PaLM", 2022 (z-loss),
    https://arxiv.org/abs/2204.02311
    """
    op = "softmax_cross_entropy"
    logits, labels, weights = jax.tree.map(jnp.asarray, (logits, labels, weights))
    check_floating(op, dict(logits=logits, weights=weights))
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}, but the last axis holds the classes;"
            " pass logits of shape [..., classes]."
        )
    options = Options(label_smoothing, z_loss, ignore_index)
    labels = check_labels(op, labels, logits.shape, options)
    _check_options(op, options, weights, logits.shape[:-1], reduction)
    reference_only(op, implementation, logits)
    losses = _token_losses(options, logits, labels)
    return _reduce(losses, counted(labels, options), weights, reduction)


def linear_softmax_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`softmax_cross_entropy(x @ w + bias, labels)` that never holds the logits of all tokens.

    .. math::
        z = x w + \text{bias}, \qquad \ell_n \text{ as for softmax\_cross\_entropy}

    The logits of a language model are its largest array by far. Here they exist for one chunk of
    tokens at a time, in float32, and the backward makes them again instead of keeping them: it costs
    one more product, and keeps two numbers a token.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w: [D, V], of any float dtype; it is rounded to x's for the product, which accumulates in
        float32. The gradient of w is summed over all tokens in float32.
      labels: [...] or [..., V], as for `softmax_cross_entropy`.
      bias: [V].
      chunk_size: tokens whose logits exist at once; by default as many as make 64 MiB of float32.
        It changes memory and time, not the result but for rounding.

    The other arguments, the result and the errors are those of `softmax_cross_entropy`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> x, w = jnp.ones((6, 4)), jnp.zeros((4, 10))
      >>> loss, (dx, dw) = jax.value_and_grad(
      ...     lambda x, w: jaxfused.linear_softmax_cross_entropy(x, w, jnp.arange(6)), (0, 1)
      ... )(x, w)
      >>> print(f"{loss:.3f}")
      2.303

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024,
    https://arxiv.org/abs/2411.09009
    """
    op = "linear_softmax_cross_entropy"
    x, w, labels, bias, weights = jax.tree.map(jnp.asarray, (x, w, labels, bias, weights))
    check_floating(op, dict(x=x, w=w, bias=bias, weights=weights))
    check_affine(op, x, "w", w, "bias", bias)
    features = w.shape[1]
    if features == 0:
        raise ValueError(
            f"{op}: w has shape {w.shape}, but its last axis holds the classes;"
            " pass w of shape [features, classes]."
        )
    options = Options(label_smoothing, z_loss, ignore_index)
    leading = x.shape[:-1]
    labels = check_labels(op, labels, (*leading, features), options)
    _check_options(op, options, weights, leading, reduction)
    if chunk_size is not None:
        check_count(op, "chunk_size", chunk_size)
    reference_only(op, implementation, x)
    rows = math.prod(leading)
    losses = _linear_token_losses(
        options,
        chunk_size or _default_chunk_size(rows, features),
        x.reshape(rows, x.shape[-1]),
        w,
        bias,
        labels.reshape(rows, *labels.shape[len(leading) :]),
    )
    return _reduce(losses.reshape(leading), counted(labels, options), weights, reduction)


def check_labels(op: str, labels: jax.Array, shape: tuple[int, ...], options: Options) -> jax.Array:
    """Returns labels that fit logits of `shape`, in a dtype that holds any class and `ignore_index`."""
    if is_soft(labels):
        check_shape(op, "labels", labels, shape, f"soft labels go with logits of shape {shape}")
        if options.ignore_index is not None:
            raise ValueError(
                f"{op}: ignore_index={options.ignore_index} was passed with soft labels, which have"
                " no class to compare with it; pass weights that are 0 where a token is ignored."
            )
        return labels
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"{op}: labels have dtype {labels.dtype}, but they are classes or a distribution over"
            " them; pass integers or floats."
        )
    rule = f"there is one class for each token of logits of shape {shape}"
    check_shape(op, "labels", labels, shape[:-1], rule)
    return labels.astype(common_dtype(labels.dtype, jnp.int32))


def _check_options(
    op: str,
    options: Options,
    weights: jax.Array | None,
    leading: tuple[int, ...],
    reduction: str,
) -> None:
    check_shape(op, "weights", weights, leading, "there is one weight for each token")
    check_constant(op, "label_smoothing", options.label_smoothing)
    check_constant(op, "z_loss", options.z_loss)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(
            f"{op}: label_smoothing is {options.label_smoothing}, but it is a share;"
            " pass a number from 0 to 1."
        )
    check_reduction(op, reduction)


def check_reduction(op: str, reduction: str) -> None:
    """Checks that `reduction` is one of the reductions that losses have."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{op}: reduction={reduction!r} is not known; pass 'mean', 'sum' or 'none'."
        )


def _default_chunk_size(rows: int, features: int) -> int:
    """Returns the tokens of a chunk: chunks are equal, so that the last one needs little padding."""
    chunks = max(1, math.ceil(rows * features / _CHUNK_LOGITS))
    return max(1, math.ceil(rows / chunks))


def _reduce(
    losses: jax.Array, counts: jax.Array, weights: jax.Array | None, reduction: str
) -> jax.Array:
    total = counts.astype(losses.dtype)
    if weights is not None:
        weights = weights.astype(losses.dtype)
        losses, total = losses * weights, total * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    total = jnp.sum(total)
    return jnp.sum(losses) / jnp.where(total == 0.0, 1.0, total)


# --- gradient -------------------------------------------------------------------------------------


class _Residuals(NamedTuple):
    logits: jax.Array
    labels: jax.Array
    statistics: Statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(options: Options, logits, labels):
    return reference.cross_entropy.token_losses(logits, labels, options)[0]


def _token_losses_fwd(options: Options, logits, labels):
    losses, statistics = reference.cross_entropy.token_losses(logits, labels, options)
    return losses, _Residuals(logits, labels, statistics)


def _token_losses_bwd(options: Options, saved: _Residuals, dlosses):
    args = (*saved, dlosses, options)
    dlogits = reference.cross_entropy.token_gradients(*args).astype(saved.logits.dtype)
    soft = is_soft(saved.labels)
    return dlogits, reference.cross_entropy.label_gradients(*args) if soft else None


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)


class _LinearResiduals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    labels: jax.Array
    statistics: Statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear_token_losses(options: Options, chunk_size: int, x, w, bias, labels):
    return reference.cross_entropy.linear_token_losses(x, w, bias, labels, options, chunk_size)[0]


def _linear_token_losses_fwd(options: Options, chunk_size: int, x, w, bias, labels):
    losses, statistics = reference.cross_entropy.linear_token_losses(
        x, w, bias, labels, options, chunk_size
    )
    return losses, _LinearResiduals(x, w, bias, labels, statistics)


def _linear_token_losses_bwd(options: Options, chunk_size: int, saved: _LinearResiduals, dlosses):
    return reference.cross_entropy.linear_token_gradients(*saved, dlosses, options, chunk_size)


_linear_token_losses.defvjp(_linear_token_losses_fwd, _linear_token_losses_bwd)
