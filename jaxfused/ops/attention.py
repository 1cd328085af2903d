"""dot_product_attention: validation, choice of implementation, and the call of cuDNN."""

from collections.abc import Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.validation import check_constant, check_floating, check_shape
from jaxfused.reference.attention import Mask

AttentionImplementation = dispatch.Implementation | Literal["cudnn"]


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: AttentionImplementation | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention: `jax.nn.dot_product_attention` with more inside one pass.

    .. math::
        L &= \text{cap} \cdot \tanh(\text{scale} \cdot Q K^T / \text{cap}) + \text{bias} \\
        P_{ts} &= \frac{e^{L_{ts}}}{e^{\text{sink}} + \sum_{s'} e^{L_{ts'}}} \\
        O &= \text{dropout}(P) V

    over the keys that the mask allows. Without a cap L is the scaled product plus bias, and without
    sinks their term is absent. Letters: B batch, T queries, S keys, N query heads, K key heads, H
    head size, V head size of the values. Arguments up to `return_residual` are those of
    `jax.nn.dot_product_attention`.

    A query that may attend to nothing gets 0, and gives zero gradients; it is not an error.

    Args:
      query: [B, T, N, H] or [T, N, H], float32, bfloat16 or float16 (float64 with "xla").
      key: [B, S, K, H] or [S, K, H], of the query's dtype. N is a multiple of K; neighbouring query
        heads share a key head.
      value: [B, S, K, V] or [S, K, V], of the query's dtype.
      bias: is added to the logits; up to 4 axes that broadcast to [B, N, T, S]. Any float dtype.
        Its gradient has its shape.
      mask: bool, True where a query may attend to a key; broadcasts to [B, N, T, S] too.
      scale: of the logits; by default 1 / sqrt(H). An array of shape () gets a gradient, in "xla".
      is_causal: query t attends to keys s <= t, counted from the first also where T and S differ.
      query_seq_lengths: [B] integers; queries beyond give 0.
      key_value_seq_lengths: [B] integers; keys beyond are masked.
      local_window_size: (left, right), or one number for both: t - left <= s <= t + right.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla", "cudnn". None
        does not choose cuDNN, whose gradients may differ from run to run.
      return_residual: whether to return the log-sum-exp too.
      logits_soft_cap: keeps the logits before bias within (-cap, cap).
      query_segment_ids: [B, T] or [T] integers, with key_value_segment_ids: a query attends to keys
        of its own segment.
      key_value_segment_ids: [B, S] or [S] integers.
      sinks: [N], one learned logit a head that takes probability and gives nothing.
      dropout_rate: the fraction of probabilities to drop, to the nearest 1/65536; the others are
        divided by the fraction that is kept.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0. What is kept depends on the
        key and on (b, n, t, s) alone, by `jaxfused.reference.attention.keep`, and is the same in
        every implementation. Under `shard_map` or `pmap` fold the device's index into the key.

    Returns:
      The output, [B, T, N, V] or [T, N, V], of the query's dtype. With `return_residual` also the
      log-sum-exp of L (and the sink), [B, T, N] or [T, N], of the key's dtype as in JAX, but
      differentiable; where a query attends to nothing, -0.7 times the largest float32, rounded.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> jaxfused.dot_product_attention(q, k, v, is_causal=True).shape
      (2, 5, 4, 8)

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762; the
    cap: Gemma Team, "Gemma 2", 2024, https://arxiv.org/abs/2408.00118; sinks: OpenAI, "gpt-oss-120b
    & gpt-oss-20b Model Card", 2025, https://arxiv.org/abs/2508.10925
    """
    query, key, value, bias, sinks = jax.tree.map(jnp.asarray, (query, key, value, bias, sinks))
    has_batch = query.ndim != 3
    if not has_batch:
        query, key, value = (a[None] if a.ndim == 3 else a for a in (query, key, value))
    _validate(query, key, value, bias, sinks)
    batch, query_length, heads, head_size = query.shape
    key_length = key.shape[1]
    who = _mask(
        query,
        key,
        mask,
        is_causal,
        local_window_size,
        query_seq_lengths,
        key_value_seq_lengths,
        query_segment_ids,
        key_value_segment_ids,
    )
    if bias is not None:
        bias = _broadcastable("bias", bias, (batch, heads, query_length, key_length))
    dropout_words = _dropout_words(dropout_rate, dropout_key)
    if logits_soft_cap is not None:
        check_constant("dot_product_attention", "logits_soft_cap", logits_soft_cap)
    if scale is None:
        scale = head_size**-0.5

    used = {
        "bias": bias is not None,
        "mask": mask is not None,
        "scale as an array": isinstance(scale, jax.Array),
        "return_residual": return_residual,
        "logits_soft_cap": logits_soft_cap is not None,
        "segment ids": who.query_segments is not None,
        "sinks": sinks is not None,
        "dropout": dropout_words is not None,
    }
    chosen = dispatch.choose(
        "dot_product_attention",
        implementation,
        implementations(
            dispatch.current_device(query, key, value),
            dtype=query.dtype,
            query_length=query_length,
            key_length=key_length,
            head_size=head_size,
            value_head_size=value.shape[-1],
            is_causal=is_causal,
            window=who.window,
            used=[name for name, is_used in used.items() if is_used],
        ),
    )
    if chosen == "cudnn":
        output = _cudnn(query, key, value, bias, who, scale)
        return output if has_batch else output[0]
    output, lse = reference.attention.attention(
        query,
        key,
        value,
        bias,
        sinks,
        who,
        dropout_words,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
    )
    lse = lse.astype(key.dtype)
    if not has_batch:
        output, lse = output[0], lse[0]
    return (output, lse) if return_residual else output


def implementations(
    device: dispatch.Device,
    *,
    dtype: Any,
    query_length: int,
    key_length: int,
    head_size: int,
    value_head_size: int,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    used: Collection[str] = (),
) -> dict[str, str | None]:
    """For each implementation, in order of preference, None or why it cannot run on `device`.

    `used` names the optional arguments that are given and need support: "bias", "mask",
    "scale as an array", "return_residual", "logits_soft_cap", "segment ids", "sinks", "dropout".
    """
    return {
        "pallas": "there is no Pallas kernel of dot_product_attention yet",
        "cuda": "there is no CUDA kernel of dot_product_attention yet",
        "xla": None,
        "cudnn": _why_cudnn_unsupported(
            device,
            dtype=dtype,
            query_length=query_length,
            key_length=key_length,
            head_size=head_size,
            value_head_size=value_head_size,
            is_causal=is_causal,
            window=window,
            used=used,
        ),
    }


def _validate(query, key, value, bias, sinks) -> None:
    op = "dot_product_attention"
    check_floating(op, {"query": query, "bias": bias, "sinks": sinks})
    for name, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim != 4:
            raise ValueError(
                f"{op}: {name} has shape {array.shape}, but query, key and value have 4 axes each,"
                " or 3 without the batch; pass (batch, length, heads, head size)."
            )
        if array.dtype != query.dtype:
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but the query's is {query.dtype};"
                f" pass {name}.astype(query.dtype)."
            )
    batch, _, heads, head_size = query.shape
    key_heads = key.shape[2]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{op}: query has {heads} heads and key {key_heads}, but query heads share key heads"
            " evenly; pass a multiple of the key's heads as the query's."
        )
    check_shape(
        op,
        "key",
        key,
        (batch, key.shape[1], key_heads, head_size),
        f"query has shape {query.shape}, and both have one batch and head size",
    )
    check_shape(op, "value", value, (*key.shape[:3], value.shape[3]), f"key has shape {key.shape}")
    check_shape(op, "sinks", sinks, (heads,), f"query has {heads} heads")


def _mask(
    query,
    key,
    mask,
    is_causal,
    local_window_size,
    query_lengths,
    key_lengths,
    query_segments,
    key_segments,
) -> Mask:
    op = "dot_product_attention"
    batch, query_length, heads, _ = query.shape
    key_length = key.shape[1]
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise ValueError(
                f"{op}: mask has dtype {mask.dtype}, but it says True or False for each query and"
                " key; pass an array of bool, or pass what is added to the logits as bias."
            )
        mask = _broadcastable("mask", mask, (batch, heads, query_length, key_length))
    if (query_segments is None) != (key_segments is None):
        raise ValueError(
            f"{op}: one of query_segment_ids and key_value_segment_ids was passed, but they are"
            " compared with each other; pass both or none."
        )
    return Mask(
        is_causal=bool(is_causal),
        window=_window(local_window_size),
        query_lengths=_integers("query_seq_lengths", query_lengths, (batch,)),
        key_lengths=_integers("key_value_seq_lengths", key_lengths, (batch,)),
        query_segments=_integers("query_segment_ids", query_segments, (batch, query_length)),
        key_segments=_integers("key_value_segment_ids", key_segments, (batch, key_length)),
        explicit=mask,
    )


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    if left < 0 or right < 0:
        raise ValueError(
            f"dot_product_attention: local_window_size is {size}, but it counts the keys to the"
            " left and to the right of a query; pass numbers from 0 up."
        )
    return left, right


def _integers(name: str, array: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """The array as int32 of `shape`; a leading axis of 1 may be left out, as in 3-D queries."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"dot_product_attention: {name} has dtype {array.dtype}, but it holds integers;"
            f" pass {name}.astype(jnp.int32)."
        )
    if shape[0] == 1 and array.shape == shape[1:]:
        array = array[None]
    check_shape("dot_product_attention", name, array, shape, f"query and key imply {shape}")
    return array.astype(jnp.int32)


