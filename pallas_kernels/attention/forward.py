"""Attention on Hopper, forward: flash attention with a producer and one to three consumers.

The producer copies Q, K and V by TMA; each consumer owns 64 queries. A consumer issues Q K^T of a block
together with P V of the previous block, and computes exponentials as soon as Q K^T is done. Meanwhile
the tensor cores work on its P V and on the products of the other consumers. CTAs are persistent: the
copies of the next tile run during the end of the current one.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import (
    LOG2E,
    Logits,
    Operands,
    Tile,
    forward_results,
)
from pallas_kernels.attention.memory import SWIZZLED_COLUMNS, WGMMA_ROWS, Columns, Heads, Matrix
from pallas_kernels.attention.own_lists import HEADS_TOGETHER, helps, shares_for
from pallas_kernels.attention.persistent import Cta, PersistentKernel, Ring, Role, registers
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.shares import result_of_shares, store_share, with_shares
from pallas_kernels.attention.softmax import VECTOR, Softmax, Weighing, Weighted, across
from pallas_kernels.attention.tiles import ListedVisits, OwnVisits, Place, QueryTiles, Visits
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES


@dataclass(frozen=True)
class ForwardConfig:
    """Division of the work: each consumer owns 64 queries of a tile and visits blocks of keys."""

    consumers: int = 2
    key_block: int = 128
    stages: int = 2
    """Pipeline stages of K, and also of V: blocks of keys that shared memory holds."""
    takes_turns: bool = False
    """True if consumers issue their WGMMAs in turns (ping-pong), so that one computes exponentials while
    another multiplies."""
    separate_output: bool = True
    """True if the output has shared memory of its own; otherwise it overwrites Q if it is as wide."""
    heads_together: int = 1
    """Heads whose tiles are scheduled together, so that K and V stay in the L2 cache."""
    wide_blocks: bool = False
    """True if the last features of a head, less than 64, are one block of 64 columns, padded with zeros,
    and not blocks of 32 and 16 columns, each of which takes WGMMAs of its own."""
    own_lists: bool = False
    """True if each consumer visits its own range of a mask object's list of key blocks (`OwnLists`)."""
    shares: int = 1
    """Shares into which the longest lists are divided, for different CTAs; needs `own_lists`."""

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"consumers must be 1, 2 or 3, got {self.consumers}")
        if self.key_block % 16 or not 64 <= self.key_block <= 256:
            raise ValueError(
                f"key_block must be a multiple of 16 from 64 to 256, got {self.key_block}"
            )
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")

    @property
    def query_block(self) -> int:
        return self.consumers * WGMMA_ROWS

    def columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q and K, and of V and the output."""
        lengths = (shape.query_count, shape.key_count)
        return (
            self._blocks(shape.head_size, lengths, SWIZZLED_COLUMNS),
            self._blocks(shape.value_size, lengths, self.key_block),
        )

    def _blocks(self, size: int, lengths: tuple[int, ...], contracted: int) -> Columns:
        layout = Columns.of(size, lengths, contracted)
        widens = (
            self.wide_blocks and not layout.copies_tiles and layout.swizzled == SWIZZLED_COLUMNS
        )
        return Columns.in_wide_blocks(size) if widens else layout

    def has_own_output(self, shape: Shape) -> bool:
        """True if the output has shared memory of its own. It can share Q's only in the same layout."""
        head, value = self.columns(shape)
        return self.separate_output or head != value

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        head, value = self.columns(shape)
        count = head.bytes(self.query_block)
        count += self.stages * (head.bytes(self.key_block) + value.bytes(self.key_block))
        if self.has_own_output(shape):
            count += value.bytes(self.query_block)
        return count + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        return self.shared_bytes(shape) <= SHARED_MEMORY_BYTES


_CACHED_BYTES = 2**24
"""Bytes of K and V of the heads whose tiles run at the same time: they stay in a Hopper GPU's L2 of
50 MB, together with other data."""


