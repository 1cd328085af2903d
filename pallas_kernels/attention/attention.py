"""Attention on Hopper: limits of the kernels, the choice between them, and their entry points.

`forward` and `backward` hold the kernels for any number of keys, `short` those for few keys,
`split_keys` those for few queries, and `wide_heads` the forward for large heads. They share `mask`
(which blocks of keys a block of queries visits), `logits` (from products to logits and back) and
`memory` (matrices in shared memory). `estimate` predicts which of them is fastest.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.attention import backward as attention_bwd
from pallas_kernels.attention import (
    estimate,
    short_backward,
    short_forward,
    split_keys,
    split_keys_backward,
    wide_heads,
)
from pallas_kernels.attention import forward as attention_fwd
from pallas_kernels.attention import short as attention_short
from pallas_kernels.attention.block_lists import as_explicit
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.short_backward import ShortBackwardConfig
from pallas_kernels.attention.short_forward import ShortForwardConfig
from pallas_kernels.attention.split_keys import SplitForwardConfig
from pallas_kernels.attention.split_keys_backward import SplitBackwardConfig
from pallas_kernels.attention.wide_heads import WideForwardConfig

_LARGEST_HEAD_SIZE = 256


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    query_count: int,
    key_count: int,
    head_size: int,
    value_size: int,
    used: Collection[str] = (),
) -> str | None:
    """Returns None if the forward can run, else the rule that rejects the call.

    The backward can run too, unless the heads `are_wide`. `used` names the optional arguments of the
    call.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"query, key and value must be bfloat16 or float16, got {dtype}"
    most = {
        "queries": (head_size, wide_heads.MOST_KEY_COLUMNS),
        "values": (value_size, wide_heads.MOST_COLUMNS),
    }
    for name, (size, largest) in most.items():
        if size % 8 or not 8 <= size <= largest:
            return f"head sizes of the {name} must be multiples of 8 up to {largest}, got {size}"
    if query_count == 0 or key_count == 0:
        return "there must be queries and keys"
    if "scale as an array" in used:
        return "scale must be a Python float, as it is a constant of the kernels"
    return None


def are_wide(head_size: int, value_size: int) -> bool:
    """Returns whether a head size is above 256, which only the kernel of `wide_heads` takes."""
    return max(head_size, value_size) > _LARGEST_HEAD_SIZE


ForwardConfig = (
    attention_fwd.ForwardConfig | ShortForwardConfig | SplitForwardConfig | WideForwardConfig
)
"""Config of the forward; its type says which of the four forward kernels runs."""
BackwardConfig = attention_bwd.BackwardConfig | ShortBackwardConfig | SplitBackwardConfig


_FEW_QUERIES = 64
"""Queries in a warpgroup's tile in the kernels that do not split keys. A head with fewer queries leaves
rows of the tile empty, so the kernels that split the keys over CTAs are considered for it."""
_GAIN = 0.9
"""Ratio of predicted times below which a family of kernels (long, short, split keys) replaces the family
that `forward_candidates` or `backward_candidates` considers first."""


def forward_candidates(
    shape: Shape, dtype: Any, *, logits: Logits, multiprocessors: int
) -> tuple[ForwardConfig, ...]:
    """Returns the forward's configs worth trying, all of them legal, the best guess first."""
    if are_wide(shape.head_size, shape.value_size):
        return wide_heads.candidates(shape, logits, multiprocessors)
    longs = attention_fwd.candidates(shape, logits, multiprocessors)
    if logits.has_functions:
        return longs
    whole: tuple[ForwardConfig, ...] = longs
    if _is_short(shape, dtype):
        whole = (*short_forward.candidates(shape, multiprocessors), longs[0])
    splits = split_keys.candidates(shape, logits, multiprocessors)
    return _in_order(whole, splits, estimate.forward, shape, logits, multiprocessors)