def _broadcastable(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array with 4 axes, each of them 1 or that of `shape`."""
    fits = array.ndim <= 4 and all(
        size in (1, full) for size, full in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"dot_product_attention: {name} has shape {array.shape}, but the logits have shape"
            f" {shape}; pass an array that broadcasts to them."
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _dropout_words(rate: float, key: jax.Array | None) -> jax.Array | None:
    """The two words that `reference.attention.keep` takes, or None where nothing is dropped."""
    check_constant("dot_product_attention", "dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"dot_product_attention: dropout_rate is {rate}, but it is the fraction to drop;"
            " pass a number from 0 up and below 1."
        )
    if rate == 0.0:
        return None
    if key is None:
        raise ValueError(
            f"dot_product_attention: dropout_rate is {rate}, but dropout_key is None;"
            " pass a key of jax.random."
        )
    return jax.random.bits(key, (2,), jnp.uint32)


# --- cuDNN ----------------------------------------------------------------------------------------


def _why_cudnn_unsupported(
    device, *, dtype, query_length, key_length, head_size, value_head_size, is_causal, window, used
) -> str | None:
    """None, or which limit of jax.nn.dot_product_attention(implementation="cudnn") is exceeded."""
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return "cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or later"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {dtype}"
    largest = 256 if capability >= (9, 0) else 128
    if head_size % 8 or head_size > largest:
        return f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {head_size}"
    if value_head_size != head_size:
        return f"cuDNN is called with one head size, not {head_size} and {value_head_size}"
    if query_length % 2 or key_length % 2:
        return (
            "JAX refuses the gradient of cuDNN's attention unless lengths are even,"
            f" not {query_length} queries and {key_length} keys"
        )
    if window is not None:
        if window[1] != 0 and not is_causal:
            return f"cuDNN has no window to the right without is_causal, and {window[1]} was passed"
        if query_length > key_length:
            return "cuDNN's window may leave queries without keys where there are fewer keys"
    missing = [name for name in used if name not in ("bias", "mask")]
    if missing:
        return f"cuDNN's attention does not have {' and '.join(missing)}, or not its gradient"
    return None


def _cudnn(query, key, value, bias, mask: Mask, scale) -> jax.Array:
    """Calls cuDNN, and puts 0 where a query attends to nothing.

    cuDNN itself gives such a query the mean of the values, or NaN where its sequence has no keys.
    """
    is_causal, window = mask.is_causal, mask.window
    if window is not None:
        # Nothing to the right is what causal means, and all that cuDNN's window knows.
        is_causal, window = True, (window[0], 0)
    logits_shape = (query.shape[1], key.shape[1])
    if bias is not None:
        bias = jnp.broadcast_to(bias, bias.shape[:2] + logits_shape).astype(query.dtype)
    explicit = mask.explicit
    if explicit is not None:
        explicit = jnp.broadcast_to(explicit, explicit.shape[:2] + logits_shape)
    key_lengths = mask.key_lengths
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        explicit,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=mask.query_lengths,
        key_value_seq_lengths=None if key_lengths is None else jnp.maximum(key_lengths, 1),
        local_window_size=window,
        implementation="cudnn",
    )
    attends = jnp.any(mask.allowed(*logits_shape), axis=-1)
    return jnp.where(attends.swapaxes(1, 2)[..., None], output, 0)
