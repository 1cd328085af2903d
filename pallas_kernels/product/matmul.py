"""A matrix product for Hopper whose epilogue is a traced Python function.

The bare product is not the point: XLA has a good one. What XLA pays for separately, bias, activation,
residual, the derivative of an activation and the sums for a bias gradient, is here a function of the
float32 accumulators and of named operands, traced into the kernel.
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

from pallas_kernels import hopper
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES
from pallas_kernels.product.mainloop import (
    CONSUMERS,
    Block,
    MatmulConfig,
    Product,
    TileEpilogue,
    TilePlace,
    wastes_wide_tiles,
)
from pallas_kernels.product.operands import SWIZZLE_BYTES, block, swizzled_columns
from pallas_kernels.store import store_unoptimized

_DTYPES = (jnp.bfloat16, jnp.float16)
_GRAIN = 8
"""What K and N must be multiples of: rows of 16-bit numbers then begin at multiples of 16 bytes, as the
copy engine wants."""

Epilogue = Callable[..., Mapping[str, jax.Array]]
Leaving = Callable[..., tuple[jax.Array, ...]]


def default_config(
    n: int, k: int, products: int, dtype: Any, read_bytes: int, written_bytes: int, row_bytes: int
) -> MatmulConfig:
    """The fastest of those measured on an H200 that leave room for the epilogue.

    Args:
      n: the columns of the result.
      k: the length of the sums.
      products: that are taken in one pass over a.
      dtype: of the operands.
      read_bytes: of an element in each of the matrices that the epilogue reads.
      written_bytes: of an element in each of those that it writes.
      row_bytes: of a column in each of its rows.
    """

    def shared_memory_bytes(c: MatmulConfig) -> int:
        chunk = c.tile_m * c.epilogue_columns
        streams = chunk * (c.read_slots * read_bytes + c.write_slots * written_bytes)
        return c.ring_bytes(dtype) + CONSUMERS * (streams + c.tile_n * row_bytes)

    tiles = functools.partial(MatmulConfig, epilogue_columns=32)
    several = tiles(read_slots=2, write_slots=2)
    candidates: list[MatmulConfig] = []
    if dtype == jnp.float32:
        # Nothing is rounded on its way out of the accumulators: a smaller tile leaves registers.
        tiles = functools.partial(tiles, tile_n=128)
    elif products > 1:
        # The gated unit of [16384, 768] x [768, 3072]: 225 us, 234 with 128 x 192, 239 without the
        # cluster; of [16384, 1024] x [1024, 4096] 393 and 403.
        candidates.append(tiles(tile_m=64, tile_n=256, cluster=2))
        candidates += [tiles(tile_n=128, cluster=2, stages=stages) for stages in (4, 3)]
    elif read_bytes and written_bytes > 2 and k <= 1536:
        # Over so short sums the epilogue takes longer than the product. The hidden gradient of an
        # mlp [16384, 768, 3072]: 182 us with 128 x 128, 190 with 128 x 192; of a gated one 179 us
        # with 64 x 256, 184 with 64 x 192, 200 with 128 x 128, and at [16384, 1024, 4096] 272, 298, 313.
        if read_bytes > 2:
            if n % 256 == 0:
                candidates.append(replace(several, tile_m=64, tile_n=256))
            candidates.append(replace(several, tile_m=64))
        candidates.append(replace(several, tile_n=128))
    elif wastes_wide_tiles(n):
        # 25216 x 4096 x 1024: 263 us with tiles of 256 columns that the warpgroups share, 280 with
        # tiles of 128 in turn, 284 with those of 192, an eighth of which lies beyond 1024 columns.
        if n % 256 == 0:
            candidates.append(tiles(tile_m=64, tile_n=256, ping_pong=False))
        candidates.append(tiles(tile_n=128, write_slots=2))
    candidates += [
        tiles(write_slots=2),
        tiles(),
        tiles(stages=3),
        tiles(tile_n=128),
        tiles(tile_n=128, stages=3),
        tiles(tile_n=128, stages=2),
        tiles(tile_m=64, tile_n=128, stages=2),
    ]
    return next(
        c for c in candidates if shared_memory_bytes(c) <= SHARED_MEMORY_BYTES - BARRIER_BYTES
    )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
    allows_tf32: bool = False,
) -> str | None:
    """None where products with epilogues can run, else why not.

    Args:
      dtypes: of the operand to multiply, "x", and of what else enters the epilogue or leaves it,
        None for what does not.
      features: the sizes of the axes of which a product is taken or made, rows aside.
      allows_tf32: whether float32 may be multiplied with the 10 bits of tf32.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtypes["x"] == jnp.float32 and not allows_tf32:
        return (
            "it multiplies float32 as tf32, which is less than x's float32 is to be multiplied with"
        )
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
    name: str = "matmul",
) -> dict[str, jax.Array]:
    """What `epilogue` makes of a @ b: matrices [M, N], and sums over their rows, by name.

    Args:
      a: [M, K] ([K, M] with `a_transposed`), or several, for a sum of products a_i @ b_i.
      b: [K, N] ([N, K] with `b_transposed`) for each a and each of the `products` that are taken in
        one pass over a: in this order in a sequence, or as blocks of one array. Of float32 the
        tensor cores take [N, K], which [K, N] is copied to, and no transposed a.
      epilogue: takes a float32 tile of each product and, by name and as float32, the same tile of
        what `rows` and `matrices` hold. Returns tiles by name.
      outputs: the dtypes of the matrices among them.
      leaving: what may be rounded to a's dtype where it leaves the accumulators: takes a tile of
        each product, and the rows by name, and returns the tiles that `epilogue` takes in their
        place. For an epilogue with much arithmetic: a large tile of accumulators leaves it few
        registers, and is rounded.
      rows: [N] each, or None for one that is absent.
      matrices: [M, N] each, or None.
      column_sums: which of the outputs, as rounded, are also summed over the rows, to float32 [N].
      name: of the kernel, in a profile.

    Returns:
      The matrices by name, and for each of `column_sums` its sum by the name "sum_" + name.
    """
    terms = [a] if isinstance(a, jax.Array) else list(a)
    if terms[0].dtype == jnp.float32 and not b_transposed:
        b = b.T if isinstance(b, jax.Array) else [array.T for array in b]
        b_transposed = True
    m = terms[0].shape[1 if a_transposed else 0]
    ks = tuple(term.shape[0 if a_transposed else 1] for term in terms)
    bs, blocks, n = _blocks(b, ks, products, b_transposed)
    present_rows = {name: row for name, row in (rows or {}).items() if row is not None}
    present = {name: matrix for name, matrix in (matrices or {}).items() if matrix is not None}
    if config is None:
        config = default_config(
            n,
            sum(ks),
            products,
            terms[0].dtype,
            *(
                sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
                for dtypes in (
                    [x.dtype for x in present.values()],
                    outputs.values(),
                    [row.dtype for row in present_rows.values()],
                )
            ),
        )
    _check_config(
        config, terms[0].dtype, products, b_transposed, (*present.values(), *outputs.values())
    )
    b_columns = n
    if config.pads_columns and not b_transposed:
        b_columns += -n % swizzled_columns(terms[0].dtype)
        bs = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, b_columns - n)]) for x in bs]
    product = Product(
        m=m,
        n=n,
        ks=ks,
        dtype=terms[0].dtype,
        blocks=tuple(blocks),
        config=config,
        multiprocessors=multiprocessors,
        products=products,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        b_columns=b_columns,
    )
    launch = _Epilogue(
        product=product,
        leaving=leaving,
        function=epilogue,
        rows={name: row.dtype for name, row in present_rows.items()},
        matrices={name: x.dtype for name, x in present.items()},
        outputs=dict(outputs),
        column_sums=tuple(column_sums),
    )
    results = product.launch(
        terms,
        bs,
        (*present_rows.values(), *present.values()),
        out_type=(
            *(jax.ShapeDtypeStruct((m, n), dtype) for dtype in outputs.values()),
            *(jax.ShapeDtypeStruct(launch.sums_shape, jnp.float32) for _ in column_sums),
        ),
        scratch=launch.scratch(),
        epilogue=launch.of_tile,
        name=name,
    )
    matrices_out, sums = results[: len(outputs)], results[len(outputs) :]
    return dict(zip(outputs, matrices_out, strict=True)) | {
        f"sum_{name}": jnp.sum(partial_sums, axis=0)[:n]
        for name, partial_sums in zip(column_sums, sums, strict=True)
    }


