"""Appends new tokens to a KVCache, by XLA's scatters or by one fused kernel."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.ops.rope.rope import rope
from jaxfused.ops.serving import append_cuda
from jaxfused.ops.serving.example_operands import example_operands
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.kernel_gradient import gradients_in_xla, kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner

NO_PALLAS = "there is no Pallas kernel that appends to a cache"


class Arrays(NamedTuple):
    """Operands of an append; those after `lengths` may be None."""

    kept_key: Any
    """Cached keys [B, S, K, H], or [L, B, S, K, H] of all layers; `kept_value` has the values."""
    kept_value: Any
    key: Any
    """New keys [B, T, K, H]; `value` is [B, T, K, V]."""
    value: Any
    lengths: Any
    """Number of tokens in the cache before the new ones, int32 [B]."""
    counts: Any
    """Number of valid tokens among the T, int32 [B]; None for all."""
    sequences: Any
    """Index in the cache of each sequence, int32 [B]; None for all in order."""
    layer: Any
    """Index of the layer in a cache of all layers, int32 []; None for one layer."""
    key_scale: Any
    """Scales of an 8-bit cache, float32: per token and head, `kept_key` without H, or per head [K]."""
    value_scale: Any
    cos: Any
    """Cosines of the keys' rotation, float32 [B, T, R/2] or [T, R/2]; None without rotation."""
    sin: Any


@dataclass(frozen=True)
class Options:
    """Static options of an append."""

    dtype: Any
    """Dtype of the cached numbers, even if the cache holds their bits in another one."""
    is_ring: bool
    interleaved: bool
    scales_tokens: bool
    """True if each token and head gets a scale of its own, computed from its values."""


def cache_axes(arrays: Any) -> str:
    """Returns letters of a cache's axes [.., S, K, H] but H: layers (if any), sequences, S and K.

    The axis of sequences is "b", split over devices as the batch is, or "c" if sequences are chosen
    by index: a chosen sequence may be on any device.
    """
    layers = "" if arrays.layer is None else "l"
    return layers + ("b" if arrays.sequences is None else "c") + "sk"


