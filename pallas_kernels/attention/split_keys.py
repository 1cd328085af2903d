"""Attention on Hopper, forward for few queries: the keys of a head are split over CTAs (flash decoding).

With few queries, whole heads are too few tasks for all SMs, and reading keys and values takes all of the
time. The rows of a CTA are the queries of all heads that share a key head (`packing`), and its keys are
one of the parts into which the visited blocks of keys are split. A CTA writes the output over its part
of the keys and the log-sum-exp, in float32; a second kernel (`merge_splits`) merges the parts in a fixed
order. If there is one part and no sink, the output is that of the call, in its dtype.

A CTA is one warpgroup, which starts its own copies as soon as a pipeline stage (slot) is free. Two CTAs
on an SM take turns with the tensor cores, and together keep enough copies in flight.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import Extent, Index
from pallas_kernels.attention.memory import WGMMA_ROWS, Columns, Heads, Matrix, ceil_to
from pallas_kernels.attention.merge_splits import MOST_SPLITS, merge, only_part
from pallas_kernels.attention.packing import PackedTile, Packing
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.softmax import Softmax, Weighing, Weighted, across
from pallas_kernels.hopper import ALLOCATION_BYTES, BARRIER_BYTES, SHARED_MEMORY_BYTES


@dataclass(frozen=True)
class KeySplits:
    """Division of the work: each CTA has 64 rows and one part of the keys."""

    splits: int
    """Parts into which a head's blocks of keys are split, one for each CTA."""
    key_block: int = 64
    stages: int = 2
    """Pipeline stages of K, and also of V: blocks of keys that shared memory holds."""
    ctas_per_multiprocessor: int = 2

    def __post_init__(self):
        if not 1 <= self.splits <= MOST_SPLITS:
            raise ValueError(f"splits must be from 1 to {MOST_SPLITS}, got {self.splits}")
        if self.key_block not in (64, 128):
            raise ValueError(f"key_block must be 64 or 128, got {self.key_block}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")


@dataclass(frozen=True)
class SplitForwardConfig(KeySplits):
    """Division of the work of heads of up to 256 columns, whose output one warpgroup holds."""

    def columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q and K, and of V."""
        lengths = (Packing.of(shape).rows, shape.key_count)
        return (
            Columns.of(shape.head_size, lengths),
            Columns.of(shape.value_size, (shape.key_count,), self.key_block),
        )

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        head, value = self.columns(shape)
        count = head.bytes(WGMMA_ROWS + self.stages * self.key_block)
        count += value.bytes(self.stages * self.key_block)
        return count + 2 * value.cut(_OUTPUT_COLUMNS).bytes(WGMMA_ROWS) + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        # CUDA reserves one allocation unit of shared memory for each CTA of an SM.
        room = (SHARED_MEMORY_BYTES + ALLOCATION_BYTES) // self.ctas_per_multiprocessor
        return self.shared_bytes(shape) <= room - ALLOCATION_BYTES


_OUTPUT_COLUMNS = memory.SWIZZLED_COLUMNS // 2
"""Most columns of a block of the float32 output in shared memory: the widest swizzle, 128 bytes."""


def visited_keys(shape: Shape, logits: Logits) -> int:
    """Estimates how many keys of a head are visited under causal mask, window and pattern."""
    blocks = logits.mask.key_blocks((0, shape.query_count), 1, logits.mask.extent)
    return max(1, round((int(blocks.stop) - int(blocks.start)) * logits.mask.visited_share))


def candidates(
    shape: Shape, logits: Logits, multiprocessors: int
) -> tuple[SplitForwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    The guess splits the keys into as many parts as fill the GPU with one wave of CTAs. If unsplit keys
    take more than one wave, it has the number of parts that leaves the fewest SMs idle in the last one.
    """
    widest = max(shape.head_size, shape.value_size)
    shapes = [dict(stages=2), dict(stages=3, ctas_per_multiprocessor=1)]
    if widest <= memory.SWIZZLED_COLUMNS:
        three = dict(stages=2, ctas_per_multiprocessor=3)
        shapes = [three, dict(stages=3), dict(stages=2, key_block=128), *shapes]
    elif widest > 2 * memory.SWIZZLED_COLUMNS:
        shapes = [dict(stages=2, ctas_per_multiprocessor=1)]
        shapes.insert(0, dict(stages=3, ctas_per_multiprocessor=1))
    result = []
    for options in shapes:
        config = SplitForwardConfig(1, **options)
        if not config.fits(shape):
            continue
        counts = numbers_of_splits(shape, logits, config, multiprocessors)
        # The first options are tried with all of `counts`, the others only with the best one.
        for splits in counts[:1] if result else counts:
            result.append(SplitForwardConfig(splits, **options))
    return tuple(result)


