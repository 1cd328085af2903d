"""Merges attention over parts of the keys into attention over all of them, on Hopper.

The output over all keys is the mean of the parts' outputs, weighted by their sums of exponentials. A CTA
merges four consecutive queries of a head, each in one warp. It starts all of its copies at once, and so
waits for memory once. The parts are added in a fixed order, whatever order they were computed in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import (
    EMPTY_LSE,
    LOG2E,
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
"""Limit on the parts whose outputs for four queries, 128 columns at a time, fit in shared memory."""


def merge(
    outs: jax.Array,
    lses: jax.Array,
    operands: Operands,
    shape: Shape,
    dtype: Any,
    logits: Logits,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], saved) as pallas_kernels.attention.attention.forward does.

    outs is [B * K, parts, rows, V] in float32 with the rows of `packing`, and lses, in base 2, is
    [B * K, parts, rows rounded up]. If a row attends to no keys of a part, they hold 0 and EMPTY_LSE.
    If `logits.saves_apart`, lses has the maxima of all parts, and then log2 of their sums.
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
        *refs, out_gmem, lse_gmem = refs
        ops = Operands(**dict(zip(optional, refs, strict=True)))
        kernel(outs_gmem, lses_gmem, ops, out_gmem, lse_gmem, **shared)

    out, lse = plgpu.kernel(
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
    return out, lse


def only_part(
    outs: jax.Array,
    lses: jax.Array,
    operands: Operands,
    shape: Shape,
    dtype: Any,
    logits: Logits,
) -> tuple[jax.Array, jax.Array]:
    """Returns `merge`'s results for a single part, by XLA: little more than a rounding is left to do."""
    batch, query_count, _, heads, key_heads, _, value_size = shape
    packing = Packing.of(shape)
    out = packing.unpacked(outs.reshape(batch, key_heads, packing.rows, value_size))
    lse2, *log_sum = (
        lses[:, i, : packing.rows].reshape(batch, heads, query_count)
        for i in range(logits.row_numbers)
    )
    empty = lse2 <= EMPTY_LSE
    if operands.sinks is not None:
        sinks = jnp.broadcast_to(operands.sinks[None, :, None] * LOG2E, lse2.shape)
        if log_sum:
            # The larger of both becomes the maximum, from which the logarithms are counted.
            maximum = jnp.maximum(lse2, sinks)
            from_maximum = (lse2 - maximum) + log_sum[0]
            log_sum = [jnp.logaddexp2(from_maximum, sinks - maximum)]
            exponent, lse2 = from_maximum - log_sum[0], maximum
        else:
            with_sink = jnp.logaddexp2(lse2, sinks)
            exponent, lse2 = lse2 - with_sink, with_sink
        share = jnp.where(empty, 0.0, jnp.exp2(exponent))
        out = out * share.transpose(0, 2, 1)[..., None]
        empty = lse2 <= EMPTY_LSE
    if operands.query_lengths is not None:
        positions = jnp.arange(query_count, dtype=jnp.int32)[None, None]
        beyond = positions >= operands.query_lengths[:, None, None]
        out = jnp.where(beyond.transpose(0, 2, 1)[..., None], 0.0, out)
        empty = empty | beyond
    saved = [jnp.where(empty, EMPTY_LSE, lse2 if log_sum else lse2 * (1 / LOG2E)), *log_sum]
    missing = ((0, 0), (0, 0), (0, saved_length(query_count) - query_count))
    saved = [jnp.pad(numbers, missing, constant_values=EMPTY_LSE) for numbers in saved]
    return out.astype(dtype), saved[0] if not log_sum else jnp.concatenate(saved, axis=2)


