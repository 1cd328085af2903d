"""A matrix product for Hopper whose epilogue is a traced Python function.

The bare product is not the point: XLA has a good one. What XLA pays for separately, bias, activation,
residual, the derivative of an activation and the sums for a bias gradient, is here a function of the
float32 accumulators and of named operands, traced into the kernel.

A CTA has one warpgroup that copies tiles of the operands into a ring in shared memory, and two that
multiply. In ping-pong these two hold different output tiles: one runs its epilogue and stores while
the other one multiplies, so that an epilogue costs nothing as long as it is shorter than the product
of a tile. Otherwise they share an output tile of twice the height, whose operands are read less often.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2
"""Warpgroups of a CTA that multiply; the one after them copies."""
SHARED_MEMORY_BYTES = 227 * 1024
_BARRIER_BYTES = 1024
_ITEMSIZE = 2
ACCUMULATOR_ELEMENTS = 128 * 192
"""Of a warpgroup's tile: 192 of a thread's 232 registers. With 256 they spill."""

_DTYPES = (jnp.bfloat16, jnp.float16)
_GRAIN = 16
"""What K and N must be multiples of: the columns of the narrowest swizzle that wgmma reads."""

Epilogue = Callable[..., Mapping[str, jax.Array]]
Leaving = Callable[..., tuple[jax.Array, ...]]


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is cut into tiles."""

    tile_m: int = 128
    """Rows of a warpgroup's accumulators."""
    tile_n: int = 192
    """Columns of them; several products in one pass over a divide them among themselves."""
    tile_k: int = 64
    stages: int = 4
    """Slots of the ring: tiles of the operands in flight or in use."""
    ping_pong: bool = True
    """The warpgroups hold different output tiles; otherwise the halves of one twice as high."""
    cluster: int = 1
    """CTAs one below the other that share the tiles of b: each copies a part of them to all."""
    epilogue_columns: int = 64
    """Columns of a tile that the epilogue takes at a time."""
    read_slots: int = 1
    """Slots for such columns of each matrix that the epilogue reads; all are filled ahead of it."""
    write_slots: int = 1
    """Slots for such columns of each matrix that the epilogue writes."""
    band: int = 8
    """Output tiles are taken in bands of so many rows of tiles, for the sake of the cache."""

    def __post_init__(self) -> None:
        if self.tile_m % 64 or self.tile_n % 8 or self.tile_n > 256:
            raise ValueError(
                "MatmulConfig: wgmma takes tiles of a multiple of 64 rows and of 8 columns up to 256,"
                f" got {self.tile_m} x {self.tile_n}"
            )
        if self.tile_m * self.tile_n > ACCUMULATOR_ELEMENTS:
            raise ValueError(
                f"MatmulConfig: a tile may have {ACCUMULATOR_ELEMENTS} elements,"
                f" got {self.tile_m} x {self.tile_n}"
            )
        for name in ("stages", "cluster", "read_slots", "write_slots", "band"):
            if getattr(self, name) < 1:
                raise ValueError(f"MatmulConfig: {name} must be at least 1")

    @property
    def cta_tile_m(self) -> int:
        return self.tile_m if self.ping_pong else CONSUMERS * self.tile_m

    def shared_memory_bytes(self, read_bytes: int, written_bytes: int, row_bytes: int) -> int:
        """Of a CTA, with an epilogue over so many bytes an output element, and so many a column."""
        ring = self.stages * (self.cta_tile_m + self.tile_n) * self.tile_k * _ITEMSIZE
        chunk = self.tile_m * self.epilogue_columns
        streams = chunk * (self.read_slots * read_bytes + self.write_slots * written_bytes)
        return ring + CONSUMERS * (streams + self.tile_n * row_bytes)


