"""dot_product_attention: validation, choice of implementation, gradient, and the call of cuDNN."""

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import dot_product_attention as jax_dot_product_attention

from jaxfused import dispatch
from jaxfused.ops.attention import attention_cuda as cuda_attention
from jaxfused.ops.attention import attention_xla, costs_float32
from jaxfused.ops.attention.mask import EMPTY_LSE, Mask
from jaxfused.ops.linear.linear import allows_tf32
from jaxfused.runtime import cuda_library, dropout_arguments, sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_floating,
    check_shape,
    check_soft_cap,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate, Rule, Times
from jaxfused.runtime.gate import choose_without_stages, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import batch_all, is_batched
from pallas_kernels.attention import attention as pallas_attention
from pallas_kernels.attention import estimate
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.logits import Logits, Operands, dropout_seeds, saved_length
from pallas_kernels.attention.mask import BlockMask, segment_blocks
from pallas_kernels.attention.shape import Shape

AttentionImplementation = dispatch.Implementation | Literal["cudnn"]


@python_numbers
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
    query_offset: int | jax.Array | Literal["bottom_right"] | None = None,
    return_lse: bool = False,
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
      query: [B, T, N, H] or [T, N, H], float32, bfloat16 or float16 (float64 and integers with "xla").
      key: [B, S, K, H] or [S, K, H], of the query's dtype. N is a multiple of K; neighbouring query
        heads share a key head.
      value: [B, S, K, V] or [S, K, V], of the query's dtype.
      bias: is added to the logits; up to 4 axes that broadcast to [B, N, T, S]. Any float dtype.
        Its gradient has its shape.
      mask: bool, True where a query may attend to a key; broadcasts to [B, N, T, S] too.
      scale: of the logits, finite; by default 1 / sqrt(H). An array that broadcasts to [B, N, T, S],
        such as one of each head [N, 1, 1], gets a gradient, in "xla".
      is_causal: query t, which stands at key p = t + query_offset, attends to keys s <= p.
      query_seq_lengths: [B] integers; queries beyond give 0. Above T they mean T, below 0 they mean 0.
      key_value_seq_lengths: [B] integers, likewise; keys beyond are masked.
      local_window_size: (left, right), or one number for both: p - left <= s <= p + right.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla", "cudnn". None
        does not choose cuDNN, whose gradients may differ from run to run.
      return_residual: whether to return the log-sum-exp too, as JAX does: in the key's dtype, and no
        gradient flows into it.
      query_offset: where the first query stands among the keys, for `is_causal` and
        `local_window_size`: a number or [B] integers, of any sign; None, as in JAX, for 0 also where T
        and S differ. "bottom_right" has the last query stand at the last key: it is the number of keys
        less that of queries, both by their lengths. So do new tokens whose keys end a cache.
      return_lse: whether to return the log-sum-exp too, in float32 (float64 with "xla" of float64), with
        its gradient. Attention over a part of the keys is merged with that over another part by it.
      logits_soft_cap: keeps the logits before bias within (-cap, cap); finite and above 0.
      query_segment_ids: [B, T] or [T] integers, with key_value_segment_ids: a query attends to keys
        of its own segment.
      key_value_segment_ids: [B, S] or [S] integers.
      sinks: [N], one learned logit a head that takes probability and gives nothing.
      dropout_rate: the fraction of probabilities to drop, to the nearest 1/65536; the others are
        divided by the fraction that is kept.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0. What is kept depends on the
        key and on (b, n, t, s) alone, by `jaxfused.runtime.dropout.keep`, and is the same in
        every implementation. Under `shard_map` or `pmap` fold the device's index into the key.

    Returns:
      The output, [B, T, N, V] or [T, N, V], of the query's dtype. With `return_residual` or
      `return_lse` also the log-sum-exp of L (and the sink), [B, T, N] or [T, N]; where a query attends
      to nothing, -0.7 times the largest float32.

      Of integers the result is of integers too, and as in JAX so are the probabilities that multiply
      the values: those below 1 are 0.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> jaxfused.dot_product_attention(q, k, v, is_causal=True).shape
      (2, 5, 4, 8)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762; the
    cap: Gemma Team, "Gemma 2", 2024, https://arxiv.org/abs/2408.00118; sinks: OpenAI, "gpt-oss-120b
    & gpt-oss-20b Model Card", 2025, https://arxiv.org/abs/2508.10925
    """
    query, key, value, bias, sinks = as_arrays(query, key, value, bias, sinks)
    has_batch = query.ndim != 3
    if not has_batch:
        query, key, value = (a[None] if a.ndim == 3 else a for a in (query, key, value))
    _validate(query, key, value, bias, sinks)
    if return_residual and return_lse:
        raise ValueError(
            "dot_product_attention: return_residual and return_lse were passed, and both return the"
            " log-sum-exp, the first without a gradient; pass one of them."
        )
    batch, query_length, heads, head_size = query.shape
    key_length = key.shape[1]
    who = _mask(
        query,
        key,
        mask,
        is_causal,
        local_window_size,
        query_offset,
        query_seq_lengths,
        key_value_seq_lengths,
        query_segment_ids,
        key_value_segment_ids,
    )
    if bias is not None:
        bias = _broadcastable("bias", bias, (batch, heads, query_length, key_length))
    dropout_words = dropout_arguments.dropout_words(
        "dot_product_attention", dropout_rate, dropout_key
    )
    check_soft_cap("dot_product_attention", logits_soft_cap)
    scale = _scale(scale, head_size, (batch, heads, query_length, key_length))

    device = dispatch.current_device(query, key, value)
    if implementation == "cudnn":
        used = {
            "scale as an array": isinstance(scale, jax.Array),
            "return_residual": return_residual,
            "return_lse": return_lse,
            "logits_soft_cap": logits_soft_cap is not None,
            "segment ids": who.query_segments is not None,
            "query_offset": who.query_offset is not None,
            "sinks": sinks is not None,
            "dropout": dropout_words is not None,
        }
        reason = _why_cudnn_unsupported(
            device, query, key, value, who, [name for name, is_used in used.items() if is_used]
        )
        choose_without_stages(
            "dot_product_attention", "cudnn", {"cudnn": reason}, query, key, value
        )
        output = _cudnn(query, key, value, bias, who, scale)
        output = named(output, "dot_product_attention", "output")
        return output if has_batch else output[0]
    if _takes_reference(implementation, device, query, key, scale):
        output, lse = attention_xla.attention(
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
        output = named(output, "dot_product_attention", "output")
        lse = named(lse, "dot_product_attention", "log_sum_exp")
    else:
        options = _Options(
            is_causal=who.is_causal,
            window=who.window,
            scale=float(scale),
            soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
            dropout_rate=float(dropout_rate),
            allows_tf32=query.dtype == jnp.float32 and allows_tf32(None),
        )
        run = Runner(implementation, device)
        output, lse = _run(run, options, query, key, value, bias, sinks, who, dropout_words)
    if not has_batch:
        output, lse = output[0], lse[0]
    if return_residual:
        return output, jax.lax.stop_gradient(lse.astype(key.dtype))
    return (output, lse) if return_lse else output


def _takes_reference(implementation, device, query, key, scale) -> bool:
    """Whether plain jax.numpy runs the call, as it does if scale is an array: kernels take constants."""
    missing = None
    if isinstance(scale, jax.Array):
        why = "scale must be a Python float, as it is a constant of the kernels"
        missing = {"pallas": why, "cuda": why}
    return takes_reference(
        "dot_product_attention", implementation, device, query, key, missing=missing
    )


def _validate(query, key, value, bias, sinks) -> None:
    op = "dot_product_attention"
    check_floating(op, {"bias": bias, "sinks": sinks})
    if not jnp.issubdtype(query.dtype, jnp.integer):
        check_floating(op, {"query": query})
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
            f"{op}: query has {heads} heads and key {key_heads}, but the number of query heads must be"
            " a multiple of the number of key heads, which they share evenly; pass such numbers."
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
    query_offset,
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
    query_segments, key_segments = _segments(
        query_segments, key_segments, batch, query_length, key_length
    )
    query_lengths = _lengths("query_seq_lengths", query_lengths, batch, query_length)
    key_lengths = _lengths("key_value_seq_lengths", key_lengths, batch, key_length)
    window = _window(local_window_size)
    if isinstance(query_offset, str) and query_offset == "bottom_right":
        # Lengths are arrays, and counts are numbers.
        keys = key_length if key_lengths is None else key_lengths
        query_offset = keys - (query_length if query_lengths is None else query_lengths)
    offset = query_offsets(query_offset, batch, query_length, key_length, window or (0, 0))
    return Mask(
        is_causal=bool(is_causal),
        window=window,
        # Without either limit positions say nothing.
        query_offset=offset if is_causal or window is not None else None,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        query_segments=query_segments,
        key_segments=key_segments,
        explicit=mask,
    )


def _scale(scale: Any, head_size: int, logits_shape: tuple[int, ...]) -> float | jax.Array:
    """Returns a constant of the kernels, or an array of shape () or of four axes."""
    if scale is None:
        return head_size**-0.5 if head_size else 1.0
    if hasattr(scale, "shape") and (scale.shape or not isinstance(scale, np.ndarray | np.generic)):
        array = jnp.asarray(scale)
        if jnp.issubdtype(array.dtype, jnp.integer):
            array = array.astype(jnp.float32)
        check_floating("dot_product_attention", {"scale": array})
        return _broadcastable("scale", array, logits_shape) if array.ndim else array
    is_number = isinstance(scale, int | float | np.ndarray | np.generic)
    if not is_number or isinstance(scale, bool) or not math.isfinite(scale):
        raise ValueError(
            f"dot_product_attention: scale is {scale!r}, but the logits are multiplied by it; pass a"
            " finite number, or None for 1 / sqrt(head size)."
        )
    return float(scale)


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = size if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(not isinstance(side, Integral) or side < 0 for side in sides):
        raise ValueError(
            f"dot_product_attention: local_window_size is {size!r}, but it counts the keys to the left"
            " and to the right of a query; pass a whole number from 0 up, or two."
        )
    left, right = sides
    # A window beyond _LONGEST is no limit, and positions have 32 bits.
    return min(int(left), _LONGEST), min(int(right), _LONGEST)


_LONGEST = 2**29


def query_offsets(
    offset: Any, batch: int, queries: int, keys: int, window: tuple[int, int] = (0, 0)
) -> jax.Array | None:
    """Returns [B] offsets limited to what makes a difference, as kernels add to them; None for 0."""
    if offset is None:
        return None
    if isinstance(offset, str) and offset == "bottom_right":
        offset = keys - queries
    least, most = -queries - window[1], keys + window[0]
    if isinstance(offset, str | bool | float):
        raise ValueError(
            f"dot_product_attention: query_offset is {offset!r}, but it says at which key the first"
            ' query stands; pass a whole number, an integer for each sequence, or "bottom_right".'
        )
    if isinstance(offset, Integral):
        offset = min(max(int(offset), least), most)
        return jnp.full((batch,), offset, jnp.int32) if offset else None
    if isinstance(offset, Sequence):
        offset = np.asarray(offset)
    if isinstance(offset, np.ndarray) and np.issubdtype(offset.dtype, np.integer):
        # Before JAX takes the lower 32 bits.
        offset = np.clip(offset.astype(np.int64), least, most).astype(np.int32)
    if not jnp.shape(offset):
        offset = jnp.broadcast_to(offset, (batch,))
    array = _integers("query_offset", offset, (batch,))
    assert array is not None
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.int32)
    if jnp.issubdtype(array.dtype, jnp.signedinteger):
        array = jnp.maximum(array, least)
    return jnp.minimum(array, most).astype(jnp.int32)


def _lengths(name: str, lengths: Any, batch: int, full: int) -> jax.Array | None:
    """Returns the lengths clipped to 0 to `full`, as kernels rely on it."""
    array = _integers(name, lengths, (batch,))
    if array is None:
        return None
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.int32)
    return jnp.clip(array, 0, full).astype(jnp.int32)


def _segments(
    query_segments: Any, key_segments: Any, batch: int, query_length: int, key_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns both as int32; 64-bit ids are replaced by their ranks."""
    queries = _integers("query_segment_ids", query_segments, (batch, query_length))
    keys = _integers("key_value_segment_ids", key_segments, (batch, key_length))
    if queries is None or keys is None:
        return None, None
    if max(queries.dtype.itemsize, keys.dtype.itemsize) > 4:
        both = jnp.concatenate([queries, keys], axis=1)
        _, ranks = jnp.unique(both, return_inverse=True, size=both.size)
        queries, keys = jnp.split(ranks.reshape(both.shape), [query_length], axis=1)
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


