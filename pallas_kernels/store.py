"""Stores to shared and to global memory with fewer checks and barriers than Pallas's own."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


def store_unoptimized(ref, value: jax.Array) -> None:
    """Writes `value` to `ref`, in any register layout.

    Since JAX 0.12, `ref[...] = value` rejects layouts that fill no whole sectors or have bank conflicts,
    unless `plgpu.store` is called with optimized=False. JAX 0.11 has neither check nor function.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_registers(ref, value: jax.Array, layout: Any) -> None:
    """Writes an array held in registers as `layout` to unswizzled memory, without a barrier.

    As with `store_piece`, the caller synchronises with other readers and writers of that memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, memory: Any, registers: Any) -> None:
        del ctx
        registers.store_untiled(memory, optimized=False)

    store(ref, value)


def store_piece(ref, value: jax.Array) -> None:
    """Writes an array in the register layout of WGMMA to swizzled shared memory, without a barrier.

    `ref[...] = value` has a barrier of the warpgroup before and after the stores. Here the caller
    ensures that earlier reads of this memory have ended, and calls `commit_stores` before later
    reads. `value` is [rows, columns], and a row of at most 128 bytes: the swizzle's width.
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


def store_swizzled(ref, value: jax.Array, layout: Any) -> None:
    """Writes an array [rows, columns] to shared memory with a swizzle of 128 bytes, without a barrier.

    As with `store_piece`, the caller synchronises with other readers and writers of that memory.
    """
    columns = 128 // value.dtype.itemsize

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType((plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))),
            layout,
        )
    )
    def store(ctx: Any, memory: Any, registers: Any) -> None:
        del ctx
        registers.store_tiled(memory, swizzle=128, optimized=False, tiling_rank=2)

    store(ref, value)


def commit_stores() -> None:
    """Makes stores to shared memory visible to copies, and waits until earlier copies have read it.

    The function does what `plgpu.commit_smem` and `plgpu.wait_smem_to_gmem` do, with one barrier of the
    warpgroup instead of two.
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
    """Writes a tile's results to buffers in shared memory in turn, and copies them to global memory.

    With several buffers, a result's stores complete while the next result is computed. The barrier
    before the copy of one result to global memory then also frees the buffer of the next result.

    Args:
      results: an iterable that computes each result when it is asked for it.
      count: the number of results.
      slots: the number of buffers; result n is written to buffer n % slots.
      store: writes a result, given its number and value, to its buffer.
      send: starts the copies of a result, given its number, and commits them as a group.
    """

    def commit_and_send(number: int) -> None:
        commit_stores()
        send(number)

    overlaps = slots > 1
    for number, result in enumerate(results):
        if overlaps and number:
            # The stores of the previous result have completed by now.
            commit_and_send(number - 1)
        if not overlaps or (number == 0 and count % slots):
            # In the other cases the last `commit_stores`, of this tile or the one before it, has waited
            # until the copy out of this buffer had read it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(number, result)
        if not overlaps:
            commit_and_send(number)
    if overlaps:
        commit_and_send(count - 1)