def default_config(
    k: int, products: int, read_bytes: int, written_bytes: int, row_bytes: int
) -> MatmulConfig:
    """The fastest of those measured on an H200 that leave room for the epilogue.

    Args:
      k: the length of the sums.
      products: that are taken in one pass over a.
      read_bytes: of an element in each of the matrices that the epilogue reads.
      written_bytes: of an element in each of those that it writes.
      row_bytes: of a column in each of its rows.
    """
    tiles = functools.partial(MatmulConfig, epilogue_columns=32)
    several = tiles(read_slots=2, write_slots=2)
    candidates: list[MatmulConfig] = []
    if products > 1:
        # The gated unit of [16384, 768] x [768, 3072]: 218 us, 234 without the cluster.
        candidates += [tiles(cluster=2), tiles(cluster=2, stages=3)]
    elif read_bytes and written_bytes > 2 and k <= 1536:
        # Over so short sums the epilogue takes longer than the product. The hidden gradient of an
        # mlp [16384, 768, 3072]: 182 us with 128 x 128, 190 with 128 x 192; of a gated one 202 us
        # with 64 x 192, 230 with 128 x 128.
        if read_bytes > 2:
            candidates.append(replace(several, tile_m=64))
        candidates.append(replace(several, tile_n=128))
    candidates += [
        tiles(write_slots=2),
        tiles(),
        tiles(stages=3),
        tiles(tile_n=128),
        tiles(tile_n=128, stages=3),
        tiles(tile_n=128, stages=2),
    ]
    return next(
        config
        for config in candidates
        if config.shared_memory_bytes(read_bytes, written_bytes, row_bytes)
        <= SHARED_MEMORY_BYTES - _BARRIER_BYTES
    )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
) -> str | None:
    """None where products with epilogues can run, else why not.

    Args:
      dtypes: of the operand to multiply, "x", and of what else enters the epilogue or leaves it,
        None for what does not.
      features: the sizes of the axes of which a product is taken or made, rows aside.
    """
    if compute_capability is None or compute_capability[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if dtypes["x"] not in _DTYPES:
        return f"it takes bfloat16 and float16, and x has dtype {jnp.dtype(dtypes['x'])}"
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in (*_DTYPES, jnp.float32):
            return (
                f"it takes float32, bfloat16 and float16, and {name} has dtype {jnp.dtype(dtype)}"
            )
    for name, size in features.items():
        if size % _GRAIN:
            return f"it takes multiples of {_GRAIN} features, and {name} has {size}"
    return None


def matmul(
    a: jax.Array | Sequence[jax.Array],
    b: jax.Array | Sequence[jax.Array],
    *,
    epilogue: Epilogue,
    outputs: Mapping[str, Any],
    leaving: Leaving | None = None,
    rows: Mapping[str, jax.Array | None] | None = None,
    matrices: Mapping[str, jax.Array | None] | None = None,
    column_sums: Sequence[str] = (),
    products: int = 1,
    a_transposed: bool = False,
    b_transposed: bool = False,
    config: MatmulConfig | None = None,
    multiprocessors: int,
) -> dict[str, jax.Array]:
    """What `epilogue` makes of a @ b: matrices [M, N], and sums over their rows, by name.

    Args:
      a: [M, K] ([K, M] with `a_transposed`), or several, for a sum of products a_i @ b_i.
      b: [K, N] ([N, K] with `b_transposed`) for each a and each of the `products` that are taken in
        one pass over a: in this order in a sequence, or as blocks of one array.
      epilogue: takes a float32 tile of each product and, by name and as float32, the same tile of
        what `rows` and `matrices` hold. Returns tiles by name.
      outputs: the dtypes of the matrices among them.
      leaving: what is rounded to a's dtype where it leaves the accumulators: takes a tile of each
        product, and the rows by name, and returns the tiles that `epilogue` takes in their place.
        For an epilogue with much arithmetic: a whole tile of accumulators leaves few registers.
      rows: [N] each, or None for one that is absent.
      matrices: [M, N] each, or None.
      column_sums: which of the outputs, as rounded, are also summed over the rows, to float32 [N].

    Returns:
      The matrices by name, and for each of `column_sums` its sum by the name "sum_" + name.
    """
    terms = [a] if isinstance(a, jax.Array) else list(a)
    m, k = terms[0].shape[::-1] if a_transposed else terms[0].shape
    if isinstance(b, jax.Array):
        n = b.shape[0 if b_transposed else 1] // products
        blocks = [
            _Block(0, product * n, term * k)
            for term in range(len(terms))
            for product in range(products)
        ]
        bs = [b]
    else:
        bs = list(b)
        n = bs[0].shape[0 if b_transposed else 1]
        blocks = [_Block(index, 0, 0) for index in range(len(bs))]
    present_rows = {name: row for name, row in (rows or {}).items() if row is not None}
    present = {name: matrix for name, matrix in (matrices or {}).items() if matrix is not None}
    if config is None:
        config = default_config(
            k * len(terms),
            products,
            *(
                sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
                for dtypes in (
                    [x.dtype for x in present.values()],
                    outputs.values(),
                    [row.dtype for row in present_rows.values()],
                )
            ),
        )
    if config.tile_n % (products * config.epilogue_columns):
        raise ValueError(
            f"matmul: {products} products share tile_n ({config.tile_n}), and epilogue_columns"
            f" ({config.epilogue_columns}) must divide each one's part"
        )
    # A copy through a swizzled tile wants whole groups of 8 rows in memory, and more than one group.
    padding = max(-m % 8, 16 - m)
    if padding:
        terms = [jnp.pad(term, ((0, padding), (0, 0))) for term in terms]
        present = {name: jnp.pad(x, ((0, padding), (0, 0))) for name, x in present.items()}
    kernel = _Kernel(
        m=m,
        n=n,
        k=k,
        dtype=terms[0].dtype,
        terms=len(terms),
        products=products,
        blocks=tuple(blocks),
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        leaving=leaving,
        epilogue=epilogue,
        rows={name: row.dtype for name, row in present_rows.items()},
        matrices={name: x.dtype for name, x in present.items()},
        outputs=dict(outputs),
        column_sums=tuple(column_sums),
        config=config,
        multiprocessors=multiprocessors,
    )
    results = plgpu.kernel(
        kernel,
        out_type=(
            *(jax.ShapeDtypeStruct((m + padding, n), dtype) for dtype in outputs.values()),
            *(jax.ShapeDtypeStruct(kernel.sums_shape, jnp.float32) for _ in column_sums),
        ),
        scratch_types=kernel.scratch(),
        grid=(kernel.clusters,),
        grid_names=("cluster",),
        cluster=(config.cluster,),
        cluster_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*terms, *bs, *present_rows.values(), *present.values())
    matrices_out, sums = results[: len(outputs)], results[len(outputs) :]
    return {name: y[:m] for name, y in zip(outputs, matrices_out, strict=True)} | {
        f"sum_{name}": jnp.sum(partial_sums, axis=0)[:n]
        for name, partial_sums in zip(column_sums, sums, strict=True)
    }


@dataclass(frozen=True)
class _Block:
    """Where the b of one product lies."""

    array: int
    n_start: int
    k_start: int


@dataclass(frozen=True)
class _Kernel:
    """One launch: its static facts, and the code of its warpgroups."""

    m: int
    """Rows that count; the arrays may have a few more."""
    n: int
    k: int
    dtype: Any
    terms: int
    products: int
    blocks: tuple[_Block, ...]
    a_transposed: bool
    b_transposed: bool
    leaving: Leaving | None
    epilogue: Epilogue
    rows: Mapping[str, Any]
    matrices: Mapping[str, Any]
    outputs: Mapping[str, Any]
    column_sums: tuple[str, ...]
    config: MatmulConfig
    multiprocessors: int

    @property
    def part_n(self) -> int:
        """Columns of the output that a tile covers."""
        return self.config.tile_n // self.products

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Output tiles of a cluster, down and across."""
        height = self.config.cta_tile_m * self.config.cluster
        return pl.cdiv(self.m, height), pl.cdiv(self.n, self.part_n)

    @property
    def tile_count(self) -> int:
        down, across = self.tile_grid
        return down * across

    @property
    def clusters(self) -> int:
        return min(self.multiprocessors // self.config.cluster, self.tile_count)

    @property
    def k_steps(self) -> int:
        return self.terms * pl.cdiv(self.k, self.config.tile_k)

    @property
    def chunks(self) -> int:
        """Parts of a tile that the epilogue takes one after the other.

        Not more than there are columns: where the swizzle pattern is as wide as the whole array,
        Mosaic forgets by how many patterns a copy starts beyond it.
        """
        return pl.cdiv(min(self.n, self.part_n), self.config.epilogue_columns)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Partial column sums: a row for the tile of each warpgroup."""
        down, across = self.tile_grid
        height = self.config.cta_tile_m * self.config.cluster
        return down * (height // self.config.tile_m), across * self.part_n

    # --- shared memory ----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        c = self.config
        # Rows of an array, not only of its tiles, have to be whole swizzle patterns.
        swizzle = min(
            _widest_swizzle(
                self.dtype, *((self.m, c.tile_m) if self.a_transposed else (self.k, c.tile_k))
            ),
            _widest_swizzle(
                self.dtype, *((self.k, c.tile_k) if self.b_transposed else (self.n, self.part_n))
            ),
        )
        a_tile, b_tile = (c.cta_tile_m, c.tile_k), (c.tile_k, self.part_n)
        if self.a_transposed:
            a_tile = a_tile[::-1]
        if self.b_transposed:
            b_tile = b_tile[::-1]
        takers = 1 if c.ping_pong else CONSUMERS
        scratch = dict(
            a_smem=_tiled((c.stages, *a_tile), self.dtype, swizzle),
            b_smem=[_tiled((c.stages, *b_tile), self.dtype, swizzle) for _ in range(self.products)],
            # A warpgroup has to see every phase of a barrier that it waits on: in ping-pong each has
            # its own.
            full=plgpu.Barrier(
                num_arrivals=1 + self.products,
                num_barriers=c.stages * (CONSUMERS if c.ping_pong else 1),
            ),
            free=plgpu.Barrier(num_arrivals=takers, num_barriers=c.stages)
            if c.cluster == 1
            else plgpu.ClusterBarrier(
                collective_axes=("cta",), num_arrivals=takers, num_barriers=c.stages
            ),
            out_smem={
                name: self._stream(dtype, c.write_slots) for name, dtype in self.outputs.items()
            },
        )
        if c.ping_pong:
            scratch["turn"] = plgpu.Barrier(num_barriers=CONSUMERS)
        if self.rows:
            scratch["row_smem"] = {
                name: plgpu.SMEM((CONSUMERS, self.part_n), dtype)
                for name, dtype in self.rows.items()
            }
            scratch["row_full"] = plgpu.Barrier(num_arrivals=len(self.rows), num_barriers=CONSUMERS)
        if self.matrices:
            scratch["matrix_smem"] = {
                name: self._stream(dtype, c.read_slots) for name, dtype in self.matrices.items()
            }
            scratch["matrix_full"] = plgpu.Barrier(
                num_arrivals=len(self.matrices), num_barriers=CONSUMERS * c.read_slots
            )
        return scratch

    def _stream(self, dtype: Any, slots: int) -> Any:
        """What holds chunks of a matrix on its way between the epilogue and memory."""
        c = self.config
        swizzle = _widest_swizzle(dtype, self.n, c.epilogue_columns)
        shape = (CONSUMERS, slots, c.tile_m, c.epilogue_columns)
        return _tiled(shape, dtype, swizzle)

    # --- device side ------------------------------------------------------------------------------

    def __call__(self, *refs, **smem) -> None:
        gmem = _Refs(self, refs)
        wg_idx = lax.axis_index("wg")
        lax.cond(
            wg_idx == CONSUMERS,
            lambda: self._copy_operands(gmem, **smem),
            lambda: self._multiply(gmem, wg_idx, **smem),
        )

    def _tiles_of_cluster(self) -> jax.Array:
        first = lax.axis_index("cluster")
        return lax.div(jnp.int32(self.tile_count - 1) - first, jnp.int32(self.clusters)) + 1

    def _place(self, sequence_idx) -> tuple[jax.Array, jax.Array]:
        """First row and column of the output tile that this CTA takes as number `sequence_idx`."""
        c = self.config
        m_idx, n_idx = plgpu.planar_snake(
            lax.axis_index("cluster") + sequence_idx * self.clusters, self.tile_grid, 0, c.band
        )
        return (m_idx * c.cluster + lax.axis_index("cta")) * c.cta_tile_m, n_idx * self.part_n

    def _full_idx(self, sequence_idx, slot):
        """The barrier of a slot that is being filled for a tile."""
        if not self.config.ping_pong:
            return slot
        return lax.rem(sequence_idx, jnp.int32(CONSUMERS)) * self.config.stages + slot

    def _next_slot(self, slot):
        return lax.select(slot == self.config.stages - 1, jnp.int32(0), slot + 1)

    def _copy_operands(self, gmem, *, a_smem, b_smem, full, free, **_) -> None:
        """The warpgroup that fills the ring, tile by tile of the output and step by step along K."""
        c = self.config
        plgpu.set_max_registers(40, action="decrease")

        def along(ref, transposed, start, size, k_start):
            span, k_span = pl.ds(start, size), pl.ds(k_start, c.tile_k)
            return ref.at[k_span, span] if transposed else ref.at[span, k_span]

        def fill(sequence_idx, m_start, n_start, term, k_idx, carry):
            slot, filled = carry

            @pl.when(filled >= c.stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            landed = full.at[self._full_idx(sequence_idx, slot)]
            k_start = k_idx * c.tile_k
            plgpu.copy_gmem_to_smem(
                along(gmem.terms[term], self.a_transposed, m_start, c.cta_tile_m, k_start),
                a_smem.at[slot],
                landed,
            )
            for product in range(self.products):
                block = self.blocks[term * self.products + product]
                plgpu.copy_gmem_to_smem(
                    along(
                        gmem.bs[block.array],
                        not self.b_transposed,
                        block.n_start + n_start,
                        self.part_n,
                        block.k_start + k_start,
                    ),
                    b_smem[product].at[slot],
                    landed,
                    collective_axes="cta" if c.cluster > 1 else None,
                )
            return self._next_slot(slot), filled + 1

        def tile(sequence_idx, carry):
            m_start, n_start = self._place(sequence_idx)
            for term in range(self.terms):
                step = functools.partial(fill, sequence_idx, m_start, n_start, term)
                carry = lax.fori_loop(0, self.k_steps // self.terms, step, carry)
            return carry

        nothing = (jnp.int32(0), jnp.int32(0))
        slot, filled = lax.fori_loop(0, self._tiles_of_cluster(), tile, nothing)
        # Nobody may still be about to arrive here when this CTA ends.
        for back in range(1, c.stages + 1):

            @pl.when(filled >= back)
            def _(back=back):
                last_filled = lax.rem(slot + (c.stages - back), jnp.int32(c.stages))
                plgpu.barrier_wait(free.at[last_filled])

    def _multiply(self, gmem, wg_idx, *, a_smem, b_smem, full, free, **smem) -> None:
        """A warpgroup that multiplies, and runs the epilogue of its tiles."""
        c = self.config
        plgpu.set_max_registers(232, action="increase")
        tiles = self._tiles_of_cluster()
        stride = CONSUMERS if c.ping_pong else 1
        first = wg_idx if c.ping_pong else jnp.int32(0)
        if c.ping_pong:
            plgpu.barrier_arrive(smem["turn"].at[0], predicate=wg_idx == CONSUMERS - 1)

        def operands(slot):
            a = a_smem.at[slot]
            if not c.ping_pong:
                mine = pl.ds(wg_idx * c.tile_m, c.tile_m)
                a = a.at[:, mine] if self.a_transposed else a.at[mine]
            if self.a_transposed:
                a = a.transpose((1, 0))
            for product in range(self.products):
                b = b_smem[product].at[slot]
                yield a, b.transpose((1, 0)) if self.b_transposed else b

        def tile(tile_idx, _):
            sequence_idx = first + tile_idx * stride
            m_start, n_start = self._place(sequence_idx)
            if not c.ping_pong:
                m_start += wg_idx * c.tile_m
            epilogue = _EpilogueOfTile(self, gmem, smem, wg_idx, m_start, n_start)
            epilogue.prefetch()

            def accumulate(acc_ref):
                def multiply(slot):
                    plgpu.barrier_wait(full.at[self._full_idx(sequence_idx, slot)])
                    for product, (a, b) in enumerate(operands(slot)):
                        part = slice(product * self.part_n, (product + 1) * self.part_n)
                        plgpu.wgmma(acc_ref.at[:, part] if self.products > 1 else acc_ref, a, b)

                def step(_, previous):
                    slot = self._next_slot(previous)
                    multiply(slot)
                    plgpu.wgmma_wait(self.products)
                    plgpu.barrier_arrive(free.at[previous])
                    return slot

                if c.ping_pong:
                    plgpu.barrier_wait(smem["turn"].at[wg_idx])
                slot = lax.rem(sequence_idx * self.k_steps, jnp.int32(c.stages))
                multiply(slot)
                slot = lax.fori_loop(1, self.k_steps, step, slot)
                if c.ping_pong:
                    other = smem["turn"].at[CONSUMERS - 1 - wg_idx]
                    plgpu.barrier_arrive(other, predicate=sequence_idx < tiles - 1)
                return acc_ref[...], slot

            acc, slot = pl.run_scoped(accumulate, plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))
            plgpu.barrier_arrive(free.at[slot])
            epilogue.run(acc)

        count = lax.div(tiles - first + (stride - 1), jnp.int32(stride))
        lax.fori_loop(0, count, tile, None)
        plgpu.wait_smem_to_gmem(0)


class _Refs:
    """The arrays of a launch by their roles."""

    def __init__(self, kernel: _Kernel, refs: Sequence[Any]):
        remaining = iter(refs)
        self.terms = [next(remaining) for _ in range(kernel.terms)]
        self.bs = [next(remaining) for _ in {block.array for block in kernel.blocks}]
        self.rows = {name: next(remaining) for name in kernel.rows}
        self.matrices = {name: next(remaining) for name in kernel.matrices}
        self.outputs = {name: next(remaining) for name in kernel.outputs}
        self.sums = {name: next(remaining) for name in kernel.column_sums}


@dataclass(frozen=True)
class _EpilogueOfTile:
    """The epilogue of the tile at (m_start, n_start), chunk by chunk of its columns."""

    kernel: _Kernel
    gmem: _Refs
    smem: Mapping[str, Any]
    wg_idx: jax.Array
    m_start: jax.Array
    n_start: jax.Array

    def prefetch(self) -> None:
        """Has what the first chunks need copied while the tile is multiplied."""
        for name, ref in self.gmem.rows.items():
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(self.n_start, self.kernel.part_n)],
                self.smem["row_smem"][name].at[self.wg_idx],
                self.smem["row_full"].at[self.wg_idx],
            )
        for chunk in range(min(self.kernel.chunks, self.kernel.config.read_slots)):
            self._copy_matrices(chunk)

    def run(self, acc: jax.Array) -> None:
        kernel = self.kernel
        if kernel.rows:
            plgpu.barrier_wait(self.smem["row_full"].at[self.wg_idx])
        products = [self._products(acc, chunk) for chunk in range(kernel.chunks)]
        rows = [
            {name: self._row(name, chunk) for name in kernel.rows} for chunk in range(kernel.chunks)
        ]
        if kernel.leaving is not None:
            narrow = [
                tuple(tile.astype(kernel.dtype) for tile in kernel.leaving(*tiles, **operands))
                for tiles, operands in zip(products, rows, strict=True)
            ]
            # Without this the compiler may move the rounding to where it is used.
            narrow = lax.optimization_barrier(narrow)
            products = [[tile.astype(jnp.float32) for tile in tiles] for tiles in narrow]
            rows = [{} for _ in range(kernel.chunks)]
        for chunk in range(kernel.chunks):
            matrices = self._load_matrices(chunk)
            results = kernel.epilogue(*products[chunk], **rows[chunk], **matrices)
            self._store(chunk, {n: results[n].astype(d) for n, d in kernel.outputs.items()})

    def _products(self, acc: jax.Array, chunk: int) -> list[jax.Array]:
        part_n, width = self.kernel.part_n, self.kernel.config.epilogue_columns
        starts = [product * part_n + chunk * width for product in range(self.kernel.products)]
        return [acc[:, start : start + width] for start in starts]

    def _load_matrices(self, chunk: int) -> dict[str, jax.Array]:
        """Takes a chunk out of shared memory, and has the next one copied into its place."""
        if not self.kernel.matrices:
            return {}
        slots = self.kernel.config.read_slots
        slot = chunk % slots
        plgpu.barrier_wait(self._matrix_full(slot))
        loaded = {
            name: plgpu.load(
                self.smem["matrix_smem"][name].at[self.wg_idx, slot], layout=plgpu.Layout.WGMMA
            ).astype(jnp.float32)
            for name in self.kernel.matrices
        }
        if chunk + slots < self.kernel.chunks:
            plgpu.commit_smem()  # All four warps have read it.
            self._copy_matrices(chunk + slots)
        return loaded

    @property
    def _shape(self) -> tuple[int, int]:
        return self.kernel.config.tile_m, self.kernel.config.epilogue_columns

    def _columns(self, chunk: int):
        """Of the output."""
        width = self.kernel.config.epilogue_columns
        return pl.ds(self.n_start + chunk * width, width)

    def _block(self, ref, chunk: int):
        return ref.at[pl.ds(self.m_start, self.kernel.config.tile_m), self._columns(chunk)]

    def _matrix_full(self, slot: int):
        return self.smem["matrix_full"].at[self.wg_idx * self.kernel.config.read_slots + slot]

    def _copy_matrices(self, chunk: int) -> None:
        slot = chunk % self.kernel.config.read_slots
        for name, ref in self.gmem.matrices.items():
            destination = self.smem["matrix_smem"][name].at[self.wg_idx, slot]
            plgpu.copy_gmem_to_smem(self._block(ref, chunk), destination, self._matrix_full(slot))

    def _row(self, name: str, chunk: int) -> jax.Array:
        width = self.kernel.config.epilogue_columns
        row = plgpu.load(
            self.smem["row_smem"][name].at[self.wg_idx, pl.ds(chunk * width, width)],
            layout=plgpu.Layout.WGMMA.reduce(0),
        )
        return lax.broadcast_in_dim(row.astype(jnp.float32), self._shape, (1,))

    def _store(self, chunk: int, results: Mapping[str, jax.Array]) -> None:
        kernel, slots = self.kernel, self.kernel.config.write_slots
        places = {
            name: self.smem["out_smem"][name].at[self.wg_idx, chunk % slots] for name in results
        }
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        for name, tile in results.items():
            places[name][...] = tile
        plgpu.commit_smem()
        for name, place in places.items():
            block = self._block(self.gmem.outputs[name], chunk)
            plgpu.copy_smem_to_gmem(place, block, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        for name in kernel.column_sums:
            self._store_sum(name, chunk, places[name])

    def _store_sum(self, name: str, chunk: int, tile) -> None:
        """Sums the columns of a tile in shared memory, each within a warp.

        In the layout of the accumulators a column is spread over the warps, and sums across warps
        share their memory among all warpgroups of a CTA.
        """
        kernel, c = self.kernel, self.kernel.config
        layout = _column_layout(c.epilogue_columns)
        values = plgpu.load(tile, layout=layout, optimized=False).astype(jnp.float32)
        if kernel.sums_shape[0] * c.tile_m != kernel.m:
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            values = jnp.where(row < kernel.m - self.m_start, values, 0.0)
        partial_sums = self.gmem.sums[name].at[lax.div(self.m_start, jnp.int32(c.tile_m))]
        partial_sums.at[self._columns(chunk)][...] = jnp.sum(values, axis=0)


def _column_layout(columns: int) -> plgpu.Layout:
    """Registers in which each warp holds a quarter of the columns, by 16 bytes of 16-bit numbers."""
    vec = 8
    quarter = columns // 4
    rows = 32 * vec // quarter
    if quarter == vec:
        tiling, warp_dims, lane_dims = ((rows, columns), (vec,)), (-2,), (-3,)
    else:
        tiling, warp_dims, lane_dims = ((rows, columns), (quarter,), (vec,)), (-3,), (-4, -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
    )


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Shared memory as the copy engine and wgmma both want it."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _widest_swizzle(dtype: Any, *widths: int) -> int:
    """In bytes, of which rows of each of these widths are a multiple."""
    return min(plgpu.find_swizzle(width * jnp.dtype(dtype).itemsize * 8) for width in widths)
