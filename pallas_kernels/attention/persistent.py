"""The frame of the kernels for any number of keys: persistent CTAs, a warpgroup that copies, others.

A CTA stays on its multiprocessor and works through a list of tiles. Its last warpgroup, the producer,
fills slots of shared memory by TMA; the consumers multiply what is in them, and give them back.
Barriers in pairs say which slots are full and which are free.
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

from pallas_kernels.attention.logits import Operands
from pallas_kernels.attention.memory import Heads, Matrix
from pallas_kernels.attention.tiles import KeyTiles, QueryTiles


def registers(consumers: int) -> tuple[int, int]:
    """Registers of a thread of a consumer and of the producer, from 64 Ki a multiprocessor."""
    return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[consumers]


class Cta(NamedTuple):
    """What a warpgroup sees of its CTA, as references and traced numbers."""

    arrays: tuple[Any, ...]
    """The kernel's arrays in global memory."""
    results: tuple[Any, ...]
    """What it writes there."""
    operands: Operands
    memory: Mapping[str, Any]
    """Shared memory and barriers, by name."""
    wg_idx: jax.Array
    tile_count: jax.Array
    """How many tiles this CTA works through."""
    place: Callable[[Any], Any]
    """Where its tile of an index lies: see `tiles`."""

    def ring(self, name: str, slots: int) -> "Ring":
        """Of shared memory and barriers called `name`_smem, `name`_full and `name`_free."""
        memory = (self.memory[f"{name}_{part}"] for part in ("smem", "full", "free"))
        return Ring(*memory, slots)


class Ring(NamedTuple):
    """Slots of shared memory that the producer fills in turn, and that consumers give back."""

    memory: Any
    full: Any
    free: Any
    slots: int

    def slot(self, step: Any) -> jax.Array:
        """The slot of what is filled as number `step`."""
        return lax.rem(step, jnp.int32(self.slots))

    def matrix(self, slot: Any) -> Matrix:
        return Matrix.of(self.memory, slot)

    def fill(self, slot: Any, heads: Heads, batch: Any, start: Any, head: Any) -> None:
        """For the producer: waits until the slot is free, and starts the copies to it."""
        plgpu.barrier_wait(self.free.at[slot])
        self.matrix(slot).fill(heads, batch, start, head, self.full.at[slot])

    def wait(self, slot: Any) -> None:
        """Until the slot is full."""
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.free.at[slot])

    def release_all(self) -> None:
        """Slots are free at the start."""
        for slot in range(self.slots):
            self.release(slot)

    def drain(self) -> None:
        """For the producer at its end: the interpreter wants every arrival to be waited for."""
        for slot in range(self.slots):
            plgpu.barrier_wait(self.free.at[slot])


class Role(NamedTuple):
    """What some warpgroups of every CTA do."""

    warpgroups: range
    run: Callable[[Cta], None]

    def includes(self, wg_idx: jax.Array) -> jax.Array:
        if len(self.warpgroups) == 1:
            return wg_idx == self.warpgroups.start
        assert self.warpgroups.start == 0
        return wg_idx < self.warpgroups.stop


@dataclass(frozen=True)
class PersistentKernel:
    """All that is static in the launch of such a kernel."""

    name: str
    tiles: QueryTiles | KeyTiles
    schedule: np.ndarray
    """The tiles of each CTA, see `tiles.schedule`."""
    roles: Sequence[Role]
    memory: Mapping[str, Any]
    results: Sequence[jax.ShapeDtypeStruct]

    def __call__(
        self, arrays: Sequence[jax.Array], operands: Operands, segment_bounds: jax.Array | None
    ) -> Sequence[jax.Array]:
        """The results; operands are filled up to whole blocks, the bounds those of the segments."""
        optional = {name: x for name, x in operands._asdict().items() if x is not None}
        bounds = [] if segment_bounds is None else [segment_bounds]

        def kernel(*refs, **memory):
            arrays_gmem, refs = refs[: len(arrays)], refs[len(arrays) :]
            schedule_gmem, refs = refs[0], refs[1:]
            bounds_gmem = refs[0] if bounds else None
            refs = refs[len(bounds) :]
            operands_gmem = Operands(**dict(zip(optional, refs, strict=False)))
            wg_idx, cta_idx = lax.axis_index("wg"), lax.axis_index("cta")

            def place(tile_idx):
                number = schedule_gmem[cta_idx, tile_idx + 1]
                return self.tiles.place(number, operands_gmem, bounds_gmem)

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
        )(*arrays, self.schedule, *bounds, *optional.values())
