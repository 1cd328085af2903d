"""KVCache: keys and values of the tokens that a model has read, written in place and attended to."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.attention.attention import AttentionImplementation, dot_product_attention
from jaxfused.ops.rope.rope_tables import check_tables
from jaxfused.ops.serving import append_stages, cache_stages, new_tokens
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    as_dtype,
    as_int32,
    check_count,
    check_floating,
    check_shape,
    python_numbers,
    readable_values,
)
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.serialization import serializable
from jaxfused.runtime.shapes import merge_axes, split_axis

_LONGEST = 2**29
"""Longest window, in tokens, with which positions fit into 32 bits."""
_QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of the tokens that each sequence of a batch has read, for one layer or a stack.

    A step of a model, over T new tokens of each sequence (one while decoding, a chunk of a prompt, or a
    whole prompt), is for every layer

        cache = cache.append(key, value, layer=i)
        attended = cache.attend(query, layer=i)

    and then once `cache = cache.advance(T)`. Token t of sequence b stands at position lengths[b] + t.
    Values beyond a sequence's length are never used, not even NaN, and later tokens overwrite
    them: to drop tokens, or a sequence, make its length smaller by `dataclasses.replace`.

    The cache is a pytree. Where `jax.jit` is given it with `donate_argnums`, and in the carry of
    `lax.scan`, `lax.fori_loop` and `lax.while_loop`, it is written in place and never copied. A scan
    over layers therefore has the whole stack in its carry and passes `layer`; `xs` would be copied.
    For a prompt, kernels read a copy of the layer's slice of a stack; a tuple of caches, one a layer,
    needs no copy.
    Keys and values that are stored in 8 bits have no gradient: train with a cache of floats.

    Letters: B sequences, S places for each, K key heads, H head size, V head size of the values.

    Attributes:
      key: [B, S, K, H], or [L, B, S, K, H] for L layers, in float32, bfloat16, float16 or int8; or uint8
        with the bits of float8, which XLA would copy to write into. Those of 8 bits are multiplied by
        `key_scale`.
      value: [B, S, K, V] or [L, B, S, K, V], of the keys' dtype.
      lengths: [B] int32, the tokens of each sequence that have been read before this step.
      starts: [B] integers, the first token of each sequence, where prompts are padded on the left; None
        for 0. No query sees tokens before it.
      key_scale: float32, [B, S, K] or [L, B, S, K] for a scale of each token and head, which `append`
        chooses; or [K] or [L, K] for one of each head, which are given. None where nothing is quantised.
      value_scale: the same for the values.
      window: how many tokens a query sees, itself included; the cache is then a ring, in which token p
        lies at place p % S. None for all.
      float8: format of uint8 keys and values, "float8_e4m3fn" or "float8_e5m2"; None for others.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> cache = jaxfused.KVCache.zeros(batch=2, length=16, key_heads=2, head_size=8, dtype="float32")
      >>> def step(cache, query, key, value):
      ...     cache = cache.append(key, value)
      ...     return cache.advance(query.shape[1]), cache.attend(query)
      >>> query, key, value = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8)), jnp.ones((2, 5, 2, 8))
      >>> cache, attended = jax.jit(step, donate_argnums=0)(cache, query, key, value)
      >>> attended.shape, cache.lengths
      ((2, 5, 4, 8), Array([5, 5], dtype=int32))

    Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022,
    https://arxiv.org/abs/2211.05102; rings: Beltagy et al., "Longformer", 2020,
    https://arxiv.org/abs/2004.05150
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    starts: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    window: int | None = field(default=None, metadata={"static": True})
    float8: str | None = field(default=None, metadata={"static": True})

    @classmethod
    @python_numbers
    def zeros(
        cls,
        *,
        batch: int,
        length: int,
        key_heads: int,
        head_size: int,
        value_size: int | None = None,
        layers: int | None = None,
        dtype: Any = jnp.bfloat16,
        key_scale: jax.Array | None = None,
        value_scale: jax.Array | None = None,
        starts: jax.Array | None = None,
        window: int | None = None,
    ) -> Self:
        """Returns an empty cache.

        Args:
          batch: B.
          length: S, the places of each sequence. With a window, window + T - 1 for steps of up to T
            tokens.
          key_heads: K.
          head_size: H.
          value_size: V; None for H.
          layers: L; None for one layer, without that axis.
          dtype: of keys and values. int8, float8_e4m3fn and float8_e5m2 have a scale of each token and
            head, unless scales are given.
          key_scale: [K] or [L, K], with `value_scale`: a scale of each head, such as its largest
            magnitude / 448 (float8_e4m3fn) or / 127 (int8). Larger values saturate.
          value_scale: likewise.
          starts: [B], where prompts are padded on the left.
          window: how many tokens a query sees, with its own.

        Raises:
          ValueError: sizes or dtypes do not fit.
        """
        sizes = dict(batch=batch, length=length, key_heads=key_heads, head_size=head_size)
        sizes["value_size"] = value_size = head_size if value_size is None else value_size
        optional = {"layers": layers, "window": window}
        sizes |= {name: size for name, size in optional.items() if size is not None}
        for name, size in sizes.items():
            check_count("KVCache", name, size)
        if window is not None and window > length:
            raise ValueError(
                f"KVCache: window is {window}, but there are {length} places for its tokens; pass a"
                f" length of at least {window}."
            )
        dtype = jnp.dtype(as_dtype("KVCache", "dtype", dtype))
        is_quantized = dtype.name in _QUANTIZED
        if not is_quantized and dtype.name not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(
                f"KVCache: dtype is {dtype}, but keys and values are kept in float32, bfloat16 or"
                f" float16, or in {', '.join(_QUANTIZED)} with scales; pass one of these."
            )
        scales: Any = (key_scale, value_scale)
        if (key_scale is None) != (value_scale is None) or (
            key_scale is not None and not is_quantized
        ):
            raise ValueError(
                "KVCache: key_scale and value_scale are given together, to a dtype of 8 bits; pass both"
                f" with one of {', '.join(_QUANTIZED)}, or none."
            )
        stack = () if layers is None else (layers,)
        places = (*stack, batch, length, key_heads)
        if is_quantized and key_scale is None:
            scales = (jnp.zeros(places, jnp.float32), jnp.zeros(places, jnp.float32))
        elif is_quantized:
            scales = tuple(jnp.asarray(scale, jnp.float32) for scale in scales)
            for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
                check_shape("KVCache", name, scale, (*stack, key_heads), "each head has a scale")
                known = readable_values(scale)
                if known is not None and not (np.isfinite(known) & (known > 0)).all():
                    raise ValueError(
                        f"KVCache: {name} is {known.tolist()}, but tokens are divided by it; pass"
                        " positive, finite scales."
                    )
        if starts is not None:
            check_shape(
                "KVCache", "starts", as_int32(starts), (batch,), f"there are {batch} sequences"
            )
            starts = _integers("starts", starts)
        float8 = dtype.name if dtype.name.startswith("float8") else None
        kept_dtype = jnp.uint8 if float8 else dtype
        return cls(
            jnp.zeros((*places, head_size), kept_dtype),
            jnp.zeros((*places, value_size), kept_dtype),
            jnp.zeros(batch, jnp.int32),
            starts,
            scales[0],
            scales[1],
            window=window,
            float8=float8,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the keys and values."""
        return jnp.dtype(self.float8 or self.key.dtype)

    @property
    def capacity(self) -> int:
        """Places of each sequence, S."""
        return self.key.shape[-3]

    def positions(self, tokens: int) -> jax.Array:
        """Returns the positions of the next `tokens` tokens, [B, tokens], for `jaxfused.rope`.

        They count from each sequence's start; those of padding before it are negative.
        """
        if not isinstance(tokens, int | np.integer) or tokens < 0:
            raise ValueError(
                f"KVCache.positions: tokens is {tokens!r}, but it is the number of new tokens; pass an"
                " int of 0 or more."
            )
        self = self._of_jax()
        positions = self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        return positions if self.starts is None else positions - self.starts[:, None]

    @python_numbers
    def append(
        self,
        key: jax.Array,
        value: jax.Array,
        *,
        layer: int | jax.Array | None = None,
        counts: jax.Array | None = None,
        batch_index: jax.Array | None = None,
        cos: jax.Array | None = None,
        sin: jax.Array | None = None,
        interleaved: bool = False,
        implementation: dispatch.Implementation | None = None,
    ) -> Self:
        """Returns the cache with T new tokens of each sequence written; `advance` updates the lengths.

        Args:
          key: [B, T, K, H] of any float dtype, rotated already unless `cos` is given; it is rounded or
            quantised to the cache's.
          value: [B, T, K, V].
          layer: which layer of a stack.
          counts: [B] integers, how many of the T tokens each sequence has, the others being padding on
            the right; None for all.
          batch_index: [B'] integers, the sequences of the cache that the B' of `key` and `value` are;
            None for all in order. Each comes at most once among those with new tokens: one that comes
            twice is an error where the numbers can be read (NumPy's, or those of a CPU, outside of jit),
            and elsewhere it is undefined which one's tokens are written.
          cos: [T, R/2] or [B, T, R/2] with `sin`: the keys are rotated here, as `jaxfused.rope` does.
          sin: like `cos`.
          interleaved: as in `jaxfused.rope`.
          implementation: None for the fastest that can run, or "cuda", "xla". "cuda" does all of it in
            one kernel.

        Tokens past the last place of a cache that is no ring are dropped: nothing else is overwritten.

        Raises:
          ValueError: shapes do not fit, or a sequence comes twice or is none of the cache's.
        """
        self = self._of_jax()
        key, value = as_arrays(key, value)
        self._check_layer(layer)
        lengths, given = self._lengths(key, counts, batch_index)
        self._check_sequences("append", counts, batch_index)
        batch, tokens = key.shape[:2]
        what = f"the cache has {self.key.shape[-2]} key heads"
        for name, new, kept in (("key", key, self.key), ("value", value, self.value)):
            check_shape("KVCache.append", name, new, (batch, tokens, *kept.shape[-2:]), what)
        if cos is not None or sin is not None:
            cos, sin = check_tables("KVCache.append", key.shape, *as_arrays(cos, sin))
            if cos.ndim == key.ndim:
                raise ValueError(
                    f"KVCache.append: cos has shape {cos.shape}, with angles of each head, but here all"
                    " heads share them; rotate the keys by jaxfused.rope before."
                )
            cos, sin = (table.astype(jnp.float32) for table in (cos, sin))
        scales_tokens = self.key_scale is not None and self._scales_tokens(self.key_scale)
        written = append_stages.append(
            append_stages.Arrays(
                self.key,
                self.value,
                key,
                value,
                lengths,
                None if counts is None else given,
                None if batch_index is None else _integers("batch_index", batch_index),
                None if layer is None else as_int32(layer),
                *self._scales(layer),
                cos,
                sin,
            ),
            append_stages.Options(
                self.dtype, self.window is not None, bool(interleaved), scales_tokens
            ),
            implementation,
        )
        names = ("key", "value", "key_scale", "value_scale")
        changed: dict[str, Any] = dict(zip(names, written, strict=True))
        return replace(self, **{name: new for name, new in changed.items() if new is not None})

    @python_numbers
    def attend(
        self,
        query: jax.Array,
        *,
        layer: int | jax.Array | None = None,
        counts: jax.Array | None = None,
        batch_index: jax.Array | None = None,
        scale: float | jax.Array | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        tree_mask: jax.Array | None = None,
        alibi_slopes: jax.Array | None = None,
        batch_invariant: bool = False,
        implementation: AttentionImplementation | None = None,
    ) -> jax.Array:
        """Attends from T new tokens, which have been appended, to all tokens up to each of them.

        Layers that share a cache pass the same `layer`, and only one of them appends.

        Args:
          query: [B, T, N, H], of any float dtype; neighbouring query heads share a key head.
          layer: as for `append`, and so are the next two.
          counts: queries beyond their sequence's count give 0.
          batch_index: keys and values of these sequences are copied for the call, unless the kernel
            reads the cache in place: see `implementation`.
          scale: the other arguments are those of `jaxfused.dot_product_attention`.
          local_window_size: not with the cache's own `window`.
          logits_soft_cap: as there.
          sinks: as there.
          tree_mask: [B, T, T] bool, which of the T new tokens each of them sees, as where several
            continuations are tried at once; itself and its ancestors then. All see the tokens before
            them. A token's position, for windows and ALiBi, counts the new ones that it sees. None for
            the new tokens up to itself.
          alibi_slopes: [N]: a key's logit is less by its head's slope times its distance.
          batch_invariant: whether a sequence's output has the same bits whatever the lengths and tokens
            of the other sequences. The kernel that reads the cache in place does not have that.
          implementation: as there. None and "cuda" read a cache in place if heads have 64 or 128
            features and up to 16 queries share a key head; without it a cache of 8 bits or a layer of a
            stack is copied in the query's dtype. On Hopper GPUs None does so for one layer of floats
            only where several sequences have long caches: the kernel divides its work by their lengths.

        Returns:
          [B, T, N, V], of the query's dtype.

        Raises:
          ValueError: shapes do not fit, a sequence is none of the cache's, or a ring has overwritten
            tokens that the first queries see.
        """
        self, (query,) = self._of_jax(), as_arrays(query)
        self._check_layer(layer)
        lengths, given = self._lengths(query, counts, batch_index)
        self._check_sequences("attend", counts, batch_index)
        check_floating("KVCache.attend", {"query": query})
        tokens = query.shape[1]
        tree_mask, alibi_slopes = new_tokens.check("KVCache.attend", query, tree_mask, alibi_slopes)
        options: dict[str, Any] = dict(scale=scale, logits_soft_cap=logits_soft_cap, sinks=sinks)
        if counts is not None:
            options["query_seq_lengths"] = given
        if self.window is None:
            options |= self._mask(lengths, given, tokens, batch_index)
            options["local_window_size"] = local_window_size
            if tree_mask is not None:
                options |= self._tree_mask(tree_mask, lengths, local_window_size)
            if alibi_slopes is not None:
                options |= new_tokens.alibi_options(alibi_slopes, tree_mask, lengths)
        else:
            self._check_ring(tokens, local_window_size)
            if tree_mask is not None or alibi_slopes is not None:
                raise ValueError(
                    "KVCache.attend: tree_mask or alibi_slopes was passed, but a ring's places are in no"
                    " order; make the cache without window, and pass local_window_size."
                )
            options |= self._ring_mask(lengths, given, tokens, batch_index)
        is_plain = "mask" not in options and "score_mod" not in options and self.starts is None
        if is_plain and not batch_invariant:
            in_place = self._in_place(query, options, layer, batch_index, implementation)
            if in_place is not None:
                return in_place
        kept = (self.key, self.key_scale), (self.value, self.value_scale)
        key, value = (self._read(*x, layer, batch_index, query.dtype) for x in kept)
        if self.window is not None and "mask" in options:
            # Values that no query sees may be NaN, and an attention weight of 0 times NaN is NaN.
            is_seen = jnp.any(options["mask"], axis=(1, 2))[:, :, None, None]
            key, value = (jnp.where(is_seen, x, 0) for x in (key, value))
        attended = dot_product_attention(
            query, key, value, implementation=implementation, **options
        )
        assert isinstance(attended, jax.Array)
        return attended

    def _in_place(
        self,
        query: jax.Array,
        options: dict[str, Any],
        layer: Any,
        batch_index: Any,
        implementation: str | None,
    ) -> jax.Array | None:
        """Returns the output of the kernel that reads the cache in place, or None if it cannot run."""
        if implementation not in (None, "cuda"):
            return None
        device = dispatch.current_device(query, self.key)
        heads, size = query.shape[2:]
        key_heads = self.key.shape[-2]
        window, scale, cap = (
            options.get(name) for name in ("local_window_size", "scale", "logits_soft_cap")
        )
        sinks = options["sinks"]
        sides = window if isinstance(window, tuple | list) else (window, window)
        # Invalid arguments are passed to dot_product_attention, whose error names the rule.
        fits: bool = key_heads > 0 and heads % key_heads == 0 and size == self.key.shape[-1]
        fits &= window is None or all(isinstance(side, int) and side >= 0 for side in sides)
        fits &= scale is None or (isinstance(scale, int | float) and math.isfinite(scale))
        fits &= cap is None or (isinstance(cap, int | float) and 0 < cap < math.inf)
        fits &= sinks is None or jnp.shape(sinks) == (heads,)
        if device.platform != "gpu" or not fits:
            return None
        grouped = (key_heads, heads // key_heads)
        offset, lengths = options.get("query_offset"), options["key_value_seq_lengths"]
        arrays = cache_stages.Arrays(
            split_axis(query, 2, *grouped),
            self.key,
            self.value,
            *self._scales(layer),
            lengths if offset is None else None,
            # In a ring, whose places are in no order, a single query sees all that hold tokens.
            lengths - 1 if offset is None else offset,
            options.get("query_seq_lengths"),
            None if sinks is None else jnp.asarray(sinks).astype(jnp.float32).reshape(grouped),
            None if batch_index is None else _integers("batch_index", batch_index),
            None if layer is None else as_int32(layer),
        )
        of_call = cache_stages.Options(
            self.dtype,
            size**-0.5 if scale is None else float(scale),
            None if cap is None else float(cap),
            None if window is None else min(sides[0] + 1, _LONGEST),
        )
        if not cache_stages.reads_in_place(arrays, of_call, implementation):
            return None
        attended = cache_stages.attend(arrays, of_call, implementation)
        return merge_axes(attended, 2)

    @python_numbers
    def advance(self, counts: int | jax.Array, batch_index: jax.Array | None = None) -> Self:
        """Returns the cache after a step of `counts` tokens of each sequence, a number or [B].

        A sequence that comes several times in `batch_index` is advanced as often.
        """
        self, counts = self._of_jax(), _integers("counts", counts)
        index = None if batch_index is None else _integers("batch_index", batch_index)
        if counts.ndim:
            sequences = (self.lengths if index is None else index).shape
            what = f"there are {sequences} sequences"
            check_shape("KVCache.advance", "counts", counts, sequences, what)
        if index is None:
            return replace(self, lengths=self.lengths + counts)
        lengths = _placed(
            lambda lengths, index, counts: lengths.at[index].add(counts, mode="drop"),
            lambda lengths, index, counts: lengths,
            *(self.lengths, index, counts),
        )
        return replace(self, lengths=lengths)

    # --- places and masks -------------------------------------------------------------------------

    def _of_jax(self) -> Self:
        """Returns the cache with JAX's arrays, in place of NumPy's of a checkpoint, or of lists."""
        names = ("key", "value", "key_scale", "value_scale")
        arrays = as_arrays(*(getattr(self, name) for name in names))
        starts = None if self.starts is None else as_int32(self.starts)
        kept: dict[str, Any] = dict(zip(names, arrays, strict=True))
        return replace(self, lengths=_integers("lengths", self.lengths), starts=starts, **kept)

    def _check_layer(self, layer: Any) -> None:
        if (layer is None) != (self.key.ndim == 4):
            has = "no stack of layers" if layer is not None else f"{self.key.shape[0]} layers"
            raise ValueError(
                f"KVCache: layer is {layer}, but the cache has {has}; pass the layer's number for a"
                " stack made by zeros(layers=...), and none otherwise."
            )
        if layer is None:
            return
        layers = self.key.shape[0]
        is_number = jnp.ndim(layer) == 0 and jnp.issubdtype(jnp.result_type(layer), jnp.integer)
        known = readable_values(layer) if isinstance(layer, jax.Array) else layer
        if not is_number or (known is not None and not -layers <= known < layers):
            raise ValueError(
                f"KVCache: layer is {layer}, but the cache has {layers} layers; pass an integer from 0"
                f" to {layers - 1}."
            )

    def _check_sequences(self, method: str, counts: Any, batch_index: Any) -> None:
        """Checks, if the values are known, the sequences with new tokens.

        The cache must have them, and `append` must have each of them once.
        """
        if batch_index is None:
            return
        index, new = (
            readable_values(x) if isinstance(x, jax.Array) else np.asarray(x)
            for x in (batch_index, 1 if counts is None else counts)
        )
        if index is None or new is None:
            return
        index, batch = index[np.broadcast_to(new > 0, index.shape)], self.lengths.shape[0]
        if index.size and not -batch <= index.min() <= index.max() < batch:
            raise ValueError(
                f"KVCache.{method}: batch_index is {batch_index}, but the cache has {batch} sequences;"
                f" pass numbers from 0 to {batch - 1}, or counts of 0 for the others."
            )
        if method == "attend":
            return
        index = np.where(index < 0, index + batch, index)
        sequences, times = np.unique(index, return_counts=True)
        twice = sequences[times > 1]
        if twice.size:
            raise ValueError(
                f"KVCache.append: batch_index is {batch_index}, with tokens of sequence {twice[0]}"
                " more than once, which would have the same places; pass each sequence once, or counts"
                " of 0 for the others."
            )

    def _lengths(self, new: Any, counts: Any, batch_index: Any) -> tuple[jax.Array, jax.Array]:
        """Returns each sequence's length before the step and its number of new tokens, both [B]."""
        if new.ndim != 4:
            raise ValueError(
                f"KVCache: new tokens have shape {new.shape}, but they have 4 axes; pass (batch, length,"
                " heads, head size)."
            )
        batch, tokens = new.shape[:2]
        lengths = self._of(self.lengths, batch_index)
        check_shape(
            "KVCache", "lengths", lengths, (batch,), f"there are {batch} sequences of new tokens"
        )
        if counts is None:
            return lengths, jnp.full_like(lengths, tokens)
        counts = _integers("counts", counts)
        check_shape(
            "KVCache", "counts", counts, (batch,), f"there are {batch} sequences of new tokens"
        )
        return lengths, jnp.clip(counts, 0, tokens)

    def _mask(
        self, lengths: jax.Array, counts: jax.Array, tokens: int, batch_index: Any
    ) -> dict[str, Any]:
        """Returns the options of attention with which each token attends to those up to itself."""
        mask: dict[str, Any] = dict(
            # A single token sees all tokens, so that it needs no causal mask.
            is_causal=tokens > 1,
            query_offset=lengths,
            key_value_seq_lengths=lengths + counts,
        )
        if self.starts is not None:
            place = jnp.arange(self.capacity, dtype=jnp.int32)[None]
            is_token = place >= self._of(self.starts, batch_index)[:, None]
            # Tokens are in segment 1. Padding before them is in segment 0, which has no queries.
            mask["key_value_segment_ids"] = is_token.astype(jnp.int32)
            mask["query_segment_ids"] = jnp.ones((lengths.shape[0], tokens), jnp.int32)
        return mask

    def _tree_mask(
        self, tree: jax.Array, lengths: jax.Array, window: int | tuple[int, int] | None
    ) -> dict[str, Any]:
        left = window[0] if isinstance(window, tuple | list) else window
        mask = new_tokens.tree_options(tree, lengths, self.capacity, left)
        return dict(is_causal=False, local_window_size=None, **mask)

    def _ring_mask(
        self, lengths: jax.Array, counts: jax.Array, tokens: int, batch_index: Any
    ) -> dict[str, Any]:
        capacity, total, window = self.capacity, lengths + counts, self.window
        assert window is not None
        if tokens == 1 and window == capacity and self.starts is None:
            # During the first round through the ring, only the written places hold tokens.
            return dict(key_value_seq_lengths=jnp.minimum(total, capacity))
        last = total[:, None] - 1
        # Position of the token that each place holds; negative if the place is empty.
        held = last - (last - jnp.arange(capacity, dtype=jnp.int32)[None]) % capacity
        position = lengths[:, None, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :, None]
        first = 0 if self.starts is None else self._of(self.starts, batch_index)[:, None]
        sees = (held[:, None] <= position) & (held[:, None] > position - window)
        return dict(mask=(sees & (held >= first)[:, None])[:, None])

    def _check_ring(self, tokens: int, local_window_size: Any) -> None:
        assert self.window is not None
        if local_window_size is not None:
            raise ValueError(
                f"KVCache.attend: local_window_size is {local_window_size}, but the cache has a window"
                f" of its own, of {self.window} tokens; leave it out."
            )
        if tokens > self.capacity - self.window + 1:
            raise ValueError(
                f"KVCache.attend: query has {tokens} tokens, which overwrite tokens in {self.capacity}"
                f" places that the first of them see in their window of {self.window}; make the cache"
                f" with a length of at least {self.window + tokens - 1}, pass fewer tokens a step, or"
                " attend from a whole prompt to its own keys by dot_product_attention."
            )

    # --- cached arrays ----------------------------------------------------------------------------

    def _of(self, array: jax.Array, batch_index: Any) -> jax.Array:
        if batch_index is None:
            return array
        index = _integers("batch_index", batch_index)
        return _placed(
            lambda array, index: array.at[index].get(mode="clip"),
            lambda array, index: P(*index, *array[1:]),
            *(array, index),
        )

    def _scales_tokens(self, scale: jax.Array) -> bool:
        """Returns whether `scale` has one number per token and head, the shape of `key` without H.

        Otherwise it has one number per head.
        """
        return scale.ndim == self.key.ndim - 1

    def _scales(self, layer: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the scales of keys and of values, each None for a cache of floats.

        Of scales per head, only those of `layer` are returned; scales per token and head keep their
        axis of layers.
        """

        def of(scale: jax.Array | None) -> jax.Array | None:
            if scale is None or layer is None or self._scales_tokens(scale):
                return scale
            return _of_layer(scale, layer)

        return of(self.key_scale), of(self.value_scale)

    def _read(
        self, kept: jax.Array, scale: jax.Array | None, layer: Any, batch_index: Any, dtype: Any
    ) -> jax.Array:
        """Returns keys or values [B, S, K, H] of a layer in the query's dtype."""
        if layer is not None:
            kept = _of_layer(kept, layer)
        kept = self._of(kept, batch_index)
        if scale is None:
            return kept.astype(dtype)
        of_heads = not self._scales_tokens(scale)
        if layer is not None:
            scale = _of_layer(scale, layer)
        scale = scale[None, None] if of_heads else self._of(scale, batch_index)
        kept = lax.bitcast_convert_type(kept, self.dtype)
        return QuantizedArray(kept, scale[..., None], None, axis=-1).dequantize(dtype)


def _placed(function: Callable[..., jax.Array], spec: Any, *arrays: jax.Array) -> jax.Array:
    """Applies a function that indexes arrays along axes that Explicit mesh axes may split.

    `spec` returns the result's PartitionSpec, given those of the arrays.
    """
    if not sharding.is_explicit(*arrays):
        return function(*arrays)
    place = spec(*(jax.typeof(array).sharding.spec for array in arrays))
    return jax.sharding.auto_axes(function, out_sharding=place)(*arrays)


def _of_layer(array: jax.Array, layer: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(array, layer, 0, False)


def _integers(name: str, value: Any) -> jax.Array:
    """Returns an argument as int32 after a check that it holds integers."""
    array = as_int32(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"KVCache: {name} has dtype {array.dtype}, but it holds integers; pass"
            f" {name}.astype(jnp.int32)."
        )
    return array