@dataclass(frozen=True)
class _Merge(MergedRows):
    """The kernel's static parameters, shared memory and code."""

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
        # Rows beyond the last query are those of the next head or zeros, and are not used.
        first = lax.rem(head, group) * shape.query_count + start
        rows = pl.ds(first, WARPS)
        # Traced indices, unlike static ones, may lie beyond the end of an array.
        every = pl.ds(chunk * 0, self.splits)
        columns = pl.ds(chunk * self.columns, self.columns)
        plgpu.copy_gmem_to_smem(outs_gmem.at[pair, every, rows, columns], outs_smem, full)
        every = pl.ds(chunk * 0, lses_smem.shape[0])
        # A copy must begin at a multiple of 16 bytes along the last axis, else the GPU reports an
        # illegal instruction. So it takes eight numbers from the aligned place before the first row on.
        offset = lax.rem(first, jnp.int32(WARPS))
        aligned_rows = pl.ds(first - offset, lses_smem.shape[1])
        plgpu.copy_gmem_to_smem(lses_gmem.at[pair, every, aligned_rows], lses_smem, full)
        plgpu.barrier_wait(full)

        layout = self.layout()
        row_layout = layout.reduce(1)
        four = pl.ds(offset, WARPS)
        count = self.splits * self.logits.row_numbers
        lses = [plgpu.load(lses_smem.at[i, four], layout=row_layout) for i in range(count)]
        share, saved = self.normalized(lses, operands, batch, head, start, row_layout)
        out = jnp.zeros((WARPS, self.columns), jnp.float32)
        out = plgpu.layout_cast(out, layout)
        for i in range(self.splits):
            weight = jnp.exp2(share(i))
            part = plgpu.load(outs_smem.at[i], layout=layout)
            out += part * lax.broadcast_in_dim(weight, part.shape, [0])
        out_smem[...] = out.astype(self.dtype)
        plgpu.commit_smem()
        self.write(out_smem, out_gmem.at[batch], start, head, columns)

        length = saved_length(shape.query_count)

        @pl.when(chunk == 0)
        def _():
            numbers = saved
            if len(saved) == 1:
                numbers = [jnp.where(saved[0] == EMPTY_LSE, EMPTY_LSE, saved[0] * (1 / LOG2E))]
            for i, each in enumerate(numbers):
                first = start if i == 0 else start + i * length
                store_unoptimized(lse_gmem.at[batch, head, pl.ds(first, WARPS)], each)

        @pl.when((chunk == 0) & (quad == self.quads - 1))
        def _():
            nothing = jnp.full((WARPS,), EMPTY_LSE, jnp.float32)
            nothing = plgpu.layout_cast(nothing, row_layout)
            for first in range(0, lse_gmem.shape[2], length):
                for i in range(self.quads * WARPS, length, WARPS):
                    place = lse_gmem.at[batch, head, pl.ds(first + i, WARPS)]
                    store_unoptimized(place, nothing)

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

    def normalized(
        self,
        lses: list[jax.Array],
        operands: Operands,
        batch: jax.Array,
        head: jax.Array,
        start: jax.Array,
        layout: Any,
    ) -> tuple[Callable[[int], jax.Array], list[jax.Array]]:
        """Returns log2 of a part's share of the row, by its number, and what is saved, in base 2.

        The former is -infinity for rows without keys or sink, and for those past the query length.
        """
        maxima, log_sums = lses[: self.splits], lses[self.splits :]

        def above(i: int, base: jax.Array) -> jax.Array:
            """Returns log2 of a part's sum of exponentials, less `base`."""
            lse = maxima[i] - base
            return lse + log_sums[i] if log_sums else lse

        maximum = maxima[0]
        for lse in maxima[1:]:
            maximum = jnp.maximum(maximum, lse)
        if operands.sinks is not None:
            sink = operands.sinks[head] * LOG2E
            maximum = jnp.maximum(maximum, sink)
        total: Any = 0.0
        for i in range(self.splits):
            total += jnp.exp2(above(i, maximum))
        if operands.sinks is not None:
            total += jnp.exp2(sink - maximum)
        empty = maximum <= EMPTY_LSE
        if operands.query_lengths is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout)
            empty = empty | (start + row >= operands.query_lengths[batch])
        log_sum = jnp.log2(total)
        if log_sums:
            whole = jnp.where(empty, jnp.inf, log_sum)
            saved = [jnp.where(empty, EMPTY_LSE, maximum), jnp.where(empty, 0.0, log_sum)]
            return lambda i: above(i, maximum) - whole, saved
        lse2 = maximum + log_sum
        whole = jnp.where(empty, jnp.inf, lse2)
        return lambda i: above(i, whole), [jnp.where(empty, EMPTY_LSE, lse2)]