def _check_config(
    config: MatmulConfig, dtype: Any, products: int, b_transposed: bool, streams: Sequence[Any]
) -> None:
    """Raises where the tiles of a config do not fit the operands or the matrices of the epilogue."""
    if config.tile_n % (products * config.epilogue_columns):
        raise ValueError(
            f"matmul: {products} products share tile_n ({config.tile_n}), and epilogue_columns"
            f" ({config.epilogue_columns}) must divide each one's part"
        )
    columns = swizzled_columns(dtype)
    if not b_transposed and config.tile_n // products % columns:
        raise ValueError(
            f"matmul: {products} products share tile_n ({config.tile_n}), and where b is [K, N] each"
            f" one's part must be a multiple of {columns}; pass another config"
        )
    widest = max(jnp.dtype(getattr(stream, "dtype", stream)).itemsize for stream in streams)
    if config.epilogue_columns * widest > SWIZZLE_BYTES:
        raise ValueError(
            f"matmul: epilogue_columns is {config.epilogue_columns}, but of numbers of {widest} bytes"
            f" at most {SWIZZLE_BYTES // widest} columns are taken at a time; pass another config"
        )


def _blocks(
    b: jax.Array | Sequence[jax.Array], ks: Sequence[int], products: int, transposed: bool
) -> tuple[list[jax.Array], list[Block], int]:
    """The arrays with the b of all terms and products, where each lies, and how wide one is.

    One array with several is reshaped so that each ends where an axis does: beyond it there are zeros.
    """
    if not isinstance(b, jax.Array):
        bs = list(b)
        blocks = [Block(index) for index in range(len(bs))]
        return bs, blocks, bs[0].shape[0 if transposed else 1]
    terms = len(ks)
    if len(set(ks)) > 1:
        raise ValueError(f"matmul: terms of one array b must be of one length, got {tuple(ks)}")
    n = b.shape[0 if transposed else 1] // products
    k_axes = (terms, ks[0]) if terms > 1 else (ks[0],)
    n_axes = (products, n) if products > 1 else (n,)
    blocks = [
        Block(0, term if terms > 1 else None, product if products > 1 else None)
        for term in range(terms)
        for product in range(products)
    ]
    return [b.reshape((*n_axes, *k_axes) if transposed else (*k_axes, *n_axes))], blocks, n


