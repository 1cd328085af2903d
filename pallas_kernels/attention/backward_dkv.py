"""Gradients of attention's keys and values on Hopper; another kernel computes that of the queries.

A tile of keys stays in shared memory and its dK and dV in registers, while the blocks of queries that it
visits are copied to shared memory one after the other. The tiles of logits are transposed, with keys as
rows and queries as columns, so that P^T and dS^T are operands of the next products in the registers in
which they were computed: warpgroups neither wait for each other nor exchange tiles.

With heads of more than 128 features, dK and dV of 64 keys fill the registers of two warpgroups. In that
case one warpgroup computes S^T, P^T and dV and passes P^T to the other, which computes dP^T, dS^T and
dK. Each of them computes two of the four products.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.key_gradient_config import PROBABILITY_SLOTS, KeyGradientConfig
from pallas_kernels.attention.logits import Logits, Operands, TransposedTile
from pallas_kernels.attention.mask import Extent
from pallas_kernels.attention.memory import SWIZZLED_COLUMNS, WGMMA_ROWS, Columns, Heads, Matrix
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
from pallas_kernels.attention.shares import (
    result_of_shares,
    store_share,
    sum_of_shares,
    with_sums,
)
from pallas_kernels.attention.speeds import BYTES, LAUNCH, per_row
from pallas_kernels.attention.tiles import KeyPlace, KeyTiles

_QUERY_SHARES = (2, 3, 4, 6, 8, 12, 16)
_MOST_SHARED_TILES = 4
"""Tiles of keys per SM above which SMs have about equal work without dividing tiles into shares."""
_WIDEST_WITH_MANY_QUERIES = 80
"""Largest head size at which dK and dV of 64 keys and tiles of 128 queries fit into the registers."""


def candidates(shape: Shape, logits: Logits, multiprocessors: int) -> tuple[KeyGradientConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    The products S^T and dP^T read both operands from shared memory, whose bandwidth limits them when a
    block has few queries. The guess therefore has blocks of 128 queries where registers allow them. With
    wider heads it has K in registers instead, which leaves room for one of the two products at a time.
    """
    widest = max(shape.head_size, shape.value_size)
    visits_all_queries = logits.mask.reach() == (None, None)
    few = KeyGradientConfig(query_stages=3 if visits_all_queries else 2)
    many = KeyGradientConfig(query_block=128)
    kept = replace(few, multiplies_early=False, keeps_keys=True)
    if widest > 2 * SWIZZLED_COLUMNS:
        configs = [KeyGradientConfig(splits_roles=True, tile_stages=1)]
    elif logits.needs_registers:
        configs = [few, replace(few, query_stages=5 - few.query_stages)]
    elif widest <= _WIDEST_WITH_MANY_QUERIES:
        configs = [many, replace(many, tile_stages=1), few]
    else:
        late = replace(kept, keeps_keys=False, query_block=96, query_stages=2, tile_stages=1)
        configs = [kept, replace(kept, query_stages=5 - few.query_stages), late, few]
    if helps(logits.mask) and not configs[0].splits_roles:
        own = replace(few, query_stages=2, own_lists=True, heads_together=HEADS_TOGETHER)
        shares = shares_for(
            *(logits.mask, own.query_block, own.key_block, own.key_parts),
            heads=shape.batch * shape.key_heads,
            multiprocessors=multiprocessors,
            transposed=True,
        )
        configs.insert(0, replace(own, shares=shares))
    guess = configs[0]
    configs += [replace(guess, heads_together=heads) for heads in (1, 16)]
    return tuple(config for config in configs if config.fits(shape))


def default_config(shape: Shape, logits: Logits, multiprocessors: int) -> KeyGradientConfig:
    """Returns the first of `candidates`: the best guess without measurements."""
    return candidates(shape, logits, multiprocessors)[0]


