"""Attention on Hopper, forward for heads of 257 to 512 columns: two warpgroups share 64 queries.

The output of 64 queries and 512 columns, 128 KiB in float32, does not fit into the registers of a
warpgroup together with the logits. Each of two warpgroups computes one half of the output's columns,
from its own half of the values. Both compute all logits and weights: Q K^T is computed twice, but the
warpgroups exchange no weights. Q, a block of K and a block of V of 512 columns take 192 of an SM's 227
KiB of shared memory, so that a CTA is alone on its SM.

As in `split_keys`, the keys of a head may be split over CTAs, and `merge_splits` merges the parts. The
rows of a CTA are the queries of all heads that share a key head if these are few (decoding), and those
of one head otherwise, whose causal tiles then visit no blocks of later keys.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.memory import WGMMA_ROWS, Columns, Matrix, ceil_to
from pallas_kernels.attention.packing import Packing
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.softmax import Softmax, across
from pallas_kernels.attention.split_keys import (
    Cta,
    KeySplits,
    Part,
    SplitForward,
    numbers_of_splits,
)
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

MOST_COLUMNS = 512
"""Most columns of the values: 256 in the registers of each warpgroup."""
MOST_KEY_COLUMNS = 576
"""Most columns of queries and keys: MLA (multi-head latent attention) has 512 latent columns and 64 with
rotary positions."""
_HALVES = 2
"""Warpgroups of a CTA, each with one half of the output's columns."""


