"""Merges parts of paged attention: each is the output of one CTA over some of a tile's keys.

How many parts a tile of rows has depends on run-time lengths (`page_work`). As in `merge_splits`, the
output is the mean of the parts' outputs, weighted by the parts' sums of exponentials, and added in a
fixed order. A CTA merges four rows, one in each warp. Parts are copied four at a time, while earlier
parts are added.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import EMPTY_LSE, LOG2E, Operands
from pallas_kernels.attention.memory import WGMMA_ROWS
from pallas_kernels.attention.merged_rows import MergedRows
from pallas_kernels.attention.packing import Packing
from pallas_kernels.attention.page_work import Division, Plan
from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import WARPS

_TOGETHER = 4
"""Parts whose outputs of four rows are copied to shared memory together, for one pipeline stage."""
_SLOTS = 3
"""Pipeline stages, each with the copies of `_TOGETHER` parts."""


def merge(
    outs: jax.Array,
    lses: jax.Array,
    plan: Plan,
    operands: Operands,
    division: Division,
    packing: Packing,
    shape: Shape,
    dtype: Any,
) -> jax.Array:
    """Merges outs [parts, rows, 1, V] into [B * tiles of rows, rows, V], weighted by lses [parts, 64].

    A part has the rows of one tile; lses are the log-sum-exps in base 2.
    """
    kernel = _Merge(shape, dtype, division, packing, outs.shape[1])
    optional = {"sinks": operands.sinks, "query_lengths": operands.query_lengths}
    optional = {name: array for name, array in optional.items() if array is not None}

    def run(outs_gmem, lses_gmem, starts, *refs, **shared):
        *refs, out_gmem = refs
        ops = Operands(**dict(zip(optional, refs, strict=True)))
        kernel(outs_gmem, lses_gmem, Plan(starts, None), ops, out_gmem, **shared)

    return plgpu.kernel(
        run,
        out_type=kernel.result(),
        scratch_types=kernel.memory(),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        kernel_name="attention_merge_parts",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outs.reshape(*outs.shape[:2], -1), lses, plan.starts, *optional.values())


@dataclass(frozen=True)
class _Merge(MergedRows):
    """The kernel that merges parts: its static parameters, shared memory and code."""

    division: Division
    packing: Packing
    rows: int
    """Rows of a part in global memory; the rest of a tile of 64 rows is padding."""

    @property
    def quads(self) -> int:
        """Groups of four rows in a tile of rows; each warp of a CTA merges one row of a group."""
        return -(-self.rows // WARPS)

    @property
    def ctas(self) -> int:
        return self.shape.batch * self.division.units * self.quads * self.chunks

    def memory(self) -> dict[str, Any]:
        return dict(
            outs_smem=plgpu.SMEM((_SLOTS, _TOGETHER, WARPS, self.columns), jnp.float32),
            # A copy moves a multiple of 128 bytes: for four parts, eight log-sum-exps (32 bytes) each,
            # of which four are used.
            lses_smem=plgpu.SMEM((_SLOTS, _TOGETHER, 2 * WARPS), jnp.float32),
            out_smem=plgpu.SMEM((WARPS, self.columns), self.dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=_SLOTS),
        )

    def result(self) -> jax.ShapeDtypeStruct:
        units = self.shape.batch * self.division.units
        return jax.ShapeDtypeStruct((units, self.rows, self.shape.value_size), self.dtype)

    def __call__(
        self,
        outs_gmem: Any,
        lses_gmem: Any,
        plan: Plan,
        operands: Operands,
        out_gmem: Any,
        *,
        outs_smem: Any,
        lses_smem: Any,
        out_smem: Any,
        full: Any,
    ) -> None:
        number, chunks, quads = lax.axis_index("cta"), jnp.int32(self.chunks), jnp.int32(self.quads)
        chunk = lax.rem(number, chunks)
        number = lax.div(number, chunks)
        start = lax.rem(number, quads) * WARPS
        number = lax.div(number, quads)
        units = jnp.int32(self.division.units)
        sequence, unit = lax.div(number, units), lax.rem(number, units)
        first, stop = self.division.parts(plan, sequence, unit)
        copies = lax.div(stop - first + (_TOGETHER - 1), jnp.int32(_TOGETHER))

        def copy(i):
            slot = lax.rem(i, jnp.int32(_SLOTS))
            # JAX refuses static indices beyond the end of an array, but not traced ones.
            parts = pl.ds(first + i * _TOGETHER, _TOGETHER)
            columns = pl.ds(chunk * self.columns, self.columns)
            place = outs_gmem.at[parts, pl.ds(start, WARPS), columns]
            plgpu.copy_gmem_to_smem(place, outs_smem.at[slot], full.at[slot])
            # A part has 64 log-sum-exps. A copy reads eight, from a multiple of four on.
            rows = pl.ds(jnp.minimum(start, WGMMA_ROWS - 2 * WARPS), 2 * WARPS)
            plgpu.copy_gmem_to_smem(lses_gmem.at[parts, rows], lses_smem.at[slot], full.at[slot])

        for i in range(_SLOTS):
            i = start * 0 + i
            pl.when(i < copies)(lambda i=i: copy(i))

        layout = self.layout()
        row_layout = layout.reduce(1)
        offset = start - jnp.minimum(start, WGMMA_ROWS - 2 * WARPS)

        def cast(maximum, total, out):
            rows = (plgpu.layout_cast(x, row_layout) for x in (maximum, total))
            return *rows, plgpu.layout_cast(out, layout)

        def add_part(slot, j, *carry):
            maximum, total, out = cast(*carry)
            lse = plgpu.load(lses_smem.at[slot, j, pl.ds(offset, WARPS)], layout=row_layout)
            lse, highest = (
                plgpu.layout_cast(lse, row_layout),
                plgpu.layout_cast(jnp.maximum(maximum, lse), row_layout),
            )
            decay, weight = jnp.exp2(maximum - highest), jnp.exp2(lse - highest)
            part = plgpu.load(outs_smem.at[slot, j], layout=layout)
            out = out * lax.broadcast_in_dim(decay, out.shape, [0])
            out += part * lax.broadcast_in_dim(weight, part.shape, [0])
            return cast(highest, total * decay + weight, out)

        def add(i, carry):
            slot, carry = lax.rem(i, jnp.int32(_SLOTS)), cast(*carry)
            plgpu.barrier_wait(full.at[slot])
            for j in range(_TOGETHER):
                is_part = first + i * _TOGETHER + j < stop
                added = functools.partial(add_part, slot, j)
                carry = lax.cond(is_part, added, cast, *carry)
            # The commit waits until all warps have read the slot, which the next copy fills again.
            plgpu.commit_smem()
            pl.when(i + _SLOTS < copies)(lambda: copy(i + _SLOTS))
            return cast(*carry)

        def constant(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        carry = (
            constant(EMPTY_LSE, (WARPS,), row_layout),
            constant(0.0, (WARPS,), row_layout),
            constant(0.0, (WARPS, self.columns), layout),
        )
        maximum, total, out = cast(*lax.fori_loop(0, copies, add, carry))
        inverse = self.inverse(maximum, total, operands, sequence, unit, start, row_layout)
        inverse = lax.broadcast_in_dim(inverse, out.shape, [0])
        if operands.query_lengths is not None:
            # A query beyond the length may be NaN, which a factor of 0 would not cancel.
            out = jnp.where(inverse == 0.0, 0.0, out)
        out_smem[...] = (out * inverse).astype(self.dtype)
        plgpu.commit_smem()
        self.write(out_smem, out_gmem.at[number], start, chunk)
        plgpu.wait_smem_to_gmem(0)

    def write(self, out_smem: Any, out_gmem: Any, start: jax.Array, chunk: jax.Array) -> None:
        """Starts the copies of four rows from `start` on to a tile's output [rows, V].

        `chunk` says which 64 or 128 columns they are.
        """
        for c in range(self.chunks):
            first = c * self.columns
            count = min(self.columns, self.shape.value_size - first)
            for i in range(WARPS):

                @pl.when((chunk == c) & (start + i < self.rows))
                def _(i=i, first=first, count=count):
                    row = out_gmem.at[start + i, pl.ds(first, count)]
                    plgpu.copy_smem_to_gmem(out_smem.at[i, pl.ds(0, count)], row)

    def inverse(
        self,
        maximum: jax.Array,
        total: jax.Array,
        operands: Operands,
        sequence: jax.Array,
        unit: jax.Array,
        start: jax.Array,
        layout: Any,
    ) -> jax.Array:
        """Returns 1 / total [4], the factor of each merged row; 0 for rows past the query length.

        It is finite for a row without keys too: the log-sum-exp of each of its parts is EMPTY_LSE, equal
        to the maximum, so each adds 1 to the total.
        """
        tiles, count = jnp.int32(self.packing.tiles), jnp.int32(self.packing.query_count)
        key_head = lax.div(unit, tiles)
        first = lax.rem(unit, tiles) * WGMMA_ROWS + start

        def row() -> jax.Array:
            return plgpu.broadcasted_iota(jnp.int32, (WARPS,), 0, layout=layout)

        if operands.sinks is not None:
            most = jnp.int32(self.packing.group - 1)
            for i in range(WARPS):
                head = key_head * self.packing.group + lax.min(lax.div(first + i, count), most)
                sink = jnp.exp2(operands.sinks[head] * LOG2E - maximum)
                total = jnp.where(row() == i, total + sink, total)
        # This is 1 / total: Mosaic finds no register layout for a division's constant 1.
        inverse = jnp.exp2(-jnp.log2(total))
        if operands.query_lengths is not None:
            query = self.packing.query(first + row())
            inverse = jnp.where(query >= operands.query_lengths[sequence], 0.0, inverse)
        return inverse