def key_gradients(
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
    config: KeyGradientConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dkey [B, S, K, H], dvalue [B, S, K, V]) for query and dout [B, T, N, .].

    lse2, the log-sum-exp in base 2, and delta, rowsum(out * dout) - dlse, are float32 [B, N, T padded to
    whole blocks of queries].
    """
    shape = Shape.of(query, key, value)
    config = config or default_config(shape, logits, multiprocessors)
    if config.loses_keys(shape):
        raise ValueError(
            f"keeps_keys needs heads of more than 64, got {shape.head_size}; pass keeps_keys=False"
        )
    tiles = shared_tiles(shape, logits, config, multiprocessors)
    head, columns = config.columns(shape)
    kind = _SplitGradients if config.splits_roles else _BothGradients
    kernel = kind(shape, query.dtype, logits, config, tiles, head, columns)
    producer = Role(range(config.warpgroups, config.warpgroups + 1), kernel.produce)
    tables = tiles.tables(operands)
    launch = PersistentKernel(
        name="attention_key_gradient",
        tiles=tiles,
        schedule=tiles.schedule(
            shape.batch, config.heads_together, multiprocessors, operands, tables
        ),
        roles=(producer, *kernel.consumers()),
        memory=kernel.memory(),
        results=(
            *(
                jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * tiles.shares, x.shape[3]), x.dtype)
                for x in (key, value)
            ),
            *kernel.of_shares(),
        ),
    )
    arrays = (query, key, value, dout, lse2, delta)
    padded = operands.padded(config.query_block, WGMMA_ROWS).transposed()
    dkey, dvalue, *of_shares = launch(arrays, padded, tables)
    starts = tiles.starts_of_shared
    dkey = with_sums(dkey, of_shares[:1], starts)
    dvalue = with_sums(dvalue, of_shares[1:], starts)
    return sum_of_shares(dkey, tiles.shares), sum_of_shares(dvalue, tiles.shares)


def shared_tiles(
    shape: Shape, logits: Logits, config: KeyGradientConfig, multiprocessors: int
) -> KeyTiles:
    """Returns the tiles of keys, each divided into the number of shares predicted fastest.

    A tile of keys visits the queries of all query heads that share its key head. If there are fewer
    tiles than SMs, or the first tiles visit many queries and the last few, as in causal attention, these
    heads are divided into shares for different CTAs, and with one head in a share, its blocks of queries
    too. The dK and dV of a tile's shares are added up afterwards.
    """
    whole = KeyTiles(
        *(logits.mask, shape.key_heads, shape.group, config.key_block, config.query_block),
        parts=config.key_parts if config.own_lists and not config.splits_roles else 0,
        list_shares=config.shares,
    )
    has_many = shape.batch * shape.key_heads * whole.count > _MOST_SHARED_TILES * multiprocessors
    if whole.starts_of_shared or has_many:
        return whole
    divisors = [n for n in range(1, shape.group + 1) if shape.group % n == 0]
    options = [replace(whole, group=shape.group // n, group_shares=n) for n in divisors]
    options += [replace(options[-1], query_shares=n) for n in _QUERY_SHARES]
    return min(options, key=lambda tiles: microseconds(shape, tiles, config, multiprocessors))


def microseconds(
    shape: Shape, tiles: KeyTiles, config: KeyGradientConfig, multiprocessors: int
) -> float:
    """Estimates the microseconds of all tiles of keys and of the sum of their shares."""
    visited = tiles.longest(shape.batch, config.heads_together, multiprocessors)
    by_tiles = visited * per_row(shape) * config.key_block / 128
    if tiles.shares == 1:
        return by_tiles
    values = shape.batch * shape.key_count * shape.key_heads * (shape.head_size + shape.value_size)
    # Each share writes dK and dV to memory, 2 bytes an element, and the sum reads them again.
    return by_tiles + LAUNCH + 2 * 2 * tiles.shares * values / BYTES


class _Visit(NamedTuple):
    """A block of queries whose contribution a warpgroup adds to dK and dV of its 64 keys."""

    step: jax.Array
    """Number of blocks of queries that the CTA has processed before this one, over all its tiles."""
    tile: TransposedTile
    is_partial: Any
    """Whether the mask may forbid elements of the block."""
    extent: Extent


@dataclass(frozen=True)
class _KeyGradients:
    """Base class of the two kernels for dK and dV: parameters, shared memory and the producer."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: KeyGradientConfig
    tiles: KeyTiles
    head: Columns
    value: Columns

    def consumers(self) -> tuple[Role, ...]:
        raise NotImplementedError

    def memory(self) -> dict[str, Any]:
        config, dtype = self.config, self.dtype
        rows, wgs, keys = config.query_block, config.warpgroups, config.key_slots
        q_stages, do_stages = config.query_stages, config.dout_stages
        head, value = self.head, self.value
        readers = wgs // config.key_parts
        return dict(
            q_smem=head.memory((q_stages,), rows, dtype),
            do_smem=value.memory((do_stages,), rows, dtype),
            k_smem=head.memory((keys,), WGMMA_ROWS, dtype),
            v_smem=value.memory((keys,), WGMMA_ROWS, dtype),
            lse_smem=[plgpu.SMEM((q_stages, rows), jnp.float32)] * self.logits.row_numbers,
            delta_smem=plgpu.SMEM((do_stages, rows), jnp.float32),
            kv_full=plgpu.Barrier(num_arrivals=head.count + value.count, num_barriers=keys),
            kv_free=plgpu.Barrier(num_arrivals=readers, num_barriers=keys),
            q_full=plgpu.Barrier(
                num_arrivals=head.count + self.logits.row_numbers, num_barriers=q_stages
            ),
            q_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=q_stages),
            do_full=plgpu.Barrier(num_arrivals=value.count + 1, num_barriers=do_stages),
            do_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=do_stages),
        )

    def of_shares(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of list shares' float32 dK and dV; () if no tile's list is divided."""
        tiles = self.tiles
        sizes = (tiles.own, self.shape.batch, self.shape.key_heads * tiles.shares, tiles.rows)
        of_both = (result_of_shares(*sizes, columns.width) for columns in (self.head, self.value))
        return tuple(shape for of_one in of_both for shape in of_one)

    def rings(self, cta: Cta) -> tuple[Ring, Ring]:
        """Returns the pipelines (circular buffers) of Q with the log-sum-exp, and of dO with delta."""
        return cta.ring("q", self.config.query_stages), cta.ring("do", self.config.dout_stages)

    def keys(self, cta: Cta) -> Ring:
        """Returns the pipeline (circular buffer) of K and V, which has 64 keys in a slot."""
        memory = (cta.memory[name] for name in ("k_smem", "kv_full", "kv_free"))
        return Ring(*memory, self.config.key_slots)

    def key_slot(self, tile_idx: Any, part: Any) -> jax.Array:
        """Returns the slot of shared memory for keys 64 * part to 64 * part + 63 of the CTA's tile."""
        stage = lax.rem(tile_idx, jnp.int32(self.config.tile_stages))
        return stage * self.config.key_parts + part

    # --- the producer -----------------------------------------------------------------------------

    def produce(self, cta: Cta) -> None:
        plgpu.set_max_registers(registers(self.config.warpgroups)[1], action="decrease")
        if self.config.tile_stages > 1:
            self.copy_keys(cta, 0)
        lax.fori_loop(0, cta.tile_count, functools.partial(self.copy_tile, cta), jnp.int32(0))
        for ring in (*self.rings(cta), self.keys(cta)):
            ring.drain()

    def copy_keys(self, cta: Cta, tile_idx: Any) -> None:
        """Starts the copies of K and V of the CTA's tile number `tile_idx` to shared memory."""
        at = cta.place(tile_idx)
        _, k_heads, v_heads = map(Heads, cta.arrays[:3])
        ring = self.keys(cta)
        for part in range(self.config.key_parts):
            slot = self.key_slot(tile_idx, part)
            start = at.start + part * WGMMA_ROWS
            ring.fill(slot, k_heads, at.batch_idx, start, at.key_head_idx)
            values = Matrix.of(cta.memory["v_smem"], slot)
            values.fill(v_heads, at.batch_idx, start, at.key_head_idx, ring.full.at[slot])

    def copy_tile(self, cta: Cta, tile_idx: jax.Array, first: jax.Array) -> jax.Array:
        """Copies a tile's blocks of queries; takes and returns the CTA's count of copied blocks."""
        at = cta.place(tile_idx)
        following = tile_idx + 1
        copies_ahead = self.config.tile_stages > 1
        if not copies_ahead:
            self.copy_keys(cta, tile_idx)

        def copy_next_keys(is_time):
            exists = following < cta.tile_count
            pl.when(is_time & exists)(lambda: self.copy_keys(cta, following))

        def copy_pair(head_idx, visits, i, step):
            if copies_ahead:
                # This tile's first queries are needed before the next tile's keys.
                copy_next_keys(step == first + self.config.query_stages)
            self.copy_queries(cta, at, head_idx, visits.block(i), step)
            return step + 1

        def copy_head(g, step):
            head_idx = at.first_head_idx + g
            visits = at.visits(g)
            body = functools.partial(copy_pair, head_idx, visits)
            return lax.fori_loop(visits.start, visits.stop, body, step)

        end = lax.fori_loop(0, self.tiles.group, copy_head, first)
        if copies_ahead:
            copy_next_keys(end <= first + self.config.query_stages)
        return end

    def copy_queries(self, cta: Cta, at: KeyPlace, head_idx: Any, i: Any, step: Any) -> None:
        """Copies Q and dO of block i of the queries, with log-sum-exp (and rest) and delta of each."""
        queries, douts = self.rings(cta)
        q_gmem, _, _, do_gmem, lse_gmem, delta_gmem = cta.arrays
        start = i * self.config.query_block
        rows = (at.batch_idx, head_idx, pl.ds(start, self.config.query_block))
        of_q = [lse_gmem.at[rows]]
        if self.logits.saves_rest:
            of_q.append(cta.operands.lse_rest.at[*rows[:2], 0, rows[2]])
        for ring, gmem, vectors, vectors_smem in (
            (queries, q_gmem, of_q, cta.memory["lse_smem"]),
            (douts, do_gmem, [delta_gmem.at[rows]], [cta.memory["delta_smem"]]),
        ):
            slot = ring.slot(step)
            ring.fill(slot, Heads(gmem), at.batch_idx, start, head_idx)
            for vector, smem in zip(vectors, vectors_smem, strict=True):
                plgpu.copy_gmem_to_smem(vector, smem.at[slot], ring.full.at[slot])

    # --- shared by the consumers of both kernels --------------------------------------------------

    def begin(self, cta: Cta, part: Any) -> None:
        """Sets a warpgroup's registers, and frees the stages of Q, dO and its 64 keys (`part`)."""
        plgpu.set_max_registers(registers(self.config.warpgroups)[0], action="increase")
        keys = self.keys(cta)
        for stage in range(self.config.tile_stages):
            keys.release(stage * self.config.key_parts + part)
        for ring in self.rings(cta):
            ring.release_all()

    def own(self, cta: Cta) -> jax.Array:
        """Returns the warpgroup's index behind an optimization barrier.

        Without the barrier, addresses computed from the index would be hoisted out of the loop over
        blocks, and occupy registers throughout it.
        """
        return lax.optimization_barrier(cta.wg_idx)

    def all_visits(
        self, cta: Cta, at: KeyPlace, step: jax.Array, visit: Callable[[_Visit], None]
    ) -> jax.Array:
        """Calls `visit` for each block of queries in the tile's list; returns the next block's step."""
        rows, group = self.config.query_block, self.tiles.group

        def of_block(g, visits, first, i, _):
            part = 0 if self.config.splits_roles else self.own(cta) * WGMMA_ROWS
            key_start = self.logits.operand_start(
                at.start + part, self.shape.key_count, self.config.key_block
            )
            tile = TransposedTile(
                at.batch_idx,
                at.first_head_idx + g,
                visits.block(i) * rows,
                key_start,
                (WGMMA_ROWS, rows),
                transposed=True,
                bits=visits.bits(i, part),
            )
            tile = tile.loaded(cta.operands._replace(lse_rest=None))
            visit(_Visit(first + i, tile, visits.is_partial(i), at.extent))

        def of_head(g, first):
            visits = at.visits(g)
            own = visits.of_part(self.own(cta))
            first -= visits.start
            skip = functools.partial(skip_step, self.rings(cta), first)
            if own is not visits:
                lax.fori_loop(visits.start, own.start, skip, None)
            body = functools.partial(of_block, g, own, first)
            lax.fori_loop(own.start, own.stop, body, None)
            if own is not visits:
                lax.fori_loop(own.stop, visits.stop, skip, None)
            return first + visits.stop

        return lax.fori_loop(0, group, of_head, step)

    def slots(self, cta: Cta, visit: _Visit) -> tuple[jax.Array, jax.Array]:
        queries, douts = self.rings(cta)
        return queries.slot(visit.step), douts.slot(visit.step)

    def release(self, cta: Cta, visit: _Visit) -> None:
        """Frees the pipeline stages of a visited block of queries, for the producer to fill."""
        # The fence orders the producer's next copies after this thread's reads of log-sum-exp and
        # delta.
        plgpu.commit_smem()
        for ring, slot in zip(self.rings(cta), self.slots(cta, visit), strict=True):
            ring.release(slot)

    def probabilities(
        self, cta: Cta, visit: _Visit, products: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns P^T [64 keys, queries of a block], and the logits' derivative by `products` (S^T).

        The derivative is None if it is the constant `scale`.
        """
        logits, is_partial = self.logits, visit.is_partial
        if logits.mask.is_always_full(self.config.query_block, self.config.key_block):
            is_partial = False
        x = logits.logits_if_masked(products, visit.tile, cta.operands, visit.extent, is_partial)
        slot, _ = self.slots(cta, visit)
        lse_smem, *rest = (smem.at[slot] for smem in cta.memory["lse_smem"])
        lse2 = plgpu.load(lse_smem, layout=visit.tile.layout.reduce(0))
        shift = logits.shift(visit.tile, cta.operands)
        of_block = lse2 if shift is None else lse2 - shift
        tile = visit.tile.with_rest(cta.operands, rest)
        p = logits.probabilities(x, of_block, tile, cta.operands)
        if logits.mask.has_query_lengths or logits.mask.query_count % self.config.query_block:
            p = logits.within_rows(p, lax.broadcast_in_dim(lse2, x.shape, [1]))
        return p, logits.derivative(products, visit.tile, cta.operands)

    def delta(self, cta: Cta, visit: _Visit) -> jax.Array:
        return visit.tile.along_queries(cta.memory["delta_smem"].at[self.slots(cta, visit)[1]])

    def tile_accumulator(self) -> Any:
        return plgpu.ACC((WGMMA_ROWS, self.config.query_block), jnp.float32)

    def write_key(self, cta: Cta, at: KeyPlace, slot: Any, start: Any, dkey: list[Any]) -> None:
        """Stores dK of 64 keys, clipped at the array's end, through the shared memory of K."""
        # Without a cap, the scale is multiplied into dK once at the end instead of into every tile of
        # dS.
        scale = self.logits.scale if self.logits.soft_cap is None else 1.0
        matrix = Matrix.of(cta.memory["k_smem"], slot)
        self.write(cta, at, 0, matrix, start, [block * scale for block in dkey])

    def write_value(self, cta: Cta, at: KeyPlace, slot: Any, start: Any, dvalue: list[Any]) -> None:
        """Stores dV of 64 keys, in the same way as `write_key`."""
        factor = 1 / self.logits.keep_probability
        matrix = Matrix.of(cta.memory["v_smem"], slot)
        self.write(cta, at, 1, matrix, start, [block * factor for block in dvalue])

    def write(
        self, cta: Cta, at: KeyPlace, result: int, matrix: Matrix, start: Any, blocks: list[Any]
    ) -> None:
        """Stores dK (`result` 0) or dV (1) of 64 keys, summed over all queries or a share of them."""

        def write_rows():
            matrix.store(blocks)
            matrix.write(Heads(cta.results[result]), at.batch_idx, start, at.shared_head_idx)

        if not self.of_shares():
            write_rows()
            return
        number = at.share
        assert number is not None
        pl.when(number == 0)(write_rows)

        @pl.when(number > 0)
        def _():
            place = (at.batch_idx, at.shared_head_idx, number - 1)
            place += (pl.ds(start - at.start, WGMMA_ROWS),)
            store_share(cta.results[2 + result], place, blocks)


@dataclass(frozen=True)
class _BothGradients(_KeyGradients):
    """The kernel in which each warpgroup owns 64 keys and holds both their gradients in registers."""

    def consumers(self) -> tuple[Role, ...]:
        return (Role(range(self.config.warpgroups), self.consume),)

    def consume(self, cta: Cta) -> None:
        self.begin(cta, cta.wg_idx)
        lax.fori_loop(0, cta.tile_count, functools.partial(self.add_up, cta), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def add_up(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Computes dK and dV of 64 keys; takes and returns the CTA's count of visited blocks."""
        at = cta.place(tile_idx)
        keys = self.keys(cta)
        keys.wait(self.key_slot(tile_idx, cta.wg_idx))
        kept_keys = None
        if self.config.keeps_keys:
            matrix = keys.matrix(self.key_slot(tile_idx, cta.wg_idx))
            kept_keys = [plgpu.load(k, layout=plgpu.Layout.WGMMA) for k in matrix.operands]

        def accumulate(dk_accs, dv_accs):
            visit = functools.partial(self.visit, cta, tile_idx, kept_keys, dk_accs, dv_accs)
            end = self.all_visits(cta, at, step, visit)
            return memory.load_accumulators(dk_accs), memory.load_accumulators(dv_accs), end

        dkey, dvalue, end = pl.run_scoped(
            accumulate, self.head.accumulators(), self.value.accumulators()
        )
        slot = self.key_slot(tile_idx, cta.wg_idx)
        start = at.start + cta.wg_idx * WGMMA_ROWS
        self.write_value(cta, at, slot, start, dvalue)
        self.write_key(cta, at, slot, start, dkey)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        keys.release(slot)
        return end

    def visit(
        self,
        cta: Cta,
        tile_idx: jax.Array,
        kept_keys: list[jax.Array] | None,
        dk_accs: list[Any],
        dv_accs: list[Any],
        visit: _Visit,
    ) -> None:
        """Adds the contribution of a block of queries to dK and dV of this warpgroup's 64 keys."""
        queries, _ = self.rings(cta)
        q_slot, _ = self.slots(cta, visit)
        gradient = functools.partial(self.logits_gradient, cta, tile_idx, kept_keys, visit, dv_accs)
        if self.config.multiplies_early:
            ds = pl.run_scoped(gradient, self.tile_accumulator(), self.tile_accumulator())
        else:
            ds = gradient(None, None)
        memory.multiply(dk_accs, ds.astype(self.dtype), queries.matrix(q_slot))
        # Wait for the product here: WGMMAs in flight would keep the registers of P and dS occupied
        # during the next visit. The other warpgroup uses the tensor cores meanwhile.
        memory.load_accumulators(dk_accs)
        self.release(cta, visit)

    def logits_gradient(
        self,
        cta: Cta,
        tile_idx: jax.Array,
        kept_keys: list[jax.Array] | None,
        visit: _Visit,
        dv_accs: list[Any],
        s_acc: Any,
        dp_acc: Any,
    ) -> jax.Array:
        """Returns dS^T [64 keys, queries of the block], and adds the block's contribution to dV.

        If `s_acc` and `dp_acc` are None, S^T and dP^T are multiplied one after the other.
        """
        queries, douts = self.rings(cta)
        q_slot, do_slot = self.slots(cta, visit)
        dout = douts.matrix(do_slot)
        values = functools.partial(Matrix.of, cta.memory["v_smem"])

        def own_slot():
            return self.key_slot(tile_idx, self.own(cta))

        def multiply_keys(acc):
            keys = kept_keys or self.keys(cta).matrix(own_slot())
            memory.multiply_transposed(acc, keys, queries.matrix(q_slot))

        queries.wait(q_slot)
        if s_acc is None:

            def late_products(acc):
                multiply_keys(acc)
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            products = pl.run_scoped(late_products, self.tile_accumulator())
        else:
            multiply_keys(s_acc)
            douts.wait(do_slot)
            memory.multiply_transposed(dp_acc, values(own_slot()), dout)
            products = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.value.count)
        p, derivative = self.probabilities(cta, visit, products)
        # P is rounded here to the dtype that the product for dV needs: P in float32 would not fit into
        # the registers.
        p = lax.optimization_barrier(p.astype(self.dtype))
        kept = None
        if self.logits.dropout_rate > 0:
            kept = self.logits.dropped(p, visit.tile, cta.operands)

        def add_to_value(acc):
            memory.multiply(dv_accs, p if kept is None else kept, dout)
            return plgpu.wgmma_accumulator_load(acc, wait_n=self.value.count)

        if dp_acc is None:

            def late_gradient(acc):
                douts.wait(do_slot)
                memory.multiply_transposed(acc, values(own_slot()), dout)
                return add_to_value(acc)

            dp = pl.run_scoped(late_gradient, self.tile_accumulator())
        else:
            dp = add_to_value(dp_acc)
        return self.logits.gradient(p, dp, self.delta(cta, visit), kept, derivative)


@dataclass(frozen=True)
class _SplitGradients(_KeyGradients):
    """The kernel in which two warpgroups own the same 64 keys; one computes dV and the other dK."""

    def consumers(self) -> tuple[Role, ...]:
        return (
            Role(range(1), functools.partial(self.consume, True)),
            Role(range(1, 2), functools.partial(self.consume, False)),
        )

    def memory(self) -> dict[str, Any]:
        rows = self.config.query_block
        p_smem = memory.tiled((PROBABILITY_SLOTS,), WGMMA_ROWS, rows, self.dtype)
        return super().memory() | dict(
            p_smem=p_smem,
            p_full=plgpu.Barrier(num_barriers=PROBABILITY_SLOTS),
            p_free=plgpu.Barrier(num_barriers=PROBABILITY_SLOTS),
            kv_read=plgpu.Barrier(num_arrivals=2),
        )

    def probability_ring(self, cta: Cta) -> Ring:
        return cta.ring("p", PROBABILITY_SLOTS)

    def consume(self, gives_values: bool, cta: Cta) -> None:
        self.begin(cta, 0)
        if not gives_values:
            self.probability_ring(cta).release_all()
        body = functools.partial(self.add_up, gives_values, cta)
        lax.fori_loop(0, cta.tile_count, body, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        if gives_values:
            self.probability_ring(cta).drain()

    def add_up(
        self, gives_values: bool, cta: Cta, tile_idx: jax.Array, step: jax.Array
    ) -> jax.Array:
        """Computes dK or dV of a tile; takes and returns the CTA's count of visited blocks."""
        at = cta.place(tile_idx)
        keys = self.keys(cta)
        slot = self.key_slot(tile_idx, 0)
        keys.wait(slot)

        def accumulate(accs):
            one = self.visit_of_values if gives_values else self.visit_of_keys
            end = self.all_visits(cta, at, step, functools.partial(one, cta, slot, accs))
            return memory.load_accumulators(accs), end

        columns = self.value if gives_values else self.head
        gradient, end = pl.run_scoped(accumulate, columns.accumulators())
        # The gradients overwrite K and V, which the other warpgroup's products may still read.
        plgpu.barrier_arrive(cta.memory["kv_read"])
        plgpu.barrier_wait(cta.memory["kv_read"])
        write = self.write_value if gives_values else self.write_key
        write(cta, at, slot, at.start, gradient)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        keys.release(slot)
        return end

    def visit_of_values(self, cta: Cta, slot: jax.Array, accs: list[Any], visit: _Visit) -> None:
        """Adds the contribution of a block of queries to dV, and passes P^T to the other warpgroup."""
        queries, douts = self.rings(cta)
        q_slot, do_slot = self.slots(cta, visit)
        ring = self.probability_ring(cta)
        p_slot = ring.slot(visit.step)

        def with_products(s_acc):
            queries.wait(q_slot)
            keys = self.keys(cta).matrix(lax.optimization_barrier(slot))
            memory.multiply_transposed(s_acc, keys, queries.matrix(q_slot))
            products = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
            p, derivative = self.probabilities(cta, visit, products)
            return p, self.logits.chained(p, derivative)

        p, factor = pl.run_scoped(with_products, self.tile_accumulator())
        plgpu.barrier_wait(ring.free.at[p_slot])
        ring.memory[p_slot] = factor.astype(self.dtype)
        plgpu.barrier_arrive(ring.full.at[p_slot])
        p = p.astype(self.dtype)
        if self.logits.dropout_rate > 0:
            p = self.logits.dropped(p, visit.tile, cta.operands)
        douts.wait(do_slot)
        memory.multiply(accs, p, douts.matrix(do_slot))
        memory.load_accumulators(accs)
        self.release(cta, visit)

    def visit_of_keys(self, cta: Cta, slot: jax.Array, accs: list[Any], visit: _Visit) -> None:
        """Adds the contribution of a block of queries to dK, using P^T from the other warpgroup."""
        queries, douts = self.rings(cta)
        q_slot, do_slot = self.slots(cta, visit)
        ring = self.probability_ring(cta)
        p_slot = ring.slot(visit.step)

        def with_products(dp_acc):
            douts.wait(do_slot)
            values = Matrix.of(cta.memory["v_smem"], lax.optimization_barrier(slot))
            memory.multiply_transposed(dp_acc, values, douts.matrix(do_slot))
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            ring.wait(p_slot)
            factor = plgpu.load(ring.memory.at[p_slot], layout=visit.tile.layout)
            ring.release(p_slot)
            kept = None
            if self.logits.dropout_rate > 0:
                kept = self.logits.dropped(factor, visit.tile, cta.operands)
            return self.logits.gradient(factor, dp, self.delta(cta, visit), kept, None)

        ds = pl.run_scoped(with_products, self.tile_accumulator()).astype(self.dtype)
        queries.wait(q_slot)
        memory.multiply(accs, ds, queries.matrix(q_slot))
        memory.load_accumulators(accs)
        self.release(cta, visit)
