"""Gradients of weights (wgrad) and biases: products and sums over all rows, for several operators."""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import product_regimes, sharding
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.product_xla import (
    side_by_side,
    sum_over_rows,
    sums_side_by_side,
    unshared,
    weight_product,
)
from jaxfused.runtime.roofline import UNMODELLED, is_modelled
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner
from pallas_kernels.gemm import weight_gradient as pallas_weight_gradient
from pallas_kernels.gemm.cost import WeightWork


def weight_gradient(
    run: Runner, op: str, x: jax.Array, dy: jax.Array, dtype: Any, precision: Any
) -> jax.Array:
    """Returns dw [D, F]: the transpose of x [..., D] times dy [..., F], summed over all rows."""
    (dw,), _ = weight_gradients(run, op, x, (dy,), dtype, precision)
    return dw


def weight_and_bias_gradients(
    run: Runner,
    op: str,
    x: jax.Array,
    dy: jax.Array,
    dtype: Any,
    bias: jax.Array | None,
    precision: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the transpose of x [..., D] times dy [..., F], and the sum of dy, over all rows.

    Args:
      run: the operator's Runner.
      op: the operator's name.
      x: the layer's input, in the dtype of the product.
      dy: the cotangent, of any dtype; it is rounded for the product, but not for the sum.
      dtype: dtype of the weights' gradient.
      bias: the bias, whose dtype the sum has; None for no sum.
      precision: the product's precision.
    """
    narrow = dy.astype(x.dtype)
    rounds = narrow.dtype != dy.dtype
    (dw,), sums = weight_gradients(
        run, op, x, (narrow,), dtype, precision, sums_rows=bias is not None and not rounds
    )
    if bias is None:
        return dw, None
    return dw, sum_rows(dy, bias.dtype) if sums is None else sums[0].astype(bias.dtype)


def weight_gradients(
    run: Runner,
    op: str,
    x: jax.Array,
    dys: Sequence[jax.Array],
    dtype: Any,
    precision: Any,
    *,
    sums_rows: bool = False,
    side_by_side: bool = False,
    piece: int | None = None,
    joined: bool = False,
) -> tuple[list[jax.Array], list[jax.Array] | None]:
    """Returns the transpose of x [..., D] times each dy [..., F], and float32 sums of the dys or None.

    Args:
      run: the operator's Runner.
      op: the operator's name.
      x: the layer's input, of the dys' dtype.
      dys: the cotangents of x's products. If devices split them, they have one width.
      dtype: dtype of the results.
      precision: the products' precision, as in `jax.numpy.matmul`.
      sums_rows: whether each dy is summed over all of its rows.
      side_by_side: whether XLA takes one product of the dys, concatenated.
      piece: columns of the pieces in which they are concatenated, as in `product_xla.side_by_side`.
      joined: whether to return one product, and one sum, of all dys concatenated.
    """
    in_one_piece = sharding.is_in_one_piece(x, *dys)
    kernel = WeightGradients(
        op,
        jnp.dtype(dtype),
        precision,
        len(dys),
        sums_rows,
        side_by_side,
        joined and in_one_piece,
        piece,
    )
    if sharding.is_explicit(x, *dys):
        # The devices' products are float32, so that they are added before rounding. The sums of dy are
        # computed outside: devices that hold different features of x would each add the same sums.
        alone = replace(kernel, dtype=jnp.dtype(jnp.float32), sums_rows=False)
        sums = [sum_rows(dy, jnp.float32) for dy in dys] if sums_rows else []
        results = (*run(alone, x, *dys), *sums)
    elif in_one_piece:
        results = run(kernel, x, *dys)
    elif _would_run_on_rows(run, kernel, x, dys):
        # The caller's `implementation` is dropped: columns of x and dy may be sharded too, and a shard
        # may have a shape that the named kernel does not support.
        results = replace(run, implementation=None)(kernel, x, *dys)
    else:
        # XLA's partitioner can split this product over devices. It may leave each device's product as a
        # partial sum of dw, and add these later.
        results = kernel.in_xla(x, *dys)
    count = 1 if kernel.joined else len(dys)
    dws = [dw.astype(dtype) for dw in results[:count]]
    sums_of_rows = list(results[count:])
    if joined and not kernel.joined:
        dws = [jnp.concatenate(dws, axis=-1)]
        sums_of_rows = [sums_side_by_side(sums_of_rows)] if sums_rows else []
    return dws, sums_of_rows if sums_rows else None


def _would_run_on_rows(
    run: Runner, kernel: "WeightGradients", x: jax.Array, dys: Sequence[jax.Array]
) -> bool:
    """Returns whether a kernel would run if devices split the rows evenly, as in data parallel training.

    Under Auto mesh axes XLA's partitioner decides after tracing how rows are sharded, and then a
    kernel is chosen for a shard. If none would be chosen, or if the mesh has Manual axes, where a
    kernel's operands would be gathered, the partitioner gets a plain product.
    """
    if not sharding.is_partitioned_by_xla(x, *dys):
        return False
    rows = math.prod(x.shape[:-1]) // jax.device_count()
    if rows == 0 or run.implementation not in (None, "pallas"):
        return False
    shards = [jax.ShapeDtypeStruct((rows, a.shape[-1]), a.dtype) for a in (x, *dys)]
    return replace(run, implementation=None).choice(kernel, *shards).implementation != "xla"


def sum_rows(dy: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of a bias: dy [..., F] summed over all of its rows in float32.

    XLA gives a sum over few rows too few threads, so that a product with ones is faster there.
    """
    rows = math.prod(dy.shape[:-1])
    if _is_product_with_ones(rows, dy) and not sharding.is_explicit(dy):
        # The barrier keeps XLA from merging this product with wgrad, which reads the same dy.
        flat = jax.lax.optimization_barrier(dy.reshape(rows, dy.shape[-1]))
        ones = jnp.ones((_TILE_ROWS, rows), dy.dtype)
        return jnp.matmul(ones, flat, preferred_element_type=jnp.float32)[0].astype(dtype)
    return sum_over_rows(dy).astype(dtype)


def _is_product_with_ones(rows: int, dy: Any) -> bool:
    few = rows <= _ROWS_OF_SLOW_SUMS and dy.size >= _SIZE_OF_SLOW_SUMS
    return few and dy.dtype.itemsize == 2 and rows % _SPLIT_ROWS == 0


_ROWS_OF_SLOW_SUMS = 2**14
_SPLIT_ROWS = 256
"""Divisor of the number of rows. XLA splits wgrad's sum over rows (split-K), and copies operands to pad
them if their rows are no multiple of this."""
_SIZE_OF_SLOW_SUMS = 2**20
_TILE_ROWS = 8
"""Rows of a product's smallest tile, and of the matrix of ones whose product with dy sums dy's rows."""


@dataclass(frozen=True)
class WeightGradients:
    """Computes x^T @ dy [D, F], and dy summed over rows [F], for x [rows, D] and each of several dys.

    The products have `dtype`. The sums are float32, and are computed if `sums_rows`.
    """

    op: str
    dtype: Any
    precision: Any
    count: int
    """Number of dys."""
    sums_rows: bool
    side_by_side: bool
    """True if XLA runs one product with the concatenated dys, not one for each."""
    joined: bool = False
    """True if the products are returned as one array, concatenated by columns, and so are the sums."""
    piece: int | None = None
    """Columns of the pieces of dys that XLA concatenates, such as a head's; None for whole dys."""

    @property
    def name(self) -> str:
        return f"{self.op} weight gradient"

    def axes(self, *operands) -> Axes:
        del operands
        columns = ("j",) if self.joined else ("f",) * self.count
        sums = columns if self.sums_rows else ()
        return Axes((ROWS + "d", *(ROWS + "f",) * self.count), (*("d" + f for f in columns), *sums))

    def work(self, x, *dys) -> WeightWork:
        return WeightWork(
            x.shape[0],
            x.shape[1],
            tuple(dy.shape[1] for dy in dys),
            out_bytes=self.dtype.itemsize,
            sums=self.sums_rows,
        )

    def why_not(self, device, x, *dys) -> Mapping[str, str | None]:
        if x.dtype.itemsize != 2 or any(dy.dtype != x.dtype for dy in dys):
            return {"xla": None}
        names = [f"cotangent {index}" for index in range(len(dys))]
        reason = pallas_weight_gradient.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"x": x.dtype},
            features={"x": x.shape[1]}
            | {name: dy.shape[1] for name, dy in zip(names, dys, strict=True)},
        )
        return {"pallas": reason, "xla": None}

    def estimate(self, device, able, x, *dys) -> Estimate:
        del able
        if not is_modelled(device):
            return UNMODELLED
        return product_regimes.of_weights(self.work(x, *dys), side_by_side=self.side_by_side)

    def configs(self, implementation, device, x, *dys) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_weight_gradient.fitting(self.work(x, *dys), device.multiprocessors)

    def run(self, implementation, device, x, *dys, config=None) -> Results:
        if implementation != "pallas":
            return self.in_xla(x, *dys)
        dws, sums = pallas_weight_gradient.weight_gradient(
            x,
            dys,
            out_dtype=self.dtype,
            sums_rows=self.sums_rows,
            multiprocessors=device.multiprocessors,
            config=config,
        )
        return (*self._as_wanted(dws), *self._as_wanted(sums or ()))

    def in_xla(self, x, *dys) -> tuple[jax.Array, ...]:
        """Returns the products and sums by XLA, for x [..., D] with any number of leading axes."""
        gradient = functools.partial(weight_product, out_dtype=self.dtype, precision=self.precision)
        dws: Sequence[jax.Array]
        if self.side_by_side and len(dys) > 1:
            dw = gradient(x, side_by_side(dys, self.piece))
            ends = [sum(dy.shape[-1] for dy in dys[: i + 1]) for i in range(len(dys) - 1)]
            dws = (dw,) if self.joined else jnp.split(dw, ends, axis=-1)
        else:
            first, *others = dys
            dws = self._as_wanted(
                [gradient(x, first), *(gradient(*unshared(x, dy)) for dy in others)]
            )
        if not self.sums_rows:
            return tuple(dws)
        sums = [sum_rows(dy, jnp.float32) for dy in self._summed_in_xla(dys)]
        if self.joined and len(sums) > 1:
            sums = [sums_side_by_side(sums)]
        return (*dws, *sums)

    def _as_wanted(self, columns: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the arrays concatenated along their columns if `joined`, else unchanged."""
        if not self.joined or len(columns) < 2:
            return columns
        return (jnp.concatenate(columns, axis=-1),)

    def _summed_in_xla(self, dys: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the arrays that XLA sums over rows: all dys concatenated if `joined`, else each dy."""
        if not self.side_by_side or not self.joined or len(dys) < 2:
            return dys
        return (side_by_side(dys, self.piece),)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        """Implements `jax.vmap`: XLA computes the products of all entries as one batched product."""
        del call, axis_size
        in_axes = [0 if batched else None for batched in in_batched]
        return jax.vmap(self.in_xla, in_axes=in_axes)(*operands)

    xla_takes_rows = True
