"""What the warps of a warpgroup do by themselves, and how they wait for one another."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import WARPS


def await_all() -> None:
    """Returns when all warps of the warpgroup have come this far.

    `plgpu.commit_smem` does too, but first waits for what was stored to shared memory. That is not
    needed where the warps have only read what is about to be overwritten.
    """

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        del ctx
        mgpu.utils.warpgroup_barrier()

    wait()


def run_by_one(turn: jax.Array, function: Callable[[], None]) -> None:
    """Has one warp, number `turn` modulo their number, start copies, and waits for nobody.

    What a whole warpgroup starts, each of its threads prepares, though one of them starts it: twice as
    many instructions for each of four warps.
    """

    @pl.kernel(mesh=plgpu.WarpMesh(axis_name="warp"))
    def run() -> None:
        is_chosen = lax.axis_index("warp") == lax.rem(turn, WARPS)
        pl.when(is_chosen)(function)

    run()
