"""Gradient of attention's queries on Hopper, computed by a separate kernel.

As in the forward, a consumer owns 64 queries and visits blocks of K and V one after the other. The
consumer computes S = Q K^T and dP = dO V^T again, and adds dS K to dQ in its registers. These are two
products more than if the kernel of dK and dV also summed dQ. In return no CTA waits for another, dQ is
never in memory in float32, and every sum has a fixed order.

The gradient of a bias that is not broadcast is the gradient of the logits, which a consumer has in
registers here and can write from them.
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
from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.memory import (
    SWIZZLED_COLUMNS,
    WGMMA_ROWS,
    Columns,
    Heads,
    Matrix,
    ceil_to,
)
from pallas_kernels.attention.own_lists import HEADS_TOGETHER, helps, shares_for
from pallas_kernels.attention.persistent import (
    Cta,
    PersistentKernel,
    Ring,
    Role,
    registers,
    skip_step,
)
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.shares import result_of_shares, store_share, with_sums
from pallas_kernels.attention.softmax import VECTOR
from pallas_kernels.attention.tiles import ListedVisits, OwnVisits, Place, QueryTiles, Visits
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES


@dataclass(frozen=True)
class QueryGradientConfig:
    """Division of the work: each consumer owns 64 queries of a tile and visits blocks of keys."""

    consumers: int = 2
    key_block: int = 128
    key_stages: int = 2
    """Pipeline stages of K: blocks of keys that shared memory holds."""
    value_stages: int = 2
    """Pipeline stages of V: blocks of keys that shared memory holds."""
    separate_output: bool = True
    """True if dQ has shared memory of its own; otherwise it overwrites Q."""
    heads_together: int = 4
    """Heads whose tiles are scheduled together, so that K and V stay in the L2 cache."""
    own_lists: bool = False
    """True if each consumer visits its own range of a mask object's list of key blocks (`OwnLists`)."""
    shares: int = 1
    """Shares into which the longest lists are divided, for different CTAs; needs `own_lists`."""

    @property
    def query_block(self) -> int:
        return self.consumers * WGMMA_ROWS

    def columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q and K, and of V and dO."""
        lengths = (shape.query_count, shape.key_count)
        return (
            Columns.of(shape.head_size, lengths, self.key_block),
            Columns.of(shape.value_size, lengths),
        )

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        head, value = self.columns(shape)
        outputs = 2 if self.separate_output else 1
        count = outputs * head.bytes(self.query_block) + value.bytes(self.query_block)
        count += self.key_stages * head.bytes(self.key_block)
        count += self.value_stages * value.bytes(self.key_block)
        return count + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        return self.shared_bytes(shape) <= SHARED_MEMORY_BYTES


def candidates(
    shape: Shape, logits: Logits, multiprocessors: int
) -> tuple[QueryGradientConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    The guess has the largest blocks that registers and shared memory hold; one consumer, if tiles of two
    leave half of the SMs idle; blocks of 64 keys, if the bias or mask, which must be padded to whole
    blocks of keys, needs no padded copy with these.
    """
    widest = max(shape.head_size, shape.value_size)
    if widest <= SWIZZLED_COLUMNS:
        configs = (
            QueryGradientConfig(heads_together=16),
            QueryGradientConfig(),
            QueryGradientConfig(consumers=3, key_block=64, heads_together=16),
            QueryGradientConfig(key_block=64, key_stages=4, value_stages=4, heads_together=16),
        )
    elif widest <= 2 * SWIZZLED_COLUMNS:
        wide, narrow = (
            QueryGradientConfig(),
            QueryGradientConfig(key_block=64, key_stages=3, value_stages=3),
        )
        takes_more = logits.needs_registers or logits.has_functions
        configs = (narrow, wide) if takes_more else (wide, narrow)
        configs += (replace(configs[0], heads_together=16), replace(configs[0], heads_together=1))
    else:
        configs = (QueryGradientConfig(key_block=64, value_stages=1, separate_output=False),)
    one = replace(configs[0], consumers=1, value_stages=max(2, configs[0].value_stages))
    few_tiles = 2 * shape.query_tiles(configs[0].query_block) <= multiprocessors
    configs = (one, *configs) if few_tiles else (*configs, one)
    legal = [config for config in configs if config.fits(shape)]
    guess = legal[0]
    if logits.pads_keys(guess.key_block):
        stages = dict(key_stages=2 * guess.key_stages, value_stages=2 * guess.value_stages)
        narrow = replace(guess, key_block=WGMMA_ROWS, **stages)
        legal = [narrow, *(config for config in legal if config != narrow)]
    if helps(logits.mask):
        own = replace(guess, own_lists=True, key_block=WGMMA_ROWS)
        if guess.key_block > WGMMA_ROWS:
            own = replace(own, key_stages=3, value_stages=3)
        shares = shares_for(
            *(logits.mask, own.query_block, own.key_block, own.consumers),
            heads=shape.batch * shape.heads,
            multiprocessors=multiprocessors,
        )
        legal.insert(0, replace(own, shares=shares, heads_together=HEADS_TOGETHER))
    return tuple(legal)