def candidates(shape: Shape, logits: Logits, multiprocessors: int) -> tuple[ForwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    Tensor cores idle least when several consumers compute exponentials while another multiplies. The
    guess therefore has as many consumers as the registers allow, and then the largest blocks that fit;
    one consumer, if tiles of that many queries leave half of the SMs idle; blocks of 64 keys, if the
    bias or mask, which must be padded to whole blocks of keys, needs no padded copy with these.
    """
    widest = max(shape.head_size, shape.value_size)
    if widest <= SWIZZLED_COLUMNS:
        configs = (
            ForwardConfig(consumers=3, takes_turns=True),
            ForwardConfig(consumers=3),
            ForwardConfig(consumers=2),
            ForwardConfig(consumers=2, key_block=64, stages=4),
            ForwardConfig(consumers=1),
        )
    elif widest <= 2 * SWIZZLED_COLUMNS:
        configs = (
            ForwardConfig(),
            ForwardConfig(takes_turns=True),
            ForwardConfig(consumers=3, key_block=64, takes_turns=True),
            ForwardConfig(key_block=64, stages=4),
            ForwardConfig(consumers=1),
        )
    else:
        configs = (
            ForwardConfig(key_block=64, separate_output=False),
            ForwardConfig(key_block=64, separate_output=False, takes_turns=True),
            ForwardConfig(key_block=128, separate_output=False),
            ForwardConfig(consumers=1, key_block=64, separate_output=False),
            ForwardConfig(consumers=1, key_block=128, separate_output=False),
        )
    # A product of 64 columns, padded with zeros, takes less time than one of 32 and one of 16 columns.
    wide_blocks = any(size % SWIZZLED_COLUMNS > 32 for size in (shape.head_size, shape.value_size))
    together = _heads_together(shape, logits, configs[0].query_block, multiprocessors)
    configs = tuple(
        replace(config, heads_together=together[0], wide_blocks=wide_blocks) for config in configs
    )
    if any(layout.count > 1 for layout in configs[0].columns(shape)):
        # With heads of several blocks of columns, each of which takes WGMMAs of its own, consumers that
        # issue their WGMMAs in turns are faster.
        configs = tuple(sorted(configs, key=lambda config: not config.takes_turns))
    legal = [config for config in configs if config.fits(shape)]
    if 2 * shape.query_tiles(legal[0].query_block) <= multiprocessors:
        legal.sort(key=lambda config: config.consumers > 1)
    if logits.mask.pattern is not None:
        # Tiles of at most 128 queries come first: larger ones visit blocks of keys to which only few of
        # their queries attend.
        legal.sort(key=lambda config: config.query_block > 128)
    if logits.has_functions and logits.mask.pattern is None and legal[0].consumers > 1:
        # While one of three consumers evaluates a function, tensor cores multiply for two.
        legal.sort(key=lambda config: config.consumers != 3)
    if logits.has_bias and legal[0].consumers == 3:
        # A bias takes registers that three consumers do not have: 108 us with them, 81 with two.
        legal.sort(key=lambda config: config.consumers != 2)
    if logits.pads_keys(legal[0].key_block):
        narrow = replace(legal[0], key_block=WGMMA_ROWS, stages=2 * legal[0].stages)
        legal = [narrow, *(config for config in legal if config != narrow)]
    if helps(logits.mask):
        legal.insert(0, _with_own_lists(legal[0], shape, logits, multiprocessors))
    legal += [replace(legal[0], heads_together=heads) for heads in together[1:]]
    if wide_blocks:
        legal.append(replace(legal[0], wide_blocks=False))
    return tuple(legal)


def _with_own_lists(
    config: ForwardConfig, shape: Shape, logits: Logits, multiprocessors: int
) -> ForwardConfig:
    """Returns the config with `own_lists` and blocks of 64 keys; with larger blocks more are partial."""
    stages = config.stages * config.key_block // WGMMA_ROWS
    config = replace(config, own_lists=True, key_block=WGMMA_ROWS, stages=stages)
    shares = shares_for(
        *(logits.mask, config.query_block, config.key_block, config.consumers),
        heads=shape.batch * shape.heads,
        multiprocessors=multiprocessors,
    )
    return replace(config, shares=shares, heads_together=HEADS_TOGETHER)


def _heads_together(
    shape: Shape, logits: Logits, query_block: int, multiprocessors: int
) -> list[int]:
    """Returns the values of `heads_together` worth trying, the best guess first.

    The query heads of a key head share K and V, so these are scheduled together. More heads only help
    if a CTA has few tiles and these visit unequal numbers of keys, as under a causal mask: the longest
    tiles of all heads then run first, and the shortest last.
    """
    head_bytes = 2 * shape.key_count * (shape.head_size + shape.value_size)
    most = max(1, _CACHED_BYTES // head_bytes) * shape.group
    few = shape.query_tiles(query_block) < 6 * multiprocessors
    numbers = [most, shape.group] if few and logits.mask.is_causal else [shape.group, most]
    return list(dict.fromkeys(numbers))


def default_config(shape: Shape, logits: Logits, multiprocessors: int) -> ForwardConfig:
    """Returns the first of `candidates`: the best guess without measurements."""
    return candidates(shape, logits, multiprocessors)[0]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) as pallas_kernels.attention.attention.forward does."""
    shape = Shape.of(query, key, value)
    config = config or default_config(shape, logits, multiprocessors)
    head, columns = config.columns(shape)
    parts = config.consumers if config.own_lists else 0
    # With sinks no list is divided into shares: each share would add the sink to its sum again.
    shares = 1 if logits.has_sinks else config.shares
    blocks = (config.query_block, config.key_block)
    tiles = QueryTiles(logits.mask, shape.heads, *blocks, parts, shares)
    kernel = ForwardKernel(shape, query.dtype, logits, config, tiles, head, columns)
    tables = tiles.tables(operands)
    launch = PersistentKernel(
        name="attention_forward",
        tiles=tiles,
        schedule=tiles.schedule(
            shape.batch, config.heads_together, multiprocessors, operands, tables
        ),
        roles=(
            Role(range(config.consumers, config.consumers + 1), kernel.produce),
            Role(range(config.consumers), kernel.consume),
        ),
        memory=kernel.memory(),
        results=(*forward_results(kernel.shape, kernel.dtype, logits), *kernel.of_shares()),
    )
    padded = operands.padded(WGMMA_ROWS, config.key_block)
    results = launch((query, key, value), padded, tables)
    count = 1 + logits.row_numbers
    if len(results) > count:
        return with_shares(results[:count], results[count:], logits, tiles.starts_of_shared)
    return results


class ForwardRows(NamedTuple):
    """The work of a consumer: 64 queries of a tile, and the blocks of keys that they visit."""

    at: Place
    start: jax.Array
    """Index of the first query."""
    visits: Visits | ListedVisits | OwnVisits
    step: jax.Array
    """Number of blocks that the CTA has processed before the first visit, over all of its tiles."""
    are_full: bool = False
    """True if the visits need no mask, which saves a test in each."""


@dataclass(frozen=True)
class ForwardKernel:
    """The forward kernel: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: ForwardConfig
    tiles: QueryTiles
    head: Columns
    value: Columns

    @property
    def queries(self) -> int:
        """Queries of a consumer's 64 rows."""
        return WGMMA_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's thread and of a producer's."""
        return registers(self.config.consumers)

    def memory(self) -> dict[str, Any]:
        config, dtype = self.config, self.dtype
        consumers, stages = config.consumers, config.stages
        block, head, value = config.key_block, self.head, self.value
        memory: dict[str, Any] = dict(
            q_smem=head.memory((consumers,), WGMMA_ROWS, dtype),
            k_smem=head.memory((stages,), block, dtype),
            v_smem=value.memory((stages,), block, dtype),
            q_full=plgpu.Barrier(num_arrivals=head.count, num_barriers=consumers),
            q_free=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=head.count, num_barriers=stages),
            k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=value.count, num_barriers=stages),
            v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        )
        if self.logits.mask.has_key_lengths:
            memory["cleared"] = plgpu.Barrier(num_arrivals=consumers)
        if config.takes_turns:
            memory["turn"] = plgpu.Barrier(num_barriers=consumers)
        if config.has_own_output(self.shape):
            memory["out_smem"] = value.memory((consumers,), WGMMA_ROWS, dtype)
        return memory

    def of_shares(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of the shares' float32 output and log-sum-exp; () if no list is divided."""
        sizes = (self.tiles.own, self.shape.batch, self.shape.heads, self.tiles.rows)
        # Registers are stored in whole blocks of columns, so the output's last axis is padded to these.
        of_rows = result_of_shares(*sizes) * self.logits.row_numbers
        return result_of_shares(*sizes, self.value.width) + of_rows

    def rings(self, cta: Cta) -> tuple[Ring, Ring, Ring]:
        """Returns the pipelines (circular buffers) of Q (a slot for each consumer), of K and of V."""
        stages = self.config.stages
        return cta.ring("q", self.config.consumers), cta.ring("k", stages), cta.ring("v", stages)

    # --- the producer -----------------------------------------------------------------------------

    def produce(self, cta: Cta) -> None:
        plgpu.set_max_registers(self.registers[1], action="decrease")
        lax.fori_loop(0, cta.tile_count, functools.partial(self.copy_tile, cta), jnp.int32(0))
        queries, keys, values = self.rings(cta)
        for slot in range(self.config.stages):
            plgpu.barrier_wait(keys.free.at[slot])
            plgpu.barrier_wait(values.free.at[slot])
        queries.drain()

    def copy_tile(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Copies Q, K and V of a tile; takes and returns the CTA's count of copied blocks of keys."""
        at = cta.place(tile_idx)
        queries, keys, values = self.rings(cta)
        q_heads, k_heads, v_heads = map(Heads, cta.arrays)
        key_head = lax.div(at.head_idx, jnp.int32(self.shape.group))
        block = self.config.key_block

        def copy_queries(consumer):
            start = at.start + consumer * WGMMA_ROWS
            queries.fill(consumer, q_heads, at.batch_idx, start, at.head_idx)

        def copy_block(ring, heads, index, slot):
            ring.fill(slot, heads, at.batch_idx, index * block, key_head)

        count = at.stop - at.first
        last = at.block(0)
        # The first consumer's queries are copied first, so that it starts before the others.
        copy_queries(0)
        copy_block(keys, k_heads, last, keys.slot(step))
        for consumer in range(1, self.config.consumers):
            copy_queries(consumer)
        copy_block(values, v_heads, last, values.slot(step))

        def copy_pair(i, _):
            slot, index = keys.slot(step + i), at.block(i)
            copy_block(keys, k_heads, index, slot)
            copy_block(values, v_heads, index, slot)

        lax.fori_loop(1, count, copy_pair, None)
        return step + count

    # --- the consumers ----------------------------------------------------------------------------

    def consume(self, cta: Cta) -> None:
        plgpu.set_max_registers(self.registers[0], action="increase")
        queries, keys, values = self.rings(cta)
        for slot in range(self.config.stages):
            keys.release(slot)
            values.release(slot)
        queries.release(cta.wg_idx)
        if self.config.takes_turns:
            is_last = cta.wg_idx == self.config.consumers - 1
            pl.when(is_last)(lambda: plgpu.barrier_arrive(cta.memory["turn"].at[0]))
        lax.fori_loop(0, cta.tile_count, functools.partial(self.attend, cta), jnp.int32(0))
        pl.when(cta.wg_idx == 0)(lambda: self.take_turn(cta))
        plgpu.wait_smem_to_gmem(0)

    def take_turn(self, cta: Cta) -> None:
        """Waits until it is this consumer's turn to issue products."""
        if self.config.takes_turns:
            plgpu.barrier_wait(cta.memory["turn"].at[cta.wg_idx])

    def pass_turn(self, cta: Cta) -> None:
        if self.config.takes_turns:
            is_last = cta.wg_idx == self.config.consumers - 1
            following = jnp.where(is_last, 0, cta.wg_idx + 1)
            plgpu.barrier_arrive(cta.memory["turn"].at[following])

    def attend(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Computes the output of 64 queries; takes and returns the CTA's count of visited key blocks."""
        rows, out, softmax, step = self.visit_all(cta, cta.place(tile_idx), step)
        self.write(cta, rows, *self.normalized(cta, rows, out, softmax))
        return step

    def visit_all(
        self, cta: Cta, at: Place, step: jax.Array
    ) -> tuple[ForwardRows, list[jax.Array], Softmax, jax.Array]:
        """Returns this consumer's rows of tile `at`, their output before division, and their softmax.

        The last result is the CTA's count of visited key blocks, which was `step` before the tile.
        """
        start = at.start + cta.wg_idx * self.queries
        visits = self.tiles.visits(at, start, self.queries)
        lax.fori_loop(0, visits.skipped, functools.partial(self.skip, cta, at, step), None)
        step += visits.skipped
        rows = ForwardRows(at, start, visits, step)
        weights, softmax = self.first_visit(cta, rows)
        out = self.value.zeros()
        visited, carry = 1, (out, weights, softmax)
        if self.logits.mask.has_query_offset and not self.masks_anywhere:
            # The first visits are on the diagonal, wherever the offset puts it; the others need no mask.
            on_diagonal = self.logits.mask.right_partial_blocks(WGMMA_ROWS, self.config.key_block)
            on_diagonal = lax.min(visits.count, on_diagonal)
            carry = lax.fori_loop(1, on_diagonal, functools.partial(self.visit, cta, rows), carry)
            visited, rows = lax.max(on_diagonal, 1), rows._replace(are_full=True)
        body = functools.partial(self.visit, cta, rows)
        out, weights, softmax = lax.fori_loop(visited, visits.count, body, carry)
        out, softmax = self.last_product(cta, rows, out, weights, softmax)
        step += visits.count
        if not isinstance(visits.remaining, int):
            body = functools.partial(self.skip, cta, at, step)
            lax.fori_loop(0, visits.remaining, body, None)
        return rows, out, softmax, step + visits.remaining

    def skip(self, cta: Cta, at: Place, step: jax.Array, i: jax.Array, _: None) -> None:
        """Releases the stages of a block of keys to which no row of this consumer attends."""
        _, keys, values = self.rings(cta)
        slot = keys.slot(step + i)
        keys.wait(slot)
        self.take_turn(cta)
        self.pass_turn(cta)
        keys.release(slot)
        values.wait(slot)
        self.clear_values(cta, at, at.block(i), slot)
        values.release(slot)

    def clear_values(self, cta: Cta, at: Place, block: jax.Array, slot: jax.Array) -> None:
        """Sets values of keys from the key length on to zero, in block `block` of V, which `slot` holds.

        Their weights are 0, but 0 times NaN is NaN. Where a block has such rows, the first consumer
        clears them while the others wait at a barrier.
        """
        if not self.logits.mask.has_key_lengths:
            return
        end = at.extent.key_length - block * self.config.key_block

        @pl.when(end < self.config.key_block)
        def _():
            matrix = self.rings(cta)[2].matrix(slot)
            pl.when(cta.wg_idx == 0)(lambda: matrix.clear(end))
            plgpu.barrier_arrive(cta.memory["cleared"])
            plgpu.barrier_wait(cta.memory["cleared"])

    @property
    def masks_anywhere(self) -> bool:
        """True if any visit may need a mask, not only those at the last keys."""
        mask = self.logits.mask
        return mask.has_left_edge or mask.forbids_anywhere

    def is_masked(self, rows: ForwardRows, i: int | jax.Array) -> bool | jax.Array:
        """Returns whether visit i's block needs masking, as a Python bool if known at compile time."""
        mask, block = self.logits.mask, self.config.key_block
        if rows.are_full:
            return False
        if isinstance(i, int):
            assert i == 0
            return not mask.is_always_full(self.config.query_block, block)
        if mask.forbids_anywhere:
            return True
        if not mask.has_left_edge and mask.right_partial_blocks(WGMMA_ROWS, block) == 1:
            return False
        return rows.visits.is_partial(i)

    def tile(self, cta: Cta, rows: ForwardRows, i: int | jax.Array) -> Tile:
        """Returns the tile of logits of visit i, with what is loaded before its products.

        This is the pattern's mask bits, and arrays of score and mask functions (see `Tile.loaded`).
        """
        block = self.config.key_block
        key_start = rows.visits.block(i) * block
        at = rows.at
        query_start = self.logits.operand_start(
            rows.start, self.shape.query_count, self.config.query_block
        )
        tile = Tile(
            *(at.batch_idx, at.head_idx, query_start, key_start, (WGMMA_ROWS, block)),
            bits=rows.visits.bits(i, rows.start - at.start),
        )
        return tile.loaded(cta.operands)

    def weights(
        self,
        cta: Cta,
        rows: ForwardRows,
        i: int | jax.Array,
        tile: Tile,
        products: jax.Array,
        softmax: Softmax,
    ) -> Weighted:
        """Returns the weights of the logits of visit i, the running softmax after it, and its decay.

        `products` is Q K^T, float32 [64, keys]. The decay [64] rescales the output so far, because the
        maximum that is subtracted from the logits has grown.
        """
        is_partial = self.is_masked(rows, i)
        weighing = Weighing(self.logits, self.dtype)
        return weighing(products, tile, cta.operands, rows.at.extent, is_partial, softmax)

    def logits_accumulator(self) -> Any:
        return plgpu.ACC((WGMMA_ROWS, self.config.key_block), jnp.float32)

    def first_visit(self, cta: Cta, rows: ForwardRows) -> tuple[jax.Array, Softmax]:
        """Returns the weights of the first block, and the softmax over this block alone."""
        queries, keys, _ = self.rings(cta)
        tile = self.tile(cta, rows, 0)
        queries.wait(cta.wg_idx)
        slot = keys.slot(rows.step)
        keys.wait(slot)
        self.take_turn(cta)

        def first_products(s_acc):
            memory.multiply_transposed(s_acc, queries.matrix(cta.wg_idx), keys.matrix(slot))
            self.pass_turn(cta)
            return s_acc[...]

        products = pl.run_scoped(first_products, self.logits_accumulator())
        keys.release(slot)
        self.release_queries(cta, rows, 0)
        softmax = Softmax.start(self.logits.saves_rest)
        weights, softmax, _ = self.weights(cta, rows, 0, tile, products, softmax)
        return weights, softmax

    def release_queries(self, cta: Cta, rows: ForwardRows, i: int | jax.Array) -> None:
        """Releases Q's stage after the last visit's logits, unless the output overwrites Q."""
        if "out_smem" in cta.memory:
            is_last = rows.visits.count == i + 1
            pl.when(is_last)(lambda: self.rings(cta)[0].release(cta.wg_idx))

    def visit(self, cta: Cta, rows: ForwardRows, i: jax.Array, carry: Any) -> Any:
        """Adds the weighted values of visit i - 1 to the output, and computes the softmax of visit i."""
        out, weights, softmax = carry
        queries, keys, values = self.rings(cta)
        k_slot = keys.slot(rows.step + i)
        v_slot = values.slot(rows.step + i - 1)
        tile = self.tile(cta, rows, i)
        keys.wait(k_slot)
        values.wait(v_slot)
        self.clear_values(cta, rows.at, rows.visits.block(i - 1), v_slot)
        self.take_turn(cta)

        def both_products(s_acc, out_accs):
            for acc, block in zip(out_accs, out, strict=True):
                acc[...] = block
            memory.multiply_transposed(s_acc, queries.matrix(cta.wg_idx), keys.matrix(k_slot))
            memory.multiply(out_accs, weights, values.matrix(v_slot))
            self.pass_turn(cta)
            products = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.value.count)
            keys.release(k_slot)
            self.release_queries(cta, rows, i)
            result = self.weights(cta, rows, i, tile, products, softmax)
            new_out = memory.load_accumulators(out_accs)
            values.release(v_slot)
            return new_out, *result

        new_out, new_weights, new_softmax, decay = pl.run_scoped(
            both_products, self.logits_accumulator(), self.value.accumulators()
        )
        return [block * across(decay, block.shape) for block in new_out], new_weights, new_softmax

    def last_product(
        self,
        cta: Cta,
        rows: ForwardRows,
        out: list[jax.Array],
        weights: jax.Array,
        softmax: Softmax,
    ) -> tuple[list[jax.Array], Softmax]:
        """Adds the weighted values of the last visit to the output, and completes each row's sum."""
        values = self.rings(cta)[2]
        total = jnp.sum(softmax.total, axis=1)
        slot = values.slot(rows.step + rows.visits.count - 1)
        values.wait(slot)
        self.clear_values(cta, rows.at, rows.visits.block(rows.visits.count - 1), slot)

        def product(out_accs):
            for acc, block in zip(out_accs, out, strict=True):
                acc[...] = block
            memory.multiply(out_accs, weights, values.matrix(slot))
            return memory.load_accumulators(out_accs)

        out = pl.run_scoped(product, self.value.accumulators())
        values.release(slot)
        return out, Softmax(softmax.maximum, total)

    def normalized(
        self, cta: Cta, rows: ForwardRows, out: list[jax.Array], softmax: Softmax
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the output, in blocks [64, columns], divided by the sums, and `log_sum_exp` [64].

        Both include the sink. For empty rows they are 0 and EMPTY_LSE. A row is empty if its query
        attends to neither a key nor a sink, or is not below the query length.
        """
        (maximum, total), at = softmax, rows.at
        if self.logits.has_sinks:
            sink = self.sink(cta, at) * self.logits.unit
            new_maximum = jnp.maximum(maximum, sink)
            decay = self.logits.exp(maximum - new_maximum)
            total = total * decay + self.logits.exp(sink - new_maximum)
            maximum = new_maximum
            out = [block * across(decay, block.shape) for block in out]
        empty = total == 0.0
        if cta.operands.query_lengths is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=VECTOR)
            empty = empty | (rows.start + row >= at.extent.query_length)
        lse = self.logits.log_sum_exp(maximum, total, empty, 1 / LOG2E)
        numerator = 1.0 / self.logits.keep_probability
        inverse = jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, total))
        if self.logits.has_functions and cta.operands.query_lengths is not None:
            # The caller's functions may return NaN for queries beyond a length, and 0 * NaN is NaN.
            out = [jnp.where(across(empty, block.shape), 0.0, block) for block in out]
        return [block * across(inverse, block.shape) for block in out], lse

    def sink(self, cta: Cta, at: Place) -> jax.Array:
        """Returns the sink of the tile's head, or one for each row [64]."""
        return cta.operands.sinks[at.head_idx]

    def write(
        self, cta: Cta, rows: ForwardRows, out: list[jax.Array], lse: list[jax.Array]
    ) -> None:
        """Stores this consumer's output and log-sum-exp: 64 queries, without those beyond the last."""
        queries, _, _ = self.rings(cta)
        if self.of_shares():
            number = self.tiles.share(rows.at)
            pl.when(number == 0)(lambda: self.write_rows(cta, rows, out, lse))
            pl.when(number > 0)(lambda: self.write_share(cta, rows, number - 1, out, lse))
        else:
            self.write_rows(cta, rows, out, lse)
        if "out_smem" not in cta.memory:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            queries.release(cta.wg_idx)

    def write_rows(
        self, cta: Cta, rows: ForwardRows, out: list[jax.Array], lse: list[jax.Array]
    ) -> None:
        """Stores output and log-sum-exp of this warpgroup's 64 queries over all keys."""
        out_gmem, *lse_gmems = cta.results[: 1 + len(lse)]
        at = rows.at
        # The copies of the previous tile may still be reading this shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_matrix = Matrix.of(cta.memory.get("out_smem", cta.memory["q_smem"]), cta.wg_idx)
        out_matrix.store(out)
        out_matrix.write(Heads(out_gmem), at.batch_idx, rows.start, at.head_idx)

        def write_lse():
            for gmem, numbers in zip(lse_gmems, lse, strict=True):
                gmem[at.batch_idx, at.head_idx, pl.ds(rows.start, WGMMA_ROWS)] = numbers

        # Stores from registers are not clipped at the array's end, unlike TMA copies.
        length = lse_gmems[0].shape[2]
        if length % self.tiles.rows:
            pl.when(rows.start < length)(write_lse)
        else:
            write_lse()

    def write_share(
        self,
        cta: Cta,
        rows: ForwardRows,
        number: jax.Array,
        out: list[jax.Array],
        lse: list[jax.Array],
    ) -> None:
        """Stores float32 output and log-sum-exp of this warpgroup's 64 queries over a share of keys."""
        out_gmem, *lse_gmems = cta.results[1 + len(lse) :]
        at = rows.at
        place = (at.batch_idx, at.head_idx, number, pl.ds(rows.start - at.start, WGMMA_ROWS))
        store_share(out_gmem, place, out)
        for gmem, numbers in zip(lse_gmems, lse, strict=True):
            gmem[place] = numbers
