"""dot_product_attention by the CUDA kernels of ffi/attention.

The kernels run on every GPU with tensor cores that multiply 16-bit values into float32: Turing and
later. They use the instructions of Turing and Ampere; Hopper and later have faster ones. From Ampere on
they also take float32, if it may be multiplied as tf32.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

SEGMENT_BLOCK = 32
"""Queries or keys in a block, the unit of `key_bounds` and `query_bounds`."""
_STATISTICS_BLOCK = 128
_LARGEST_LENGTH = 2**24
_LARGEST_HEAD_SIZE = 256
_LARGEST_HEAD_SIZE_OF_TURING = 128
_LARGEST_HEAD_SIZE_OF_FLOAT32 = 128
"""Largest head sizes, in features: in general, on Turing, and in float32. Larger tiles would not fit
into the shared memory of most GPUs."""
_LOG2E = float(np.log2(np.e))
_EMPTY_LSE = -0.7 * float(np.finfo(np.float32).max)
"""Log-sum-exp that the kernels return for a query that attends to nothing, as in the reference."""


class Operands(NamedTuple):
    """Optional arrays of attention."""

    bias: jax.Array | None = None
    """Bias [B or 1, N or 1, T or 1, S or 1], any float dtype."""
    explicit: jax.Array | None = None
    """Mask [B or 1, N or 1, T or 1, S or 1] int8, 1 where a query may attend to a key."""
    query_lengths: jax.Array | None = None
    """Number of queries [B] int32; `key_lengths` and `query_offset` have the same form."""
    key_lengths: jax.Array | None = None
    query_offset: jax.Array | None = None
    query_segments: jax.Array | None = None
    """Segment ids [B, T] int32 of queries; given with key_segments [B, S] and the two bounds."""
    key_segments: jax.Array | None = None
    key_bounds: jax.Array | None = None
    """Indices of blocks of keys for each block of queries, int32 [B, T / SEGMENT_BLOCK rounded up, 4]:
    the first block with a key of the queries' segments, the start and end of blocks that need no mask,
    and the end of all blocks."""
    query_bounds: jax.Array | None = None
    """Blocks of queries for each block of keys, int32 [B, S / SEGMENT_BLOCK rounded up, 4]; as in
    `key_bounds`."""
    dropout_seeds: jax.Array | None = None
    """Seeds [2, B, N] uint32 of dropout's counter-based random bits."""
    sinks: jax.Array | None = None
    """Sinks [N] float32, one more logit in every row of a head."""