def backward_candidates(
    shape: Shape, dtype: Any, *, logits: Logits, multiprocessors: int
) -> tuple[BackwardConfig, ...]:
    """Returns the backward's configs worth trying, all of them legal, the best guess first."""
    longs = attention_bwd.candidates(shape, logits, multiprocessors)
    if logits.has_functions:
        return longs
    whole: tuple[BackwardConfig, ...] = longs
    if _is_short(shape, dtype):
        shorts = short_backward.candidates(shape)
        long_time, short_time = (
            estimate.backward(shape, logits, configs[0], multiprocessors)
            for configs in (longs, shorts)
        )
        # The short kernel has one CTA for each batch entry and key head, so with few of them most SMs
        # are idle, and the long kernels can be faster.
        longer = long_time < _GAIN * short_time
        whole = (*longs, shorts[0]) if longer else (*shorts, longs[0])
    splits = split_keys_backward.candidates(shape, logits, multiprocessors)
    return _in_order(whole, splits, estimate.backward, shape, logits, multiprocessors)


def _in_order(
    whole: tuple[Any, ...],
    splits: tuple[Any, ...],
    expected: Callable[..., float],
    shape: Shape,
    logits: Logits,
    multiprocessors: int,
) -> tuple[Any, ...]:
    """Returns the configs of the family of kernels predicted faster, then the other's best config.

    `whole` are configs of kernels in which a CTA reads all keys of its queries, `splits` configs of the
    kernels that split the keys over CTAs. The latter are faster only if there are few queries: they then
    read K and V fewer times, or occupy more SMs.
    """
    whole_time, split_time = (
        expected(shape, logits, configs[0], multiprocessors) for configs in (whole, splits)
    )
    tiles = shape.query_tiles(_FEW_QUERIES)
    are_few = shape.query_count < _FEW_QUERIES or tiles < 2 * multiprocessors
    if are_few and split_time < _GAIN * whole_time:
        return (*splits, whole[0])
    return (*whole, splits[0])


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) for query [B, T, N, H], and key and value [B, S, K, .].

    If `logits.saves_rest`, what `Logits.log_sum_exp` returns beside lse follows, [B, N, R]; `backward`
    takes it as `operands.lse_rest` [B, N, T, 1].

    lse, the log-sum-exp, is a natural logarithm in float32 and includes the sink. For queries that
    attend to nothing, and from the query length on (with a sink or without), lse is EMPTY_LSE and out is
    0. R is `logits.saved_length(T)`. The default config is the first of `forward_candidates`.
    """
    if config is None:
        shape = Shape.of(query, key, value)
        config = forward_candidates(
            shape, query.dtype, logits=logits, multiprocessors=multiprocessors
        )[0]
    run: Any = attention_fwd
    if isinstance(config, ShortForwardConfig):
        run = short_forward
    elif isinstance(config, SplitForwardConfig):
        run = split_keys
    elif isinstance(config, WideForwardConfig):
        run = wide_heads
    if run is not attention_fwd:
        logits, operands = as_explicit(logits, operands)
    return run.forward(
        query, key, value, operands, logits=logits, multiprocessors=multiprocessors, config=config
    )


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    logits: Logits,
    multiprocessors: int,
    config: BackwardConfig | None = None,
    dbias_dtype: Any = jnp.float32,
) -> tuple[jax.Array | None, ...]:
    """Returns (dquery, dkey, dvalue, dbias, dsinks, *dreads), given the results of `forward`.

    lse is [B, N, R]; dlse is [B, N, T] or None. dbias has the shape of the bias, and is rounded once to
    `dbias_dtype`; dsinks is [N] in float32; either is None if its operand is absent. dreads are
    the float32 gradients of the arrays that `logits.score` reads, None for those without one. The
    default config is the first of `backward_candidates`.
    """
    if config is None:
        shape = Shape.of(query, key, value)
        config = backward_candidates(
            shape, query.dtype, logits=logits, multiprocessors=multiprocessors
        )[0]
    run: Any = attention_bwd
    if isinstance(config, ShortBackwardConfig):
        run = short_backward
    elif isinstance(config, SplitBackwardConfig):
        run = split_keys_backward
    if run is not attention_bwd:
        logits, operands = as_explicit(logits, operands)
    return run.backward(
        query,
        key,
        value,
        operands,
        out,
        lse,
        dout,
        dlse,
        logits=logits,
        multiprocessors=multiprocessors,
        config=config,
        dbias_dtype=dbias_dtype,
    )


def _is_short(shape: Shape, dtype: Any) -> bool:
    """Returns whether the kernels for up to 256 keys (`short`) can run."""
    reason = attention_short.why_unsupported(
        compute_capability=(9, 0),
        dtype=dtype,
        key_count=shape.key_count,
        head_size=shape.head_size,
        value_size=shape.value_size,
    )
    return reason is None
