"""block_sparse_matmul: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.sparse import block_sparse_xla
from jaxfused.ops.sparse.block_sparse import BlockList, BlockSparse
from jaxfused.ops.sparse.coordinates import check_dense
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import common_dtype
from jaxfused.runtime.roofline import UNMODELLED, is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from jaxfused.runtime.vmap import OneByOne
from pallas_kernels.gemm import block_sparse, block_sparse_weights


@python_numbers
def block_sparse_matmul(
    x: jax.Array,
    weight: BlockSparse,
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Product with a block-sparse matrix; only its stored blocks are multiplied.

    .. math::
        y_{:, J} = \sum_{I \,:\, (I, J) \text{ is kept}} x_{:, I} \, W_{IJ}

    The gradient of x runs over the same blocks, transposed; that of the weight is computed only at its
    blocks. Sums are in float32 (float64 for float64), and rounded once.

    Where few blocks are zero, or no kernel can run, XLA multiplies by a dense copy of the matrix: NaN
    and infinity in x then reach results of zero blocks too.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      weight: a `BlockSparse` of shape (D, F).
      precision: of the product, as in `jax.lax.dot`.
      preferred_element_type: dtype of the result; by default the operands' common one, in which they are
        multiplied.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> dense = jax.random.normal(jax.random.key(0), (256, 512))
      >>> weight = jaxfused.BlockSparse.from_dense(dense, 64, count=8)
      >>> jaxfused.block_sparse_matmul(jnp.ones((3, 256)), weight).shape, weight.density
      ((3, 512), 0.25)

    On a GPU forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Gray et al., "GPU Kernels for Block-Sparse Weights", 2017,
    https://cdn.openai.com/blocksparse/blocksparsepaper.pdf
    """
    op = "block_sparse_matmul"
    check_dense(op, "x", x)
    [x] = as_arrays(x)
    if not isinstance(weight, BlockSparse):
        raise ValueError(
            f"{op}: weight is a {type(weight).__name__}; pass a jaxfused.BlockSparse, as from"
            " BlockSparse.from_dense."
        )
    blocks = jnp.asarray(weight.blocks)
    check_floating(op, dict(x=x, weight=blocks))
    if blocks.ndim != 3:
        raise ValueError(
            f"{op}: weight has blocks of shape {blocks.shape}, but one matrix has [kept, B, B]; use"
            " jax.vmap for several."
        )
    listed = weight.by_column.entries.shape[-1]
    if blocks.shape[0] != listed:
        raise ValueError(
            f"{op}: weight has blocks of shape {blocks.shape}, but places for {listed} blocks; replace"
            " all of them, or make another matrix by BlockSparse.from_blocks."
        )
    if x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but weight has shape {weight.shape}; pass x of shape"
            f" (..., {weight.shape[0]})."
        )
    dtype = common_dtype(x.dtype, blocks.dtype)
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: preferred_element_type is {out_dtype}, but the result is of floating-point numbers;"
            " pass jnp.float32, jnp.bfloat16 or jnp.float16."
        )
    if 0 in x.shape or blocks.shape[0] == 0:
        return jnp.zeros((*x.shape[:-1], weight.shape[1]), out_dtype)
    options = Options(jnp.dtype(dtype), out_dtype, precision, weight.shape)
    device = dispatch.current_device(x)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, x, blocks, missing=missing):
        if not sharding.is_explicit(x, blocks):
            y = block_sparse_xla.block_sparse_matmul(
                x,
                weight,
                dtype=dtype,
                out_dtype=out_dtype,
                precision=precision,
                transposed=False,
            )
            return named(y, op, "output")
        run = Runner("xla", device)
    leading = sharding.leading_axes(x.ndim - 1, _LETTERS)
    operands = (x.astype(dtype), blocks.astype(dtype), *weight.by_column, *weight.by_row)
    axes = [letters.replace(ROWS, leading) for letters in (ROWS + "k", *_LISTS)]
    aligned = sharding.align(operands, operand_axes=axes, whole=_WHOLE)
    return _block_sparse_matmul(run, options, *aligned)


_LISTS = ("nbc", "p", "qn", "r", "qn")
"""Axis letters of the blocks, and of the two arrays of each list, by column and by row."""
_WHOLE = "kfnbcpqr"
_LETTERS = _WHOLE