def default_config(shape: Shape, logits: Logits, multiprocessors: int) -> QueryGradientConfig:
    """Returns the first of `candidates`: the best guess without measurements."""
    return candidates(shape, logits, multiprocessors)[0]


def query_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    logits: Logits,
    multiprocessors: int,
    config: QueryGradientConfig | None = None,
    dlogits_dtype: Any = None,
    reads: tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """Returns dQ [B, T, N, H], the gradient of the logits [B, N, T, S] in `dlogits_dtype`, and sums.

    The gradient is with respect to the logits after cap and bias, 0 where the mask forbids an element,
    and None if `dlogits_dtype` is. The sums over the keys are [B, N, T] in float32: that of P dP, and
    then, for each of `reads` (numbers as in `Logits.derivatives_of_score`), those of dL g and P g, where
    g is the derivative by that read; without `reads` there are no sums. lse2 and delta are [B, N, T
    padded to whole tiles].
    """
    shape = Shape.of(query, key, value)
    config = config or default_config(shape, logits, multiprocessors)
    head, columns = config.columns(shape)
    parts = config.consumers if config.own_lists else 0
    writes_dlogits = dlogits_dtype is not None
    # If `dlogits_dtype` or `reads` is given, no list is divided into shares, as only dQ is summed over
    # shares.
    shares = 1 if writes_dlogits or reads is not None else config.shares
    blocks = (config.query_block, config.key_block)
    tiles = QueryTiles(logits.mask, shape.heads, *blocks, parts, shares)
    kernel = _QueryGradient(
        shape, query.dtype, logits, config, tiles, head, columns, writes_dlogits, reads
    )
    results = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if writes_dlogits:
        results.append(jax.ShapeDtypeStruct(kernel.padded_logits, dlogits_dtype))
    results += [jax.ShapeDtypeStruct(kernel.padded_logits[:3], jnp.float32)] * kernel.sum_count
    results += kernel.of_shares()
    tables = tiles.tables(operands)
    launch = PersistentKernel(
        name="attention_query_gradient",
        tiles=tiles,
        schedule=tiles.schedule(
            shape.batch, config.heads_together, multiprocessors, operands, tables
        ),
        roles=(
            Role(range(config.consumers, config.consumers + 1), kernel.produce),
            Role(range(config.consumers), kernel.consume),
        ),
        memory=kernel.memory(),
        results=results,
    )
    arrays = (query, key, value, dout, lse2, delta)
    padded = operands.padded(WGMMA_ROWS, config.key_block)
    dquery, *others = launch(arrays, padded, tables)
    if kernel.of_shares():
        dquery = with_sums(dquery, others, tiles.starts_of_shared)
        others = []
    dlogits = None
    if writes_dlogits:
        dlogits = others.pop(0)[:, :, : shape.query_count, : shape.key_count]
    return dquery, dlogits, [sums[:, :, : shape.query_count] for sums in others]


class _Rows(NamedTuple):
    """The work of a consumer: 64 queries of a tile, and the blocks of keys that they visit."""

    at: Place
    start: jax.Array
    """Index of the first query."""
    visits: Visits | ListedVisits | OwnVisits
    step: jax.Array
    """Number of blocks that the CTA has processed before the first visit, over all of its tiles."""
    lse2: jax.Array
    """Log-sum-exp of each row, in base 2."""
    delta: jax.Array


