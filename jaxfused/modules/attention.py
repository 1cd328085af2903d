"""Code that the `attention_fn` of nnx and linen share: calls of the operator, or of Flax's code."""

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import call_flax, is_default, why_complex, why_given, why_intercepted
from jaxfused.modules.linear import promoted
from jaxfused.modules.promotion import floating
from jaxfused.ops.attention import attention, attention_arguments, attention_xla
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.mask import Mask
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.attention.masks.pattern import Pattern
from jaxfused.ops.fp8.fp8 import is_fp8
from jaxfused.ops.linear import qkv_projection
from jaxfused.ops.serving.kv_cache import KVCache

QueryOffset = int | jax.Array | Literal["bottom_right"] | None


def check_rate(name: str, rate: Any) -> None:
    """Checks that a dropout rate is at least 0 and less than 1."""
    # The comparison rejects NaN too.
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"{name}: dropout_rate must be in the range [0, 1), as it is the fraction to drop, but it is"
            f" {rate!r}; pass a number from 0 up and below 1."
        )


def of_attention(precision: Any) -> Any:
    """Returns the precision of attention's products of heads; float8 is for the projections only."""
    return None if is_fp8(precision) else precision


def why_flax(
    dtype: Any, *, precision: Any, dropout_is_active: bool = False, broadcast_dropout: bool = False
) -> str | None:
    """Returns None if the operator can serve a call, else why Flax's own code runs.

    Sown weights are those before dropout, so that active dropout does not prevent sowing.

    Args:
      dtype: the dtype of query, key and value after promotion.
      precision: the hook's argument, as are the others.
    """
    if dropout_is_active and broadcast_dropout:
        return "broadcast_dropout drops the same weights in every head"
    return why_intercepted() or why_given(precision=not is_default(precision)) or why_complex(dtype)