@dataclass(frozen=True)
class Options:
    """Static arguments of a block-sparse product."""

    dtype: Any
    """Dtype in which x and the blocks are multiplied."""
    out_dtype: Any
    precision: Any
    shape: tuple[int, int]
    """Shape of the matrix."""

    def weight(self, blocks: Any, lists: Sequence[Any]) -> BlockSparse:
        columns, column_entries, rows, row_entries = lists
        by_column, by_row = BlockList(columns, column_entries), BlockList(rows, row_entries)
        return BlockSparse(blocks, by_column, by_row, self.shape)


# --- gradient -------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="block_sparse_matmul")
def _block_sparse_matmul(run: Runner, options: Options, x, blocks, *lists):
    [y] = run(BlockSparseProduct(options), x, blocks, *lists)
    return y


def _fwd(run: Runner, options: Options, *operands):
    y = _block_sparse_matmul(run, options, *operands)
    return named(y, "block_sparse_matmul", "output"), operands


def _bwd(run: Runner, options: Options, operands, dy):
    x, blocks, *lists = operands
    dy = dy.astype(options.dtype)
    back = replace(options, out_dtype=options.dtype)
    [dx] = run(BlockSparseProduct(back, transposed=True), dy, blocks, *lists)
    # If devices split the rows, their partial gradients are summed in float32 before they are rounded.
    whole = sharding.is_in_one_piece(x, dy)
    of_blocks = replace(options, out_dtype=options.dtype if whole else jnp.dtype(jnp.float32))
    if options.dtype == jnp.float64:
        of_blocks = back
    [dw] = run(KeptBlocks(of_blocks), x, dy, blocks, *lists)
    return dx, dw.astype(options.dtype), None, None, None, None


_block_sparse_matmul.defvjp(_fwd, _bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSparseProduct:
    """Computes (x @ w,) from x [M, D], blocks and lists; if `transposed`, (x @ w^T,) from x [M, F]."""

    options: Options
    transposed: bool = False

    @property
    def name(self) -> str:
        return f"block_sparse_matmul {'dx' if self.transposed else 'forward'}"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "k", *_LISTS), (ROWS + "f",), whole=_WHOLE)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return batched_rows(self, call, axis_size, in_batched, *operands)

    def why_not(self, device, x, blocks, *lists) -> Mapping[str, str | None]:
        del lists
        reason = block_sparse.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"x": x.dtype, "weight": blocks.dtype},
            out_dtype=self.options.out_dtype,
            block=blocks.shape[1],
            kept=blocks.shape[0],
        )
        return {"pallas": reason, "xla": None}

    def estimate(self, device, able, x, blocks, *lists) -> Estimate:
        del able, lists
        numbers = math.prod(self.options.shape)
        is_large = numbers >= _LARGE or x.shape[0] >= _MANY_ROWS
        # Blocks of 32 read x twice as often as blocks of 64, so the limit is half as high.
        most = _MOST_KEPT / 2 if blocks.shape[1] < _WGMMA_ROWS else _MOST_KEPT
        return _estimate(device, blocks.size / numbers, most if is_large else 0.0)

    def work(self, x, blocks) -> block_sparse.Shape:
        sizes = self.options.shape[::-1] if self.transposed else self.options.shape
        return block_sparse.Shape(x.shape[0], *sizes, blocks.shape[1], blocks.shape[0])

    def configs(self, implementation, device, x, blocks, *lists) -> Sequence[Hashable]:
        del lists
        if implementation != "pallas":
            return ()
        return block_sparse.candidates(
            self.work(x, blocks), x.dtype, self.options.out_dtype, device.multiprocessors
        )

    def run(self, implementation, device, x, blocks, *lists, config: Any = None) -> Results:
        options = self.options
        if implementation == "xla":
            y = block_sparse_xla.block_sparse_matmul(
                x,
                options.weight(blocks, lists),
                dtype=options.dtype,
                out_dtype=options.out_dtype,
                precision=options.precision,
                transposed=self.transposed,
            )
            return (y,)
        starts, entries = lists[2:] if self.transposed else lists[:2]
        y = block_sparse.block_sparse_product(
            x,
            blocks,
            starts,
            entries,
            transposed=self.transposed,
            out_dtype=options.out_dtype,
            multiprocessors=device.multiprocessors,
            config=config,
            name=self.name.replace(" ", "_"),
        )
        return (y,)

    def examples(self, random, device, x, blocks, *lists):
        del device
        return [random(x), *example_weight(random, blocks, lists)]