@dataclass(frozen=True)
class _QueryGradient:
    """The kernel of dQ: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: QueryGradientConfig
    tiles: QueryTiles
    head: Columns
    value: Columns
    writes_dlogits: bool
    reads: tuple[int, ...] | None
    """Numbers, from 1, of arrays that `logits.score` reads whose gradients are sums over keys."""

    @property
    def sum_count(self) -> int:
        return 0 if self.reads is None else 1 + 2 * len(self.reads)

    @property
    def padded_logits(self) -> tuple[int, int, int, int]:
        """Shape of the logits' gradient [B, N, T, S], T and S padded, as consumers write whole tiles."""
        batch, heads, queries, keys = self.shape.logits
        return batch, heads, ceil_to(queries, WGMMA_ROWS), ceil_to(keys, self.config.key_block)

    def memory(self) -> dict[str, Any]:
        config, dtype = self.config, self.dtype
        consumers, block = config.consumers, config.key_block
        head, value = self.head, self.value
        memory: dict[str, Any] = dict(
            q_smem=head.memory((consumers,), WGMMA_ROWS, dtype),
            do_smem=value.memory((consumers,), WGMMA_ROWS, dtype),
            k_smem=head.memory((config.key_stages,), block, dtype),
            v_smem=value.memory((config.value_stages,), block, dtype),
            q_full=plgpu.Barrier(num_arrivals=head.count + value.count, num_barriers=consumers),
            q_free=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=head.count, num_barriers=config.key_stages),
            k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=config.key_stages),
            v_full=plgpu.Barrier(num_arrivals=value.count, num_barriers=config.value_stages),
            v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=config.value_stages),
        )
        if config.separate_output:
            memory["dq_smem"] = head.memory((consumers,), WGMMA_ROWS, dtype)
        return memory

    def of_shares(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape of the shares' float32 dQ; () if no tile's list is divided."""
        sizes = (self.shape.batch, self.shape.heads, self.tiles.rows, self.head.width)
        return result_of_shares(self.tiles.own, *sizes)

    def rings(self, cta: Cta) -> tuple[Ring, Ring, Ring]:
        """Returns the pipelines of Q with dO (a slot for each consumer), of K and of V."""
        config = self.config
        return (
            cta.ring("q", config.consumers),
            cta.ring("k", config.key_stages),
            cta.ring("v", config.value_stages),
        )

    # --- the producer -----------------------------------------------------------------------------

    def produce(self, cta: Cta) -> None:
        plgpu.set_max_registers(registers(self.config.consumers)[1], action="decrease")
        lax.fori_loop(0, cta.tile_count, functools.partial(self.copy_tile, cta), jnp.int32(0))
        queries, keys, values = self.rings(cta)
        for ring in (keys, values, queries):
            ring.drain()

    def copy_tile(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Copies Q, K, V and dO of a tile; takes and returns the CTA's count of copied key blocks."""
        at = cta.place(tile_idx)
        queries, keys, values = self.rings(cta)
        q_heads, k_heads, v_heads, do_heads = map(Heads, cta.arrays[:4])
        key_head = lax.div(at.head_idx, jnp.int32(self.shape.group))

        def copy_queries(consumer):
            start = at.start + consumer * WGMMA_ROWS
            queries.fill(consumer, q_heads, at.batch_idx, start, at.head_idx)
            dout = Matrix.of(cta.memory["do_smem"], consumer)
            dout.fill(do_heads, at.batch_idx, start, at.head_idx, queries.full.at[consumer])

        def copy_pair(i, _):
            start = at.block(i) * self.config.key_block
            for ring, heads in ((keys, k_heads), (values, v_heads)):
                ring.fill(ring.slot(step + i), heads, at.batch_idx, start, key_head)

        # The first consumer's queries are copied first, so that it starts before the others.
        copy_queries(0)
        copy_pair(0, None)
        for consumer in range(1, self.config.consumers):
            copy_queries(consumer)
        count = at.stop - at.first
        lax.fori_loop(1, count, copy_pair, None)
        return step + count

    # --- the consumers ----------------------------------------------------------------------------

    def consume(self, cta: Cta) -> None:
        plgpu.set_max_registers(registers(self.config.consumers)[0], action="increase")
        queries, keys, values = self.rings(cta)
        keys.release_all()
        values.release_all()
        queries.release(cta.wg_idx)
        lax.fori_loop(0, cta.tile_count, functools.partial(self.add_up, cta), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def add_up(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Computes dQ of 64 queries; takes and returns the CTA's count of visited blocks of keys."""
        at = cta.place(tile_idx)
        start = at.start + cta.wg_idx * WGMMA_ROWS
        visits = self.tiles.visits(at, start, WGMMA_ROWS)
        queries, *of_keys = self.rings(cta)
        lax.fori_loop(0, visits.skipped, functools.partial(skip_step, of_keys, step), None)
        step += visits.skipped
        lse2, delta = (
            plgpu.load(
                gmem.at[at.batch_idx, at.head_idx, pl.ds(start, WGMMA_ROWS)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            for gmem in cta.arrays[4:]
        )
        queries.wait(cta.wg_idx)
        rows = _Rows(at, start, visits, step, lse2, delta)
        if self.writes_dlogits:
            self.write_zeros(cta, rows)

        def all_visits(dq_accs):
            body = functools.partial(self.visit, cta, rows, dq_accs)
            zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), jnp.float32), VECTOR)
            sums = lax.fori_loop(0, visits.count, body, [zeros] * self.sum_count)
            return memory.load_accumulators(dq_accs), sums

        dquery, sums = pl.run_scoped(all_visits, self.head.accumulators())
        step += visits.count
        if not isinstance(visits.remaining, int):
            lax.fori_loop(0, visits.remaining, functools.partial(skip_step, of_keys, step), None)
        self.write(cta, rows, dquery)
        self.write_sums(cta, rows, sums)
        return step + visits.remaining

    def visit(
        self, cta: Cta, rows: _Rows, dq_accs: list[Any], i: jax.Array, sums: list[jax.Array]
    ) -> list[jax.Array]:
        """Adds the contribution of the block of keys of visit i to dQ (`dq_accs`) and to `sums` [64]."""
        _, keys, values = self.rings(cta)
        k_slot, v_slot = keys.slot(rows.step + i), values.slot(rows.step + i)
        acc = plgpu.ACC((WGMMA_ROWS, self.config.key_block), jnp.float32)
        products = functools.partial(self.logits_gradient, cta, rows, i, k_slot, v_slot)
        ds, own_sums = pl.run_scoped(products, acc, acc)
        memory.multiply(dq_accs, ds, keys.matrix(k_slot))
        # Wait for the product here: WGMMAs in flight would keep the registers of dS occupied during the
        # next visit. The other consumer uses the tensor cores meanwhile.
        memory.load_accumulators(dq_accs)
        keys.release(k_slot)
        return [x + own for x, own in zip(sums, own_sums, strict=True)]

    def logits_gradient(
        self, cta: Cta, rows: _Rows, i: Any, k_slot: Any, v_slot: Any, s_acc: Any, dp_acc: Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns dS [64 queries, keys of visit i's block] in Q's dtype, and sums [64] over its keys."""
        queries, keys, values = self.rings(cta)
        at, logits, block = rows.at, self.logits, self.config.key_block
        key_start = rows.visits.block(i) * block
        query_start = logits.operand_start(
            rows.start, self.shape.query_count, self.config.query_block
        )
        tile = Tile(
            *(at.batch_idx, at.head_idx, query_start, key_start, (WGMMA_ROWS, block)),
            bits=rows.visits.bits(i, rows.start - at.start),
        )
        tile = tile.loaded(cta.operands)
        # The barrier keeps the compiler from computing addresses before the loop, where they would
        # occupy registers throughout it.
        own = lax.optimization_barrier(cta.wg_idx)
        dout = Matrix.of(cta.memory["do_smem"], own)
        keys.wait(k_slot)
        memory.multiply_transposed(s_acc, queries.matrix(own), keys.matrix(k_slot))
        values.wait(v_slot)
        memory.multiply_transposed(dp_acc, dout, values.matrix(v_slot))
        products = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.value.count)

        is_partial = False
        if not logits.mask.is_always_full(self.config.query_block, block):
            is_partial = rows.visits.is_partial(i)
        x = logits.logits_if_masked(products, tile, cta.operands, at.extent, is_partial)
        shift = logits.shift(tile, cta.operands)
        of_block = rows.lse2 if shift is None else rows.lse2 - shift
        p = logits.probabilities(x, of_block, tile, cta.operands)
        if logits.mask.has_query_lengths:
            p = logits.within_rows(p, _across(rows.lse2, block))
        derivative = logits.derivative(products, tile, cta.operands)
        kept = logits.dropped(p, tile, cta.operands) if logits.dropout_rate > 0 else None
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        values.release(v_slot)
        if self.config.separate_output:
            # The next tile's queries are copied while this tile's last product is computed.
            is_last = rows.visits.count == i + 1
            pl.when(is_last)(lambda: queries.release(cta.wg_idx))
        dlogits = logits.gradient(p, dp, _across(rows.delta, block), kept, None)
        if self.writes_dlogits:
            self.write_dlogits(cta, rows, key_start, dlogits)
        sums = []
        if self.reads is not None:
            weighted = dlogits + p * _across(rows.delta, block)
            sums = [jnp.sum(weighted, axis=1)]
            sums += self.sums(products, tile, cta.operands, dlogits, p)
        return logits.chained(dlogits, derivative).astype(self.dtype), sums

    def sums(
        self,
        products: jax.Array,
        tile: Tile,
        operands: Operands,
        dlogits: jax.Array,
        probabilities: jax.Array,
    ) -> list[jax.Array]:
        """Returns sums [64] over the block's keys of dL g and P g, for each of `reads`.

        dL and P are [64, keys]; g is the logits' derivative by that array, which `logits.score` reads.
        """
        assert self.reads is not None
        parts = self.logits.derivatives_of_score(self.reads, products, tile, operands)
        sums = []
        for part in parts:
            if 1 in part.axes:
                derivative = part.over((0, 1), tile.shape).astype(jnp.float32)
                for factor in (dlogits, probabilities):
                    sums.append(jnp.sum(self.logits.chained(factor, derivative), axis=1))
            else:
                derivative = part.over((0,), tile.shape).astype(jnp.float32)
                for factor in (dlogits, probabilities):
                    sums.append(jnp.sum(factor, axis=1) * derivative)
        return sums

    def write_sums(self, cta: Cta, rows: _Rows, sums: list[jax.Array]) -> None:
        """Stores this consumer's sums [64], unless all of its queries lie beyond the last query."""
        at, count = rows.at, self.padded_logits[2]
        first = 2 if self.writes_dlogits else 1
        for place, values in zip(cta.results[first : first + self.sum_count], sums, strict=True):

            def write(place=place, values=values):
                place[at.batch_idx, at.head_idx, pl.ds(rows.start, WGMMA_ROWS)] = values

            if count % self.config.query_block:
                pl.when(rows.start < count)(write)
            else:
                write()

    def write_zeros(self, cta: Cta, rows: _Rows) -> None:
        """Stores zeros as the logits' gradient of blocks of keys that this consumer does not visit."""
        block = self.config.key_block

        def write(i, _):
            zeros = jnp.zeros((WGMMA_ROWS, block), jnp.float32)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            self.write_dlogits(cta, rows, i * block, zeros)

        blocks = self.padded_logits[3] // block
        if not isinstance(rows.visits, Visits):
            # Zeros are stored in all blocks. In a visited block the same thread overwrites each of its
            # zeros later, so no barrier is needed.
            lax.fori_loop(0, blocks, write, None)
            return
        lax.fori_loop(0, rows.at.first, write, None)
        lax.fori_loop(rows.visits.last + 1, blocks, write, None)

    def write_dlogits(self, cta: Cta, rows: _Rows, key_start: Any, dlogits: jax.Array) -> None:
        """Stores `dlogits` [64, keys of a block], unless all its rows lie beyond the last query."""
        at, count = rows.at, self.padded_logits[2]
        columns = pl.ds(key_start, self.config.key_block)

        def write():
            place = cta.results[1].at[
                at.batch_idx, at.head_idx, pl.ds(rows.start, WGMMA_ROWS), columns
            ]
            place[...] = dlogits.astype(place.dtype)

        if count % self.config.query_block:
            pl.when(rows.start < count)(write)
        else:
            write()

    def write(self, cta: Cta, rows: _Rows, dquery: list[jax.Array]) -> None:
        """Stores dQ of this warpgroup's 64 queries, summed over all keys or over a share of them."""
        # Without a cap, the scale is multiplied into dQ once at the end instead of into every tile of
        # dS.
        scale = self.logits.scale if self.logits.soft_cap is None else 1.0
        dquery = [block * scale for block in dquery]
        at = rows.at
        if self.of_shares():
            number = self.tiles.share(at)
            pl.when(number == 0)(lambda: self.write_rows(cta, rows, dquery))

            @pl.when(number > 0)
            def _():
                place = (at.batch_idx, at.head_idx, number - 1)
                place += (pl.ds(rows.start - at.start, WGMMA_ROWS),)
                store_share(cta.results[1], place, dquery)

        else:
            self.write_rows(cta, rows, dquery)
        if not self.config.separate_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.rings(cta)[0].release(cta.wg_idx)

    def write_rows(self, cta: Cta, rows: _Rows, dquery: list[jax.Array]) -> None:
        """Stores dQ of this warpgroup's 64 queries, without those beyond the last query."""
        if self.config.separate_output:
            # The copy of the previous tile may still be reading this shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        matrix = Matrix.of(cta.memory.get("dq_smem", cta.memory["q_smem"]), cta.wg_idx)
        matrix.store(dquery)
        matrix.write(Heads(cta.results[0]), rows.at.batch_idx, rows.start, rows.at.head_idx)


def _across(vector: jax.Array, columns: int) -> jax.Array:
    """Broadcasts a vector [rows] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])
