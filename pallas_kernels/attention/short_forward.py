"""Attention on Hopper, forward for S <= 256: whole rows of the softmax at once.

A head's keys and values stay in shared memory, and a warpgroup processes the head's queries 64 at a
time. Since a whole row of logits is in registers, the softmax takes one maximum and one sum, and nothing
is rescaled. The warpgroups of an SM work on different heads and never wait for each other: while one
waits for memory, others multiply or compute exponentials.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import (
    LOG2E,
    Logits,
    Operands,
    Tile,
    forward_results,
)
from pallas_kernels.attention.mask import Extent
from pallas_kernels.attention.memory import (
    SWIZZLED_COLUMNS,
    WGMMA_ROWS,
    Columns,
    Heads,
    Matrix,
    ceil_to,
)
from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

_QUERY_SLOTS = 3
"""Pipeline stages of a worker's query tiles: one is copied in, one in use, and one copied out."""

_VECTOR = plgpu.Layout.WGMMA.reduce(1)
"""Register layout of one number for each row of a tile."""


@dataclass(frozen=True)
class ShortForwardConfig:
    """Division of heads among CTAs and their warpgroups (workers)."""

    workers: int
    """Warpgroups of a CTA, each with heads and shared memory of its own."""
    tiles: int
    """Tiles of 64 queries for which a worker loads a head's keys and values once."""
    ctas_per_multiprocessor: int


def workers_that_fit(key_count: int, head_size: int, value_size: int) -> int:
    """Returns how many workers, with one head each, fit into an SM's shared memory."""
    head, value = (Columns.in_wide_blocks(size) for size in (head_size, value_size))
    count = head.bytes(ceil_to(key_count, 8)) + value.bytes(ceil_to(key_count, WGMMA_ROWS))
    count += head.bytes(_QUERY_SLOTS * WGMMA_ROWS)
    count += 0 if head == value else value.bytes(WGMMA_ROWS)
    return (SHARED_MEMORY_BYTES - BARRIER_BYTES) // (count + 4 * WGMMA_ROWS)