@dataclass(frozen=True)
class _Epilogue:
    """The epilogue of a launch: its static facts, and its shared memory."""

    product: Product
    leaving: Leaving | None
    function: Epilogue
    rows: Mapping[str, Any]
    matrices: Mapping[str, Any]
    outputs: Mapping[str, Any]
    column_sums: tuple[str, ...]

    @property
    def config(self) -> MatmulConfig:
        return self.product.config

    @property
    def fills_registers(self) -> bool:
        """Whether a thread's accumulators leave too few registers for much arithmetic."""
        return self.config.tile_m * self.config.tile_n > 128 * 128

    @property
    def chunks(self) -> int:
        """Parts of a tile that the epilogue takes one after the other, none without a column."""
        columns = min(self.product.n, self.product.part_n)
        return pl.cdiv(columns, self.config.epilogue_columns)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Partial column sums: a row for the tile of each warpgroup."""
        down, across = self.product.tile_grid
        height = self.config.cta_tile_m * self.config.cluster
        return down * (height // self.config.tile_m), across * self.product.part_n

    def scratch(self) -> dict[str, Any]:
        c = self.config
        scratch: dict[str, Any] = dict(
            out_smem={
                name: self._stream(dtype, c.write_slots) for name, dtype in self.outputs.items()
            }
        )
        if self.rows:
            scratch["row_smem"] = {
                name: plgpu.SMEM((CONSUMERS, self.product.part_n), dtype)
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
        return block((CONSUMERS, slots), c.tile_m, c.epilogue_columns, dtype)

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> TileEpilogue:
        return _EpilogueOfTile(self, _Refs(self, refs), smem, place)


class _Refs:
    """The arrays of an epilogue in global memory, by their roles."""

    def __init__(self, epilogue: _Epilogue, refs: Sequence[Any]):
        remaining = iter(refs)
        self.rows = {name: next(remaining) for name in epilogue.rows}
        self.matrices = {name: next(remaining) for name in epilogue.matrices}
        self.outputs = {name: next(remaining) for name in epilogue.outputs}
        self.sums = {name: next(remaining) for name in epilogue.column_sums}


@dataclass(frozen=True)
class _EpilogueOfTile:
    """The epilogue of a tile, chunk by chunk of its columns."""

    launch: _Epilogue
    gmem: _Refs
    smem: Mapping[str, Any]
    place: TilePlace

    @property
    def n_start(self) -> jax.Array:
        return self.place.n_idx * self.launch.product.part_n

    def prefetch(self) -> None:
        """Has what the first chunks need copied while the tile is multiplied."""
        for name, ref in self.gmem.rows.items():
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(self.n_start, self.launch.product.part_n)],
                self.smem["row_smem"][name].at[self.place.wg_idx],
                self.smem["row_full"].at[self.place.wg_idx],
            )
        for chunk in range(min(self.launch.chunks, self.launch.config.read_slots)):
            self._copy_matrices(chunk)

    def run(self, acc: jax.Array) -> None:
        launch = self.launch
        if launch.rows:
            plgpu.barrier_wait(self.smem["row_full"].at[self.place.wg_idx])
        narrow = None
        if launch.leaving is not None and launch.fills_registers:
            narrow = [
                tuple(tile.astype(launch.product.dtype) for tile in self._leaving(acc, chunk))
                for chunk in range(launch.chunks)
            ]
            # Without this the compiler may move the rounding to where it is used.
            narrow = lax.optimization_barrier(narrow)
        for chunk in range(launch.chunks):
            rows = {}
            if narrow is not None:
                tiles = [tile.astype(jnp.float32) for tile in narrow[chunk]]
            elif launch.leaving is not None:
                tiles = self._leaving(acc, chunk)
            else:
                tiles, rows = self._products(acc, chunk), self._rows(chunk)
            matrices = self._load_matrices(chunk)
            results = launch.function(*tiles, **rows, **matrices)
            self._store(chunk, {n: results[n].astype(d) for n, d in launch.outputs.items()})

    def _leaving(self, acc: jax.Array, chunk: int) -> Sequence[jax.Array]:
        assert self.launch.leaving is not None
        return self.launch.leaving(*self._products(acc, chunk), **self._rows(chunk))

    def _products(self, acc: jax.Array, chunk: int) -> list[jax.Array]:
        part_n, width = self.launch.product.part_n, self.launch.config.epilogue_columns
        starts = [
            product * part_n + chunk * width for product in range(self.launch.product.products)
        ]
        return [acc[:, start : start + width] for start in starts]

    def _load_matrices(self, chunk: int) -> dict[str, jax.Array]:
        """Takes a chunk out of shared memory, and has the next one copied into its place."""
        if not self.launch.matrices:
            return {}
        slots = self.launch.config.read_slots
        slot = chunk % slots
        plgpu.barrier_wait(self._matrix_full(slot))
        loaded = {
            name: plgpu.load(
                self._stream("matrix_smem", name, slot)[0], layout=plgpu.Layout.WGMMA
            ).astype(jnp.float32)
            for name in self.launch.matrices
        }
        if chunk + slots < self.launch.chunks:
            plgpu.commit_smem()  # All four warps have read it.
            self._copy_matrices(chunk + slots)
        return loaded

    def _stream(self, kind: str, name: str, slot: int) -> tuple[Any, Any]:
        """A slot's memory as registers and as copies see it."""
        registers, copies = self.smem[kind][name]
        return registers.at[self.place.wg_idx, slot], copies.at[self.place.wg_idx, slot]

    @property
    def _shape(self) -> tuple[int, int]:
        return self.launch.config.tile_m, self.launch.config.epilogue_columns

    def _columns(self, chunk: int):
        """Of the output."""
        width = self.launch.config.epilogue_columns
        return pl.ds(self.n_start + chunk * width, width)

    def _block(self, ref, chunk: int):
        return ref.at[pl.ds(self.place.m_start, self.launch.config.tile_m), self._columns(chunk)]

    def _matrix_full(self, slot: int):
        return self.smem["matrix_full"].at[self.place.wg_idx * self.launch.config.read_slots + slot]

    def _copy_matrices(self, chunk: int) -> None:
        slot = chunk % self.launch.config.read_slots
        for name, ref in self.gmem.matrices.items():
            _, destination = self._stream("matrix_smem", name, slot)
            plgpu.copy_gmem_to_smem(self._block(ref, chunk), destination, self._matrix_full(slot))

    def _rows(self, chunk: int) -> dict[str, jax.Array]:
        width = self.launch.config.epilogue_columns

        def over_tile(smem) -> jax.Array:
            row = plgpu.load(
                smem.at[self.place.wg_idx, pl.ds(chunk * width, width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
            )
            return lax.broadcast_in_dim(row.astype(jnp.float32), self._shape, (1,))

        return {name: over_tile(self.smem["row_smem"][name]) for name in self.launch.rows}

    def _store(self, chunk: int, results: Mapping[str, jax.Array]) -> None:
        launch, slots = self.launch, self.launch.config.write_slots
        places = {name: self._stream("out_smem", name, chunk % slots) for name in results}
        # Whatever slot the last tile ended with has been read long since.
        plgpu.wait_smem_to_gmem(slots - 1 if chunk else 0, wait_read_only=True)
        for name, tile in results.items():
            places[name][0][...] = tile
        plgpu.commit_smem()
        for name, (_, source) in places.items():
            destination = self._block(self.gmem.outputs[name], chunk)
            plgpu.copy_smem_to_gmem(source, destination, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        for name in launch.column_sums:
            self._store_sum(name, chunk, places[name][0])

    def _store_sum(self, name: str, chunk: int, tile) -> None:
        """Sums the columns of a tile in shared memory, each within a warp.

        In the layout of the accumulators a column is spread over the warps, and sums across warps
        share their memory among all warpgroups of a CTA.
        """
        launch, c = self.launch, self.launch.config
        layout = _column_layout(c.epilogue_columns, launch.outputs[name])
        values = plgpu.load(tile, layout=layout, optimized=False).astype(jnp.float32)
        if launch.sums_shape[0] * c.tile_m != launch.product.m:
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
            values = jnp.where(row < launch.product.m - self.place.m_start, values, 0.0)
        partial_sums = self.gmem.sums[name].at[lax.div(self.place.m_start, jnp.int32(c.tile_m))]
        store_unoptimized(partial_sums.at[self._columns(chunk)], jnp.sum(values, axis=0))


def _column_layout(columns: int, dtype: Any) -> plgpu.Layout:
    """Registers in which each warp holds a quarter of the columns, by 16 bytes.

    Swizzling moves units of 16 bytes: a longer vector would be read across them.
    """
    vec = 16 // jnp.dtype(dtype).itemsize
    quarter = columns // 4
    rows = 32 * vec // quarter
    if quarter == vec:
        tiling, warp_dims, lane_dims = ((rows, columns), (vec,)), (-2,), (-3,)
    else:
        tiling, warp_dims, lane_dims = ((rows, columns), (quarter,), (vec,)), (-3,), (-4, -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
    )
