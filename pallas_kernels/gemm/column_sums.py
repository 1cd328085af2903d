"""Sums over the rows of a tile, from the registers in which its warpgroup holds the tile.

In the layout of WGMMA eight threads of a warp have the same columns, in different rows. Pairs of threads
exchange halves: each thread sums one half of the columns and sends its values of the other half to its
partner. After three such exchanges each thread has the sum of one column of 32, and nothing was summed
twice. The sums of the four warps are added in shared memory. Mosaic's own sum over rows would give every
thread every column, and exchange the sums through one buffer that the warpgroups of a CTA share.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import store

WARPS = 4
COLUMNS = 32
"""Columns of a block: each of the 32 threads of a warp ends with the sum of one column."""
_ROW_BITS = 3
"""Bits of a lane's index that select its rows: three bits above the two that select its columns."""


def of_warps(values: jax.Array) -> jax.Array:
    """Sums float32 values [rows, C] over the rows of each warp: [4, C]. C is a multiple of 32."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(
            (WARPS, values.shape[1]), jnp.float32, layout=_LAYOUT_OF_WARPS
        ),
    )
    def of_warps_registers(ctx: Any, values: Any) -> Any:
        del ctx
        lane = arith.remui(
            mgpu.utils.thread_idx(), mgpu.utils.c(32, ir.IntegerType.get_signless(32))
        )
        return _summed_registers(values, lane)

    return of_warps_registers(values)


def keep(ref: Any, sums: jax.Array) -> None:
    """Writes what `of_warps` returned to shared memory [4, C]; `finish` reads it after a barrier."""
    store.store_registers(ref, sums, _LAYOUT_OF_WARPS)


def finish(ref: Any, destination: Any) -> None:
    """Adds the sums of all warps in shared memory [4, C], and stores them in global memory [C]."""
    columns = ref.shape[-1] // WARPS
    quarters = plgpu.Layout.TILED(
        plgpu.Tiling(((ref.shape[-1],), (columns,), (columns // 8,))),
        warp_dims=(-3,),
        lane_dims=(plgpu.Replicated(4), -2),
        vector_dim=-1,
    )
    first, *others = (
        plgpu.load(ref.at[warp], layout=quarters, optimized=False) for warp in range(WARPS)
    )
    store.store_registers(destination, sum(others, first), quarters)


# The axes of a block of 32 columns: warp, group of 8 columns, pair of a group, column of a pair. The
# index of a thread in its warp has the group in its upper bits, then the column of a pair (one bit),
# then the pair (the lowest two bits).
_LAYOUT_OF_WARPS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, COLUMNS), (8,), (2,), (1,))),
    warp_dims=(-5,),
    lane_dims=(-4, -2, -3),
    vector_dim=-1,
)


def _summed_registers(values: Any, lane: Any) -> Any:
    """Emits the code of `of_warps` when a kernel is lowered; returns the registers with the sums.

    `values` [rows, C] is in the layout of WGMMA, and `lane` is the thread's index in its warp.
    """
    # A register's indices: block of 64 rows, block of 8 columns, and which 8 of a warp's 16 rows.
    rows: dict[int, Any] = {}
    for (_, block, *_), register in np.ndenumerate(values.registers):
        rows[block] = arith.addf(rows[block], register) if block in rows else register
    sums = {
        2 * block + column: vector.extract(register, [], [column])
        for block, register in rows.items()
        for column in (0, 1)
    }
    i32 = ir.IntegerType.get_signless(32)
    for bit in reversed(range(_ROW_BITS)):
        thread_bit = 4 << bit
        masked = arith.andi(lane, mgpu.utils.c(thread_bit, i32))
        upper = arith.cmpi(arith.CmpIPredicate.ne, masked, mgpu.utils.c(0, i32))
        for low in [number for number in sums if not number >> bit & 1]:
            high = low | 1 << bit
            own = arith.select(upper, sums[high], sums[low])
            others = arith.select(upper, sums[low], sums[high])
            sums[low] = arith.addf(own, mgpu.utils.shfl_bfly(others, thread_bit))
            del sums[high]
    layout = _LAYOUT_OF_WARPS.to_mgpu()
    shape = (WARPS, values.shape[1])
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    registers.flat[:] = [vector.from_elements(kind, [sums[number]]) for number in sorted(sums)]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
