"""Stores to shared and to global memory that are less careful than Pallas's own."""

from collections.abc import Callable, Iterable
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


def store_registers(ref, value: jax.Array, layout: Any) -> None:
    """Writes an array in a layout of registers to memory without swizzle, and waits for nobody.

    As with `store_piece`, the caller sees to who still reads or writes that memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, memory: Any, registers: Any) -> None:
        del ctx
        registers.store_untiled(memory, optimized=False)

    store(ref, value)


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


def commit_stores() -> None:
    """Lets copies read what the warpgroup has stored to shared memory, and waits for older copies.

    That is `plgpu.commit_smem` and `plgpu.wait_smem_to_gmem` in one barrier: afterwards no copy to
    global memory that began before still reads shared memory.
    """

    @plgpu.inline_mgpu()
    def commit(ctx: Any) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        ctx.await_async_copy(0, await_read_only=True)

    commit()


def store_in_turn(
    results: Iterable[Any],
    *,
    count: int,
    slots: int,
    store: Callable[[int, Any], None],
    send: Callable[[int], None],
) -> None:
    """Has the results of a tile stored to slots of shared memory in turn, and copied out from there.

    With several slots a result is on its way to shared memory while the next one is computed. One
    barrier then serves the copy of the former and the slot of the latter.

    Args:
      results: each is computed when its turn has come.
      count: how many there are.
      slots: of shared memory; result n has slot n modulo their number.
      store: writes a result, of which it takes the number too, to its slot.
      send: starts the copies of the result with a number, and commits them as a group.
    """

    def commit_and_send(number: int) -> None:
        commit_stores()
        send(number)

    overlaps = slots > 1
    for number, result in enumerate(results):
        if overlaps and number:
            # By now its stores have arrived.
            commit_and_send(number - 1)
        if not overlaps or (number == 0 and count % slots):
            # Else the slot is free since the result before was committed, in this tile or the last.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(number, result)
        if not overlaps:
            commit_and_send(number)
    if overlaps:
        commit_and_send(count - 1)
