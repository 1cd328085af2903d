"""The main loop of a product: the warpgroups that fill the pipeline, multiply and run the epilogue.

A CTA has one producer warpgroup, which copies tiles of the operands into the stages of a pipeline in
shared memory, and two consumers, which multiply. In ping-pong the consumers hold different output tiles:
one runs its epilogue and stores while the other multiplies, so that an epilogue takes no extra time if
it is shorter than a tile's product. Otherwise each has one half of an output tile of twice the height,
so that a tile of b, copied once, is multiplied by twice as many rows of a.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.matmul_config import CONSUMERS
from pallas_kernels.gemm.operands import matrix_of
from pallas_kernels.gemm.tiled_product import RAW_STAGES, Ring, Step, TiledProduct, TilePlace


class TileEpilogue(Protocol):
    """The epilogue of one output tile."""

    def prefetch(self) -> None:
        """Starts the copies of the epilogue's operands, which overlap the tile's product."""

    def run(self, acc: jax.Array) -> None:
        """Runs the epilogue on the accumulators [tile_m, tile_n], and stores its results."""


class SummingEpilogue(TileEpilogue, Protocol):
    """The epilogue of a product that also sums an operand's rows (wgrad with a bias gradient)."""

    def store_sums(self, sums: Any) -> None:
        """Stores the sums that `TiledProduct.sum_slot` returns, before `run` stores the accumulators."""


@dataclass(frozen=True)
class Producer:
    """The producer warpgroup, which fills pipeline stages tile by tile and K step by K step."""

    product: TiledProduct
    ring: Ring
    a_gmem: Sequence[Any]
    b_gmem: Sequence[Any]
    step_scales: Sequence[Any] = ()

    def run(self) -> None:
        plgpu.set_max_registers(40, action="decrease")
        self.product.copy_once(self.ring, self.b_gmem)
        nothing = (jnp.int32(0), jnp.int32(0))
        slot, filled = lax.fori_loop(0, self.product.tiles_of_cluster(), self._fill_tile, nothing)
        self._await_readers(slot, filled)

    def _fill_tile(self, sequence_idx, carry):
        """Fills stages for all K steps of a tile; the carry is (next stage, stages filled so far)."""
        place = self.product.position(sequence_idx)
        for term, steps in enumerate(self.product.steps_of_terms):
            fill = functools.partial(self._fill_slot, sequence_idx, place, term)
            carry = lax.fori_loop(0, steps, fill, carry)
        return carry

    def _fill_slot(self, sequence_idx, place, term, k_idx, carry):
        product, ring = self.product, self.ring
        slot, filled = carry
        m_start, n_idx, *group = place

        @pl.when(filled >= product.config.stages)
        def _():
            plgpu.barrier_wait(ring.free.at[slot])

        full = ring.full.at[product.full_idx(sequence_idx, slot)]
        step = Step(m_start, n_idx, term, k_idx, *group)
        product.copy_step(ring, self.a_gmem, self.b_gmem, slot, step, full)
        if product.scaled_columns:
            of_rows, of_columns = self.step_scales
            rows = pl.ds(m_start, product.config.cta_tile_m)
            plgpu.copy_gmem_to_smem(of_rows.at[k_idx, rows], ring.a_scale.at[slot], full)
            if not product.scales_columns_alike:
                columns = pl.ds(n_idx * product.part_n, product.part_n)
                plgpu.copy_gmem_to_smem(of_columns.at[k_idx, columns], ring.b_scale.at[slot], full)
        return product.next_slot(slot), filled + 1

    def _await_readers(self, slot, filled) -> None:
        """Waits until the consumers of the cluster have freed all stages.

        A CTA that exits earlier would leave other CTAs to arrive at barriers that no longer exist.
        """
        stages = self.product.config.stages
        for back in range(1, stages + 1):

            @pl.when(filled >= back)
            def _(back=back):
                last_filled = lax.rem(slot + (stages - back), jnp.int32(stages))
                plgpu.barrier_wait(self.ring.free.at[last_filled])


