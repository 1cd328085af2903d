"""Barriers between the warps of a warpgroup, and work that a single warp does."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import WARPS


def await_all() -> None:
    """Waits until all warps of the warpgroup have reached this point.

    `plgpu.commit_smem` does the same, but first waits until stores to shared memory are visible to
    copies. Before memory is overwritten that the warps have only read, this wait is not needed.
    """

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        del ctx
        mgpu.utils.warpgroup_barrier()

    wait()


def run_by_one(turn: jax.Array, function: Callable[[], None]) -> None:
    """Runs `function`, which starts copies, in warp `turn` modulo `WARPS` alone, without a barrier.

    One thread issues a copy. If the whole warpgroup calls the copy function, all four warps compute the
    copy's addresses: twice as many instructions in each warp.
    """

    @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
    def run() -> None:
        is_chosen = lax.axis_index("warp") == lax.rem(turn, WARPS)
        pl.when(is_chosen)(function)

    run()
