"""Stores to shared and to global memory that are less careful than Pallas's own."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


def store_unoptimized(ref, value: jax.Array) -> None:
    """Writes what does not fill whole sectors, or all banks, with 16 bytes a thread at most.

    Since JAX 0.12 `ref[...] = value` insists on that; JAX 0.11 never did, and has no `plgpu.store`.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_piece(ref, value: jax.Array) -> None:
    """Writes one swizzled piece of rows, [rows, columns] in the layout of wgmma, and waits for nobody.

    `ref[...] = value` has the warpgroup wait for its slowest warp before and after. Here the caller
    sees to it that nobody still reads what is overwritten, and calls `commit_stores` before it is read.
    """
    columns = value.shape[1]
    swizzle = columns * value.dtype.itemsize

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType((plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))),
            plgpu.Layout.WGMMA,
        )
    )
    def store(ctx: Any, memory: Any, registers: Any) -> None:
        del ctx
        registers.store_tiled(memory, swizzle=swizzle, tiling_rank=2)

    store(ref, value)


def commit_stores(copies_in_flight: int) -> None:
    """Lets copies read what the warpgroup has stored to shared memory, and waits for older copies.

    That is `plgpu.commit_smem` and `plgpu.wait_smem_to_gmem` in one barrier: afterwards no more than
    `copies_in_flight` groups of copies to global memory still read shared memory.
    """

    @plgpu.inline_mgpu()
    def commit(ctx: Any) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        ctx.await_async_copy(copies_in_flight, await_read_only=True)

    commit()
