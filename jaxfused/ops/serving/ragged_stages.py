"""Attention of a ragged batch to keys and values in pages, by one kernel or by two."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.serving import paged_stages
from jaxfused.ops.serving.example_operands import example_operands
from jaxfused.ops.serving.paged_stages import InPages, More, Options, attend, reads_in_place
from jaxfused.ops.serving.pages import Pools, Sequences
from jaxfused.runtime import sharding
from jaxfused.runtime.kernel_gradient import gradients_in_xla, kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner
from pallas_kernels.attention import chunks
from pallas_kernels.attention.pages import Pages

_MOST_GATHERED = 2**28
"""Largest number of bytes of keys that a ragged batch gathers at a time."""
_MOST_ROWS = 64
"""Largest number of rows of a tile: queries of one sequence that attend together."""


class Arrays(NamedTuple):
    """Operands of a call. The N query heads are axes [K, G], G of each key head, to shard alike."""

    query: Any
    """Queries of all sequences [R, K, G, H]."""
    key: Any
    """Pool of keys in its layout; `value` is the pool of values. See `Pools`."""
    value: Any
    table: Any
    """Page table, int32 [B, n]."""
    begin: Any
    """`Sequences`: int32 [B], as are `end`, `offset` and `keys`."""
    end: Any
    offset: Any
    keys: Any
    sinks: Any
    """Attention sinks, float32 [K, G], or None."""

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.begin, self.end, self.offset, self.keys)


def attend_ragged(
    queries: jax.Array,
    pools: Pools,
    page_indices: jax.Array,
    sequences: Sequences,
    options: Options,
    sinks: jax.Array | None,
    implementation: Any,
) -> jax.Array:
    """Returns the output [R, N, V] of queries [R, N, H]; rows of no sequence are 0."""
    in_place = reads_in_place(queries[None, :1], pools, page_indices[:1], options, implementation)
    if in_place and pools.has_floats:
        arrays = _arrays(queries, pools, page_indices, sequences, sinks)
        device = dispatch.current_device(queries, arrays.key)
        stage = _by_two_kernels(options, implementation, device, arrays)
        if stage is not None:
            spelt = stage.axes(*arrays)
            aligned = sharding.align(arrays, operand_axes=spelt.operands, whole=spelt.whole)
            run = Runner("pallas", device, "there are many more rows than sequences")
            output = _in_place(run, stage, Arrays(*aligned))
            return output.reshape(*queries.shape[:2], -1)
    operands = (queries, pools, page_indices, sequences, options, sinks)
    return attend_in_tiles(*operands, implementation, in_place)


# --- one kernel: tiles of a few rows of one sequence ----------------------------------------------


def attend_in_tiles(
    queries: jax.Array,
    pools: Pools,
    page_indices: jax.Array,
    sequences: Sequences,
    options: Options,
    sinks: jax.Array | None,
    implementation: Any,
    in_place: bool,
) -> jax.Array:
    """Does what `attend_ragged` does, as `paged_attention` of tiles of rows of one sequence each."""
    rows, batch = queries.shape[0], page_indices.shape[0]
    # In a kernel, each token of a tile has one row for every query head that shares a key head.
    most = max(1, _MOST_ROWS * pools.heads // queries.shape[1]) if in_place else _MOST_ROWS
    owner, is_token = sequences.of_rows(rows)
    tiles = _tiles(sequences, owner, min(most, -(-rows // batch)))
    row = tiles.first[:, None] + jnp.arange(tiles.rows, dtype=jnp.int32)[None]
    tokens = queries[:, None] if tiles.rows == 1 else jnp.take(queries, row, axis=0, mode="clip")

    def of(tokens: jax.Array, owner: jax.Array, count: jax.Array, length: jax.Array) -> Any:
        call = (options, More(sinks), implementation, in_place)
        (output,) = attend(tokens, count, pools, length, page_indices[owner], *call)
        return output

    # The tiles are processed in groups, because a copy of the pages of all tiles takes too much memory.
    arrays = (tokens, tiles.owner, tiles.valid, tiles.length)
    keys = page_indices.shape[1] * pools.page_size * pools.heads
    tile_bytes = keys * (pools.key.shape[-1] + pools.value_size) * queries.dtype.itemsize
    output = of(*arrays) if in_place else _in_groups(of, arrays, tile_bytes)
    output = output.reshape(-1, *output.shape[2:])
    if tiles.rows > 1:
        output = jnp.take(output, tiles.place, axis=0, mode="clip")
    return jnp.where(is_token[:, None, None], output, 0)


class _Tiles(NamedTuple):
    """Tiles of a ragged batch: up to `rows` consecutive rows of one sequence, which attend together."""

    rows: int
    owner: jax.Array
    """Sequence of each tile, [tiles]."""
    first: jax.Array
    """First row of each tile, [tiles]."""
    valid: jax.Array
    """Number of rows of each tile, [tiles]; 0 for unused tiles."""
    length: jax.Array
    """Tokens of the sequence up to the tile's last row, [tiles]."""
    place: jax.Array
    """Position of each row of the batch among the rows of all tiles, [rows of the batch]."""


