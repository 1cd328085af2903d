"""Backward of attention on Hopper for few queries: all gradients from one read of keys and values.

The rows of a CTA are the queries of all heads that share a key head (`packing`). If they are at most 64,
one tile has all of them: dK and dV of a block of keys are complete after one visit, and only dQ is a sum
over blocks. The keys are split over CTAs: each sums dQ over its blocks in registers, and writes it in
float32 at the end; XLA adds the dQ of these CTAs in a fixed order. With more rows this kernel computes
only dQ, and `backward_dkv`'s kernel computes dK and dV.

A visit to a block of keys takes five products. The product for dQ reads dS^T, with keys as rows, from
shared memory; those for dK and dV take dS^T and P^T from the registers in which they were computed. dK
and dV of a block are copied to global memory from the shared memory of its keys and values. Two CTAs on
an SM take turns with the tensor cores.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import backward_dkv, memory
from pallas_kernels.attention.backward import prepare
from pallas_kernels.attention.backward_bias import bias_gradient
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import Extent, Index
from pallas_kernels.attention.memory import (
    SWIZZLED_COLUMNS,
    WGMMA_ROWS,
    Columns,
    Heads,
    Matrix,
)
from pallas_kernels.attention.packing import Packing, TransposedPackedTile
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.split_keys import visited_keys
from pallas_kernels.hopper import ALLOCATION_BYTES, BARRIER_BYTES, SHARED_MEMORY_BYTES

_KEY_BLOCK = 64
"""Keys of a block; they are the rows of a tile of logits, whose columns are 64 queries."""

_MOST_COLUMNS = 192
"""Float32 columns of dQ and of dK or dV that fit into a warpgroup's registers together.