def places(
    lengths: jax.Array, counts: jax.Array | None, tokens: int, capacity: int, is_ring: bool
) -> jax.Array:
    """Returns the index along the cache's axis S at which to write each new token, int32 [B, T].

    Tokens that are not written have indices from S (`capacity`) on, which a scatter drops. No two
    tokens of a sequence have the same index.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)[None]
    place = lengths[:, None] + token
    count = jnp.full_like(lengths, tokens)[:, None] if counts is None else counts[:, None]
    is_written = token < count
    if not is_ring:
        is_written &= place < capacity
    else:
        # If there are more new tokens than the ring's `capacity`, only the last `capacity` are
        # written.
        is_written &= token >= count - capacity
        place = place % capacity
    return jnp.where(is_written, place, capacity + token)


def append_xla(arrays: Arrays, options: Options) -> Results:
    """Returns the cache's keys, values and their scales per token, if any, after XLA's scatters."""
    batch, tokens = arrays.key.shape[:2]
    capacity = arrays.kept_key.shape[-3]
    every = jnp.arange(batch, dtype=jnp.int32)
    row = every if arrays.sequences is None else arrays.sequences
    place = places(arrays.lengths, arrays.counts, tokens, capacity, options.is_ring)

    def write(kept: Any, new: jax.Array | None) -> Any:
        if new is None:
            return None
        index: tuple[Any, ...] = (row[:, None], place)
        if arrays.layer is not None:
            index = (arrays.layer, *index)
        # Under Explicit axes JAX requires the result's sharding if the batch is split over devices.
        where = jax.typeof(kept).sharding if sharding.is_explicit(kept) else None
        return kept.at[index].set(new, mode="drop", unique_indices=True, out_sharding=where)

    key = arrays.key
    if arrays.cos is not None:
        rotated = rope(
            key,
            cos=arrays.cos,
            sin=arrays.sin,
            interleaved=options.interleaved,
            implementation="xla",
        )
        assert isinstance(rotated, jax.Array)
        key = rotated
    new_key, key_scale = _as_kept(key, arrays.key_scale, arrays.kept_key.dtype, options)
    new_value, value_scale = _as_kept(
        arrays.value, arrays.value_scale, arrays.kept_value.dtype, options
    )
    return (
        write(arrays.kept_key, new_key),
        write(arrays.kept_value, new_value),
        write(arrays.key_scale, key_scale),
        write(arrays.value_scale, value_scale),
    )


def _as_kept(
    new: jax.Array, scale: jax.Array | None, bits: Any, options: Options
) -> tuple[jax.Array, jax.Array | None]:
    """Returns new tokens [B, T, K, H] in the cache's dtype, and their scales [B, T, K] or None.

    With `options.scales_tokens` the scales are computed; else `scale` [K] is used, and none
    returned.
    """
    if scale is None:
        return new.astype(options.dtype), None
    given = None if options.scales_tokens else scale[None, None, :, None]
    kept = quantize(new, options.dtype, axis=-1, scale=given)
    values = lax.bitcast_convert_type(kept.values, bits)
    return values, kept.scale[..., 0] if options.scales_tokens else None


@dataclass(frozen=True)
class Append:
    """Writes new tokens into the cache's memory; returns its keys, values and scales per token."""

    options: Options

    @property
    def name(self) -> str:
        return "KVCache.append forward"

    def axes(self, *operands) -> Axes:
        arrays = Arrays(*operands)
        cache = cache_axes(arrays)
        kept = cache + "h", cache + "v"
        scale = cache if self.options.scales_tokens else "k"
        angles = "tr" if arrays.cos is not None and arrays.cos.ndim == 2 else "btr"
        tokens = ("btkh", "btkv", "b", "b", "b", "", scale, scale, angles, angles)
        results = [scale if self.options.scales_tokens else None] * 2
        return Axes((*kept, *tokens), (*kept, *results), whole="lcsthvr")

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = Arrays(*operands)
        of_cuda = append_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=arrays.key.dtype,
            value_dtype=arrays.value.dtype,
            kept=self.options.dtype,
            columns=max(arrays.key.shape[-1], arrays.value.shape[-1]),
            places=arrays.kept_key.shape[-3],
        )
        return {"pallas": NO_PALLAS, "cuda": of_cuda, "xla": None}

    estimate = kernels_first("XLA rotates, quantises and writes each array in kernels of its own")

    def examples(self, random, device, *operands) -> Any:
        del device
        return example_operands(
            random, Arrays(*operands), lengths=0, counts=0, sequences=0, layer=0
        )

    def run(self, implementation, device, *operands) -> Results:
        del device
        arrays, options = Arrays(*operands), self.options
        if implementation == "xla":
            return append_xla(arrays, options)
        batch, tokens = arrays.key.shape[:2]
        pages = 1 if arrays.layer is None else arrays.kept_key.shape[0]
        layer_pages = arrays.kept_key.shape[-4]

        def merged(array: Any, axes: int) -> Any:
            """Merges layers and sequences, the axes before the last `axes` ones, into one axis."""
            if array is None:
                return None
            return array.reshape(pages * layer_pages, *array.shape[-axes:])

        def of_rows(array: Any) -> Any:
            return array.reshape(batch * tokens, *array.shape[2:])

        def angles(array: Any) -> Any:
            return None if array is None else array.reshape(-1, array.shape[-1])

        scales = (arrays.key_scale, arrays.value_scale)
        if options.scales_tokens:
            scales = tuple(merged(scale, 2) for scale in scales)
        new = append_cuda.forward(
            append_cuda.Tokens(
                of_rows(arrays.key),
                of_rows(arrays.value),
                arrays.lengths,
                arrays.counts,
                table=None if arrays.sequences is None else arrays.sequences[:, None],
                layer=arrays.layer,
                cos=angles(arrays.cos),
                sin=angles(arrays.sin),
            ),
            append_cuda.Pages(merged(arrays.kept_key, 3), merged(arrays.kept_value, 3), *scales),
            kept=options.dtype,
            sequence_tokens=tokens,
            layer_pages=layer_pages,
            is_ring=options.is_ring,
            interleaved=options.interleaved,
        )
        kept = arrays.kept_key, arrays.kept_value
        results = [a.reshape(old.shape) for a, old in zip(new[:2], kept, strict=True)]
        if not options.scales_tokens:
            return (*results, None, None)
        old_scales = arrays.key_scale, arrays.value_scale
        return (*results, *(a.reshape(o.shape) for a, o in zip(new[2:], old_scales, strict=True)))

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return None


def append(arrays: Arrays, options: Options, implementation: str | None) -> Results:
    """Returns the results of `append_xla`, by the fastest implementation or the named one."""
    stage = Append(options)
    run = Runner(implementation, dispatch.current_device(arrays.key, arrays.kept_key))
    if run.choice(stage, *arrays).implementation == "xla":
        return append_xla(arrays, options)
    spelt = stage.axes(*arrays)
    aligned = sharding.align(arrays, operand_axes=spelt.operands, whole=spelt.whole)
    return _append(run, options, Arrays(*aligned))


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="KVCache.append")
def _append(run: Runner, options: Options, arrays: Arrays) -> Results:
    return run(Append(options), *arrays)


def _append_fwd(run: Runner, options: Options, arrays: Arrays) -> tuple[Results, Arrays]:
    return _append(run, options, arrays), arrays


def _append_bwd(run: Runner, options: Options, arrays: Arrays, dresults: Any) -> Any:
    """Returns the gradients of XLA's scatters."""
    del run
    return gradients_in_xla(lambda arrays: append_xla(arrays, options), arrays, dresults)


_append.defvjp(_append_fwd, _append_bwd)