def candidates(shape: Shape, multiprocessors: int) -> tuple[ShortForwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    Two CTAs of one worker have more registers a thread than one CTA of two workers. The guess has two
    tiles of queries a worker, for which keys and values are loaded once, if that leaves no worker idle.
    """
    room = workers_that_fit(shape.key_count, shape.head_size, shape.value_size)
    ctas = min(2, room)
    chunks = -(-shape.query_count // WGMMA_ROWS)
    tiles = min(2, chunks)
    if shape.batch * shape.heads * chunks < ctas * multiprocessors * tiles:
        tiles = 1
    guess = ShortForwardConfig(1, tiles, ctas)
    others = [
        ShortForwardConfig(1, count, ctas)
        for count in (1, 2, 4)
        if count <= chunks and count != tiles
    ]
    if room > 1:
        others.append(ShortForwardConfig(2, tiles, 1))
        others.append(ShortForwardConfig(1, tiles, 1))
    if room > 2:
        others.append(ShortForwardConfig(1, tiles, 3))
    return guess, *others


def default_config(shape: Shape, multiprocessors: int) -> ShortForwardConfig:
    """Returns the first of `candidates`: the best guess without measurements."""
    return candidates(shape, multiprocessors)[0]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ShortForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) as pallas_kernels.attention.attention.forward does."""
    shape = Shape.of(query, key, value)
    return _run((query, key, value), shape, operands, logits, multiprocessors, config)


def forward_packed(
    packed: jax.Array,
    operands: Operands,
    *,
    key_heads: int,
    logits: Logits,
    multiprocessors: int,
    config: ShortForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs `forward` on [B, T, N + 2 K, H], the query, key and value heads of one projection.

    If the array were split into three, XLA would copy the slices before the kernel.
    """
    shape = Shape.of_packed(packed, key_heads)
    return _run((packed,), shape, operands, logits, multiprocessors, config)


def _run(
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    operands: Operands,
    logits: Logits,
    multiprocessors: int,
    config: ShortForwardConfig | None,
) -> tuple[jax.Array, jax.Array]:
    config = config or default_config(shape, multiprocessors)
    kernel = _ShortForward(shape, arrays[0].dtype, logits, config, multiprocessors)
    operands = operands.padded(WGMMA_ROWS, kernel.key_rows)
    optional, tree = jax.tree.flatten(operands)

    def run(*refs, **shared):
        count = len(refs) - 1 - logits.row_numbers
        refs, results = refs[:count], refs[count:]
        ops = jax.tree.unflatten(tree, refs[len(arrays) :])
        heads = memory.queries_keys_values(refs[: len(arrays)], shape.heads, shape.key_heads)
        kernel(heads, ops, results, shared)

    return plgpu.kernel(
        run,
        out_type=forward_results(kernel.shape, kernel.dtype, logits),
        scratch_types=kernel.memory(),
        grid=(kernel.ctas,),
        grid_names=("cta",),
        num_threads=config.workers,
        thread_name="wg",
        kernel_name="attention_short_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, *optional)


class _Worker(NamedTuple):
    """References and indices of a warpgroup that works through tiles of its own."""

    heads: tuple[Heads, Heads, Heads]
    """Q, K and V in global memory."""
    operands: Operands
    results: tuple[Any, Any]
    """Output and log-sum-exp in global memory."""
    shared: dict[str, Any]
    """Buffers of shared memory and barriers of all workers, by name."""
    wg_idx: jax.Array
    idx: jax.Array
    """Index of this worker among all workers of the GPU."""
    steps: jax.Array
    """Number of query tiles that this worker processes."""

    def keys(self) -> Matrix:
        return Matrix.of(self.shared["k_smem"], self.wg_idx)

    def values(self) -> Matrix:
        return Matrix.of(self.shared["v_smem"], self.wg_idx)

    def queries(self, step: Any) -> Matrix:
        return Matrix.of(self.shared["q_smem"], self.wg_idx, lax.rem(step, jnp.int32(_QUERY_SLOTS)))

    def output(self, step: Any) -> Matrix:
        """Returns the buffer of a step's output: that of its queries, if it has the same layout."""
        if self.shared["out_smem"]:
            return Matrix.of(self.shared["out_smem"], self.wg_idx)
        return self.queries(step)

    def full(self, name: str) -> Any:
        """Returns the barrier on which the copies to "q", "k" or "v" arrive."""
        return self.shared[f"{name}_full"].at[self.wg_idx]


class _Place(NamedTuple):
    """Position of a step's tile of queries: batch entry, head and first query."""

    batch_idx: jax.Array
    head_idx: jax.Array
    start: jax.Array


_Part = tuple[Tile, jax.Array]
"""Position of up to 64 columns of a tile of logits, and the logits' values."""


@dataclass(frozen=True)
class _ShortForward:
    """The forward kernel for up to 256 keys: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    config: ShortForwardConfig
    multiprocessors: int

    @property
    def head(self) -> Columns:
        return Columns.in_wide_blocks(self.shape.head_size)

    @property
    def value(self) -> Columns:
        return Columns.in_wide_blocks(self.shape.value_size)

    @property
    def key_rows(self) -> int:
        """Key rows in shared memory, and so columns of the logits."""
        return ceil_to(self.shape.key_count, 8)

    @property
    def parts(self) -> int:
        """Number of parts into which a head's queries are divided, each of `config.tiles` * 64."""
        return -(-self.shape.query_count // (self.config.tiles * WGMMA_ROWS))

    @property
    def items(self) -> int:
        """Parts of all heads; a worker loads keys and values once for each part."""
        return self.shape.batch * self.shape.heads * self.parts

    @property
    def ctas(self) -> int:
        ctas = self.config.ctas_per_multiprocessor * self.multiprocessors
        return min(ctas, -(-self.items // self.config.workers))

    def memory(self) -> dict[str, Any]:
        workers, dtype, head, value = self.config.workers, self.dtype, self.head, self.value
        value_rows = ceil_to(self.shape.key_count, WGMMA_ROWS)
        return dict(
            q_smem=head.memory((workers, _QUERY_SLOTS), WGMMA_ROWS, dtype),
            k_smem=head.memory((workers,), self.key_rows, dtype),
            v_smem=value.memory((workers,), value_rows, dtype),
            out_smem=[] if head == value else value.memory((workers,), WGMMA_ROWS, dtype),
            lse_smem=plgpu.SMEM((self.logits.row_numbers * workers, WGMMA_ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=head.count, num_barriers=workers),
            k_full=plgpu.Barrier(num_arrivals=head.count, num_barriers=workers),
            v_full=plgpu.Barrier(num_arrivals=value.count, num_barriers=workers),
        )

    def __call__(
        self,
        heads: tuple[Heads, Heads, Heads],
        operands: Operands,
        results: tuple[Any, Any],
        shared: dict[str, Any],
    ) -> None:
        wg_idx = lax.axis_index("wg")
        idx = wg_idx * self.ctas + lax.axis_index("cta")
        workers = self.config.workers * self.ctas
        own_items = lax.div(self.items - idx + (workers - 1), jnp.int32(workers))
        steps = own_items * self.config.tiles
        worker = _Worker(heads, operands, results, shared, wg_idx, idx, steps)

        @pl.when(steps > 0)
        def _():
            self.copy_queries(worker, 0)
            self.copy_keys(worker, 0)
            self.copy_values(worker, 0)

        @pl.loop(0, steps)
        def _(step):
            self.attend(worker, step)

        plgpu.wait_smem_to_gmem(0)

    def place(self, worker: _Worker, step: Any) -> _Place:
        tiles, heads = jnp.int32(self.config.tiles), jnp.int32(self.shape.heads)
        item = worker.idx + lax.div(step, tiles) * (self.config.workers * self.ctas)
        batch_head = lax.div(item, jnp.int32(self.parts))
        tile = lax.rem(item, jnp.int32(self.parts)) * self.config.tiles + lax.rem(step, tiles)
        return _Place(lax.div(batch_head, heads), lax.rem(batch_head, heads), tile * WGMMA_ROWS)

    def copy_queries(self, worker: _Worker, step: Any) -> None:
        at = self.place(worker, step)
        full = worker.full("q")
        worker.queries(step).fill(worker.heads[0], at.batch_idx, at.start, at.head_idx, full)

    def copy_keys(self, worker: _Worker, step: Any) -> None:
        at = self.place(worker, step)
        key_head = lax.div(at.head_idx, jnp.int32(self.shape.group))
        worker.keys().fill(worker.heads[1], at.batch_idx, 0, key_head, worker.full("k"))

    def copy_values(self, worker: _Worker, step: Any) -> None:
        at = self.place(worker, step)
        key_head = lax.div(at.head_idx, jnp.int32(self.shape.group))
        worker.values().fill(worker.heads[2], at.batch_idx, 0, key_head, worker.full("v"))

    def attend(self, worker: _Worker, step: jax.Array) -> None:
        """Computes the output of one tile of queries."""
        at = self.place(worker, step)
        tiles = jnp.int32(self.config.tiles)
        is_first = lax.rem(step, tiles) == 0
        has_next = step + 1 < worker.steps
        changes_head = has_next & (lax.rem(step + 1, tiles) == 0)
        extent = worker.operands.extent(self.logits.mask, at.batch_idx)

        plgpu.barrier_wait(worker.full("q"))
        # The results of two steps ago have been copied out of this memory: `write` waited for that.
        pl.when(has_next)(lambda: self.copy_queries(worker, step + 1))
        pl.when(is_first)(lambda: plgpu.barrier_wait(worker.full("k")))

        def products(acc):
            memory.multiply_transposed(acc, worker.queries(step), worker.keys())
            return acc[...]

        x = pl.run_scoped(products, plgpu.ACC((WGMMA_ROWS, self.key_rows), jnp.float32))
        pl.when(changes_head)(lambda: self.copy_keys(worker, step + 1))

        weights, maximum, total = self.softmax(worker, at, self.logits_parts(worker, at, extent, x))

        @pl.when(is_first)
        def _():
            plgpu.barrier_wait(worker.full("v"))
            worker.values().clear_beyond(self.logits.mask, extent, 0)

        def outputs(*accs):
            for i, part in enumerate(weights):
                values = worker.values().rows(i * SWIZZLED_COLUMNS, SWIZZLED_COLUMNS)
                memory.multiply(accs, part, values)
            return [acc[...] for acc in accs]

        out = pl.run_scoped(outputs, *self.value.accumulators())
        pl.when(changes_head)(lambda: self.copy_values(worker, step + 1))
        self.write(worker, step, at, extent.query_length, out, maximum, total)

    def logits_parts(
        self, worker: _Worker, at: _Place, extent: Extent, products: jax.Array
    ) -> list[_Part]:
        """Returns the logits in parts of 64 columns.

        `products` is Q K^T, float32 [64, keys]. With parts, few float32 weights occupy registers at the
        same time, and only parts that may have masked elements are masked.
        """
        key_count, operands = self.shape.key_count, worker.operands
        masks_anywhere = not self.logits.mask.is_always_full(WGMMA_ROWS, 1)
        # A worker's last tiles may lie beyond the queries. TMA copies are clipped there, but register
        # loads of bias and explicit mask must stay within the arrays.
        query_start = self.logits.operand_start(
            at.start, self.shape.query_count, self.config.tiles * WGMMA_ROWS
        )
        parts = []
        for first in range(0, self.key_rows, SWIZZLED_COLUMNS):
            part = products[:, first : min(first + SWIZZLED_COLUMNS, self.key_rows)]
            tile = Tile(at.batch_idx, at.head_idx, query_start, first, part.shape)
            is_masked = masks_anywhere or first + part.shape[1] > key_count
            parts.append((tile, self.logits.logits(part, tile, operands, extent, is_masked)))
        return parts

    def softmax(
        self, worker: _Worker, at: _Place, parts: list[_Part]
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Returns the weights of each part [64, 64], and each row's maximum [64] and sum [64]."""
        logits, operands = self.logits, worker.operands
        maximum = functools.reduce(jnp.maximum, [jnp.max(part, axis=1) for _, part in parts])
        maximum = maximum * logits.multiplier
        if logits.has_sinks:
            sink = operands.sinks[at.head_idx] * logits.unit
            maximum = jnp.maximum(maximum, sink)
        # A row of -inf needs any finite maximum, so that -inf - maximum is not NaN.
        maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        total: Any = 0.0
        weights = []
        for tile, part in parts:
            part = logits.exp(part * logits.multiplier - _across(maximum, part.shape))
            total = total + jnp.sum(part, axis=1)
            if logits.dropout_rate > 0:
                part = logits.dropped(part, tile, operands)
            part = part.astype(self.dtype)
            if part.shape[1] < SWIZZLED_COLUMNS:
                rest = jnp.zeros((WGMMA_ROWS, SWIZZLED_COLUMNS - part.shape[1]), self.dtype)
                rest = plgpu.layout_cast(rest, plgpu.Layout.WGMMA)
                part = jnp.concatenate([part, rest], axis=1)
            weights.append(part)
        if logits.has_sinks:
            total = total + logits.exp(sink - maximum)
        return weights, maximum, total

    def write(
        self,
        worker: _Worker,
        step: jax.Array,
        at: _Place,
        query_length: Any,
        out: list[jax.Array],
        maximum: jax.Array,
        total: jax.Array,
    ) -> None:
        """Stores output and log-sum-exp of a tile in shared memory, and starts their copies."""
        empty = total == 0.0
        if worker.operands.query_lengths is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=_VECTOR)
            empty = empty | (at.start + row >= query_length)
        # The copies of the previous step's results overlapped this step's products.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lse_smem = [worker.shared["lse_smem"].at[worker.wg_idx]]
        if self.logits.saves_rest:
            lse_smem.append(worker.shared["lse_smem"].at[self.config.workers + worker.wg_idx])
        lse = self.logits.log_sum_exp(maximum, total, empty, 1 / LOG2E)
        for smem, numbers in zip(lse_smem, lse, strict=True):
            smem[...] = numbers
        total = jnp.where(empty, 1.0, total)
        inverse = jnp.where(empty, 0.0, (1.0 / self.logits.keep_probability) / total)
        output = worker.output(step)
        output.store([block * _across(inverse, block.shape) for block in out])
        out_gmem, *lse_gmems = worker.results
        output.write(Heads(out_gmem), at.batch_idx, at.start, at.head_idx)

        # The last of a worker's tiles of a head may begin beyond the last query. The copy of the tile's
        # log-sum-exp would not be clipped at the end of the head, and would overwrite the next head's.
        @pl.when(at.start < self.shape.query_count)
        def _():
            rows = pl.ds(at.start, WGMMA_ROWS)
            for smem, gmem in zip(lse_smem, lse_gmems, strict=True):
                plgpu.copy_smem_to_gmem(smem, gmem.at[at.batch_idx, at.head_idx, rows])


def _across(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a vector with one number per row over the columns of a tile of `shape`."""
    return lax.broadcast_in_dim(vector, shape, [0])