If dQ alone has more, registers spill. That still takes less time than computing dK and dV by
`backward_dkv`'s kernel, which does not pack the query heads of a key head into one tile.
"""


@dataclass(frozen=True)
class SplitBackwardConfig:
    """Division of the work: each CTA has a tile of rows of a key head and one part of the keys."""

    splits: int
    """Parts into which a head's blocks of keys are split, one for each CTA."""
    stages: int = 2
    """Pipeline stages of K and V: blocks of keys that shared memory holds."""
    ctas_per_multiprocessor: int = 2

    def __post_init__(self):
        if self.splits < 1:
            raise ValueError(f"splits must be at least 1, got {self.splits}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers and vectors."""
        rows = WGMMA_ROWS + self.stages * _KEY_BLOCK
        count = sum(columns.bytes(rows) for columns in _columns(shape))
        tile = 2 * _KEY_BLOCK * WGMMA_ROWS
        return count + tile + 2 * ALLOCATION_BYTES + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        # CUDA reserves one allocation unit of shared memory for each CTA of an SM.
        room = (SHARED_MEMORY_BYTES + ALLOCATION_BYTES) // self.ctas_per_multiprocessor
        return self.shared_bytes(shape) <= room - ALLOCATION_BYTES


def _columns(shape: Shape) -> tuple[Columns, Columns]:
    """Returns how shared memory holds columns (features) of Q, K and dK, and of V, dO and dV.

    K has a swizzle of 128 bytes, because dS has it, and both operands of the product dS @ K must have
    the same.
    """
    return Columns.in_wide_blocks(shape.head_size), Columns.in_blocks(shape.value_size)


def is_fused(shape: Shape) -> bool:
    """Whether one kernel computes all gradients, which takes all rows of a key head in one tile."""
    return Packing.of(shape).rows <= WGMMA_ROWS


def candidates(
    shape: Shape, logits: Logits, multiprocessors: int
) -> tuple[SplitBackwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first."""
    result = []
    for options in (
        dict(stages=3),
        dict(stages=2),
        dict(stages=4, ctas_per_multiprocessor=1),
        dict(stages=2, ctas_per_multiprocessor=1),
    ):
        config = SplitBackwardConfig(1, **options)
        if not config.fits(shape):
            continue
        tasks = shape.batch * shape.key_heads * Packing.of(shape).tiles
        places = config.ctas_per_multiprocessor * max(1, multiprocessors)
        blocks = -(-visited_keys(shape, logits) // _KEY_BLOCK)
        # Starting and ending a CTA takes about as long as visiting `fixed` blocks of keys.
        fixed = 3
        best = min(
            range(1, max(1, min(places, blocks)) + 1),
            key=lambda n: -(-tasks * n // places) * (-(-blocks // n) + fixed),
        )
        numbers = (best,) if result else (best, max(1, best // 2), min(blocks, 2 * best))
        result += [SplitBackwardConfig(n, **options) for n in dict.fromkeys(numbers)]
    return tuple(result)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    logits: Logits,
    multiprocessors: int,
    config: SplitBackwardConfig | None = None,
    dbias_dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the same gradients as pallas_kernels.attention.attention.backward, in its order."""
    shape = Shape.of(query, key, value)
    config = config or candidates(shape, logits, multiprocessors)[0]
    keys = backward_dkv.default_config(shape, logits, multiprocessors)
    blocks = () if is_fused(shape) else (keys.query_block,)
    lse2, delta, dbias, dsinks = prepare(
        operands, out, lse, dout, dlse, logits, blocks=blocks, dbias_dtype=dbias_dtype
    )
    arrays = (query, key, value, operands, lse2, delta, dout)
    if operands.bias is not None and dbias is None:
        dbias = bias_gradient(*arrays, logits=logits, dtype=dbias_dtype)
    results = _split(*arrays, logits=logits, config=config)
    if is_fused(shape):
        dquery, dkey, dvalue = results
    else:
        (dquery,) = results
        options = dict(logits=logits, multiprocessors=multiprocessors)
        dkey, dvalue = backward_dkv.key_gradients(*arrays, **options, config=keys)
    return dquery, dkey, dvalue, dbias, dsinks


def _split(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    logits: Logits,
    config: SplitBackwardConfig,
) -> tuple[jax.Array, ...]:
    """Returns (dquery, dkey, dvalue), or only (dquery,) if a key head has more than 64 rows.

    query and dout are [B, T, N, .], key and value [B, S, K, .], lse2 and delta [B, N, padded T].
    """
    shape = Shape.of(query, key, value)
    packing = Packing.of(shape)
    queries = slice(0, shape.query_count)
    lse2 = packing.padded(packing.of_queries(lse2[..., queries]), jnp.inf)
    delta = packing.padded(packing.of_queries(delta[..., queries]))
    kernel = _SplitBackward(shape, query.dtype, logits, config, packing)
    packed = packing.operands(operands).padded(WGMMA_ROWS, _KEY_BLOCK).transposed()
    packed = packed._replace(sinks=None)
    optional, tree = jax.tree.flatten(packed)
    arrays = (packing.queries(query), key, value, packing.queries(dout), lse2, delta)

    def run(*refs, **shared):
        refs, results = refs[: -len(kernel.results())], refs[-len(kernel.results()) :]
        ops = jax.tree.unflatten(tree, refs[len(arrays) :])
        kernel(_Cta(refs[: len(arrays)], ops, results, shared))

    name = "attention_split_backward" if kernel.is_fused else "attention_split_query_gradient"
    dqs, *others = plgpu.kernel(
        run,
        out_type=kernel.results(),
        scratch_types=kernel.memory(),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, *optional)
    # XLA adds the CTAs' sums of dQ in one kernel, in an order that depends on the shape alone.
    dqs = dqs.reshape(shape.batch, shape.key_heads, config.splits, *dqs.shape[1:2], -1)
    dquery = (jnp.sum(dqs, axis=2) * kernel.scale).astype(query.dtype)
    return packing.unpacked(dquery), *others


class _Cta(NamedTuple):
    """References to the arrays and buffers that a CTA uses."""

    arrays: tuple[Any, ...]
    """Q, K, V, dO, log-sum-exp and delta in global memory. Q and dO are as `Packing.queries` returns
    them, log-sum-exp and delta [B, K, padded rows]."""
    operands: Operands
    results: tuple[Any, ...]
    """dQ [B * K * splits, rows, 1, H], and dK and dV if the kernel `is_fused`, in global memory."""
    shared: dict[str, Any]
    """Buffers of shared memory and barriers, by name."""

    def full(self, name: str, slot: Any) -> Any:
        """Returns the barrier on which the copies to pipeline stage `slot` of "k" or "v" arrive."""
        return self.shared[f"{name}_full"].at[slot]

    def matrix(self, name: str, *index: Any) -> Matrix:
        """Returns the 16-bit matrix in pipeline stage `index` of the buffers `name`_smem."""
        return Matrix.of([block[:2] for block in self.shared[f"{name}_smem"]], *index)


class _Part(NamedTuple):
    """Task of a CTA: 64 rows of a key head, and one part of the blocks of keys that they visit."""

    batch_idx: jax.Array
    key_head: jax.Array
    split: jax.Array
    start: jax.Array
    """Index of the first row of the tile of 64, among all rows of the key head."""
    first: jax.Array
    """Index of the first visited block of keys; [first, first + count) are visited in order."""
    count: jax.Array
    skipped: tuple[jax.Array, jax.Array]
    """Range, among the blocks of keys that no query attends to, whose dK and dV (0) this CTA writes."""
    blocks: tuple[Index, Index, Index, Index]
    """The `Blocks` of keys that the queries attend to."""
    extent: Extent


@dataclass(frozen=True)
class _SplitBackward:
    """The backward kernel with split keys: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: SplitBackwardConfig
    packing: Packing

    @property
    def head(self) -> Columns:
        return _columns(self.shape)[0]

    @property
    def value(self) -> Columns:
        return _columns(self.shape)[1]

    @property
    def is_fused(self) -> bool:
        return is_fused(self.shape)

    @property
    def ctas(self) -> int:
        tasks = self.shape.batch * self.shape.key_heads * self.packing.tiles
        return tasks * self.config.splits

    @property
    def scale(self) -> float:
        """Factor by which sums of dS K and dS^T Q are multiplied for dQ and dK.

        It is 1 with a cap, whose derivative, a factor of dS, contains the scale.
        """
        return self.logits.scale if self.logits.soft_cap is None else 1.0

    def memory(self) -> dict[str, Any]:
        stages, dtype = self.config.stages, self.dtype
        return dict(
            q_smem=self.head.memory((), WGMMA_ROWS, dtype),
            do_smem=self.value.memory((), WGMMA_ROWS, dtype),
            k_smem=[
                _with_sums(block, width)
                for block, width in zip(
                    self.head.memory((stages,), _KEY_BLOCK, dtype), self.head.widths, strict=True
                )
            ],
            v_smem=self.value.memory((stages,), _KEY_BLOCK, dtype),
            ds_smem=memory.tiled((), _KEY_BLOCK, WGMMA_ROWS, dtype),
            lse_smem=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
            delta_smem=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=self.head.count + self.value.count + 2),
            k_full=plgpu.Barrier(num_arrivals=self.head.count, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=self.value.count, num_barriers=stages),
        )

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        batch, _, key_count, _, key_heads, head_size, value_size = self.shape
        dqs = (batch * key_heads * self.config.splits, self.packing.rows, 1, head_size)
        of_queries = (jax.ShapeDtypeStruct(dqs, jnp.float32),)
        if not self.is_fused:
            return of_queries
        return (
            *of_queries,
            jax.ShapeDtypeStruct((batch, key_count, key_heads, head_size), self.dtype),
            jax.ShapeDtypeStruct((batch, key_count, key_heads, value_size), self.dtype),
        )

    def part(self, cta: _Cta) -> _Part:
        splits, key_heads = jnp.int32(self.config.splits), jnp.int32(self.shape.key_heads)
        number, tiles = lax.axis_index("cta"), jnp.int32(self.packing.tiles)
        start, number = lax.rem(number, tiles) * WGMMA_ROWS, lax.div(number, tiles)
        split, number = lax.rem(number, splits), lax.div(number, splits)
        key_head, batch_idx = lax.rem(number, key_heads), lax.div(number, key_heads)
        extent = cta.operands.extent(self.logits.mask, batch_idx)
        queries = self.packing.query_range(start, WGMMA_ROWS)
        blocks = self.logits.mask.key_blocks(queries, _KEY_BLOCK, extent)
        # Visited blocks, and blocks to which no query attends, are each divided evenly among the CTAs.
        visited = jnp.asarray(blocks.stop - blocks.start, jnp.int32)
        skipped = -(-self.shape.key_count // _KEY_BLOCK) - visited

        def share(count, index):
            return lax.div(count * index, splits)

        first = blocks.start + share(visited, split)
        return _Part(
            batch_idx,
            key_head,
            split,
            start,
            first,
            blocks.start + share(visited, split + 1) - first,
            (share(skipped, split), share(skipped, split + 1)),
            blocks,
            extent,
        )

    def __call__(self, cta: _Cta) -> None:
        part = self.part(cta)
        # A part without visits has neither copies nor barriers to wait for.
        pl.when(part.count > 0)(lambda: self.start(cta, part))

        def all_visits(dq_accs):
            visit = functools.partial(self.visit, cta, part, dq_accs)
            lax.fori_loop(0, part.count, lambda i, _: visit(i), None)
            return memory.load_accumulators(dq_accs)

        dquery = pl.run_scoped(all_visits, self.head.accumulators())
        self.write_queries(cta, part, dquery)
        if self.is_fused:
            first, stop = part.skipped
            pl.when(stop > first)(lambda: self.write_zeros(cta, part))
        plgpu.wait_smem_to_gmem(0)

    # --- copies -----------------------------------------------------------------------------------

    def start(self, cta: _Cta, part: _Part) -> None:
        """Starts the copies of 64 rows of Q, dO, log-sum-exp and delta, and of the first key blocks."""
        batch_idx, head_idx = self.packing.place(part.batch_idx, part.key_head)
        q_gmem, _, _, do_gmem, lse_gmem, delta_gmem = cta.arrays
        full = cta.shared["q_full"]
        for name, gmem in (("q", q_gmem), ("do", do_gmem)):
            Matrix.of(cta.shared[f"{name}_smem"]).fill(
                Heads(gmem), batch_idx, part.start, head_idx, full
            )
        for name, gmem in (("lse", lse_gmem), ("delta", delta_gmem)):
            rows = gmem.at[part.batch_idx, part.key_head, pl.ds(part.start, WGMMA_ROWS)]
            plgpu.copy_gmem_to_smem(rows, cta.shared[f"{name}_smem"], full)
        for i in range(self.config.stages):
            self.copy_block(cta, part, i)

    def copy_block(self, cta: _Cta, part: _Part, i: int | jax.Array) -> None:
        """Starts the copies of the keys and values of visit i, if there is such a visit."""
        slot = self.slot(i)

        def copy():
            start = (part.first + i) * _KEY_BLOCK
            for name, gmem in (("k", cta.arrays[1]), ("v", cta.arrays[2])):
                full = cta.full(name, slot)
                matrix = cta.matrix(name, slot)
                matrix.fill(Heads(gmem), part.batch_idx, start, part.key_head, full)

        pl.when(i < part.count)(copy)

    def slot(self, i: int | jax.Array) -> int | jax.Array:
        return i if isinstance(i, int) else lax.rem(i, jnp.int32(self.config.stages))

    # --- products ---------------------------------------------------------------------------------

    def visit(self, cta: _Cta, part: _Part, dq_accs: list[Any], i: jax.Array) -> None:
        """Computes dK and dV of a block of keys, and adds its contribution to dQ."""
        slot = self.slot(i)
        keys, values = cta.matrix("k", slot), cta.matrix("v", slot)
        queries, dout = Matrix.of(cta.shared["q_smem"]), Matrix.of(cta.shared["do_smem"])
        # The queries arrive once: a second wait for their barrier would never end.
        pl.when(i == 0)(lambda: plgpu.barrier_wait(cta.shared["q_full"]))

        def logits_products(s_acc):
            plgpu.barrier_wait(cta.full("k", slot))
            memory.multiply_transposed(s_acc, keys, queries)

        def probability_products(dp_acc):
            plgpu.barrier_wait(cta.full("v", slot))
            memory.multiply_transposed(dp_acc, values, dout)

        def both_products(s_acc, dp_acc):
            logits_products(s_acc)
            probability_products(dp_acc)
            products = plgpu.wgmma_accumulator_load(s_acc, wait_n=self.value.count)
            probabilities = self.probabilities(cta, part, i, products)
            return probabilities, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)

        def one_product(multiply, acc):
            multiply(acc)
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        square = plgpu.ACC((_KEY_BLOCK, WGMMA_ROWS), jnp.float32)
        if self.head.width < _MOST_COLUMNS:
            (p, kept, derivative), dp = pl.run_scoped(both_products, square, square)
        else:
            # dQ leaves registers for only one tile of S^T or dP^T at a time.
            products = pl.run_scoped(functools.partial(one_product, logits_products), square)
            p, kept, derivative = self.probabilities(cta, part, i, products)
            dp = pl.run_scoped(functools.partial(one_product, probability_products), square)
        delta = self.tile(part, i).along_queries(cta.shared["delta_smem"])
        ds = self.logits.gradient(p, dp, delta, kept, derivative).astype(self.dtype)
        kept = p if kept is None else kept
        ds_smem = cta.shared["ds_smem"]
        ds_smem[...] = ds
        plgpu.commit_smem()
        memory.multiply(dq_accs, ds_smem.transpose((1, 0)), keys)
        if self.is_fused:
            factor = 1.0 / self.logits.keep_probability
            self.write(cta, part, i, values, 2, kept, dout, factor)
        # Wait for the product dS K, because dK or later keys overwrite the keys that it reads.
        memory.load_accumulators(dq_accs)
        if not self.is_fused:
            self.copy_block(cta, part, i + self.config.stages)
            return
        self.write(cta, part, i, keys, 1, ds, queries, self.scale)
        # Wait until the previous visit's dK and dV are copied out: later keys and values overwrite them.
        plgpu.wait_smem_to_gmem(self.head.count + self.value.count, wait_read_only=True)
        pl.when(i > 0)(lambda: self.copy_block(cta, part, i - 1 + self.config.stages))

    def tile(self, part: _Part, i: jax.Array) -> TransposedPackedTile:
        return TransposedPackedTile(
            part.batch_idx,
            part.key_head,
            part.start,
            (part.first + i) * _KEY_BLOCK,
            (_KEY_BLOCK, WGMMA_ROWS),
            transposed=True,
            packing=self.packing,
        )

    def probabilities(
        self, cta: _Cta, part: _Part, i: jax.Array, products: jax.Array
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns tiles [keys, queries]: P^T, P^T after dropout, and the derivative of the cap.

        The second is None without dropout, and the third without a cap.
        """
        logits, tile, number = self.logits, self.tile(part, i), part.first + i
        is_partial: bool | jax.Array = False
        if not logits.mask.is_always_full(WGMMA_ROWS, _KEY_BLOCK):
            _, full_start, full_stop, _ = part.blocks
            is_partial = (number < full_start) | (number >= full_stop)
        x = logits.logits_if_masked(products, tile, cta.operands, part.extent, is_partial)
        lse2 = tile.along_queries(cta.shared["lse_smem"])
        p = logits.probabilities(x, lse2, tile, cta.operands)
        derivative = None
        if logits.soft_cap is not None:
            derivative = logits.derivative_of_capped(products)
        # P is rounded to the dtype that the product for dV needs, to occupy fewer registers.
        p = lax.optimization_barrier(p.astype(self.dtype))
        kept = logits.dropped(p, tile, cta.operands) if logits.dropout_rate > 0 else None
        return p, kept, derivative

    # --- results ----------------------------------------------------------------------------------

    def write(
        self,
        cta: _Cta,
        part: _Part,
        i: jax.Array,
        place: Matrix,
        result: int,
        left: jax.Array,
        right: Matrix,
        factor: float,
    ) -> None:
        """Writes left @ right * factor, dK (`result` 1) or dV (2) of 64 keys, to global memory.

        The product is computed for as many columns at a time as fit into the registers, and stored in
        `place`, the shared memory of the block's keys or values.
        """
        columns = self.head if result == 1 else self.value
        start = (part.first + i) * _KEY_BLOCK
        for group in _groups(columns.widths, _MOST_COLUMNS - self.head.width):
            accs = [plgpu.ACC((_KEY_BLOCK, columns.widths[j]), jnp.float32) for j in group]
            part_of_right = Matrix(*(tuple(refs[j] for j in group) for refs in right))

            def product(accs, part_of_right=part_of_right):
                memory.multiply(accs, left, part_of_right)
                return memory.load_accumulators(accs)

            for j, block in zip(group, pl.run_scoped(product, accs), strict=True):
                place.operands[j][...] = (block * factor).astype(self.dtype)
        plgpu.commit_smem()
        place.write(Heads(cta.results[result]), part.batch_idx, start, part.key_head)

    def write_queries(self, cta: _Cta, part: _Part, dquery: list[jax.Array]) -> None:
        """Writes this CTA's float32 dQ, clipped to existing rows, through the shared memory of K."""
        # Copies of dK may still read this memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = [tuple(block)[2:] for block in cta.shared["k_smem"]]
        number = (part.batch_idx * self.shape.key_heads + part.key_head) * self.config.splits
        place = Matrix(
            *(
                tuple(b[kind].at[j] for b in sums for j in range(b[kind].shape[0]))
                for kind in (0, 1)
            )
        )
        width = SWIZZLED_COLUMNS // 2
        pieces = [
            block[:, first : min(first + width, block.shape[1])]
            for block in dquery
            for first in range(0, block.shape[1], width)
        ]
        place.store(pieces)
        place.write(Heads(cta.results[0]), number + part.split, part.start, number * 0)

    def write_zeros(self, cta: _Cta, part: _Part) -> None:
        """Writes zeros as dK and dV of this CTA's blocks of keys that no query attends to."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        start, stop = part.blocks[0], part.blocks[3]
        matrices = (cta.matrix("k", 0), cta.matrix("v", 0))
        for matrix, columns in zip(matrices, (self.head, self.value), strict=True):
            matrix.store([zeros.astype(self.dtype) for zeros in columns.zeros()])

        @pl.loop(part.skipped[0], part.skipped[1])
        def _(i):
            number = jnp.where(i < start, i, i + (stop - start))
            for matrix, gmem in zip(matrices, cta.results[1:], strict=True):
                matrix.write(Heads(gmem), part.batch_idx, number * _KEY_BLOCK, part.key_head)


def _with_sums(block: Any, width: int) -> Any:
    """Returns a block of `Columns.memory` with a further view: the memory as `width` float32 columns.

    This view is in pieces of at most 32 columns (128 bytes, the widest swizzle).
    """
    pieces = -(-width // (SWIZZLED_COLUMNS // 2))
    columns = Columns((width // pieces,), width // pieces)
    sums = columns.memory((pieces,), WGMMA_ROWS, jnp.float32)
    return plgpu.RefUnion(*block.refs, *sums[0].refs)


def _groups(widths: tuple[int, ...], most: int) -> list[list[int]]:
    """Returns groups of consecutive indices of `widths` (blocks of columns).

    A group has as many blocks as have together at most `most` columns, but at least one.
    """
    groups: list[list[int]] = []
    for j, width in enumerate(widths):
        if groups and sum(widths[k] for k in groups[-1]) + width <= most:
            groups[-1].append(j)
        else:
            groups.append([j])
    return groups
