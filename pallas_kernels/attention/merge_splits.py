"""Merges attention over parts of the keys into attention over all of them, on Hopper.

A part is the output of one CTA of `split_keys` or `wide_heads` over some of the keys. The output over
all keys is the mean of the parts' outputs, weighted by the parts' sums of exponentials. A CTA merges
four consecutive queries of a head, one in each warp. It starts all of its copies at once, and so waits
for the latency of memory once. Parts are added in a fixed order, so that results repeat bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import (
    EMPTY_LSE,
    Logits,
    Operands,
    forward_results,
    saved_length,
)
from pallas_kernels.attention.memory import ceil_to
from pallas_kernels.attention.merged_rows import MergedRows
from pallas_kernels.attention.packing import Packing
from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import WARPS
from pallas_kernels.store import store_unoptimized

MOST_SPLITS = 96
"""Largest number of parts whose outputs of four queries and 128 columns fit into shared memory."""


def merge(
    outs: jax.Array, lses: jax.Array, operands: Operands, shape: Shape, dtype: Any, logits: Logits
) -> tuple[jax.Array, ...]:
    """Returns what pallas_kernels.attention.attention.forward does.

    outs is [B * K, parts, rows, V] in float32, and lses, in the base of `logits`, [B * K, parts, rows
    rounded up], or twice as many parts, the rests, if `saves_rest`. Row g * T + t of a key head is query
    t of its g-th query head. If it attends to no keys of a part, outs and lses hold 0 and EMPTY_LSE, or
    the rest is -inf.
    """
    kernel = _Merge(shape, dtype, outs.shape[1], logits)
    optional = {
        name: array
        for name, array in (
            ("sinks", operands.sinks),
            ("query_lengths", operands.query_lengths),
        )
        if array is not None
    }

    def run(outs_gmem, lses_gmem, *refs, **shared):
        ops = Operands(**dict(zip(optional, refs, strict=False)))
        out_gmem, *lse_gmem = refs[len(optional) :]
        kernel(outs_gmem, lses_gmem, ops, out_gmem, lse_gmem, **shared)

    return plgpu.kernel(
        run,
        out_type=forward_results(kernel.shape, kernel.dtype, logits),
        scratch_types=kernel.memory(),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        kernel_name="attention_merge_splits",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outs, lses, *optional.values())


def only_part(
    outs: jax.Array, lses: jax.Array, operands: Operands, shape: Shape, dtype: Any, logits: Logits
) -> tuple[jax.Array, ...]:
    """Returns `merge`'s results for a single part, by XLA: it applies sinks and lengths, and rounds."""
    batch, query_count, _, heads, key_heads, _, value_size = shape
    packing = Packing.of(shape)
    out = packing.unpacked(outs.reshape(batch, key_heads, packing.rows, value_size))
    lse2, *rest = (
        lses[:, i, : packing.rows].reshape(batch, heads, query_count)
        for i in range(logits.row_numbers)
    )
    empty = rest[0] == -jnp.inf if rest else lse2 <= EMPTY_LSE
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[None, :, None] * logits.unit, lse2.shape)
        if rest:
            maximum = jnp.maximum(lse2, sinks)
            total = logits.exp(lse2 - maximum, rest[0]) + logits.exp(sinks - maximum)
            with_sink, of_both = logits.log_sum_exp(maximum, total)
            share = logits.exp(lse2 - with_sink, rest[0] - of_both)
            rest, without = [of_both], total == 0.0
        else:
            with_sink = jnp.logaddexp2(lse2, sinks)
            share = jnp.exp2(lse2 - with_sink)
            without = with_sink <= EMPTY_LSE
        out = out * jnp.where(empty, 0.0, share).transpose(0, 2, 1)[..., None]
        lse2, empty = with_sink, without
    if operands.query_lengths is not None:
        positions = jnp.arange(query_count, dtype=jnp.int32)[None, None]
        beyond = positions >= operands.query_lengths[:, None, None]
        out = jnp.where(beyond.transpose(0, 2, 1)[..., None], 0.0, out)
        empty = empty | beyond
    lse = jnp.where(empty, EMPTY_LSE, lse2 * (1 / logits.unit))
    missing = ((0, 0), (0, 0), (0, saved_length(query_count) - query_count))
    lse = jnp.pad(lse, missing, constant_values=EMPTY_LSE)
    rest = [jnp.pad(jnp.where(empty, 0.0, x), missing) for x in rest]
    return out.astype(dtype), lse, *rest