def _integers(name: str, array: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns integers of `shape`; a leading axis of 1 may be missing, as with 3-D queries."""
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
    return array


def _broadcastable(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the array with 4 axes, each of which has length 1 or that of `shape`."""
    fits = array.ndim <= 4 and all(
        size in (1, full) for size, full in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"dot_product_attention: {name} has shape {array.shape}, but the logits have shape"
            f" {shape}; pass an array that broadcasts to them."
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


# --- kernels and their gradient -------------------------------------------------------------------


_FEW_QUERIES = 64
"""Largest number of queries for which XLA may be faster; with more, its logits take too much memory."""


_KERNELS = ("pallas", "cuda")
_LIKE_CUDA = ForwardConfig(consumers=1)
"""Config of the Pallas kernel whose estimated time stands for that of the CUDA kernels."""


def _times(by_kernels: float, by_xla: float) -> Times:
    """Returns the times of XLA and of both kernels, of which the first that can run is taken."""
    times = dict.fromkeys(_KERNELS, by_kernels) | {"xla": by_xla}
    return Times(times, "Pallas and CUDA have one model, and Pallas comes first")


@dataclass(frozen=True)
class _Options:
    """Static options of a call of the kernels."""

    is_causal: bool
    window: tuple[int, int] | None
    scale: float
    soft_cap: float | None
    dropout_rate: float
    allows_tf32: bool = False
    """True if the operands are float32 and may be rounded to tf32, as XLA rounds them by default."""

    def forward_times(
        self, device: dispatch.Device, able: Collection[str], arrays: "_Arrays"
    ) -> Times:
        """Returns the times of a forward; benchmarks/LAB.md says what they were fitted to.

        XLA's passes over the logits cost less with a few queries and many keys, and in float32 for any
        work that is too small to fill the GPU.
        """
        if arrays.query.dtype == jnp.float32:
            work = self._work_of_float32(device, arrays)
            return _times(work.forward(), work.xla_forward())
        batch, queries, key_heads, groups, _ = arrays.query.shape
        keys = self.visited_keys(arrays)
        heads = batch * key_heads * groups
        by_xla = 8 + self._bytes_of_keys(arrays) / 1.2e6 + heads * queries * keys * 12 / 3e6
        shape, logits = arrays.shape(), self.logits(arrays.query, arrays.key, arrays)
        config: pallas_attention.ForwardConfig = _LIKE_CUDA
        if "pallas" in able:
            config = pallas_attention.forward_candidates(
                shape, arrays.query.dtype, logits=logits, multiprocessors=device.multiprocessors
            )[0]
        return _times(estimate.forward(shape, logits, config, device.multiprocessors), by_xla)

    def backward_estimate(
        self, device: dispatch.Device, able: Collection[str], arrays: "_Arrays"
    ) -> Estimate:
        """Returns the times of a backward, or the rule where the Pallas kernels cannot run."""
        if arrays.query.dtype == jnp.float32:
            work = self._work_of_float32(device, arrays)
            return _times(work.backward(), work.xla_backward())
        batch, queries, key_heads, groups, _ = arrays.query.shape
        keys = self.visited_keys(arrays)
        if "pallas" not in able:
            why = "up to 16 queries over 64 keys or more are faster in XLA than in CUDA"
            return Rule(("xla",), why) if queries <= 16 and keys >= 64 else None
        shape, logits = arrays.shape(), self.logits(arrays.query, arrays.key, arrays)
        heads = batch * key_heads * groups
        by_xla = 20 + self._bytes_of_keys(arrays) / 0.8e6 + heads * queries * keys * 24 / 3e6
        config = pallas_attention.backward_candidates(
            shape, arrays.query.dtype, logits=logits, multiprocessors=device.multiprocessors
        )[0]
        return _times(estimate.backward(shape, logits, config, device.multiprocessors), by_xla)

    def rule(self, device: dispatch.Device, arrays: "_Arrays") -> Rule | None:
        """Returns the rule for both directions, or None if times decide."""
        if device.multiprocessors == 0:
            return Rule(_KERNELS, "the device's number of SMs is unknown")
        if arrays.key.shape[1] == 1:
            return Rule(("xla",), "a single key, whose weight is always 1, is faster in XLA")
        if arrays.query.dtype != jnp.float32 and arrays.query.shape[1] > _FEW_QUERIES:
            why = f"XLA's logits of more than {_FEW_QUERIES} queries take too much memory"
            return Rule(_KERNELS, why)
        return None

    def _work_of_float32(self, device: dispatch.Device, arrays: "_Arrays") -> costs_float32.Work:
        batch, queries, key_heads, groups, head_size = arrays.query.shape
        _, keys, _, value_size = arrays.value.shape
        mean = float(keys)
        if self.is_causal and arrays.query_offset is not None:
            mean = max(0.5, keys - queries / 2)
        elif self.is_causal:
            mean = min(queries, keys) * (min(queries, keys) + 1) / 2
            mean = (mean + max(0, queries - keys) * keys) / max(1, queries)
        if self.window is not None:
            left, right = self.window
            mean = min(mean, 1 + left + (0 if self.is_causal else right))
        return costs_float32.Work(
            batch=batch,
            queries=queries,
            keys=keys,
            heads=key_heads * groups,
            key_heads=key_heads,
            head_size=max(head_size, value_size),
            visited_keys=mean,
            multiprocessors=device.multiprocessors,
        )

    def _bytes_of_keys(self, arrays: "_Arrays") -> float:
        """Returns the bytes of the keys and values that are visited, in 16 bits."""
        batch, _, key_heads, _, head_size = arrays.query.shape
        keys = self.visited_keys(arrays)
        return 2.0 * batch * keys * key_heads * (head_size + arrays.value.shape[3])

    def why_not(self, device: dispatch.Device, arrays: "_Arrays") -> Mapping[str, str | None]:
        """Returns why each implementation cannot run, in both directions, or None if it can."""
        call = dict(
            compute_capability=device.compute_capability,
            dtype=arrays.query.dtype,
            query_count=arrays.query.shape[1],
            key_count=arrays.key.shape[1],
            head_size=arrays.query.shape[4],
            value_size=arrays.value.shape[3],
        )
        return {
            "pallas": pallas_attention.why_unsupported(**call),
            "cuda": cuda_attention.why_unsupported(**call, allows_tf32=self.allows_tf32),
            "xla": None,
        }

    def visited_keys(self, arrays: "_Arrays") -> int:
        """Returns how many keys some of the queries may attend to by their positions."""
        queries, keys = arrays.query.shape[1], arrays.key.shape[1]
        if self.is_causal and arrays.query_offset is None:
            keys = min(keys, queries)
        if self.window is not None:
            keys = min(keys, queries + sum(self.window))
        return keys

    def logits(self, query: Any, key: Any, operands: "Operands | _Arrays") -> Logits:
        """Returns the options in the form that the Pallas kernels take."""
        mask = BlockMask(
            query_count=query.shape[1],
            key_count=key.shape[1],
            is_causal=self.is_causal,
            window=self.window,
            has_query_offset=operands.query_offset is not None,
            has_query_lengths=operands.query_lengths is not None,
            has_key_lengths=operands.key_lengths is not None,
            has_segments=operands.query_segments is not None,
            has_explicit=operands.explicit is not None,
        )
        return Logits(
            scale=self.scale,
            mask=mask,
            soft_cap=self.soft_cap,
            has_bias=operands.bias is not None,
            has_sinks=operands.sinks is not None,
            dropout_rate=self.dropout_rate,
        )


def _for_cuda(
    logits: Logits, operands: Operands
) -> tuple[cuda_attention.Operands, cuda_attention.Options]:
    """Returns operands and options in the form that the CUDA kernels take."""
    queries, keys = operands.query_segments, operands.key_segments
    bounds = {}
    if queries is not None and keys is not None:
        block = cuda_attention.SEGMENT_BLOCK
        bounds = dict(
            key_bounds=segment_blocks(queries, keys, block, block),
            query_bounds=segment_blocks(keys, queries, block, block),
        )
    left, right = logits.mask.reach()
    options = cuda_attention.Options(
        scale=logits.scale,
        soft_cap=logits.soft_cap,
        left=left,
        right=right,
        dropout_threshold=logits.dropout_threshold,
    )
    return cuda_attention.Operands(**operands._asdict(), **bounds), options


class _Arrays(NamedTuple):
    """Operands, with query heads [N] as [K, G] so that they are sharded like their key heads.

    The fields are arrays or None. The same class holds the cotangents of these arrays.
    """

    query: Any
    """[B, T, K, G, H]"""
    key: Any
    """[B, S, K, H]"""
    value: Any
    """[B, S, K, V]"""
    bias: Any = None
    """[B or 1, K or 1, G or 1, T or 1, S or 1]; `explicit` has the same axes and is int8."""
    sinks: Any = None
    """[K, G]"""
    query_lengths: Any = None
    key_lengths: Any = None
    query_offset: Any = None
    query_segments: Any = None
    key_segments: Any = None
    explicit: Any = None
    dropout_seeds: Any = None
    """[2, B, K, G]"""

    def axes(self) -> tuple[str, ...]:
        """Returns the letters of each operand's axes for `sharding`."""
        bias, explicit = _axes_of_logits(self.bias), _axes_of_logits(self.explicit)
        return ("btkgh", "bskh", "bskv", bias, "kg", "b", "b", "b", "bt", "bs", explicit, "zbkg")

    def shape(self) -> Shape:
        """Returns the sizes in the form that the Pallas kernels take."""
        batch, query_count, key_heads, groups, head_size = self.query.shape
        _, key_count, _, value_size = self.value.shape
        heads = key_heads * groups
        return Shape(batch, query_count, key_count, heads, key_heads, head_size, value_size)

    def ungrouped(self) -> tuple[jax.Array, jax.Array, jax.Array, Operands]:
        """Returns the arrays in the form that the kernels take, with query heads [N]."""
        batch, query_count, key_heads, groups, head_size = self.query.shape
        heads = key_heads * groups

        def matrix(array):
            if array is None:
                return None
            first, k, g, *last = array.shape
            return array.reshape(first, k * g, *last)

        seeds, sinks = self.dropout_seeds, self.sinks
        operands = Operands(
            bias=matrix(self.bias),
            sinks=None if sinks is None else sinks.reshape(heads),
            query_lengths=self.query_lengths,
            key_lengths=self.key_lengths,
            query_offset=self.query_offset,
            query_segments=self.query_segments,
            key_segments=self.key_segments,
            explicit=matrix(self.explicit),
            dropout_seeds=None if seeds is None else seeds.reshape(2, batch, heads),
        )
        query = self.query.reshape(batch, query_count, heads, head_size)
        return query, self.key, self.value, operands


_WHOLE = "tshvrgzBKGTS"
"""Axes that every device must hold whole: all but the batch and the key heads."""


def _axes_of_logits(array: jax.Array | None) -> str:
    """Returns the letters of [B, K, G, T, S], with other letters for axes of length 1."""
    if array is None:
        return "BKGTS"
    return "".join(
        letter.upper() if size == 1 else letter
        for letter, size in zip("bkgts", array.shape, strict=True)
    )


def _run(run: Runner, options: _Options, query, key, value, bias, sinks, mask: Mask, dropout_words):
    """Returns (output [B, T, N, V], lse [B, T, N]), computed by the kernels."""
    batch, query_count, heads, head_size = query.shape
    key_heads = key.shape[2]
    groups = heads // key_heads

    def matrix(array):
        if array is None:
            return None
        first, n, *last = array.shape
        return array.reshape(first, *((1, 1) if n == 1 else (key_heads, groups)), *last)

    seeds = None
    if dropout_words is not None:
        seeds = dropout_seeds(dropout_words, batch, heads).reshape(2, batch, key_heads, groups)
    arrays = _Arrays(
        query.reshape(batch, query_count, key_heads, groups, head_size),
        key,
        value,
        matrix(bias),
        None if sinks is None else sinks.astype(jnp.float32).reshape(key_heads, groups),
        mask.query_lengths,
        mask.key_lengths,
        mask.query_offset,
        mask.query_segments,
        mask.key_segments,
        matrix(None if mask.explicit is None else mask.explicit.astype(jnp.int8)),
        seeds,
    )
    arrays = _Arrays(*sharding.align(arrays, operand_axes=arrays.axes(), whole=_WHOLE))
    output, lse = _attention(run, options, arrays)
    output = output.reshape(batch, query_count, heads, value.shape[-1])
    lse = lse[..., :query_count].reshape(batch, heads, query_count).swapaxes(1, 2)
    if sinks is not None and mask.query_lengths is not None:
        # The kernels skip queries beyond the length entirely, including their sinks.
        lse = jnp.where(_within(mask, query_count), lse, sinks.astype(lse.dtype)[None, None])
    return output, lse


def _within(mask: Mask, query_count: int) -> jax.Array:
    """Returns [B, T, 1]: whether a query is within its length."""
    assert mask.query_lengths is not None
    return jnp.arange(query_count)[None, :, None] < mask.query_lengths[:, None, None]


class _Residuals(NamedTuple):
    arrays: _Arrays
    output: jax.Array
    """[B, T, K, G, V]"""
    lse: jax.Array
    """[B, K, G, R] with R = `saved_length(T)`; entries from T on are padding."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="dot_product_attention")
def _attention(run: Runner, options: _Options, arrays: _Arrays):
    return run(_Forward(options), *arrays)


def _attention_fwd(run: Runner, options: _Options, arrays: _Arrays):
    output, lse = run(_Forward(options), *arrays)
    output = named(output, "dot_product_attention", "output")
    lse = named(lse, "dot_product_attention", "log_sum_exp")
    return (output, lse), _Residuals(arrays, output, lse)


def _attention_bwd(run: Runner, options: _Options, saved: _Residuals, cotangents):
    doutput, dlse = cotangents
    arrays = saved.arrays
    bias, query = arrays.bias, arrays.query
    # Only an axis of the batch or of the key heads is split over devices.
    own_bias = bias is not None and bias.shape[:2] == (query.shape[0], query.shape[2])
    dquery, dkey, dvalue, dbias, dsinks = run(
        _Backward(options, own_bias), saved.output, saved.lse, doutput, dlse, *arrays
    )
    if dbias is not None:
        dbias = dbias.astype(arrays.bias.dtype)
    return (_Arrays(dquery, dkey, dvalue, dbias, dsinks),)


_attention.defvjp(_attention_fwd, _attention_bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """Computes (output [B, T, K, G, V], lse [B, K, G, R]) from the operands of _Arrays."""

    options: _Options

    @property
    def name(self) -> str:
        return "dot_product_attention forward"

    def axes(self, *operands) -> Axes:
        return Axes(_Arrays(*operands).axes(), ("btkgv", "bkgr"), _WHOLE, {"r": "t"})

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        return self.options.why_not(device, _Arrays(*operands))

    def estimate(self, device, able, *operands) -> Estimate:
        arrays, options = _Arrays(*operands), self.options
        return options.rule(device, arrays) or options.forward_times(device, able, arrays)

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        arrays = _Arrays(*operands)
        if implementation != "pallas":
            return ()
        return pallas_attention.forward_candidates(
            arrays.shape(),
            arrays.query.dtype,
            logits=self.options.logits(arrays.query, arrays.key, arrays),
            multiprocessors=device.multiprocessors,
        )

    def examples(self, random, device, *operands) -> Sequence[Any]:
        del device
        return _examples(random, _Arrays(*operands))

    def run(self, implementation, device, *operands, config=None) -> Results:
        arrays = _Arrays(*operands)
        query, key, value, optional = arrays.ungrouped()
        if implementation == "xla":
            return _in_xla(self.options, arrays)(query, key, value, optional.bias, optional.sinks)
        logits = self.options.logits(query, key, optional)
        if implementation == "cuda":
            output, lse = cuda_attention.forward(
                query,
                key,
                value,
                *_for_cuda(logits, optional),
                saved_length=saved_length(query.shape[1]),
            )
        else:
            output, lse = pallas_attention.forward(
                query,
                key,
                value,
                optional,
                logits=logits,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return _grouped(arrays, output, lse)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _over_batch(self, call, axis_size, in_batched, operands, 0)


@dataclass(frozen=True)
class _Backward:
    """Computes (dquery, dkey, dvalue, dbias, dsinks); the last two are None if the operand is absent.

    The operands are the output, the log-sum-exp, the cotangents of both, and _Arrays.
    """

    options: _Options
    own_bias: bool = False
    """True if each device owns a part of the bias. If so, dbias has the bias's dtype if kernels support
    it. Else it is float32, because devices may add up their parts."""

    @property
    def name(self) -> str:
        return "dot_product_attention backward"

    def axes(self, *operands) -> Axes:
        arrays = _Arrays(*operands[4:])
        axes = arrays.axes()
        results = tuple(
            None if array is None else letters
            for array, letters in zip(arrays[:5], axes[:5], strict=True)
        )
        return Axes(("btkgv", "bkgr", "btkgv", "bkgr", *axes), results, _WHOLE)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        return self.options.why_not(device, _Arrays(*operands[4:]))

    def estimate(self, device, able, *operands) -> Estimate:
        arrays, options = _Arrays(*operands[4:]), self.options
        return options.rule(device, arrays) or options.backward_estimate(device, able, arrays)

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        arrays = _Arrays(*operands[4:])
        if implementation != "pallas":
            return ()
        return pallas_attention.backward_candidates(
            arrays.shape(),
            arrays.query.dtype,
            logits=self.options.logits(arrays.query, arrays.key, arrays),
            multiprocessors=device.multiprocessors,
        )

    def examples(self, random, device, *operands) -> Sequence[Any]:
        arrays = _examples(random, _Arrays(*operands[4:]))
        forward = _Forward(self.options)
        implementation = Runner(None, device).choice(forward, *arrays).implementation
        output, lse = forward.run(implementation, device, *arrays)
        return output, lse, random(operands[2]), random(operands[3]), *arrays

    def run(
        self, implementation, device, output, lse, doutput, dlse, *operands, config=None
    ) -> Results:
        arrays = _Arrays(*operands)
        query, key, value, optional = arrays.ungrouped()
        batch, query_count, heads, _ = query.shape
        if implementation == "xla":
            differentiated = (query, key, value, optional.bias, optional.sinks)
            _, vjp = jax.vjp(_in_xla(self.options, arrays), *differentiated)
            dquery, dkey, dvalue, dbias, dsinks = vjp((doutput, dlse))
            return self._as_operands(arrays, dquery, dkey, dvalue, dbias, dsinks)
        logits = self.options.logits(query, key, optional)
        saved = (
            output.reshape(*query.shape[:3], -1),
            lse.reshape(batch, heads, -1),
            doutput.reshape(*query.shape[:3], -1),
            dlse.reshape(batch, heads, -1)[..., :query_count],
        )
        if implementation == "cuda":
            cuda_operands, cuda_options = _for_cuda(logits, optional)
            gradients = cuda_attention.backward(
                query, key, value, cuda_operands, *saved, cuda_options
            )
        else:
            gradients = pallas_attention.backward(
                query,
                key,
                value,
                optional,
                *saved,
                logits=logits,
                multiprocessors=device.multiprocessors,
                config=config,
                dbias_dtype=self._dbias_dtype(arrays),
            )
        return self._as_operands(arrays, *gradients)

    def _dbias_dtype(self, arrays: _Arrays) -> Any:
        has_it = arrays.bias is not None and arrays.bias.dtype in cuda_library.DTYPES
        return arrays.bias.dtype if self.own_bias and has_it else jnp.float32

    def _as_operands(self, arrays: _Arrays, dquery, dkey, dvalue, dbias, dsinks) -> Results:
        """Returns the gradients in the shapes of the arrays; that of the sinks stays float32."""
        if dbias is not None:
            dbias = dbias.reshape(arrays.bias.shape).astype(self._dbias_dtype(arrays))
        return (
            dquery.reshape(arrays.query.shape),
            dkey,
            dvalue,
            dbias,
            None if dsinks is None else dsinks.reshape(arrays.sinks.shape).astype(jnp.float32),
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _over_batch(self, call, axis_size, in_batched, operands, 4)


def _examples(random: Callable[[Any], Any], arrays: _Arrays) -> _Arrays:
    """Returns random arrays like `arrays`: of full length, in four segments, with all keys allowed."""

    def segments(ids):
        if ids is None:
            return None
        length = ids.shape[1]
        return jnp.broadcast_to(4 * jnp.arange(length, dtype=ids.dtype) // length, ids.shape)

    def lengths(counts, array):
        return None if counts is None else jnp.full_like(counts, array.shape[1])

    random_arrays = _Arrays(*(None if array is None else random(array) for array in arrays))
    explicit, offset = arrays.explicit, arrays.query_offset
    queries, keys = arrays.query.shape[1], arrays.key.shape[1]
    return random_arrays._replace(
        query_lengths=lengths(arrays.query_lengths, arrays.query),
        key_lengths=lengths(arrays.key_lengths, arrays.key),
        query_offset=None if offset is None else jnp.full_like(offset, max(0, keys - queries)),
        query_segments=segments(arrays.query_segments),
        key_segments=segments(arrays.key_segments),
        explicit=None if explicit is None else jnp.ones_like(explicit),
    )


def _grouped(arrays: _Arrays, output: jax.Array, lse: jax.Array) -> Results:
    """Reshapes [B, T, N, V] and [B, N, R] to [B, T, K, G, V] and [B, K, G, R]."""
    shape = arrays.query.shape[:4]
    batch, _, key_heads, groups = shape
    lse = lse.reshape(batch, key_heads, groups, lse.shape[-1])
    return output.reshape(*shape, output.shape[-1]), lse


def _in_xla(options: _Options, arrays: _Arrays) -> Callable[..., Results]:
    """Returns the jax.numpy forward as a function of the differentiable q, k, v, bias and sinks."""
    query, _, _, operands = arrays.ungrouped()
    query_count = query.shape[1]
    mask = Mask(
        is_causal=options.is_causal,
        window=options.window,
        query_lengths=operands.query_lengths,
        key_lengths=operands.key_lengths,
        query_offset=operands.query_offset,
        query_segments=operands.query_segments,
        key_segments=operands.key_segments,
        explicit=None if operands.explicit is None else operands.explicit != 0,
    )

    def forward(query, key, value, bias, sinks):
        output, lse = attention_xla.attention_by_seeds(
            query,
            key,
            value,
            bias,
            sinks,
            mask,
            operands.dropout_seeds,
            scale=options.scale,
            logits_soft_cap=options.soft_cap,
            dropout_rate=options.dropout_rate,
        )
        if sinks is not None and mask.query_lengths is not None:
            # The kernels' backward recognises queries beyond the length by this value alone.
            lse = jnp.where(_within(mask, query_count), lse, EMPTY_LSE)
        missing = saved_length(query_count) - query_count
        lse = jnp.pad(lse.swapaxes(1, 2), ((0, 0), (0, 0), (0, missing)))
        return _grouped(arrays, output, lse)

    return forward


def _over_batch(kernel, call, axis_size: int, in_batched, operands, first: int) -> Results | None:
    """Runs the kernel over a batch of operands; those from `first` on are _Arrays.

    The batch is merged into the axis B of the operands, unless one of them has no such axis.
    """
    arrays = _Arrays(*operands[first:])
    shared = (arrays.bias, arrays.sinks, arrays.explicit, arrays.dropout_seeds)
    if any(array is not None for array in shared):
        return None
    operands = batch_all(axis_size, in_batched, operands)
    batch = arrays.query.shape[1 if is_batched(in_batched[first]) else 0]
    folded = (None if a is None else a.reshape(axis_size * batch, *a.shape[2:]) for a in operands)
    outputs = call(kernel, *folded)
    return tuple(None if o is None else o.reshape(axis_size, batch, *o.shape[1:]) for o in outputs)


# --- cuDNN ----------------------------------------------------------------------------------------


def _why_cudnn_unsupported(device, query, key, value, mask: Mask, used) -> str | None:
    """Returns the limit exceeded of jax.nn.dot_product_attention(implementation="cudnn"), or None.

    `used` names the given optional arguments that cuDNN lacks, or of which it lacks the gradient.
    """
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return "cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or later"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {query.dtype}"
    largest = 256 if capability >= (9, 0) else 128
    (_, query_length, _, head_size), key_length = query.shape, key.shape[1]
    if head_size % 8 or head_size > largest:
        return f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {head_size}"
    if value.shape[-1] != head_size:
        return f"cuDNN is called with one head size, not {head_size} and {value.shape[-1]}"
    if 0 in (query.size, key_length):
        return "there must be queries and keys"
    # cuDNN computed a wrong gradient of the queries at 198 tokens (H200, jax 0.11.2).
    if query_length % 32 or key_length % 32:
        return (
            "cuDNN's gradient is trusted at lengths that are multiples of 32,"
            f" not {query_length} queries and {key_length} keys"
        )
    if mask.window is not None:
        right = mask.window[1]
        if right != 0 and not mask.is_causal:
            return f"cuDNN has no window to the right without is_causal, and {right} was passed"
        if query_length > key_length or mask.key_lengths is not None:
            return "cuDNN's window may leave queries without keys where there are fewer keys"
    if used:
        return f"cuDNN's attention does not have {' and '.join(used)}, or not its gradient"
    return None


def _cudnn(query, key, value, bias, mask: Mask, scale) -> jax.Array:
    """Calls cuDNN with a key for every query, and writes 0 where a query attends to nothing.

    For such a query cuDNN would return the mean of the values or NaN, and non-finite gradients. So here
    it attends to whatever is left; its result is not used and has cotangent 0. `_why_cudnn_unsupported`
    refuses windows that leave queries no key.
    """
    is_causal, window = mask.is_causal, mask.window
    if window is not None:
        # A causal mask is a window that ends at the query itself; cuDNN has no other windows.
        is_causal, window = True, (window[0], 0)
    logits_shape = (query.shape[1], key.shape[1])
    allowed = mask.allowed(*logits_shape)
    if bias is not None:
        bias = jnp.broadcast_to(bias, bias.shape[:2] + logits_shape).astype(query.dtype)
        allowed = allowed & (bias > -jnp.inf)
    attends = jnp.any(allowed, axis=-1, keepdims=True)
    if bias is not None:
        bias = jnp.where(attends, bias, jnp.zeros_like(bias))
    explicit = mask.explicit
    if explicit is not None:
        explicit = explicit | ~attends
        explicit = jnp.broadcast_to(explicit, explicit.shape[:2] + logits_shape)
    key_lengths = mask.key_lengths
    output = jax_dot_product_attention(
        query,
        key,
        value,
        bias,
        explicit,
        scale=scale,
        is_causal=is_causal,
        key_value_seq_lengths=None if key_lengths is None else jnp.maximum(key_lengths, 1),
        local_window_size=window,
        implementation="cudnn",
    )
    return jnp.where(attends.swapaxes(1, 2), output, 0)