@dataclass(frozen=True)
class WideForwardConfig(KeySplits):
    """Division of the work of wide heads: the two warpgroups of a CTA share its 64 rows."""

    stages: int = 1
    ctas_per_multiprocessor: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.ctas_per_multiprocessor != 1:
            raise ValueError("a CTA takes the memory of a whole SM: ctas_per_multiprocessor is 1")

    def columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q and K, and of one half of V."""
        lengths = (Packing.of(shape).rows, shape.key_count)
        half = _half(shape.value_size)
        is_whole = shape.value_size % memory.SWIZZLED_COLUMNS == 0 and shape.key_count % 8 == 0
        value = Columns.of(half, ()) if is_whole else Columns.in_wide_blocks(half)
        return Columns.of(shape.head_size, lengths), value

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        head, value = self.columns(shape)
        count = head.bytes(WGMMA_ROWS + self.stages * self.key_block)
        return count + _HALVES * value.bytes(self.stages * self.key_block) + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        return self.shared_bytes(shape) <= SHARED_MEMORY_BYTES


def _half(value_size: int) -> int:
    """Returns the columns of the output that a warpgroup computes, a multiple of 64."""
    return ceil_to(-(-value_size // _HALVES), memory.SWIZZLED_COLUMNS)


def _of_rows(shape: Shape) -> Shape:
    """Returns `shape`, but with as many key heads as query heads if there are more than 64 queries.

    `Packing` then puts the queries of one head into a tile of rows, and not those of a group.
    """
    return shape if shape.query_count <= WGMMA_ROWS else shape._replace(key_heads=shape.heads)


def candidates(shape: Shape, logits: Logits, multiprocessors: int) -> tuple[WideForwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first."""
    shape = _of_rows(shape)
    forms = ({"stages": 2}, {"key_block": 128}, {})
    legal = [form for form in forms if WideForwardConfig(1, **form).fits(shape)]
    result = []
    for form in legal:
        config = WideForwardConfig(1, **form)
        counts = numbers_of_splits(shape, logits, config, multiprocessors)
        # The first form is tried with all of `counts`, the others only with the best one.
        result += [WideForwardConfig(n, **form) for n in (counts[:1] if result else counts)]
    return tuple(result)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: WideForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) as pallas_kernels.attention.attention.forward does."""
    given = Shape.of(query, key, value)
    shape = _of_rows(given)
    config = config or candidates(given, logits, multiprocessors)[0]
    packing = Packing.of(shape)
    sharing = shape.key_heads // given.key_heads
    columns = config.columns(shape)
    kernel = _WideForward(shape, query.dtype, logits, config, packing, *columns, sharing)
    outs, lses = kernel.launch(query, key, value, operands)
    return kernel.merged(outs[:, : packing.rows, : shape.value_size], lses, operands)


@dataclass(frozen=True)
class _WideForward(SplitForward):
    """The forward kernel for wide heads: its static parameters, shared memory and code."""

    sharing: int = 1
    """How many heads of `shape.key_heads` read the same head of K and V: the group's query heads if a
    tile has rows of one head (above 64 queries), else 1."""
    kernel_name = "attention_wide_forward"
    warpgroups = _HALVES

    def memory(self) -> dict[str, Any]:
        block, stages, dtype = self.config.key_block, self.config.stages, self.dtype
        return dict(
            q_smem=self.head.memory((), WGMMA_ROWS, dtype),
            k_smem=self.head.memory((stages,), block, dtype),
            v_smem=self.value.memory((_HALVES * stages,), block, dtype),
            q_full=plgpu.Barrier(num_arrivals=self.head.count),
            k_full=plgpu.Barrier(num_arrivals=self.head.count, num_barriers=stages),
            k_free=plgpu.Barrier(num_arrivals=_HALVES, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=self.value.count, num_barriers=_HALVES * stages),
        )

    def results(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        pairs, splits = self.shape.batch * self.shape.key_heads, self.config.splits
        rows = ceil_to(self.packing.rows, WGMMA_ROWS)
        return (
            jax.ShapeDtypeStruct((pairs * splits, rows, _HALVES * self.value.width), jnp.float32),
            jax.ShapeDtypeStruct((pairs, splits * self.logits.row_numbers, rows), jnp.float32),
        )

    # --- copies -----------------------------------------------------------------------------------

    def start(self, cta: Cta, part: Part) -> None:
        """Starts the copies of 64 rows of queries, by the first warpgroup, and of each stage's block."""

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            batch_idx, head_idx = self.packing.place(part.batch_idx, part.key_head)
            queries = Matrix.of(cta.shared["q_smem"])
            queries.fill(cta.heads[0], batch_idx, part.start, head_idx, cta.shared["q_full"])

        for i in range(self.config.stages):
            self.copy_keys(cta, part, i)
            self.copy_values(cta, part, i)

    def place(self, part: Part, i: int | jax.Array) -> tuple[Any, Any, Any]:
        """Returns the indices of batch entry, first key and key head of visit i."""
        start = (part.first + i) * self.config.key_block
        return part.batch_idx, start, lax.div(part.key_head, jnp.int32(self.sharing))

    def copy_keys(self, cta: Cta, part: Part, i: int | jax.Array) -> None:
        """Starts the copy of the keys of visit i, if there is such a visit, in the first warpgroup."""
        slot = self.slot(i)

        @pl.when((i < part.count) & (lax.axis_index("wg") == 0))
        def _():
            matrix = self.matrix("k", cta, slot)
            matrix.fill(cta.heads[1], *self.place(part, i), cta.full("k", slot))

    def copy_values(self, cta: Cta, part: Part, i: int | jax.Array) -> None:
        """Starts the copy of this warpgroup's half of the values of visit i, if there is one."""
        buffer = self.values_buffer(i)

        @pl.when(i < part.count)
        def _():
            matrix, first = self.matrix("v", cta, buffer), lax.axis_index("wg") * self.value.width
            matrix.fill(cta.heads[2], *self.place(part, i), cta.full("v", buffer), first)

    def values_buffer(self, i: int | jax.Array) -> Any:
        return _HALVES * self.slot(i) + lax.axis_index("wg")

    def release_keys(self, cta: Cta, part: Part, i: jax.Array) -> None:
        """Starts the copy that replaces the keys of visit i, once both warpgroups have read them."""
        following, free = i + self.config.stages, cta.shared["k_free"].at[self.slot(i)]

        @pl.when(following < part.count)
        def _():
            plgpu.barrier_arrive(free)
            pl.when(lax.axis_index("wg") == 0)(lambda: plgpu.barrier_wait(free))

        self.copy_keys(cta, part, following)

    # --- products ---------------------------------------------------------------------------------

    def visit(
        self, cta: Cta, part: Part, i: jax.Array, out: list[jax.Array], softmax: Softmax
    ) -> tuple[list[jax.Array], Softmax]:
        """Adds the block of keys of visit i to `out`, this warpgroup's half of V, and to the softmax."""
        block, slot, buffer = self.config.key_block, self.slot(i), self.values_buffer(i)
        # The queries arrive once: a second wait for their barrier would never end.
        pl.when(i == 0)(lambda: plgpu.barrier_wait(cta.shared["q_full"]))
        plgpu.barrier_wait(cta.full("k", slot))

        def logits_products(acc):
            queries = Matrix.of(cta.shared["q_smem"])
            memory.multiply_transposed(acc, queries, self.matrix("k", cta, slot))
            return acc[...]

        products = pl.run_scoped(logits_products, plgpu.ACC((WGMMA_ROWS, block), jnp.float32))
        self.release_keys(cta, part, i)
        weights, softmax, decay = self.weighed(cta, part, i, products, softmax)
        plgpu.barrier_wait(cta.full("v", buffer))
        values = self.matrix("v", cta, buffer)
        values.clear_beyond(self.logits.mask, part.extent, (part.first + i) * block)

        def value_products(accs):
            for acc, columns in zip(accs, out, strict=True):
                acc[...] = columns * across(decay, columns.shape)
            memory.multiply(accs, weights, values)
            return memory.load_accumulators(accs)

        out = pl.run_scoped(value_products, self.value.accumulators())
        self.copy_values(cta, part, i + self.config.stages)
        return out, softmax

    # --- results ----------------------------------------------------------------------------------

    def write(self, cta: Cta, part: Part, out: list[jax.Array], softmax: Softmax) -> None:
        """Stores this warpgroup's half of the output's columns; the first also stores log-sum-exp."""
        total = jnp.sum(softmax.total, axis=1)
        empty = total == 0.0
        numerator = 1.0 / self.logits.keep_probability
        inverse = jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, total))
        out_gmem, lse_gmem = cta.results
        pair = part.batch_idx * self.shape.key_heads + part.key_head
        rows, wg_idx = pl.ds(part.start, WGMMA_ROWS), lax.axis_index("wg")

        @pl.when(wg_idx == 0)
        def _():
            lse = self.logits.log_sum_exp(softmax.maximum, total, empty, is_part=True)
            self.write_rows(lse_gmem, pair, part, lse)

        first = wg_idx * self.value.width
        number = pair * self.config.splits + part.split
        for block in out:
            columns = pl.ds(first, block.shape[1])
            out_gmem[number, rows, columns] = block * across(inverse, block.shape)
            first = first + block.shape[1]
