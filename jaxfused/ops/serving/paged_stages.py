"""Attention to pages in place, by kernels that read through the page table."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.serving import attention_to_copy, cached_attention_cuda
from jaxfused.ops.serving.example_operands import example_operands
from jaxfused.ops.serving.pages import Layout, Pools, are_own, values_and_scale
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.kernel_gradient import gradients_in_xla, kernel_gradient
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.runner import Axes, Results, Runner
from pallas_kernels.attention import paged
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask

_PAGE_OF_A_COPY = 128
"""Smallest page, in tokens, at which the Pallas kernel comes first: with pages of 64 it takes 1.03 to
1.06 of CUDA C's time for 16 and 64 sequences (0.98 for one)."""


class More(NamedTuple):
    """Optional operands of a call."""

    sinks: Any = None
    """Attention sinks [N]."""
    tree: Any = None
    slopes: Any = None
    """Slopes of ALiBi [N]."""


NO_MORE = More()


class Arrays(NamedTuple):
    """Operands of a call. The N query heads are axes [K, G], G of each key head, to shard alike."""

    query: Any
    """Queries [B, T, K, G, H]."""
    key: Any
    """Pool of keys in its layout; `value` is the pool of values. See `Pools`."""
    value: Any
    table: Any
    """Page table, int32 [B, n]."""
    lengths: Any
    """Number of keys of each sequence, int32 [B]."""
    offset: Any
    """Position of the first query among the keys, int32 [B]."""
    counts: Any
    """Number of valid queries among the T, int32 [B]; None for all."""
    sinks: Any
    """Attention sinks, float32 [K, G], or None."""
    key_scale: Any = None
    """Scales of 8-bit keys, float32 [K, P, S], or None; `value_scale` has those of the values."""
    value_scale: Any = None
    tree: Any = None
    """Mask [B, T, T] of the new tokens that each new token attends to; None for those up to itself."""
    slopes: Any = None
    """Slopes of ALiBi, float32 [K, G], or None."""

    def pages(self) -> paged.Pages:
        """Returns the pages as the Pallas kernel takes them."""
        return paged.Pages(self.key, self.value, self.table, self.key_scale, self.value_scale)

    def pools(self, layout: Layout) -> Pools:
        """Returns the pages as `Pools`, of which XLA makes a copy to attend to."""
        if self.key_scale is None:
            return Pools(self.key, self.value, layout)

        def quantized(values: Any, scale: Any) -> QuantizedArray:
            scale = scale if layout == "KPSH" else jnp.moveaxis(scale, 0, -1)
            return QuantizedArray(values, scale[..., None], None, axis=-1)

        key, value = quantized(self.key, self.key_scale), quantized(self.value, self.value_scale)
        return Pools(key, value, layout)


@dataclass(frozen=True)
class Options:
    """Static options of a call."""

    layout: Layout
    scale: float
    soft_cap: float | None
    window: int | None
    """Number of tokens that each query sees, itself included; None for all."""
    batch_invariant: bool = False
    """True if no sequence's result may depend on the other sequences."""
    returns_lse: bool = False
    """True if results have the log-sum-exp of the logits [B, T, K, G] after the output."""

    def gathered(
        self, arrays: Arrays, pools: Pools | None = None, implementation: Any = None
    ) -> Results:
        """Returns the results of InPages by attention to a copy of the pages of `pools`.

        Without `pools`, these are the pages of `arrays`.
        """
        pools = arrays.pools(self.layout) if pools is None else pools
        key, value = pools.read(arrays.table, arrays.lengths, arrays.query.dtype)
        return attention_to_copy.attend(arrays, self, key, value, implementation)


