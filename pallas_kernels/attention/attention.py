"""Attention on Hopper: what the kernels support, which of them runs, and the one call of each.

attention_fwd and attention_bwd hold the kernels for long sequences, attention_short those for few
keys. They share two descriptions: attention_mask (which blocks are visited) and attention_logits
(from products to logits).
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.attention import backward as attention_bwd
from pallas_kernels.attention import forward as attention_fwd
from pallas_kernels.attention import short as attention_short
from pallas_kernels.attention.logits import Logits, Operands

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
    """None where forward and backward can run, else the rule that stands in the way.

    `used` names optional arguments as `jaxfused.ops.attention.implementations` does.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"query, key and value must be bfloat16 or float16, got {dtype}"
    for size in (head_size, value_size):
        if size % 8 or not 8 <= size <= _LARGEST_HEAD_SIZE:
            return f"head sizes must be multiples of 8 up to {_LARGEST_HEAD_SIZE}, got {size}"
    if query_count == 0 or key_count == 0:
        return "there must be queries and keys"
    if "scale as an array" in used:
        return "scale must be a Python float, as it is a constant of the kernels"
    return None


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, V], lse [B, N, R]) of query [B, T, N, H], key and value [B, S, K, ...].

    lse is the natural logarithm in float32, with the sink; EMPTY_LSE where nothing is summed up, and
    for queries from their length on, sink or not; out is 0 there. R is `logits.saved_length(T)`.
    """
    module = _module(key, value, attention_fwd)
    return module.forward(
        query, key, value, operands, logits=logits, multiprocessors=multiprocessors
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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(dquery, dkey, dvalue, dbias, dsinks) from what `forward` returned.

    lse is [B, N, R], dlse [B, N, T] or None. dbias has the bias's shape, dsinks is [N], both float32,
    or None without the operand.
    """
    module = _module(key, value, attention_bwd)
    return module.backward(
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
    )


def _is_short(key_count: int, head_size: int, value_size: int, dtype: Any) -> bool:
    """Whether the kernels for few keys run: wherever they can, 256 keys or fewer."""
    return (
        attention_short.why_unsupported(
            compute_capability=(9, 0),
            dtype=dtype,
            key_count=key_count,
            head_size=head_size,
            value_size=value_size,
        )
        is None
    )


def _module(key: jax.Array, value: jax.Array, otherwise: Any) -> Any:
    is_short = _is_short(key.shape[1], key.shape[3], value.shape[3], key.dtype)
    return attention_short if is_short else otherwise
