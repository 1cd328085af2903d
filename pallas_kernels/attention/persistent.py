"""Launch and pipeline of the kernels for any number of keys: persistent CTAs, producer and consumers.

A CTA stays on its SM and works through a list of tiles. Its last warpgroup, the producer, fills pipeline
stages (slots) of shared memory by TMA. The consumers multiply the contents of the slots and release
them. Each slot has one mbarrier for "full" and another for "free".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.block_lists import Tables
from pallas_kernels.attention.logits import Operands
from pallas_kernels.attention.memory import Heads, Matrix
from pallas_kernels.attention.tiles import KeyTiles, QueryTiles


def registers(consumers: int) -> tuple[int, int]:
    """Returns the registers of a consumer's thread and of a producer's; an SM has 65,536 in all."""
    return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[consumers]


class Cta(NamedTuple):
    """Arrays, buffers and traced numbers of a CTA, as one of its warpgroups uses them."""

    arrays: tuple[Any, ...]
    """Arrays in global memory that the kernel reads."""
    results: tuple[Any, ...]
    """Arrays in global memory that the kernel writes."""
    operands: Operands
    memory: Mapping[str, Any]
    """Buffers of shared memory and barriers, by name."""
    wg_idx: jax.Array
    tile_count: jax.Array
    """Number of tiles that this CTA computes."""
    place: Callable[[Any], Any]
    """Function from a tile's index in this CTA's list to its position and the blocks that it visits."""

    def ring(self, name: str, slots: int) -> "Ring":
        """Returns the circular buffer `name`_smem with the barriers `name`_full and `name`_free."""
        memory = (self.memory[f"{name}_{part}"] for part in ("smem", "full", "free"))
        return Ring(*memory, slots)


class Ring(NamedTuple):
    """Pipeline stages (slots) in shared memory that the producer fills in turn and consumers release."""

    memory: Any
    full: Any
    free: Any
    slots: int

    def slot(self, step: Any) -> jax.Array:
        """Returns the slot that is filled in step number `step`."""
        return lax.rem(step, jnp.int32(self.slots))

    def matrix(self, slot: Any) -> Matrix:
        return Matrix.of(self.memory, slot)

    def fill(self, slot: Any, heads: Heads, batch: Any, start: Any, head: Any) -> None:
        """Waits in the producer until the slot is free, and starts the copies into it."""
        plgpu.barrier_wait(self.free.at[slot])
        self.matrix(slot).fill(heads, batch, start, head, self.full.at[slot])

    def wait(self, slot: Any) -> None:
        """Waits until the slot is full."""
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.free.at[slot])

    def release_all(self) -> None:
        """Marks all slots as free, as they are at the start."""
        for slot in range(self.slots):
            self.release(slot)

    def drain(self) -> None:
        """Waits in the producer for each slot's last release, as Mosaic's interpreter requires."""
        for slot in range(self.slots):
            plgpu.barrier_wait(self.free.at[slot])


def skip_step(rings: Sequence[Ring], first: jax.Array, i: jax.Array, _: None) -> None:
    """Waits for and releases the slots of step `first` + i, a block that this consumer does not need."""
    for ring in rings:
        slot = ring.slot(first + i)
        ring.wait(slot)
        ring.release(slot)


class Role(NamedTuple):
    """Warpgroups that run the same code in every CTA, such as the producer or the consumers."""

    warpgroups: range
    run: Callable[[Cta], None]

    def includes(self, wg_idx: jax.Array) -> jax.Array:
        if len(self.warpgroups) == 1:
            return wg_idx == self.warpgroups.start
        assert self.warpgroups.start == 0
        return wg_idx < self.warpgroups.stop


@dataclass(frozen=True)
class PersistentKernel:
    """Static parameters of the launch of a persistent kernel."""

    name: str
    tiles: QueryTiles | KeyTiles
    schedule: np.ndarray | jax.Array
    """Each CTA's count of tiles, then their numbers in order, int32 [CTAs, 1 + most tiles]."""
    roles: Sequence[Role]
    memory: Mapping[str, Any]
    results: Sequence[jax.ShapeDtypeStruct]

    def __call__(
        self, arrays: Sequence[jax.Array], operands: Operands, tables: Tables
    ) -> Sequence[jax.Array]:
        """Runs the kernel and returns its results; `operands` are padded, `tables` those of `tiles`."""
        optional, tree = jax.tree.flatten(operands)
        given = {name: x for name, x in tables._asdict().items() if x is not None}

        def kernel(*refs, **memory):
            arrays_gmem, refs = refs[: len(arrays)], refs[len(arrays) :]
            schedule_gmem, refs = refs[0], refs[1:]
            tables_gmem = Tables(**dict(zip(given, refs, strict=False)))
            refs = refs[len(given) :]
            operands_gmem = jax.tree.unflatten(tree, refs[: len(optional)])
            wg_idx, cta_idx = lax.axis_index("wg"), lax.axis_index("cta")

            def place(tile_idx):
                number = schedule_gmem[cta_idx, tile_idx + 1]
                return self.tiles.place(number, operands_gmem, tables_gmem)

            cta = Cta(
                arrays=arrays_gmem,
                results=refs[len(optional) :],
                operands=operands_gmem,
                memory=memory,
                wg_idx=wg_idx,
                tile_count=schedule_gmem[cta_idx, 0],
                place=place,
            )
            for role in self.roles:
                pl.when(role.includes(cta.wg_idx))(lambda role=role: role.run(cta))

        return plgpu.kernel(
            kernel,
            out_type=tuple(self.results),
            scratch_types=dict(self.memory),
            grid=(self.schedule.shape[0],),
            grid_names=("cta",),
            num_threads=max(role.warpgroups.stop for role in self.roles),
            thread_name="wg",
            kernel_name=self.name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*arrays, self.schedule, *given.values(), *optional)