def run_flax(
    name: str,
    reason: str,
    function: Callable[[], jax.Array],
    mask: jax.Array | None,
    *,
    is_causal: bool,
    implementation: str | None,
) -> jax.Array:
    """Runs Flax's own attention, with 0 for queries that may attend to nothing, as in the operator.

    Args:
      name: the hook's name.
      reason: the argument that the operator cannot serve.
      function: the call of Flax's code, which returns [..., T, N, V].
      mask: the mask that Flax's code was given, [..., N, T, S]; without one the result is not changed.
      is_causal: whether query t attends to keys s <= t alone.
    """
    output = call_flax(name, reason, function, implementation=implementation)
    if mask is None:
        return output
    allowed = mask != 0
    if is_causal:
        square = jnp.tril(jnp.ones(mask.shape[-2:], bool))
        allowed = allowed & square.reshape((1,) * (allowed.ndim - 2) + square.shape)
    attends = jnp.any(allowed, axis=-1).swapaxes(-1, -2)[..., None]
    # The mask may have fewer axes than the output [..., T, N, V], and its axes may have length 1.
    attends = attends.reshape((1,) * (output.ndim - attends.ndim) + attends.shape)
    return jnp.where(attends, output, jnp.zeros_like(output))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | AttentionMask | None = None,
    *,
    segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    query_offset: QueryOffset = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    """Runs the operator over any number of batch axes, with Flax's masks of any dtype.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H].
      value: [..., S, K, V].
      bias: broadcasts to [..., N, T, S].
      mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S]. Or an object of
        `jaxfused.masks`.
      segment_ids: [..., T], for the queries and as many keys.
      query_offset: as in the operator, an array for each batch entry [...].
    """
    batch = query.shape[:-3]
    segment_ids = None if segment_ids is None else _fold(batch, segment_ids, kept=1)
    output = attention.dot_product_attention(
        _fold(batch, query),
        _fold(batch, key),
        _fold(batch, value),
        None if bias is None else _fold(batch, bias),
        _fold_mask(batch, mask),
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        is_causal=is_causal,
        query_offset=_fold_offset(batch, query_offset),
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
    assert isinstance(output, jax.Array)
    return output.reshape(*batch, *output.shape[-3:])


def why_three_projections(*layers: Any) -> str | None:
    """Returns why queries, keys and values cannot be projected by one product, or None.

    Args:
      layers: (kernel [D, N, H], bias [N, H] or None) of queries, keys and values.
    """
    kernels = [kernel for kernel, _ in layers]
    if len({kernel.dtype for kernel in kernels}) > 1:
        return "their kernels differ in dtype"
    if len({kernel.shape[-1] for kernel in kernels}) > 1:
        return "their heads differ in size"
    if len({bias is None for _, bias in layers}) > 1:
        return "some have a bias and some have none"
    return None


def project_heads(
    x: jax.Array,
    query: tuple[jax.Array, jax.Array | None],
    key: tuple[jax.Array, jax.Array | None],
    value: tuple[jax.Array, jax.Array | None],
    *,
    dtype: Any,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects x [..., T, D] to queries, keys and values by one product.

    Args:
      query: kernel [D, N, H] and bias [N, H] or None.
      key: kernel [D, K, H] and bias.
      value: as for keys.
      dtype: dtype of the product; None for the one to which x and the parameters promote.
      precision: as in `jaxfused.qkv_projection`.
      implementation: as in `jaxfused.qkv_projection`.
    """
    x = promoted(x, *query, *key, *value, dtype=dtype)
    kernels, biases = zip(query, key, value, strict=True)
    return qkv_projection.separate_projections(
        x,
        [floating(kernel, x.dtype) for kernel in kernels],
        [floating(bias, x.dtype) for bias in biases],
        precision=precision,
        implementation=implementation,
    )


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | AttentionMask | None,
    *,
    is_causal: bool,
    query_offset: QueryOffset = None,
) -> jax.Array:
    """Returns the probabilities before dropout, [..., N, T, S] in the query's dtype, for sowing.

    These are the operator's probabilities, 0 where a query may attend to nothing. The arguments are
    those of `attend`.
    """
    batch, (queries, heads) = query.shape[:-3], query.shape[-3:-1]
    mask = whole_mask(mask)

    def with_four_axes(array: jax.Array | None) -> jax.Array | None:
        if array is None:
            return None
        array = _fold(batch, array)
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    folded_query, folded_key = (
        array if batch else array[None] for array in (_fold(batch, query), _fold(batch, key))
    )
    explicit = None if mask is None else with_four_axes(mask.astype(jnp.bool_))
    offset = _offset_of_entries(folded_query, folded_key, _fold_offset(batch, query_offset))
    probabilities, _ = attention_xla.weights(
        folded_query,
        folded_key,
        with_four_axes(bias),
        None,
        Mask(is_causal=is_causal, explicit=explicit, query_offset=offset),
        scale=query.shape[-1] ** -0.5,
        logits_soft_cap=None,
    )
    return probabilities.reshape(*batch, heads, queries, key.shape[-3]).astype(query.dtype)


def append_to_cache(
    name: str,
    cached_key: jax.Array,
    cached_value: jax.Array,
    index: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns Flax's cache with T new tokens at place `index`; tokens past its end are dropped.

    Args:
      name: the module's name.
      cached_key: [..., S, K, H]; cached_value is alike.
      index: how many tokens each sequence has, a scalar or [...].
      key: [..., T, K, H]; value is alike.
    """
    batch, kept = key.shape[:-3], cached_key.shape
    if kept[:-3] != batch or kept[-2:] != key.shape[-2:] or index.shape not in ((), batch):
        raise ValueError(
            f"{name}: the cache has shape {kept} and an index of shape {index.shape}, but the keys of"
            f" new tokens have shape {key.shape}; make it by init_cache for {batch} sequences, with an"
            f" index of shape () or {batch}."
        )
    one = math.prod(batch)

    def folded(array: jax.Array) -> jax.Array:
        return array.reshape(one, *array.shape[-3:])

    lengths = jnp.broadcast_to(index.astype(jnp.int32), batch).reshape(one)
    cache = KVCache(folded(cached_key), folded(cached_value), lengths)
    cache = cache.append(folded(key), folded(value))
    return cache.key.reshape(kept), cache.value.reshape(cached_value.shape)


def at_offset(
    attention_fn: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | AttentionMask | None,
    query_offset: QueryOffset,
) -> dict[str, Any]:
    """Returns the arguments that make `attention_fn` causal, with query 0 at position `query_offset`."""
    taken = inspect.signature(attention_fn).parameters
    if "query_offset" in taken:
        return dict(mask=mask, is_causal=True, query_offset=query_offset)
    return dict(mask=and_causal(mask, query, key, query_offset))


def and_causal(
    mask: jax.Array | AttentionMask | None,
    query: jax.Array,
    key: jax.Array,
    query_offset: QueryOffset,
) -> jax.Array:
    """Returns the logical and of the mask and the causal mask, as an array for Flax's code."""
    causal, whole = causal_mask(query, key, query_offset), whole_mask(mask)
    return causal if whole is None else causal & (whole != 0)


def causal_mask(query: jax.Array, key: jax.Array, query_offset: QueryOffset) -> jax.Array:
    """Returns where `is_causal` allows a query to attend to a key, [..., 1, T, S], for Flax's code."""
    batch, (queries, keys) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    folded_query, folded_key = (
        array if batch else array[None] for array in (_fold(batch, query), _fold(batch, key))
    )
    offset = _offset_of_entries(folded_query, folded_key, _fold_offset(batch, query_offset))
    allowed = Mask(is_causal=True, query_offset=offset).allowed(queries, keys)
    if offset is None:
        return allowed.reshape((1,) * len(batch) + allowed.shape[1:])
    return allowed.reshape(*batch, *allowed.shape[1:])


def _offset_of_entries(query: jax.Array, key: jax.Array, offset: Any) -> jax.Array | None:
    """Returns the offsets [B] of queries [B, T, N, H], checked as the operator checks them."""
    return attention_arguments.query_offsets(offset, query.shape[0], query.shape[1], key.shape[1])


def whole_mask(mask: jax.Array | AttentionMask | None) -> jax.Array | None:
    """Returns a mask as an array that broadcasts to [..., N, T, S]."""
    if not isinstance(mask, AttentionMask):
        return _checked_mask(mask)
    pattern, heads = Pattern.of(mask)
    return pattern.allowed(heads)[0]


def _fold_mask(
    batch: tuple[int, ...], mask: jax.Array | AttentionMask | None
) -> jax.Array | AttentionMask | None:
    if mask is None or isinstance(mask, AttentionMask):
        return mask
    return _fold(batch, _checked_mask(mask).astype(jnp.bool_))


def _checked_mask(mask: Any) -> Any:
    if mask is None or hasattr(mask, "dtype"):
        return mask
    raise ValueError(
        f"attention_fn: mask is {mask!r}, but it is an array that says which keys a query attends to;"
        " pass one, or a mask of jaxfused.masks."
    )


def _fold_offset(batch: tuple[int, ...], offset: QueryOffset) -> QueryOffset:
    if isinstance(offset, int | str | None) or not jnp.ndim(offset):
        return offset
    return jnp.broadcast_to(offset, batch).reshape(-1)


def _fold(batch: tuple[int, ...], array: jax.Array, kept: int = 3) -> jax.Array:
    """Returns the array with all axes before its last `kept` merged into one."""
    if len(batch) <= 1 or array.ndim <= kept:
        return array
    array = jnp.broadcast_to(array, (*batch, *array.shape[-kept:]))
    return array.reshape(math.prod(batch), *array.shape[-kept:])
