"""dot_product_attention in plain jax.numpy: the kernels' reference, and `implementation="xla"`.

Two definitions hold for every implementation: `Mask`, the keys to which each query attends, and
`keep_by_seeds`, the probabilities that dropout keeps.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfused.ops.attention.mask import EMPTY_LSE, Mask
from jaxfused.runtime import resharding
from jaxfused.runtime.dropout import Bits, keep_by_seeds, keep_probability
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.shapes import split_axis


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    dropout_words: jax.Array | Bits | None,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
    dropout_rate: float,
    score_mod: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, V], of the query's dtype, and the logits' log-sum-exp [B, T, N].

    The gradient saves only the arguments, and computes the probabilities [B, N, T, S] again.
    """
    bits = None
    if dropout_words is not None:
        bits = Bits.of(dropout_words, query.shape[0], query.shape[2])

    def f(query, key, value, bias, sinks, mask, bits, scale):
        return attention_by_seeds(
            query,
            key,
            value,
            bias,
            sinks,
            mask,
            bits,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            dropout_rate=dropout_rate,
            score_mod=score_mod,
        )

    return jax.checkpoint(f)(query, key, value, bias, sinks, mask, bits, scale)


def attention_by_seeds(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    bits: Bits | None,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
    dropout_rate: float,
    score_mod: Callable[[jax.Array], jax.Array] | None = None,
    with_rest: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `attention` from dropout's seeds, sharded as B and N are; see `weights`."""
    batch, query_count, heads, _ = query.shape
    key_count, key_heads = key.shape[1:3]
    groups = heads // key_heads
    key, value = cleared_beyond(mask.key_lengths, key, value)
    [query] = cleared_beyond(mask.query_lengths, query)
    probabilities, lse, *rest = weights(
        *(query, key, bias, sinks, mask),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        score_mod=score_mod,
        with_rest=with_rest,
    )
    if bits is not None:
        kept = keep_by_seeds(bits, query_count, key_count, dropout_rate)
        probabilities = jnp.where(kept, probabilities, 0.0) / keep_probability(dropout_rate)

    grouped = split_axis(probabilities, 1, key_heads, groups)
    if jnp.issubdtype(value.dtype, jnp.integer):
        # Probabilities are cast to the integers' dtype, as in JAX: all below 1 become 0.
        output = jnp.einsum("bkgts,bskv->btkgv", grouped.astype(value.dtype), value)
    else:
        output = product("bkgts,bskv->btkgv", grouped, value, dtype=value.dtype)
    output = output.reshape(batch, query_count, heads, value.shape[-1])
    # Beyond the query lengths the output is 0 already, but its cotangent may be NaN.
    [output] = cleared_beyond(mask.query_lengths, output)
    return output.astype(query.dtype), *(x.transpose(0, 2, 1) for x in (lse, *rest))


def cleared_beyond(lengths: jax.Array | None, *arrays: jax.Array) -> list[jax.Array]:
    """Returns arrays [B, T, ...] with zeros beyond the lengths [B], if there are lengths.

    Values there may be NaN, and a probability of 0 times NaN is NaN.
    """
    if lengths is None:
        return list(arrays)
    within = jnp.arange(arrays[0].shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return [
        jnp.where(jnp.expand_dims(within, range(2, x.ndim)), x, jnp.zeros((), x.dtype))
        for x in arrays
    ]


def weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
    score_mod: Callable[[jax.Array], jax.Array] | None = None,
    with_rest: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns probabilities [B, N, T, S] before dropout, and the log-sum-exp [B, N, T] of masked logits.

    `score_mod` changes all logits [B, N, T, S] before they are masked. The log-sum-exp includes sinks;
    `with_rest`, log2 of the sum of exp(logit - log-sum-exp), which rounding keeps from being 0, follows.
    """
    batch, query_count, heads, _ = query.shape
    key_count, key_heads = key.shape[1:3]
    if jnp.issubdtype(query.dtype, jnp.integer):
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    grouped = split_axis(query, 2, key_heads, heads // key_heads)
    logits = product("btkgh,bskh->bkgts", grouped, key)
    logits = logits.reshape(batch, heads, query_count, key_count)
    if isinstance(scale, jax.Array):
        scale = resharding.split_with(scale, logits).astype(logits.dtype)
    logits = logits * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + resharding.split_with(bias, logits).astype(logits.dtype)
    allowed = mask.allowed(query_count, key_count)
    if score_mod is not None:
        # Masked scores are 1, where e.g. sqrt has a finite derivative: infinity times 0 would be NaN.
        logits = score_mod(jnp.where(allowed, logits, 1.0)).astype(logits.dtype)
    if sinks is not None:
        sinks = resharding.split_with(sinks, logits, [1]).astype(logits.dtype)
    probabilities, lse = _softmax(logits, allowed, sinks)
    if not with_rest:
        return probabilities, lse
    lowest = float(jnp.finfo(logits.dtype).min)
    total = jnp.sum(jnp.exp(jnp.where(allowed, logits - lse[..., None], lowest)), axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[None, :, None] - lse)
    return probabilities, lse, jnp.where(total == 0.0, 0.0, jnp.log2(total))


@jax.custom_jvp
def _softmax(
    logits: jax.Array, allowed: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns (probabilities, log-sum-exp) of logits [B, N, T, S]; fully masked rows have probability 0.

    A sink [N] is one more logit in every row of its head, whose probability is not returned. No
    intermediate is infinite for finite arguments, because `jax_debug_infs` would report it.
    """
    lowest = float(jnp.finfo(logits.dtype).min)
    logits = jnp.where(allowed, logits, lowest)
    maximum = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    if sinks is not None:
        sinks = sinks[None, :, None, None]
        maximum = jnp.maximum(maximum, sinks)
    # The exponentials of a fully masked row would be 1.
    exponentials = jnp.where(allowed, jnp.exp(logits - maximum), 0.0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - maximum)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, EMPTY_LSE, maximum + jnp.log(total))
    return exponentials / total, lse[..., 0]


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    """Computes the derivative from the results; JAX's derivative of the steps is less accurate."""
    sinks = primals[2]
    dlogits, _, dsinks = tangents
    probabilities, lse = _softmax(*primals)

    def derivative_of_lse():
        dlse = jnp.sum(probabilities * dlogits, axis=-1)
        if sinks is None:
            return dlse
        return dlse + jnp.exp(sinks[None, :, None] - lse) * dsinks[None, :, None]

    # A single sum of all cotangents of the logits, because the terms of separate sums would not cancel
    # fully.
    dprobabilities = probabilities * (dlogits - derivative_of_lse()[..., None])
    return (probabilities, lse), (dprobabilities, derivative_of_lse())