@dataclass(frozen=True)
class KeptBlocks(OneByOne):
    """Computes the kept blocks of x^T @ dy from x [M, D], dy [M, F], blocks and lists."""

    options: Options

    @property
    def name(self) -> str:
        return "block_sparse_matmul dw"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "k", ROWS + "f", *_LISTS), ("nbc",), whole=_WHOLE)

    def why_not(self, device, x, dy, blocks, *lists) -> Mapping[str, str | None]:
        del lists
        reason = block_sparse.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"x": x.dtype, "the cotangent": dy.dtype},
            out_dtype=self.options.out_dtype,
            block=blocks.shape[1],
            kept=blocks.shape[0],
        )
        return {"pallas": reason, "xla": None}

    def estimate(self, device, able, x, dy, blocks, *lists) -> Estimate:
        del able, x, dy, lists
        numbers = math.prod(self.options.shape)
        # Blocks of 32 read x and dy twice as often; a WGMMA computes twice the rows that are stored.
        most = _MOST_KEPT / 2 / 2 if blocks.shape[1] < _WGMMA_ROWS else _MOST_KEPT
        return _estimate(device, blocks.size / numbers, most if numbers >= _LARGE else 0.0)

    def configs(self, implementation, device, x, dy, blocks, *lists) -> Sequence[Hashable]:
        del lists
        if implementation != "pallas":
            return ()
        return block_sparse_weights.candidates(
            self.work(x, dy, blocks), x.dtype, self.options.out_dtype, device.multiprocessors
        )

    def work(self, x, dy, blocks) -> block_sparse.Shape:
        """Returns the shape of the product, whose summed axis is the rows."""
        sizes = x.shape[1], x.shape[0], dy.shape[1]
        return block_sparse.Shape(*sizes, blocks.shape[1], blocks.shape[0])

    def run(self, implementation, device, x, dy, blocks, *lists, config: Any = None) -> Results:
        options = self.options
        if implementation == "xla":
            dw = block_sparse_xla.kept_blocks(
                x,
                dy,
                options.weight(blocks, lists),
                out_dtype=options.out_dtype,
                precision=options.precision,
            )
            return (dw,)
        dw = block_sparse_weights.block_sparse_weights(
            x,
            dy,
            *lists[2:],
            block=blocks.shape[1],
            out_dtype=options.out_dtype,
            multiprocessors=device.multiprocessors,
            config=config,
            name=self.name.replace(" ", "_"),
        )
        return (dw,)

    def examples(self, random, device, x, dy, blocks, *lists):
        del device
        return [random(x), random(dy), *example_weight(random, blocks, lists)]


def _estimate(device: dispatch.Device, kept: float, most: float) -> Estimate:
    """Returns Pallas if the fraction `kept` of blocks that are stored is at most `most`, else XLA.

    XLA multiplies all blocks, so its time does not fall with the fraction.
    """
    if not is_modelled(device):
        return UNMODELLED
    first = "pallas" if kept <= most else "xla"
    return Rule((first,), f"{kept:.0%} are kept, and the kernel is faster up to {most:.0%}")


_WGMMA_ROWS = 64
"""Rows that a WGMMA multiplies."""
_MOST_KEPT, _LARGE, _MANY_ROWS = 0.5, 4_000_000, 4096
"""Largest fraction of stored blocks at which the kernel is faster than XLA, if the matrix has _LARGE
elements or x _MANY_ROWS rows: XLA's smaller products end before the kernel starts."""


def example_weight(random: Any, blocks: Any, lists: Sequence[Any]) -> list[jax.Array]:
    """Returns random blocks at evenly spread positions, as example operands."""
    columns, _, rows, _ = lists
    down, across = rows.shape[0] - 1, columns.shape[0] - 1
    places = jnp.arange(blocks.shape[0]) * down * across // blocks.shape[0]
    size = blocks.shape[1]
    weight = BlockSparse.from_blocks(
        random(blocks), places // across, places % across, (down * size, across * size)
    )
    return [weight.blocks, *weight.by_column, *weight.by_row]