@dataclass(frozen=True)
class Options:
    """Static options of a call."""

    scale: float
    soft_cap: float | None = None
    left: int | None = None
    """Keys before (and `right` after) a query's position p that it attends to: p - left <= s <= p +
    right. None for no limit."""
    right: int | None = None
    dropout_threshold: int = 0
    """Dropout rate in units of 1/65536."""

    def attributes(self) -> dict[str, Any]:
        return dict(
            scale=np.float32(self.scale),
            soft_cap=np.float32(0.0 if self.soft_cap is None else self.soft_cap),
            left=np.int64(-1 if self.left is None else self.left),
            right=np.int64(-1 if self.right is None else self.right),
            dropout_threshold=np.int64(self.dropout_threshold),
        )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    query_count: int,
    key_count: int,
    head_size: int,
    value_size: int,
    used: Collection[str] = (),
    allows_tf32: bool = False,
) -> str | None:
    """Returns None if forward and backward can run, else the reason.

    `used` names the optional arguments of the call.
    `allows_tf32` says whether float32 may be multiplied with the 10 bits of tf32.
    """
    reason = cuda_library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    assert compute_capability is not None
    is_turing = compute_capability < (8, 0)
    if dtype not in cuda_library.DTYPES:
        return f"it takes float32, bfloat16 and float16, and query has dtype {jnp.dtype(dtype)}"
    if dtype != jnp.float16 and is_turing:
        return f"{jnp.dtype(dtype)} needs compute capability 8.0 or later; before, it takes float16"
    is_float32 = dtype == jnp.float32
    if is_float32 and not allows_tf32:
        return (
            "it multiplies float32 as tf32, which is less than query's float32 is to be multiplied"
            " with"
        )
    largest = _LARGEST_HEAD_SIZE_OF_TURING if is_turing else _LARGEST_HEAD_SIZE
    if is_float32:
        largest = _LARGEST_HEAD_SIZE_OF_FLOAT32
    for size in (head_size, value_size):
        if size % 8 or not 8 <= size <= largest:
            where = "in float32" if is_float32 else "on this GPU"
            return f"head sizes must be multiples of 8 up to {largest} {where}, not {size}"
    if query_count == 0 or key_count == 0:
        return "there must be queries and keys"
    if max(query_count, key_count) > _LARGEST_LENGTH:
        return f"lengths go up to {_LARGEST_LENGTH}, not {max(query_count, key_count)}"
    if "scale as an array" in used:
        return "scale must be a Python float, as it is an attribute of the call"
    return cuda_library.why_unavailable()


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    options: Options,
    *,
    saved_length: int | None = None,
) -> tuple[jax.Array, ...]:
    """Returns (out [B, T, N, V], lse [B, N, R]) of query [B, T, N, H] and key, value [B, S, K, ...].

    lse is the natural logarithm of the sum of exponentials, in float32, including the sink. For a query
    that attends to nothing, or at or beyond the query length (even with a sink), lse is the reference's
    EMPTY_LSE and out is 0. R is `saved_length`, or T without it; entries from T on are EMPTY_LSE. With a
    bias a third result is the rest of lse, which rounding took: exp(logit - lse) * 2^-rest is P.
    """
    cuda_library.register()
    batch, query_count, heads, _ = query.shape
    numbers = 1 if operands.bias is None else 2
    call = jax.ffi.ffi_call(
        "jaxfused_attention_forward",
        (
            jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((numbers * batch, heads, query_count), jnp.float32),
        ),
    )
    out, lse = call(
        query,
        key,
        value,
        *_common(query, operands),
        _absent(query) if operands.sinks is None else operands.sinks,
        **options.attributes(),
    )
    lse, *rest = [lse] if numbers == 1 else jnp.split(lse, numbers)
    if saved_length is not None and saved_length > query_count:
        padding = ((0, 0), (0, 0), (0, saved_length - query_count))
        lse = jnp.pad(lse, padding, constant_values=_EMPTY_LSE)
        rest = [jnp.pad(x, padding) for x in rest]
    return out, lse, *rest


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    options: Options,
    rest: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (dquery, dkey, dvalue, dbias, dsinks), computed from what `forward` returned.

    lse is [B, N, R] with any R of at least T, and dlse is [B, N, T]; with a bias, rest is [B, N, T].
    dbias has the shape of the bias and dsinks is [N]; both are float32, and each is None without its
    operand.
    """
    cuda_library.register()
    query_count = query.shape[1]
    dlse = dlse.astype(jnp.float32)
    # The kernels subtract delta from products of dout rounded to tf32. With a single key the two cancel,
    # so delta is computed from the same rounded dout.
    factor = _rounded_to_tf32(dout) if dout.dtype == jnp.float32 else dout.astype(jnp.float32)
    delta = jnp.sum(factor * out.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2) - dlse
    # A row with lse = inf gets weights of 2^-inf = 0: an empty row, or one that pads the last block.
    lse = lse[:, :, :query_count]
    lse = jnp.where(lse < -1e38 if rest is None else lse == _EMPTY_LSE, jnp.inf, lse)
    sink_weight = 0.0 if operands.sinks is None else jnp.exp(operands.sinks[:, None] - lse)
    unit = _LOG2E
    if rest is not None:
        unit = 1.0
        sink_weight = sink_weight * jnp.exp2(-rest)
    missing = delta * (1.0 - sink_weight) - dlse
    padding = [(0, 0), (0, 0), (0, -query_count % _STATISTICS_BLOCK)]
    lse2 = jnp.pad(lse * unit, padding, constant_values=jnp.inf)
    statistics = jnp.stack([lse2, jnp.pad(delta, padding)], axis=-1)
    bias = operands.bias
    call = jax.ffi.ffi_call(
        "jaxfused_attention_backward",
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(key.shape, key.dtype),
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            jax.ShapeDtypeStruct((0,) if bias is None else bias.shape, jnp.float32),
            jax.ShapeDtypeStruct(statistics.shape, jnp.float32),
        ),
    )
    dquery, dkey, dvalue, dbias, corrected = call(
        query,
        key,
        value,
        *_common(query, operands),
        _absent(query) if operands.query_bounds is None else operands.query_bounds,
        dout,
        statistics,
        jnp.pad(missing, padding)
        if rest is None
        else jnp.concatenate([jnp.pad(x, padding) for x in (missing, rest)]),
        **options.attributes(),
    )
    dsinks = None
    if operands.sinks is not None:
        dsinks = -jnp.sum(sink_weight * corrected[..., :query_count, 1], axis=(0, 2))
    return dquery, dkey, dvalue, None if bias is None else dbias, dsinks


def _rounded_to_tf32(x: jax.Array) -> jax.Array:
    """Returns float32 values rounded as the kernels round them: ties away from zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, jnp.float32), x)


def _common(query: jax.Array, operands: Operands) -> list[jax.Array]:
    """Returns the optional arrays of the forward's and the backward's FFI handlers, in their order."""
    bias = operands.bias
    if bias is not None and bias.dtype not in (jnp.float32, query.dtype):
        bias = bias.astype(jnp.float32)
    absent = _absent(query)
    arrays = (
        bias,
        operands.explicit,
        operands.query_lengths,
        operands.key_lengths,
        operands.query_offset,
        operands.query_segments,
        operands.key_segments,
        operands.key_bounds,
        operands.dropout_seeds,
    )
    return [absent if array is None else array for array in arrays]


def _absent(query: jax.Array) -> jax.Array:
    """Returns an array without elements, which stands for an absent operand.

    It is derived from `query`, because all operands in a `jax.shard_map` must vary over the same axes.
    """
    return jnp.zeros_like(query, shape=(0,), dtype=jnp.float32)
