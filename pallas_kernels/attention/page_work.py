"""Division of attention over pages among CTAs, by the lengths that the sequences have at run time.

The work is a list of blocks of keys: those of the first tile of rows of the first sequence, then of its
next tile, and so on to the last sequence. Every CTA takes the same number of consecutive blocks, also
across sequences, so that many CTAs share one long sequence. A part is a CTA's output for one tile of
rows. Its number is the CTA's index plus the tile's, which is unique, as both ascend along the list.

With `is_whole`, a CTA has one tile with all of its blocks: no sequence affects another's result.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.logits import Operands
from pallas_kernels.attention.mask import BlockMask, Extent, Index


class Plan(NamedTuple):
    """Arrays that say where each sequence's and each CTA's work begins; in a kernel, references."""

    starts: Any
    """Number of blocks before each sequence, and last that of all blocks, int32 [B + 1]."""
    first: Any
    """Sequence of each CTA's first block, at most B - 1, int32 [CTAs + 1]."""


class Place(NamedTuple):
    """Position of a block of keys in the list of all blocks."""

    sequence: jax.Array
    unit: jax.Array
    """Index of the tile of rows (unit) among the tiles of all key heads of the sequence."""
    block: jax.Array
    """Index of the block of keys among those that the tile of rows visits."""
    blocks: jax.Array
    """Number of blocks of keys that each tile of rows of this sequence visits."""


@dataclass(frozen=True)
class Division:
    """Static sizes of the division of blocks among CTAs."""

    ctas: int
    units: int
    """Tiles of rows of a sequence, over all of its key heads."""
    key_block: int
    is_whole: bool = False
    """True if each CTA computes one tile of rows (unit) over all of its keys."""

    def blocks(self, mask: BlockMask, extent: Extent) -> tuple[Index, jax.Array]:
        """Returns the first block of keys that a sequence visits, and how many it visits, at least one.

        A sequence without keys visits one fully masked block, so that each of its tiles has a result.
        """
        blocks = mask.key_blocks((0, mask.query_count), self.key_block, extent)
        count = jnp.asarray(blocks.stop, jnp.int32) - jnp.asarray(blocks.start, jnp.int32)
        return blocks.start, jnp.maximum(count, 1)

    def plan(self, mask: BlockMask, operands: Operands, batch: int) -> Plan:
        """Computes in XLA where each sequence's and each CTA's blocks begin, from the lengths."""

        def blocks(sequence: jax.Array) -> jax.Array:
            return self.blocks(mask, operands.extent(mask, sequence))[1]

        counts = jax.vmap(blocks)(jnp.arange(batch, dtype=jnp.int32))
        ends = self.units * jnp.cumsum(counts, dtype=jnp.int32)
        cta = jnp.arange(self.ctas + 1, dtype=jnp.int32)
        if self.is_whole:
            first = cta // self.units
        else:
            begin = self.quota(ends[-1]) * cta
            first = jnp.sum(ends[None] <= begin[:, None], axis=1, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        return Plan(starts, jnp.minimum(first, batch - 1))

    def quota(self, total: jax.Array) -> jax.Array:
        """Returns the number of blocks of keys of each CTA, given the number of all blocks."""
        return lax.div(total + (self.ctas - 1), jnp.int32(self.ctas))

    def work(self, plan: Plan, cta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the range [begin, stop) of a CTA's blocks in the list of all blocks, in a kernel."""
        if self.is_whole:
            sequence = lax.div(cta, jnp.int32(self.units))
            start = plan.starts[sequence]
            blocks = lax.div(plan.starts[sequence + 1] - start, jnp.int32(self.units))
            begin = start + lax.rem(cta, jnp.int32(self.units)) * blocks
            return begin, begin + blocks
        total = plan.starts[plan.starts.shape[0] - 1]
        quota = self.quota(total)
        return jnp.minimum(cta * quota, total), jnp.minimum((cta + 1) * quota, total)

    def place(self, plan: Plan, number: jax.Array, sequence: jax.Array) -> Place:
        """Returns the `Place` of block `number` of the list, in a kernel.

        The block is one of `sequence` or of the next sequence.
        """
        sequence += (number >= plan.starts[sequence + 1]).astype(jnp.int32)
        start = plan.starts[sequence]
        blocks = lax.div(plan.starts[sequence + 1] - start, jnp.int32(self.units))
        within = number - start
        return Place(sequence, lax.div(within, blocks), lax.rem(within, blocks), blocks)

    def parts(self, plan: Plan, sequence: jax.Array, unit: jax.Array) -> tuple[Index, Index]:
        """Returns the range [start, stop) of part numbers of tile of rows `unit` of a sequence.

        A part is the output of one CTA for that tile; with `is_whole` there is one. A kernel calls this.
        """
        number = sequence * self.units + unit
        if self.is_whole:
            return 2 * number, 2 * number + 1
        total = plan.starts[plan.starts.shape[0] - 1]
        quota = self.quota(total)
        start = plan.starts[sequence]
        blocks = lax.div(plan.starts[sequence + 1] - start, jnp.int32(self.units))
        begin = start + unit * blocks
        return number + lax.div(begin, quota), number + lax.div(begin + blocks - 1, quota) + 1