def numbers_of_splits(
    shape: Shape, logits: Logits, config: KeySplits, multiprocessors: int
) -> list[int]:
    """Returns into how many parts, one a CTA, to split a head's keys: best guess first, then others."""
    tasks = shape.batch * shape.key_heads * Packing.of(shape).tiles
    places = config.ctas_per_multiprocessor * max(1, multiprocessors)
    blocks = -(-visited_keys(shape, logits) // config.key_block)
    most = max(1, min(MOST_SPLITS, blocks))
    # Starting and ending a CTA takes about as long as visiting `fixed` blocks of keys.
    fixed = 3

    def cost(splits: int) -> int:
        return -(-tasks * splits // places) * (-(-blocks // splits) + fixed)

    best = min(range(1, most + 1), key=cost)
    others = (best * 2, max(1, best // 2), 1)
    return list(dict.fromkeys([best, *(n for n in others if n <= most)]))


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: SplitForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) as pallas_kernels.attention.attention.forward does."""
    shape = Shape.of(query, key, value)
    config = config or candidates(shape, logits, multiprocessors)[0]
    packing = Packing.of(shape)
    kernel = SplitForward(shape, query.dtype, logits, config, packing, *config.columns(shape))
    return kernel.merged(*kernel.launch(query, key, value, operands), operands)


class Cta(NamedTuple):
    """References to the arrays and buffers that a CTA uses."""

    heads: tuple[Heads, Heads, Heads]
    """Q in rows, K and V in global memory."""
    operands: Operands
    results: tuple[Any, Any]
    """Output and log-sum-exp over each part of the keys, in global memory."""
    shared: dict[str, Any]
    """Buffers of shared memory and barriers, by name."""

    def full(self, name: str, slot: Any) -> Any:
        """Returns the barrier on which the copies to pipeline stage `slot` of "k" or "v" arrive."""
        return self.shared[f"{name}_full"].at[slot]


class Part(NamedTuple):
    """Task of a CTA: 64 rows of a key head, and one part of the blocks of keys that they visit."""

    batch_idx: jax.Array
    key_head: jax.Array
    split: jax.Array
    start: jax.Array
    """Index of the first row of the tile of 64, among all rows of the key head."""
    first: jax.Array
    """Index of the first visited block of keys; [first, first + count) are visited in order."""
    count: jax.Array
    full_start: Index
    """First block without masking; the blocks of keys [full_start, full_stop) need none."""
    full_stop: Index
    extent: Extent


@dataclass(frozen=True)
class SplitForward:
    """The forward kernel with split keys: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: SplitForwardConfig
    packing: Packing
    head: Columns
    value: Columns
    kernel_name = "attention_split_forward"
    warpgroups = 1

    def launch(
        self, query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output and the log-sum-exp over each part of the keys, as `results` says."""
        packed = self.packing.operands(operands).padded(WGMMA_ROWS, self.config.key_block)
        packed = packed._replace(sinks=None, query_lengths=operands.query_lengths)
        optional, tree = jax.tree.flatten(packed)

        def run(q_gmem, k_gmem, v_gmem, *refs, **shared):
            *refs, out_gmem, lse_gmem = refs
            ops = jax.tree.unflatten(tree, refs)
            heads = (Heads(q_gmem), Heads(k_gmem), Heads(v_gmem))
            self(Cta(heads, ops, (out_gmem, lse_gmem), shared))

        return plgpu.kernel(
            run,
            out_type=self.results(),
            scratch_types=self.memory(),
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=self.warpgroups,
            thread_name="wg",
            kernel_name=self.kernel_name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(self.packing.queries(query), key, value, *optional)

    def merged(
        self, outs: jax.Array, lses: jax.Array, operands: Operands
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (out [B, T, N, V], lse [B, N, R]) from those of the parts."""
        splits = self.config.splits
        outs = outs.reshape(-1, splits, self.packing.rows, self.shape.value_size)
        finish = only_part if splits == 1 else merge
        return finish(outs, lses, operands, self.shape, self.dtype, self.logits)

    @property
    def out_dtype(self) -> Any:
        """Dtype of a part's output: the call's for a single part that no sink will scale."""
        is_final = self.config.splits == 1 and not self.logits.has_sinks
        return self.dtype if is_final else jnp.float32

    @property
    def out_columns(self) -> int:
        """Most columns of a block of the output in shared memory: those of the widest swizzle."""
        return _OUTPUT_COLUMNS * 4 // jnp.dtype(self.out_dtype).itemsize

    @property
    def ctas(self) -> int:
        return self.shape.batch * self.shape.key_heads * self.packing.tiles * self.config.splits

    def memory(self) -> dict[str, Any]:
        block, stages, dtype = self.config.key_block, self.config.stages, self.dtype
        return dict(
            q_smem=self.head.memory((), WGMMA_ROWS, dtype),
            k_smem=self.head.memory((stages,), block, dtype),
            v_smem=self.value.memory((stages,), block, dtype),
            out_smem=self.value.cut(self.out_columns).memory((), WGMMA_ROWS, self.out_dtype),
            q_full=plgpu.Barrier(num_arrivals=self.head.count),
            k_full=plgpu.Barrier(num_arrivals=self.head.count, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=self.value.count, num_barriers=stages),
        )

    def results(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        pairs, splits = self.shape.batch * self.shape.key_heads, self.config.splits
        rows, numbers = self.packing.rows, splits * self.logits.row_numbers
        return (
            jax.ShapeDtypeStruct((pairs * splits, rows, 1, self.shape.value_size), self.out_dtype),
            jax.ShapeDtypeStruct((pairs, numbers, ceil_to(rows, WGMMA_ROWS)), jnp.float32),
        )

    def part(self, cta: Cta) -> Part:
        """Returns this CTA's task. CTAs of consecutive index read the same keys, for other rows."""
        splits, key_heads = jnp.int32(self.config.splits), jnp.int32(self.shape.key_heads)
        number, tiles = lax.axis_index("cta"), jnp.int32(self.packing.tiles)
        start = lax.rem(number, tiles) * WGMMA_ROWS
        number = lax.div(number, tiles)
        split = lax.rem(number, splits)
        number = lax.div(number, splits)
        key_head, batch_idx = lax.rem(number, key_heads), lax.div(number, key_heads)
        mask, block = self.logits.mask, self.config.key_block
        extent = cta.operands.extent(mask, batch_idx)
        queries = self.packing.query_range(start, WGMMA_ROWS)
        blocks = mask.key_blocks(queries, block, extent)
        # The visited blocks of keys, whose number may depend on run-time lengths, are divided evenly
        # among the CTAs of a tile of rows.
        visited = jnp.asarray(blocks.stop - blocks.start, jnp.int32)
        first = blocks.start + lax.div(visited * split, splits)
        stop = blocks.start + lax.div(visited * (split + 1), splits)
        return Part(
            batch_idx,
            key_head,
            split,
            start,
            first,
            stop - first,
            blocks.full_start,
            blocks.full_stop,
            extent,
        )

    def __call__(self, cta: Cta) -> None:
        part = self.part(cta)
        # An empty part has neither copies nor barriers to wait for.
        pl.when(part.count > 0)(lambda: self.start(cta, part))

        def visit(i, carry):
            return self.visit(cta, part, i, *carry)

        carry = self.value.zeros(), Softmax.start(self.logits.saves_rest)
        self.write(cta, part, *lax.fori_loop(0, part.count, visit, carry))

    # --- copies -----------------------------------------------------------------------------------

    def start(self, cta: Cta, part: Part) -> None:
        """Starts the copies of 64 rows of queries, and of the first block of keys for each stage."""
        batch_idx, head_idx = self.packing.place(part.batch_idx, part.key_head)
        queries = Matrix.of(cta.shared["q_smem"])
        queries.fill(cta.heads[0], batch_idx, part.start, head_idx, cta.shared["q_full"])
        for i in range(self.config.stages):
            self.copy("k", cta, part, i)
            self.copy("v", cta, part, i)

    def copy(self, name: str, cta: Cta, part: Part, i: int | jax.Array) -> None:
        """Starts the copy of the keys or the values of visit i, if there is such a visit."""
        slot = self.slot(i)

        def copy():
            heads = cta.heads["qkv".index(name)]
            start = (part.first + i) * self.config.key_block
            matrix = self.matrix(name, cta, slot)
            matrix.fill(heads, part.batch_idx, start, part.key_head, cta.full(name, slot))

        pl.when(i < part.count)(copy)

    def slot(self, i: int | jax.Array) -> int | jax.Array:
        return i if isinstance(i, int) else lax.rem(i, jnp.int32(self.config.stages))

    def matrix(self, name: str, cta: Cta, slot: Any) -> Matrix:
        return Matrix.of(cta.shared[f"{name}_smem"], slot)

    # --- products ---------------------------------------------------------------------------------

    def visit(
        self, cta: Cta, part: Part, i: jax.Array, out: list[jax.Array], softmax: Softmax
    ) -> tuple[list[jax.Array], Softmax]:
        """Adds the block of keys of visit i to `out` [64, V] and to the softmax of 64 rows."""
        block, slot = self.config.key_block, self.slot(i)
        # The queries arrive once: a second wait for their barrier would never end.
        pl.when(i == 0)(lambda: plgpu.barrier_wait(cta.shared["q_full"]))
        plgpu.barrier_wait(cta.full("k", slot))

        def logits_products(acc):
            queries = Matrix.of(cta.shared["q_smem"])
            memory.multiply_transposed(acc, queries, self.matrix("k", cta, slot))
            return acc[...]

        acc = plgpu.ACC((WGMMA_ROWS, block), jnp.float32)
        products = pl.run_scoped(logits_products, acc)
        self.copy("k", cta, part, i + self.config.stages)

        weights, softmax, decay = self.weighed(cta, part, i, products, softmax)
        plgpu.barrier_wait(cta.full("v", slot))
        values = self.matrix("v", cta, slot)
        values.clear_beyond(self.logits.mask, part.extent, (part.first + i) * block)

        def value_products(accs):
            for acc, block in zip(accs, out, strict=True):
                acc[...] = block * across(decay, block.shape)
            memory.multiply(accs, weights, values)
            return memory.load_accumulators(accs)

        out = pl.run_scoped(value_products, self.value.accumulators())
        self.copy("v", cta, part, i + self.config.stages)
        return out, softmax

    def weighed(
        self, cta: Cta, part: Part, i: jax.Array, products: jax.Array, softmax: Softmax
    ) -> Weighted:
        """Returns the weights [64, keys] of the values of visit i, given Q K^T, and the new softmax."""
        block, number = self.config.key_block, part.first + i
        is_partial: bool | jax.Array = False
        if not self.logits.mask.is_always_full(WGMMA_ROWS, block):
            is_partial = (number < part.full_start) | (number >= part.full_stop)
        tile = PackedTile(
            part.batch_idx,
            part.key_head,
            part.start,
            number * block,
            (WGMMA_ROWS, block),
            packing=self.packing,
        )
        weighing = Weighing(self.logits, self.dtype)
        return weighing(products, tile, cta.operands, part.extent, is_partial, softmax)

    # --- results ----------------------------------------------------------------------------------

    def write(self, cta: Cta, part: Part, out: list[jax.Array], softmax: Softmax) -> None:
        """Stores output [64, V] over this CTA's part of the keys, and log-sum-exp [64]."""
        total = jnp.sum(softmax.total, axis=1)
        empty = total == 0.0
        lse = self.logits.log_sum_exp(softmax.maximum, total, empty, is_part=True)
        numerator = 1.0 / self.logits.keep_probability
        inverse = jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, total))
        out_gmem, lse_gmem = cta.results
        pair = part.batch_idx * self.shape.key_heads + part.key_head
        self.write_rows(lse_gmem, pair, part, lse)
        staged = Matrix.of(cta.shared["out_smem"])
        staged.store(self.pieces([block * across(inverse, block.shape) for block in out]))
        number = pair * self.config.splits + part.split
        staged.write(Heads(out_gmem), number, part.start, pair * 0)
        plgpu.wait_smem_to_gmem(0)

    def write_rows(self, gmem: Any, pair: Any, part: Part, lse: list[jax.Array]) -> None:
        """Stores the log-sum-exp, and its rest behind the log-sum-exps of all parts."""
        for i, numbers in enumerate(lse):
            number = part.split + i * self.config.splits if i else part.split
            gmem[pair, number, pl.ds(part.start, WGMMA_ROWS)] = numbers

    def pieces(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Cuts float32 blocks [64, columns] into those of `out_smem`."""
        most = self.out_columns
        return [b[:, i : i + most] for b in blocks for i in range(0, b.shape[1], most)]