def _tiles(sequences: Sequences, owner_of_row: jax.Array, size: int) -> _Tiles:
    """Divides rows into tiles, each of up to `size` rows of one sequence.

    The number of tiles depends on shapes alone and suffices for any lengths; unused tiles have 0
    rows. Tiles of one row are the rows of the batch.
    """
    batch, rows = sequences.begin.shape[0], owner_of_row.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    counts = sequences.counts
    if size == 1:
        begin, end, offset = (x[owner_of_row] for x in sequences[:3])
        is_token = (row >= begin) & (row < end)
        return _Tiles(1, owner_of_row, row, is_token.astype(jnp.int32), row + 1 + offset, row)
    tile = jnp.arange((rows + batch * (size - 1)) // size, dtype=jnp.int32)
    ends = jnp.cumsum(-(-counts // size), dtype=jnp.int32)
    starts = ends - -(-counts // size)
    owner = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, batch - 1)
    within = (tile - starts[owner]) * size
    count = jnp.where(tile < ends[-1], jnp.clip(counts[owner] - within, 0, size), 0)
    first = sequences.begin[owner] + within
    number = row - sequences.begin[owner_of_row]
    place = starts[owner_of_row] * size + number
    return _Tiles(size, owner, first, count, first + count + sequences.offset[owner], place)


def _in_groups(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], entry_bytes: int
) -> jax.Array:
    """Returns `function(*arrays)`, computed for a few entries of the arrays' first axis at a time.

    Each entry takes `entry_bytes`; those computed together take about `_MOST_GATHERED` bytes at
    most.
    """
    count = arrays[0].shape[0]
    groups = min(count, -(-count * entry_bytes // _MOST_GATHERED))
    if groups <= 1:
        return function(*arrays)
    size = -(-count // groups)
    groups = -(-count // size)

    def grouped(array: jax.Array) -> jax.Array:
        padding = [(0, groups * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(groups, size, *array.shape[1:])

    output = jax.lax.map(lambda group: function(*group), tuple(map(grouped, arrays)))
    return output.reshape(groups * size, *output.shape[2:])[:count]


# --- two kernels: one for sequences with one new token, one for chunks ----------------------------


@dataclass(frozen=True)
class DecodesAndChunks:
    """Computes (output [R, K, G, V],) from the operands of Arrays, without a copy of the pages.

    A kernel of `InPages` attends for sequences with one row, and divides their keys among CTAs. Another
    attends for the others in tiles of many rows. Each finds the other's sequences empty.
    """

    options: Options
    decodes: str
    """Implementation of `InPages` for sequences with one row."""

    @property
    def name(self) -> str:
        return "ragged_paged_attention forward"

    def axes(self, *operands) -> Axes:
        pools, whole = ("kpsh", "kpsv"), "rgpshvbn"
        if self.options.layout == "PSKH":
            pools = ("pskh", "pskv")
        if Arrays(*operands).value is None:
            pools, whole = ("psch", "pskv"), whole + "ck"
        return Axes(("rkgh", *pools, "bn", "b", "b", "b", "b", "kg"), ("rkgv",), whole)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        arrays = Arrays(*operands)
        reason = chunks.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=arrays.query.dtype,
            group=arrays.query.shape[2],
            sizes=_pages(arrays).sizes(self.options.layout),
        )
        if reason is None and self.options.batch_invariant:
            reason = "it divides the keys of all sequences together, and batch_invariant=True"
        if reason is None:
            reason = InPages(self.options).why_not(device, *_decodes(arrays))[self.decodes]
        return {"pallas": reason, "xla": None}

    def examples(self, random, device, *operands) -> Any:
        del device
        arrays = Arrays(*operands)
        rows, (batch, number) = arrays.query.shape[0], arrays.table.shape
        sizes = _pages(arrays).sizes(self.options.layout)
        keys = number * sizes.page_size
        # Each sequence has one row, but the last has all rows that are left.
        number = jnp.arange(batch, dtype=jnp.int32)
        end = (number + 1).at[-1].set(rows)
        begin = jnp.maximum(number, end - keys)
        made = example_operands(random, arrays, table=0, begin=0, end=0, offset=0, keys=keys)
        pages = jnp.arange(arrays.table.size, dtype=jnp.int32) % sizes.pages
        table = pages.reshape(arrays.table.shape)
        return made._replace(table=table, begin=begin, end=end, offset=keys - end)

    def configs(self, implementation, device, *operands) -> Any:
        del device
        if implementation != "pallas":
            return ()
        return chunks.candidates(_pages(Arrays(*operands)).sizes(self.options.layout))

    def run(self, implementation, device, *operands, config=None) -> Results:
        arrays, options = Arrays(*operands), self.options
        if implementation == "xla":
            return (_in_xla(options, arrays),)
        decodes = _decodes(arrays)
        (of_decodes,) = InPages(options).run(self.decodes, device, *decodes)
        is_decode = arrays.sequences.counts == 1
        rows, key_heads, group, size = arrays.query.shape
        output = chunks.forward(
            arrays.query.reshape(rows, key_heads * group, size),
            _pages(arrays),
            chunks.Sequences(
                arrays.begin, jnp.where(is_decode, 0, arrays.end), arrays.offset, arrays.keys
            ),
            layout=options.layout,
            scale=options.scale,
            soft_cap=options.soft_cap,
            window=options.window,
            sinks=None if arrays.sinks is None else arrays.sinks.reshape(-1),
            multiprocessors=device.multiprocessors,
            config=config,
        ).reshape(rows, key_heads, group, -1)
        # Sequences with chunks get different indices beyond the last row, which `at[].set` drops.
        number = jnp.arange(is_decode.size, dtype=jnp.int32)
        row = jnp.where(is_decode, arrays.begin, rows + number)
        assert of_decodes is not None
        output = output.at[row].set(of_decodes[:, 0], mode="drop", unique_indices=True)
        return (output,)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return None


def _by_two_kernels(
    options: Options, implementation: Any, device: dispatch.Device, arrays: Arrays
) -> DecodesAndChunks | None:
    """Returns the stage of two kernels if they can run and rows may be of long chunks, else None."""
    decodes = Runner(implementation, device).choice(InPages(options), *_decodes(arrays))
    stage = DecodesAndChunks(options, decodes.implementation)
    reasons = Runner(None, device).choice(stage, *arrays).reasons
    if implementation == "cuda" or reasons.get("pallas", "it is not known") is not None:
        return None
    rows, key_heads, group, _ = arrays.query.shape
    # A tile of chunks is not divided among CTAs, so there must be about as many tiles as SMs.
    tiles = (rows - arrays.begin.shape[0]) * group // chunks.ROWS * key_heads
    return stage if 2 * tiles >= device.multiprocessors else None


def _arrays(
    queries: jax.Array,
    pools: Pools,
    page_indices: jax.Array,
    sequences: Sequences,
    sinks: jax.Array | None,
) -> Arrays:
    rows, heads, size = queries.shape
    grouped = (pools.heads, heads // pools.heads)
    by_head = None if sinks is None else jnp.asarray(sinks).astype(jnp.float32).reshape(grouped)
    query = queries.reshape(rows, *grouped, size)
    whole = sequences._replace(keys=pools.lengths(sequences.keys, page_indices))
    return Arrays(query, pools.key, pools.value, page_indices, *whole, by_head)


def _pages(arrays: Arrays) -> Pages:
    return Pages(arrays.key, arrays.value, arrays.table)


def _decodes(arrays: Arrays) -> paged_stages.Arrays:
    """Returns the operands of `InPages`: sequences with one row; the others have no keys there."""
    begin, batch = arrays.begin, arrays.table.shape[0]
    if isinstance(arrays.query, jax.ShapeDtypeStruct):
        shape = (batch, 1, *arrays.query.shape[1:])
        query: Any = jax.ShapeDtypeStruct(shape, arrays.query.dtype)
        lengths = offset = begin
    else:
        query = jnp.take(arrays.query, begin, axis=0, mode="clip")[:, None]
        lengths = jnp.where(arrays.sequences.counts == 1, arrays.keys, 0)
        offset = begin + arrays.offset
    return paged_stages.Arrays(
        *(query, arrays.key, arrays.value, arrays.table, lengths, offset, None, arrays.sinks)
    )


def _in_xla(options: Options, arrays: Arrays) -> jax.Array:
    query, pools = arrays.query, Pools(arrays.key, arrays.value, options.layout)
    sinks = None if arrays.sinks is None else arrays.sinks.reshape(-1)
    queries = query.reshape(query.shape[0], -1, query.shape[-1])
    operands = (queries, pools, arrays.table, arrays.sequences, options, sinks)
    output = attend_in_tiles(*operands, implementation="xla", in_place=False)
    return output.reshape(*query.shape[:3], -1)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="ragged_paged_attention")
def _in_place(run: Runner, stage: DecodesAndChunks, arrays: Arrays) -> jax.Array:
    (output,) = run(stage, *arrays)
    return output


def _in_place_fwd(run: Runner, stage: DecodesAndChunks, arrays: Arrays) -> tuple[jax.Array, Arrays]:
    return _in_place(run, stage, arrays), arrays


def _in_place_bwd(run: Runner, stage: DecodesAndChunks, arrays: Arrays, doutput: jax.Array) -> Any:
    """Differentiates attention to a copy of the pages: serving needs no backward kernel."""
    return gradients_in_xla(functools.partial(_in_xla, stage.options), arrays, doutput)


_in_place.defvjp(_in_place_fwd, _in_place_bwd)
