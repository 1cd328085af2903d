"""Attention to a KVCache in place, for 8 bits, a layer of a stack, some or unequally long sequences."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.serving import attention_to_copy, cached_attention_cuda
from jaxfused.ops.serving.append_stages import cache_axes
from jaxfused.ops.serving.example_operands import example_operands
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.kernel_gradient import gradients_in_xla, kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.runner import Axes, Results, Runner
from pallas_kernels import hopper
from pallas_kernels.attention.attention import forward_candidates
from pallas_kernels.attention.logits import Logits
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.split_keys import SplitForwardConfig

_UNEVEN_KEYS = 16384
"""Number of keys for each CTA of `split_keys` from which the CUDA C kernel reads a plain cache instead.
It divides the keys by the sequences' lengths, on the device, where `split_keys` goes by shapes alone:
77 us and 445 for one sequence of 32,768 keys beside 63 of 512 on an H200."""
NO_PALLAS = (
    "there is no Pallas kernel that reads a cache in 8 bits or a layer of a stack in place, or divides a"
    " cache by the lengths of its sequences"
)


class Arrays(NamedTuple):
    """Operands of the attention; the N query heads are axes [K, G], G for each key head.

    Devices split K, so that the query heads of one key head stay on one device.
    """

    query: Any
    """Queries [B, T, K, G, H]."""
    key: Any
    """Cached keys [B, S, K, H], or [L, B, S, K, H] of a stack; `value` has the values."""
    value: Any
    key_scale: Any
    """Scales of an 8-bit cache, float32: per token and head, like `key` without H, or per head [K]."""
    value_scale: Any
    lengths: Any
    """Number of keys of each sequence, int32 [B]; a query sees those up to itself. None if a sequence's
    last valid query is its last key, as where new tokens have just been appended."""
    offset: Any
    """Position of the first query among the keys, int32 [B]."""
    counts: Any
    """Number of valid queries among the T, int32 [B]; None for all."""
    sinks: Any
    """Attention sinks, float32 [K, G], or None."""
    sequences: Any
    """Index in the cache of each sequence, int32 [B]; None for all in order."""
    layer: Any
    """Index of the layer in a stack, int32 []; None for one layer."""

    def with_lengths(self) -> "Arrays":
        """Returns the operands with the lengths that None stands for."""
        if self.lengths is not None:
            return self
        counts = self.query.shape[1] if self.counts is None else self.counts
        return self._replace(lengths=self.offset + counts)

    def are_plain(self) -> bool:
        """Returns whether the cache is one layer of floats, and sequence b has entry b."""
        return all(x is None for x in (self.key_scale, self.sequences, self.layer))

    def may_be_uneven(self, multiprocessors: int) -> bool:
        """Returns whether one long sequence may take much longer than the others in `split_keys`.

        It has as many CTAs for each sequence, whatever the sequences' lengths.
        """
        batch, tokens, key_heads, group, size = self.query.shape
        places, value_size = self.key.shape[-3], self.value.shape[-1]
        shape = Shape(batch, tokens, places, key_heads * group, key_heads, size, value_size)
        logits = Logits(1.0, BlockMask(tokens, places, has_key_lengths=True))
        config, *_ = forward_candidates(
            shape, self.query.dtype, logits=logits, multiprocessors=multiprocessors
        )
        if batch == 1 or not isinstance(config, SplitForwardConfig):
            return False
        return places >= _UNEVEN_KEYS * config.splits


@dataclass(frozen=True)
class Options:
    """Static options of a call."""

    dtype: Any
    """Dtype of the cached numbers, even if the arrays hold their bits as integers."""
    scale: float
    soft_cap: float | None
    window: int | None
    """Number of tokens that a query sees, itself included; None for all."""

    def copied(self, arrays: Arrays, implementation: Any = None) -> jax.Array:
        """Returns the output [B, T, K, G, V] of attention to a float copy of keys and values."""
        arrays = arrays.with_lengths()
        pairs = (arrays.key, arrays.key_scale), (arrays.value, arrays.value_scale)
        key, value = (self._read(*pair, arrays) for pair in pairs)
        (output,) = attention_to_copy.attend(arrays, self, key, value, implementation)
        return output

    def _read(self, kept: jax.Array, scale: jax.Array | None, arrays: Arrays) -> jax.Array:
        def part(array: jax.Array) -> jax.Array:
            if arrays.layer is not None:
                array = lax.dynamic_index_in_dim(array, arrays.layer, 0, False)
            if arrays.sequences is not None:
                array = array.at[arrays.sequences].get(mode="clip")
            return array

        kept = part(kept)
        if scale is None:
            return kept.astype(arrays.query.dtype)
        scale = scale[None, None] if scale.ndim == 1 else part(scale)
        values = lax.bitcast_convert_type(kept, self.dtype)
        return QuantizedArray(values, scale[..., None], None, axis=-1).dequantize(
            arrays.query.dtype
        )


@dataclass(frozen=True)
class InCache:
    """Computes (output [B, T, K, G, V],) from the operands of Arrays, without a copy of the cache."""

    options: Options

    @property
    def name(self) -> str:
        return "KVCache.attend forward"

    def axes(self, *operands) -> Axes:
        arrays = Arrays(*operands)
        cache = cache_axes(arrays)
        of_heads = arrays.key_scale is not None and arrays.key_scale.ndim == 1
        scale = "k" if of_heads else cache
        others = (scale, scale, "b", "b", "b", "kg", "b", "")
        return Axes(("btkgh", cache + "h", cache + "v", *others), ("btkgv",), whole="tglcshv")

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = Arrays(*operands)
        of_cuda = cached_attention_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=arrays.query.dtype,
            kept=self.options.dtype,
            rows=arrays.query.shape[1] * arrays.query.shape[3],
            head_size=arrays.key.shape[-1],
            value_size=arrays.value.shape[-1],
            page_size=arrays.key.shape[-3],
            most_pages=1,
            is_combined=False,
        )
        return {"pallas": NO_PALLAS, "cuda": of_cuda, "xla": None}

    estimate = kernels_first("it reads the cache where it lies, and XLA makes a copy of it")

    def examples(self, random, device, *operands) -> Any:
        del device
        arrays = Arrays(*operands)
        capacity, tokens = arrays.key.shape[-3], arrays.query.shape[1]
        return example_operands(
            random,
            arrays,
            lengths=capacity,
            offset=max(0, capacity - tokens),
            counts=tokens,
            sequences=0,
            layer=0,
        )

    def run(self, implementation, device, *operands) -> Results:
        arrays, options = Arrays(*operands), self.options
        if implementation == "xla":
            return (options.copied(arrays, implementation="xla"),)
        pages = arrays.key.shape[-4]

        def merged(array: Any, axes: int) -> Any:
            """Merges layers and sequences, the axes before the last `axes` ones, into one axis."""
            return None if array is None else array.reshape(-1, *array.shape[-axes:])

        def scales(array: Any) -> Any:
            return array[None, None] if array is not None and array.ndim == 1 else merged(array, 2)

        sequences = arrays.sequences
        if sequences is not None:
            sequences = jnp.where(sequences < 0, sequences + pages, sequences)[:, None]
        output, _ = cached_attention_cuda.forward(
            arrays.query,
            cached_attention_cuda.Cache(
                merged(arrays.key, 3),
                merged(arrays.value, 3),
                scales(arrays.key_scale),
                scales(arrays.value_scale),
                sequences,
                arrays.layer,
            ),
            lengths=arrays.lengths,
            offsets=arrays.offset,
            counts=arrays.counts,
            sinks=arrays.sinks,
            heads_first=False,
            kept=options.dtype,
            layer_pages=pages,
            window=options.window,
            scale=options.scale,
            soft_cap=options.soft_cap,
            device=device,
        )
        return (output,)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return None


def reads_in_place(arrays: Arrays, options: Options, implementation: str | None) -> bool:
    """Returns whether the kernel that reads the cache in place can run, and is expected to be faster."""
    if 0 in (arrays.query.size, arrays.key.size):
        return False
    device = dispatch.current_device(arrays.query, arrays.key)
    stage = InCache(options)
    # The kernel reads all keys once for every 16 rows (queries of the heads that share a key head);
    # other implementations read them less often.
    rows = arrays.query.shape[1] * arrays.query.shape[3]
    if implementation is None and rows > cached_attention_cuda.ROWS_OF_A_READ:
        return False
    if Runner(None, device).choice(stage, *arrays).implementation != "cuda":
        return False
    if not arrays.are_plain() or implementation == "cuda":
        return True
    # On other GPUs than Hopper's, this kernel alone divides the keys of a head among CTAs.
    if hopper.why_unfit(device.compute_capability) is not None:
        return True
    spelt = stage.axes(*arrays)
    of_device = sharding.shards(arrays, operand_axes=spelt.operands, whole=spelt.whole)
    shard = Arrays(*of_device)
    if shard.may_be_uneven(device.multiprocessors):
        return True
    shape, places = shard.query.shape, shard.key.shape[-3]
    return cached_attention_cuda.clusters_win(shape, places, options.window, device)


def attend(arrays: Arrays, options: Options, implementation: str | None) -> jax.Array:
    """Returns the output [B, T, K, G, V] of attention to the cache in place."""
    stage = InCache(options)
    spelt = stage.axes(*arrays)
    aligned = sharding.align(arrays, operand_axes=spelt.operands, whole=spelt.whole)
    run = Runner(implementation, dispatch.current_device(arrays.query, arrays.key))
    return _attend(run, options, Arrays(*aligned))


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="KVCache.attend")
def _attend(run: Runner, options: Options, arrays: Arrays) -> jax.Array:
    (output,) = run(InCache(options), *arrays)
    return output


def _attend_fwd(run: Runner, options: Options, arrays: Arrays) -> tuple[jax.Array, Arrays]:
    return _attend(run, options, arrays), arrays


def _attend_bwd(run: Runner, options: Options, arrays: Arrays, doutput: jax.Array) -> Any:
    """Differentiates attention to a copy of the cache in the query's dtype."""
    del run
    return gradients_in_xla(options.copied, arrays, doutput)


_attend.defvjp(_attend_fwd, _attend_bwd)