@dataclass(frozen=True)
class _Merge(MergedRows):
    """The kernel that merges parts: its static parameters, shared memory and code."""

    splits: int
    logits: Logits

    @property
    def quads(self) -> int:
        """Number of groups of four queries of a head; each warp of a CTA merges one query."""
        return -(-self.shape.query_count // WARPS)

    @property
    def ctas(self) -> int:
        return self.shape.batch * self.shape.heads * self.quads * self.chunks

    def memory(self) -> dict[str, Any]:
        columns = self.columns
        return dict(
            outs_smem=plgpu.SMEM((self.splits, WARPS, columns), jnp.float32),
            # A copy moves a multiple of 128 bytes.
            lses_smem=plgpu.SMEM(
                (ceil_to(self.splits * self.logits.row_numbers, 4), 2 * WARPS), jnp.float32
            ),
            out_smem=plgpu.SMEM((WARPS, columns), self.dtype),
            full=plgpu.Barrier(num_arrivals=2),
        )

    def __call__(
        self,
        outs_gmem: Any,
        lses_gmem: Any,
        operands: Operands,
        out_gmem: Any,
        lse_gmem: Any,
        *,
        outs_smem: Any,
        lses_smem: Any,
        out_smem: Any,
        full: Any,
    ) -> None:
        shape = self.shape
        number, chunks, quads = lax.axis_index("cta"), jnp.int32(self.chunks), jnp.int32(self.quads)
        chunk = lax.rem(number, chunks)
        number = lax.div(number, chunks)
        quad = lax.rem(number, quads)
        number = lax.div(number, quads)
        head, batch = (
            lax.rem(number, jnp.int32(shape.heads)),
            lax.div(number, jnp.int32(shape.heads)),
        )
        group, start = jnp.int32(shape.group), quad * WARPS
        pair = batch * shape.key_heads + lax.div(head, group)
        # The last of four rows may lie beyond the head's last query: they are then rows of the next
        # head, or zeros, and their results are not written.
        first = lax.rem(head, group) * shape.query_count + start
        rows = pl.ds(first, WARPS)
        # JAX refuses static indices beyond the end of an array, but not traced ones.
        every = pl.ds(chunk * 0, self.splits)
        columns = pl.ds(chunk * self.columns, self.columns)
        plgpu.copy_gmem_to_smem(outs_gmem.at[pair, every, rows, columns], outs_smem, full)
        every = pl.ds(chunk * 0, lses_smem.shape[0])
        # A copy must begin at a multiple of 16 bytes along the last axis, else the GPU reports an
        # illegal instruction. So it copies eight numbers from the multiple of four rows at or before
        # the first row.
        offset = lax.rem(first, jnp.int32(WARPS))
        aligned_rows = pl.ds(first - offset, lses_smem.shape[1])
        plgpu.copy_gmem_to_smem(lses_gmem.at[pair, every, aligned_rows], lses_smem, full)
        plgpu.barrier_wait(full)

        layout = self.layout()
        row_layout = layout.reduce(1)
        four = pl.ds(offset, WARPS)
        count = self.splits * self.logits.row_numbers
        lses = [plgpu.load(lses_smem.at[i, four], layout=row_layout) for i in range(count)]
        rests = lses[self.splits :] or [None] * self.splits
        parts = list(zip(lses[: self.splits], rests, strict=True))
        total, lse2, *rest = self.normalizer(parts, operands, batch, head, start, row_layout)
        out = jnp.zeros((WARPS, self.columns), jnp.float32)
        out = plgpu.layout_cast(out, layout)
        for i, (part_lse, of_part) in enumerate(parts):
            weight = self.logits.exp(part_lse - total, of_part - rest[0] if rest else None)
            part = plgpu.load(outs_smem.at[i], layout=layout)
            out += part * lax.broadcast_in_dim(weight, part.shape, [0])
        out_smem[...] = out.astype(self.dtype)
        plgpu.commit_smem()
        self.write(out_smem, out_gmem.at[batch], start, head, columns)

        @pl.when(chunk == 0)
        def _():
            lse = jnp.where(lse2 == EMPTY_LSE, EMPTY_LSE, lse2 * (1 / self.logits.unit))
            for gmem, numbers in zip(lse_gmem, [lse, *rest], strict=True):
                store_unoptimized(gmem.at[batch, head, pl.ds(start, WARPS)], numbers)

        @pl.when((chunk == 0) & (quad == self.quads - 1))
        def _():
            nothing = jnp.full((WARPS,), EMPTY_LSE, jnp.float32)
            nothing = plgpu.layout_cast(nothing, row_layout)
            for gmem in lse_gmem:
                for i in range(self.quads * WARPS, saved_length(shape.query_count), WARPS):
                    store_unoptimized(gmem.at[batch, head, pl.ds(i, WARPS)], nothing)

        plgpu.wait_smem_to_gmem(0)

    def write(self, out_smem: Any, out_gmem: Any, start: jax.Array, head: jax.Array, columns: Any):
        """Starts the copies of four queries of a head to the output [T, N, V] of a batch entry.

        Queries beyond the last one, and columns beyond those of the head, must not be written. TMA clips
        them. If four queries with all columns of shared memory are contiguous, Mosaic copies without TMA
        and would overwrite the next head or the first queries of the next batch entry; so then each
        query is copied alone.
        """
        size = self.shape.value_size
        if self.shape.heads * size != self.columns:
            rows = pl.ds(start, WARPS)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[rows, head, columns])
            return
        for i in range(WARPS):

            @pl.when(start + i < self.shape.query_count)
            def _(i=i):
                plgpu.copy_smem_to_gmem(
                    out_smem.at[i, pl.ds(0, size)], out_gmem.at[start + i, head]
                )

    def normalizer(
        self,
        parts: list[tuple[jax.Array, Any]],
        operands: Operands,
        batch: jax.Array,
        head: jax.Array,
        start: jax.Array,
        layout: Any,
    ) -> list[jax.Array]:
        """Returns two vectors [4]: the log-sum-exp subtracted from those of parts, and the one to save.

        They are in the base of `logits`. For rows without keys or sink, and past the query length, they
        are infinity, which makes all weights 0, and EMPTY_LSE. The saved one's rest, if parts have one
        next to their log-sum-exps, follows.
        """
        maximum = parts[0][0]
        for lse, _ in parts[1:]:
            maximum = jnp.maximum(maximum, lse)
        if operands.sinks is not None:
            sink = operands.sinks[head] * self.logits.unit
            maximum = jnp.maximum(maximum, sink)
        total: Any = 0.0
        for lse, rest in parts:
            total += self.logits.exp(lse - maximum, rest)
        if operands.sinks is not None:
            total += self.logits.exp(sink - maximum)
        empty = total == 0.0 if self.logits.saves_rest else maximum <= EMPTY_LSE
        if operands.query_lengths is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout)
            empty = empty | (start + row >= operands.query_lengths[batch])
        lse2, *rest = self.logits.log_sum_exp(maximum, total)
        rest = [jnp.where(empty, 0.0, x) for x in rest]
        return [jnp.where(empty, jnp.inf, lse2), jnp.where(empty, EMPTY_LSE, lse2), *rest]