@dataclass(frozen=True)
class InPages:
    """Computes (output [B, T, K, G, V],) from the operands of Arrays, without a copy of the pages.

    If the options ask for it, the log-sum-exp [B, T, K, G] comes after the output.
    """

    options: Options

    @property
    def name(self) -> str:
        return "paged_attention forward"

    def axes(self, *operands) -> Axes:
        pools, whole = ("kpsh", "kpsv"), "tgpshvn"
        if self.options.layout == "PSKH":
            pools = ("pskh", "pskv")
        if Arrays(*operands).value is None:
            # In a pool of both, keys and values alternate along the axis of heads, so devices do
            # not split it.
            pools, whole = ("psch", "pskv"), whole + "ck"
        operands = ("btkgh", *pools, "bn", "b", "b", "b", "kg", "kps", "kps", "btt", "kg")
        return Axes(operands, ("btkgv", "btkg") if self.options.returns_lse else ("btkgv",), whole)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = Arrays(*operands)
        sizes = arrays.pages().sizes(self.options.layout)
        of_pallas = paged.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=arrays.query.dtype,
            query_count=arrays.query.shape[1],
            sizes=sizes,
        )
        query = arrays.query
        of_cuda = cached_attention_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=query.dtype,
            kept=sizes.kept_dtype,
            rows=query.shape[1] * query.shape[3],
            head_size=sizes.head_size,
            value_size=sizes.value_size,
            page_size=sizes.page_size,
            most_pages=sizes.most_pages,
            is_combined=sizes.is_combined,
        )
        if arrays.tree is not None or arrays.slopes is not None:
            of_pallas = of_cuda = "no kernel over pages has a tree_mask or alibi_slopes"
        elif self.options.batch_invariant:
            of_cuda = "it divides the keys of all sequences together, and batch_invariant=True"
        if self.options.returns_lse:
            of_pallas = of_pallas or "the Pallas kernel over pages returns no log-sum-exp"
        return {"pallas": of_pallas, "cuda": of_cuda, "xla": None}

    def estimate(self, device, able, *operands) -> Estimate:
        """Returns which kernel is faster, as measured on an H200 with 16 sequences of 8,192 keys."""
        del device, able
        arrays = Arrays(*operands)
        sizes = arrays.pages().sizes(self.options.layout)
        _, queries, _, groups, *_ = arrays.query.shape
        if queries * groups > cached_attention_cuda.ROWS_OF_A_READ:
            return Rule(
                ("pallas", "cuda"), "CUDA C reads the keys again for each 16 queries of a head"
            )
        if sizes.has_scales:
            return Rule(("cuda", "pallas"), "CUDA C widens 8 bits in registers")
        if sizes.page_size < _PAGE_OF_A_COPY:
            return Rule(
                ("cuda", "pallas"), "the copies of small pages are what the other kernel waits for"
            )
        return Rule(("pallas", "cuda"), "both read the pages where they lie, and XLA copies them")

    def examples(self, random, device, *operands) -> Any:
        del device
        arrays = Arrays(*operands)
        sizes = arrays.pages().sizes(self.options.layout)
        keys = arrays.table.shape[1] * sizes.page_size
        pages = jnp.arange(arrays.table.size, dtype=jnp.int32) % sizes.pages
        tokens = arrays.query.shape[1]
        made = example_operands(
            random, arrays, table=0, lengths=keys, offset=max(0, keys - tokens), counts=tokens
        )
        return made._replace(table=pages.reshape(arrays.table.shape))

    def configs(self, implementation, device, *operands) -> Any:
        del device
        arrays = Arrays(*operands)
        if implementation != "pallas":
            return ()
        return paged.candidates(arrays.pages().sizes(self.options.layout))

    def run(self, implementation, device, *operands, config=None) -> Results:
        arrays, options = Arrays(*operands), self.options
        if implementation == "xla":
            return options.gathered(arrays, implementation="xla")
        if implementation == "cuda":
            return self._by_cuda(arrays, device)[: 1 + options.returns_lse]
        batch, tokens, key_heads, group, size = arrays.query.shape
        pages = arrays.pages()
        sizes = pages.sizes(options.layout)
        mask = BlockMask(
            tokens,
            sizes.most_pages * sizes.page_size,
            is_causal=tokens > 1,
            window=None if options.window is None else (options.window - 1, 0),
            has_query_offset=True,
            has_query_lengths=arrays.counts is not None,
            has_key_lengths=True,
        )
        has_sinks = arrays.sinks is not None
        output = paged.forward(
            arrays.query.reshape(batch, tokens, key_heads * group, size),
            pages,
            Operands(
                sinks=arrays.sinks.reshape(-1) if has_sinks else None,
                query_lengths=arrays.counts,
                key_lengths=arrays.lengths,
                query_offset=arrays.offset,
            ),
            layout=options.layout,
            logits=Logits(options.scale, mask, options.soft_cap, has_sinks=has_sinks),
            multiprocessors=device.multiprocessors,
            config=config,
            is_whole=options.batch_invariant,
        )
        return (output.reshape(batch, tokens, key_heads, group, -1),)

    def _by_cuda(self, arrays: Arrays, device: dispatch.Device) -> Results:
        options, heads_first = self.options, self.options.layout == "KPSH"

        def scales(array: Any) -> Any:
            return array if array is None or heads_first else jnp.moveaxis(array, 0, -1)

        return cached_attention_cuda.forward(
            arrays.query,
            cached_attention_cuda.Cache(
                arrays.key,
                arrays.value,
                scales(arrays.key_scale),
                scales(arrays.value_scale),
                arrays.table,
            ),
            lengths=arrays.lengths,
            offsets=arrays.offset,
            counts=arrays.counts,
            sinks=arrays.sinks,
            heads_first=heads_first,
            kept=arrays.key.dtype,
            layer_pages=None,
            window=options.window,
            scale=options.scale,
            soft_cap=options.soft_cap,
            device=device,
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return None


def reads_in_place(
    queries: jax.Array,
    pools: Pools,
    page_indices: jax.Array,
    options: Options,
    implementation: str | None,
    more: More = NO_MORE,
) -> bool:
    """Returns whether a kernel reads the pages in place for queries [B, T, N, H].

    If the named implementation has no such kernel, its `dot_product_attention` attends to a copy.
    """
    if implementation not in (None, "pallas", "cuda") or 0 in (queries.size, page_indices.size):
        return False
    kinds = {_has_token_scales(pool) for pool in (pools.key, pools.value) if pool is not None}
    if len(kinds) > 1 or None in kinds:
        return False
    arrays = _arrays(queries, pools, page_indices, page_indices[:, 0], None, more)
    device = dispatch.current_device(queries, arrays.key)
    choice = Runner(None, device).choice(InPages(options), *arrays)
    if implementation is None:
        return choice.implementation != "xla"
    return choice.reasons.get(implementation, "it is not known") is None


def attend(
    queries: jax.Array,
    counts: jax.Array | None,
    pools: Pools,
    lengths: jax.Array,
    page_indices: jax.Array,
    options: Options,
    more: More,
    implementation: Any,
    in_place: bool,
) -> tuple[jax.Array, ...]:
    """Returns (output,) of queries [B, T, N, H], the last `counts` of a sequence's `lengths` tokens.

    If the options ask for it, the log-sum-exp [B, T, N] comes after the output.
    """
    arrays = _arrays(queries, pools, page_indices, lengths, counts, more)
    arrays = arrays._replace(lengths=pools.lengths(lengths, page_indices))
    stage = InPages(options)
    spelt = stage.axes(*arrays)
    results: Any
    by_batch = any(jax.typeof(x).sharding.spec[0] for x in (queries, lengths, page_indices))
    is_split = by_batch or not pools.are_split_by_heads()
    if not in_place and is_split and _in_arrays(pools):
        # Each device copies the pages of its own sequences.
        results = sharding.per_shard(
            _Gathered(options, implementation),
            arrays,
            operand_axes=spelt.operands,
            result_axes=spelt.results,
            whole=spelt.whole,
        )
    elif not in_place:
        results = options.gathered(arrays, pools, implementation)
    else:
        aligned = sharding.align(arrays, operand_axes=spelt.operands, whole=spelt.whole)
        run = Runner(implementation, dispatch.current_device(queries, arrays.key))
        results = _in_place(run, options, Arrays(*aligned))
    return tuple(array.reshape(*queries.shape[:3], *array.shape[4:]) for array in results)


@dataclass(frozen=True)
class _Gathered:
    """Attends to a copy of the pages."""

    options: Options
    implementation: Any

    def __call__(self, *operands: Any) -> Results:
        return self.options.gathered(Arrays(*operands), implementation=self.implementation)


def _arrays(
    queries: jax.Array,
    pools: Pools,
    page_indices: jax.Array,
    lengths: jax.Array,
    counts: jax.Array | None,
    more: More,
) -> Arrays:
    batch, tokens, heads, size = queries.shape
    grouped = (pools.heads, heads // pools.heads)

    def of_heads(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else jnp.asarray(array).astype(jnp.float32).reshape(grouped)

    (key, key_scale), (value, value_scale) = (
        _values_and_scale(pool, pools.layout) for pool in (pools.key, pools.value)
    )
    return Arrays(
        queries.reshape(batch, tokens, *grouped, size),
        key,
        value,
        page_indices,
        lengths,
        lengths - (tokens if counts is None else counts),
        counts,
        of_heads(more.sinks),
        key_scale,
        value_scale,
        more.tree,
        of_heads(more.slopes),
    )


def _in_arrays(pools: Pools) -> bool:
    """Returns whether each pool has floats, or quantised values with a scale per token and head."""
    return all(_has_token_scales(pool) is not None for pool in (pools.key, pools.value))


def _has_token_scales(pool: Any) -> bool | None:
    """True if a pool has one scale per token and head, False for floats, None for other scales."""
    if not isinstance(pool, QuantizedArray):
        return False
    more = (pool.zero_point, pool.offset, pool.codebook)
    return True if all(x is None for x in more) and are_own(pool) else None


def _values_and_scale(pool: Any, layout: Layout) -> tuple[Any, Any]:
    """Returns the pool's values and its scales [K, P, S], which are None for floats."""
    values, scale = values_and_scale(pool)
    if scale is None:
        return values, None
    scale = scale.astype(jnp.float32)
    return values, scale if layout == "KPSH" else jnp.moveaxis(scale, -1, 0)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="paged_attention")
def _in_place(run: Runner, options: Options, arrays: Arrays) -> Results:
    return run(InPages(options), *arrays)


def _in_place_fwd(run: Runner, options: Options, arrays: Arrays) -> tuple[Results, Arrays]:
    return _in_place(run, options, arrays), arrays


def _in_place_bwd(run: Runner, options: Options, arrays: Arrays, cotangents: Results) -> Any:
    """Differentiates attention to a copy of the pages: serving needs no backward kernel."""
    return gradients_in_xla(options.gathered, arrays, cotangents)


_in_place.defvjp(_in_place_fwd, _in_place_bwd)