@dataclass(frozen=True)
class _Converter(Producer):
    """The producer warpgroup for a quantised b, which it copies and dequantises K step by K step."""

    def run(self) -> None:
        # The 65536 registers of an SM are 168 for each thread of three warpgroups, 504 in sum: two
        # consumers with 224 leave 56.
        plgpu.set_max_registers(56, action="decrease")
        product = self.product
        total = product.tiles_of_cluster() * product.raw_steps
        for step in range(RAW_STAGES):
            pl.when(step < total)(functools.partial(self._copy_raw, jnp.int32(step)))
        nothing = (jnp.int32(0), jnp.int32(0))
        step = functools.partial(self._convert_step, total)
        slot, filled = lax.fori_loop(0, total, step, nothing)
        self._await_readers(slot, filled)

    def _copy_raw(self, step) -> None:
        """Starts the copies of quantised weights for `step`, a K step counted over the CTA's tiles."""
        product = self.product
        _, n_idx = product.position(lax.div(step, jnp.int32(product.raw_steps)))
        k_start = lax.rem(step, jnp.int32(product.raw_steps)) * product.raw_step
        n_start = n_idx * product.part_n
        starts = (n_start, k_start) if product.b_transposed else (k_start, n_start)
        raw_slot = lax.rem(step, jnp.int32(RAW_STAGES))
        count = len(self.b_gmem) // product.products
        for index, memory in enumerate(self.ring.raw):
            arrays = self.b_gmem[index * count : (index + 1) * count]
            full = self.ring.raw_full.at[raw_slot]
            product.raw_tile.copy(arrays, memory, raw_slot, *starts, full)

    def _convert_step(self, total, step, carry):
        """Dequantises a step's weights into pipeline stages, and starts the copies of a later step.

        The carry is (next stage, stages filled so far).
        """
        product, ring, c = self.product, self.ring, self.product.config
        slot, filled = carry
        sequence_idx = lax.div(step, jnp.int32(product.raw_steps))
        m_start, _ = product.position(sequence_idx)
        k_start = lax.rem(step, jnp.int32(product.raw_steps)) * product.raw_step
        raw_slot = lax.rem(step, jnp.int32(RAW_STAGES))
        slots = []
        for half in range(product.raw_step // product.tile_k):

            @pl.when(filled >= c.stages)
            def _(slot=slot):
                plgpu.barrier_wait(ring.free.at[slot])

            full = ring.full.at[product.full_idx(sequence_idx, slot)]
            product.a_tile.copy(
                matrix_of(self.a_gmem[0]),
                ring.a_smem,
                slot,
                m_start,
                k_start + half * product.tile_k,
                full,
            )
            slots.append((slot, full))
            slot, filled = product.next_slot(slot), filled + 1
        plgpu.barrier_wait(ring.raw_full.at[raw_slot])
        for index, raw in enumerate(ring.raw):
            if product.b_transposed:
                for start in range(0, product.part_n, _CONVERTED_COLUMNS):
                    self._convert(index, raw, raw_slot, start, [slot for slot, _ in slots])
            else:
                self._convert_rows(index, raw, raw_slot, slots[0][0])
        plgpu.commit_smem()
        for _, full in slots:
            plgpu.barrier_arrive(full)
        pl.when(step + RAW_STAGES < total)(lambda: self._copy_raw(step + RAW_STAGES))
        return slot, filled

    def _convert(self, index: int, raw: Any, raw_slot: Any, start: int, slots: Any) -> None:
        """Dequantises 64 columns of b's tile, from column `start` on, into pipeline stages `slots`."""
        tile_k, first = self.product.tile_k, 0
        registers, _ = self.ring.b_smem[index]
        for w in self.product.raw_tile.dequantized(raw, raw_slot, start, _CONVERTED_COLUMNS):
            for part in range(0, w.shape[1], min(tile_k, w.shape[1])):
                width = min(tile_k, w.shape[1])
                place = registers.at[
                    slots[first // tile_k],
                    0,
                    pl.ds(start, _CONVERTED_COLUMNS),
                    pl.ds(first % tile_k, width),
                ]
                place[...] = w if width == w.shape[1] else w[:, part : part + width]
                first += width

    def _convert_rows(self, index: int, raw: Any, raw_slot: Any, slot: Any) -> None:
        """Dequantises a tile of b [K, N], whose weights share scales along N, into stage `slot`."""
        tile, memory, first = self.product.raw_tile, self.ring.b_smem[index], 0
        for w in tile.dequantized(raw, raw_slot, 0, tile.span):
            memory.at[slot, :, pl.ds(first, w.shape[1])][...] = w
            first += w.shape[1]


_CONVERTED_COLUMNS = 64
"""Columns of b that a warpgroup dequantises in registers at a time."""


SCALED_PIECE = 64
"""Columns of a tile's sums that are scaled at a time where runs of b's columns share scales. It divides
the length of a run, so that one scale is enough."""


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup, which multiplies and runs the epilogue of its tiles."""

    product: TiledProduct
    ring: Ring
    wg_idx: jax.Array
    epilogue_of: Callable[[TilePlace], Any]
    """Function from a tile to its `TileEpilogue`; `SummingEpilogue` if the product sums operands."""
    step_scales: Sequence[Any] = ()

    def run(self) -> None:
        ping_pong, turn = self.product.config.ping_pong, self.ring.turn
        registers = 232 if self.product.quantized is None else 224
        plgpu.set_max_registers(registers, action="increase")
        self.product.await_once(self.ring)
        tiles = self.product.tiles_of_cluster()
        stride = CONSUMERS if ping_pong else 1
        first = self.wg_idx if ping_pong else jnp.int32(0)
        if ping_pong:
            pl.when(self.wg_idx == CONSUMERS - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

        def tile(tile_idx, _):
            self._compute_tile(first + tile_idx * stride, tiles)

        count = lax.div(tiles - first + (stride - 1), jnp.int32(stride))
        lax.fori_loop(0, count, tile, None)
        self.product.after_tiles(self.wg_idx, self.epilogue_of)
        plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, sequence_idx, tiles) -> None:
        c = self.product.config
        m_start, n_idx, *group = self.product.position(sequence_idx)
        if not c.ping_pong:
            m_start += self.wg_idx * c.tile_m
        place = TilePlace(self.wg_idx, m_start, n_idx, *group)
        epilogue = self.epilogue_of(place)
        epilogue.prefetch()
        if self.product.scaled_columns:
            epilogue.run(self._accumulate_scaled(sequence_idx, n_idx))
            return
        if self.product.promoted_steps:
            epilogue.run(self._accumulate_promoted(sequence_idx))
            return
        accumulate = functools.partial(self._accumulate, sequence_idx, tiles, place)
        acc, slot, sums = pl.run_scoped(accumulate, self._accumulator)
        plgpu.barrier_arrive(self.ring.free.at[slot])
        if sums is not None:
            epilogue.store_sums(sums)
        epilogue.run(acc)

    @property
    def _accumulator(self) -> Any:
        c = self.product.config
        return plgpu.ACC((c.tile_m, c.tile_n), self.product.accumulator_dtype)

    def _accumulate_scaled(self, sequence_idx, n_idx) -> jax.Array:
        """Returns a tile's sums [tile_m, tile_n], to which each K step's sums are added once scaled.

        While one warpgroup scales its sums, the other warpgroup uses the tensor cores.
        """
        product, c = self.product, self.product.config
        # Columns that share a scale form a piece: their scale is multiplied by each row's scale once for
        # all of them.
        width = SCALED_PIECE if product.scales_columns_alike else c.tile_n
        starts = range(0, c.tile_n, width)

        def step(k_idx, carry):
            slot, totals = carry
            # Scales are loaded before the WGMMAs are issued, so that these hide the loads' latency.
            numbers = self._column_numbers(k_idx, n_idx, starts)
            self._await_slot(sequence_idx, slot)

            def multiply(acc_ref):
                self._issue(acc_ref, k_idx, slot)
                plgpu.wgmma_wait(0)
                return acc_ref[...]

            # Accumulators that are allocated after the wait need no instructions that zero them: the
            # first WGMMA adds to the zero register.
            sums = pl.run_scoped(multiply, self._accumulator).astype(jnp.float32)
            scaled = self._scaled_pieces(sums, slot, starts, numbers)
            totals = tuple(total + piece for total, piece in zip(totals, scaled, strict=True))
            plgpu.barrier_arrive(self.ring.free.at[slot])
            return product.next_slot(slot), totals

        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(c.stages))
        zeros = plgpu.layout_cast(jnp.zeros((c.tile_m, width), jnp.float32), plgpu.Layout.WGMMA)
        _, totals = lax.fori_loop(0, product.k_steps, step, (slot, (zeros,) * len(starts)))
        return totals[0] if len(totals) == 1 else jnp.concatenate(totals, axis=1)

    def _column_numbers(self, k_idx, n_idx, starts: range) -> list[jax.Array]:
        """Loads a step's scale for each piece of the tile's columns; none if no columns share scales."""
        product = self.product
        if not product.scales_columns_alike:
            return []
        columns = (jnp.minimum(n_idx * product.part_n + s, product.n - 1) for s in starts)
        numbers = self.step_scales[1]
        return [numbers[k_idx, lax.div(c, jnp.int32(product.scaled_columns))] for c in columns]

    def _scaled_pieces(
        self, sums, slot, starts: range, numbers: Sequence[jax.Array]
    ) -> Iterator[jax.Array]:
        """Yields the pieces of a step's sums, multiplied by the step's scales of rows and columns."""
        ring, c = self.ring, self.product.config
        rows = pl.ds(self.wg_idx * c.tile_m, c.tile_m)
        of_rows = plgpu.load(ring.a_scale.at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        if not numbers:
            of_columns = plgpu.load(ring.b_scale.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
            of_columns = lax.broadcast_in_dim(of_columns, sums.shape, (1,))
            yield sums * of_columns * lax.broadcast_in_dim(of_rows, sums.shape, (0,))
        for start, number in zip(starts, numbers, strict=False):
            piece = sums[:, start : start + starts.step]
            yield piece * lax.broadcast_in_dim(of_rows * number, piece.shape, (0,))

    def _accumulate_promoted(self, sequence_idx) -> jax.Array:
        """Returns a tile's float32 totals, to which sums of `promoted_steps` K steps each are added."""
        product, c = self.product, self.product.config
        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(c.stages))
        zeros = jnp.zeros((c.tile_m, c.tile_n), jnp.float32)
        carry = (slot, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        blocks, rest = divmod(product.k_steps, product.promoted_steps)

        def promoted(index, carry, steps=product.promoted_steps):
            first = index * product.promoted_steps
            return self._promoted(sequence_idx, first, steps, *carry)

        carry = lax.fori_loop(0, blocks, promoted, carry)
        if rest:
            carry = promoted(jnp.int32(blocks), carry, rest)
        return carry[1]

    def _promoted(self, sequence_idx, first, steps: int, slot, total) -> tuple[Any, jax.Array]:
        """Adds the sums of `steps` K steps to `total`; returns the next pipeline stage and the total.

        The loop over steps is unrolled: one of unknown length would copy the accumulators' registers at
        its end, before the last WGMMA has written them.
        """

        def multiply(acc_ref):
            last = slot
            self._issue(acc_ref, first, last)
            for step in range(1, steps):
                previous, last = last, self.product.next_slot(last)
                plgpu.wgmma_wait(self._multiply(acc_ref, sequence_idx, first + step, last))
                plgpu.barrier_arrive(self.ring.free.at[previous])
            plgpu.wgmma_wait(0)
            return acc_ref[...], last

        # Accumulators allocated after the wait need no zeroing: the first WGMMA adds to zeros.
        self._await_slot(sequence_idx, slot)
        sums, last = pl.run_scoped(multiply, self._accumulator)
        plgpu.barrier_arrive(self.ring.free.at[last])
        return self.product.next_slot(last), total + sums

    def _accumulate(self, sequence_idx, tiles, place, acc_ref):
        """Runs all K steps of a tile; returns accumulators, the stage to free next, and operands' sums.

        The sums are those of `TiledProduct.sum_slot`: the bias gradient in wgrad, else None.
        """
        product, turn = self.product, self.ring.turn
        if product.config.ping_pong:
            plgpu.barrier_wait(turn.at[self.wg_idx])
        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(product.config.stages))
        self._multiply(acc_ref, sequence_idx, jnp.int32(0), slot)
        sums = product.sum_slot(self.ring, slot, place, product.no_sums())
        step = functools.partial(self._step, acc_ref, sequence_idx, place)
        slot, sums = lax.fori_loop(1, product.k_steps, step, (slot, sums))
        if product.config.ping_pong:
            other = turn.at[CONSUMERS - 1 - self.wg_idx]
            pl.when(sequence_idx < tiles - 1)(lambda: plgpu.barrier_arrive(other))
        return acc_ref[...], slot, sums

    def _step(self, acc_ref, sequence_idx, place, k_idx, carry):
        """Issues a stage's WGMMAs, and frees the stage before it once the WGMMAs that read that end."""
        previous, sums = carry
        slot = self.product.next_slot(previous)
        count = self._multiply(acc_ref, sequence_idx, k_idx, slot)
        sums = self.product.sum_slot(self.ring, slot, place, sums)
        plgpu.wgmma_wait(count)
        plgpu.barrier_arrive(self.ring.free.at[previous])
        return slot, sums

    def _multiply(self, acc_ref, sequence_idx, k_idx, slot) -> int:
        """Issues the WGMMAs of a stage once it is filled, and returns their number."""
        self._await_slot(sequence_idx, slot)
        return self._issue(acc_ref, k_idx, slot)

    def _await_slot(self, sequence_idx, slot) -> None:
        """Waits until a stage is filled."""
        plgpu.barrier_wait(self.ring.full.at[self.product.full_idx(sequence_idx, slot)])

    def _issue(self, acc_ref, k_idx, slot) -> int:
        """Issues the WGMMAs of a filled stage, and returns their number."""
        product = self.product
        ping_pong = product.config.ping_pong
        share, shares = (jnp.int32(0), 1) if ping_pong else (self.wg_idx, CONSUMERS)
        count = 0
        for part_of_acc, a, b in product.instructions(
            acc_ref, self.ring, slot, k_idx, share, shares
        ):
            plgpu.wgmma(part_of_acc, a, b)
            count += 1
        return count


@dataclass(frozen=True)
class Product(TiledProduct):
    """A product with its producer and consumer warpgroups, to be launched with an epilogue."""

    def launch(
        self,
        terms: Sequence[jax.Array],
        bs: Sequence[jax.Array],
        others: Sequence[jax.Array],
        *,
        out_type: Sequence[jax.ShapeDtypeStruct],
        scratch: Mapping[str, Any],
        epilogue: Callable[[Sequence[Any], Mapping[str, Any], TilePlace], TileEpilogue],
        name: str,
        step_scales: Sequence[jax.Array] = (),
    ) -> Sequence[jax.Array]:
        """Runs the kernel.

        Args:
          terms: the a of each term a_i @ b_i.
          bs: the arrays that hold b, at the positions `blocks`.
          others: further operands, for the epilogue.
          scratch: shared memory of the epilogue.
          epilogue: returns a tile's epilogue, given `others` and outputs, `scratch`, and the tile.
          name: the kernel's name in a profile.
          step_scales: with `scaled_columns`, scales of the rows [steps, M] and of the columns [steps,
            N], or of runs of `scaled_columns` columns each.
        """

        def kernel(*refs, ring, own):
            a_gmem, b_gmem = refs[: len(terms)], refs[len(terms) : len(terms) + len(bs)]
            rest = refs[len(terms) + len(bs) :]
            of_steps, rest = rest[: len(step_scales)], rest[len(step_scales) :]
            product, rest = self.on_device(rest)
            wg_idx = lax.axis_index("wg")
            producer = product.producer(Ring(**ring), a_gmem, b_gmem, of_steps)
            epilogue_of = functools.partial(epilogue, rest, own)
            consumer = product.consumer(Ring(**ring), wg_idx, epilogue_of, of_steps)
            lax.cond(wg_idx == CONSUMERS, lambda: producer.run(), lambda: consumer.run())

        return plgpu.kernel(
            kernel,
            out_type=tuple(out_type),
            scratch_types={"ring": self._ring_memory(), "own": dict(scratch)},
            grid=(self.clusters,),
            grid_names=("cluster",),
            cluster=(self.config.cluster,),
            cluster_names=("cta",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*terms, *bs, *step_scales, *others)

    def on_device(self, others: Sequence[Any]) -> tuple["Product", Sequence[Any]]:
        """Returns the product with the arrays that its main loop reads, and the rest of `others`."""
        return self, others

    def producer(
        self, ring: Ring, a_gmem: Sequence[Any], b_gmem: Sequence[Any], step_scales: Sequence[Any]
    ) -> Producer:
        if self.quantized is None:
            return Producer(self, ring, a_gmem, b_gmem, step_scales)
        return _Converter(self, ring, a_gmem, b_gmem)

    def consumer(
        self,
        ring: Ring,
        wg_idx: Any,
        epilogue_of: Callable[[TilePlace], Any],
        step_scales: Sequence[Any],
    ) -> Consumer:
        return Consumer(self, ring, wg_idx, epilogue_of, step_scales)
