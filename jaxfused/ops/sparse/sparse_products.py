"""Operations of sparse_matmul and sampled_matmul: sparse @ dense, and dense @ dense at entries."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.lax import Precision

from jaxfused.ops.sparse import sparse_products_cuda, sparse_products_xla
from jaxfused.ops.sparse.coordinates import Coordinates
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import OneByOne, is_batched


@dataclass(frozen=True)
class Options:
    """Static arguments of sparse_matmul or sampled_matmul."""

    op: str
    rows: int
    """Rows of the sparse matrix."""
    in_order: bool
    """True if the entries are in the order of their rows."""
    is_unique: bool
    """True if no two entries have the same row and column."""
    precision: Any

    def of_transpose(self, rows: int) -> "Options":
        """Returns the options of a product with the transpose, which has `rows` rows."""
        return replace(self, rows=rows, in_order=False)


# --- gradients ------------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def sparse_product(run: Runner, options: Options, data, rows, columns, starts, indices, b):
    """Returns A @ b [M, N] for b [K, N]; A has values `data` [entries] at `rows` and `columns`.

    `starts` and `indices` are those of the entries' `Coordinates`, or None.
    """
    [y] = run(SparseProduct(options), data, rows, columns, starts, indices, b)
    return y


def _sparse_fwd(run: Runner, options: Options, data, rows, columns, starts, indices, b):
    y = sparse_product(run, options, data, rows, columns, starts, indices, b)
    return named(y, options.op, "output"), (data, rows, columns, b)


def _sparse_bwd(run: Runner, options: Options, operands, dy):
    data, rows, columns, b = operands
    [ddata] = run(SampledProduct(options.op), rows, columns, dy, b)
    back = options.of_transpose(b.shape[0])
    [db] = run(SparseProduct(back, "gradient"), data, columns, rows, None, None, dy)
    return ddata, None, None, None, None, db


sparse_product.defvjp(_sparse_fwd, _sparse_bwd)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def sampled_product(run: Runner, options: Options, rows, columns, x, y):
    """Returns the elements of x @ y^T at `rows` and `columns`, both [entries]."""
    [data] = run(SampledProduct(options.op, "forward"), rows, columns, x, y)
    return data


def _sampled_fwd(run: Runner, options: Options, rows, columns, x, y):
    data = sampled_product(run, options, rows, columns, x, y)
    return named(data, options.op, "output"), (rows, columns, x, y)


def _sampled_bwd(run: Runner, options: Options, operands, ddata):
    rows, columns, x, y = operands
    [dx] = run(SparseProduct(options, "dx"), ddata, rows, columns, None, None, y)
    back = options.of_transpose(y.shape[0])
    [dy] = run(SparseProduct(back, "dy"), ddata, columns, rows, None, None, x)
    return None, None, dx, dy


sampled_product.defvjp(_sampled_fwd, _sampled_bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseProduct:
    """Computes (A b [M, N],) from the entries of A, their rows and columns, and b [K, N]."""

    options: Options
    stage: str = "forward"

    @property
    def name(self) -> str:
        return f"{self.options.op} {self.stage}"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("e", "e", "e", "s", "ep", "kn"), ("mn",), whole="ekmps")

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        """Merges a batch of b into the columns of b."""
        *entries, b = operands
        if any(map(is_batched, in_batched[:5])):
            return None
        columns = jnp.moveaxis(b, 0, 1).reshape(b.shape[1], -1)
        [y] = call(self, *entries, columns)
        return (jnp.moveaxis(y.reshape(y.shape[0], axis_size, -1), 1, 0),)

    def why_not(self, device, data, rows, columns, starts, indices, b) -> Mapping[str, str | None]:
        del columns, starts, indices
        reason = sparse_products_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"the entries": data.dtype, "the dense matrix": b.dtype},
            out_dtype=b.dtype,
            sizes={"rows": self.options.rows, "entries": rows.shape[0], "columns": b.shape[0]},
            columns=b.shape[1],
        )
        return {"cuda": reason, "xla": None}

    def estimate(self, device, able, data, rows, columns, starts, indices, b) -> Estimate:
        del device, able, data, columns, starts, indices
        options, numbers = self.options, self.options.rows * b.shape[0]
        sorts = not options.in_order and options.is_unique
        if numbers < (_LEAST_UNSORTED if sorts else _LEAST_NUMBERS):
            return Rule(("xla",), "a dense product of so small a matrix ends sooner")
        if rows.shape[0] >= self._least_dense(b, exact=self._is_exact(b)):
            by = ("cuda", "xla") if self._is_dense("cuda", rows.shape[0], b) else ("xla",)
            return Rule(by, "a dense product is faster at so many entries")
        return Rule(("cuda", "xla"), "the kernel reads the rows that its entries need")

    def _is_exact(self, b) -> bool:
        return b.dtype == jnp.float32 and self.options.precision == Precision.HIGHEST

    def _least_dense(self, b, *, exact: bool) -> float:
        """Returns the number of entries from which a dense product is faster than the kernel."""
        numbers = self.options.rows * b.shape[0] * (_WITHOUT_TF32 if exact else 1)
        return numbers * (1 + _COPY / b.shape[1]) / _DENSE

    def _is_dense(self, implementation: str, entries: int, b) -> bool:
        """Returns whether an implementation multiplies by a dense copy of the matrix."""
        if implementation == "xla":
            return entries >= self._least_dense(b, exact=False)
        options, numbers = self.options, self.options.rows * b.shape[0]
        has_copy = options.in_order and options.is_unique and numbers >= _LEAST_NUMBERS
        return has_copy and entries >= self._least_dense(b, exact=self._is_exact(b))

    def run(self, implementation, device, data, rows, columns, starts, indices, b) -> Results:
        options = self.options
        flags = (options.in_order, options.is_unique)
        places = Coordinates(rows, columns, *flags, starts, indices)
        shape = dict(rows=options.rows, out_dtype=b.dtype)
        if device.platform != "gpu" and implementation == "xla":
            y = sparse_products_xla.sparse_product(data, places, b, **shape)
        elif self._is_dense(implementation, rows.shape[0], b):
            copies = sparse_products_cuda if implementation == "cuda" else sparse_products_xla
            a = copies.dense_copy(data, places, (options.rows, b.shape[0]))
            of_b = dict(dtype=b.dtype, out_dtype=b.dtype, precision=options.precision)
            y = product("mk,kn->mn", a, b, **of_b)
        elif implementation == "cuda":
            y = sparse_products_cuda.sparse_product(data, places, b, rows=options.rows)
        else:
            y = sparse_products_xla.repeatable_product(data, places, b, **shape)
        return (y,)

    def examples(self, random, device, data, rows, columns, starts, indices, b):
        """Returns random operands with evenly spread entries in the order of their rows."""
        del device
        places = jnp.arange(rows.shape[0], dtype=jnp.int32)
        spread = places * (self.options.rows / rows.shape[0])
        rows = spread.astype(jnp.int32)
        if starts is not None:
            starts = jnp.searchsorted(rows, jnp.arange(starts.shape[0]), method="sort")
        columns = places * 7919 % b.shape[0]
        indices = None if indices is None else jnp.stack([rows, columns], axis=1)
        return [random(data), rows, columns, starts, indices, random(b)]


@dataclass(frozen=True)
class SampledProduct(OneByOne):
    """Computes x @ y^T at `rows` and `columns`, [entries], from x [M, D] and y [N, D]."""

    op: str
    stage: str = "gradient of entries"

    @property
    def name(self) -> str:
        return f"{self.op} {self.stage}"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("e", "e", "md", "nd"), ("e",), whole="emnd")

    def why_not(self, device, rows, columns, x, y) -> Mapping[str, str | None]:
        del columns
        reason = sparse_products_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"the left matrix": x.dtype, "the right matrix": y.dtype},
            out_dtype=x.dtype,
            sizes={"rows": x.shape[0], "entries": rows.shape[0], "columns": y.shape[0]},
            columns=1,
        )
        return {"cuda": reason, "xla": None}

    def estimate(self, device, able, rows, columns, x, y) -> Estimate:
        del device, able, rows, columns, x, y
        return Rule(
            ("cuda", "xla"), "CUDA C reads the rows that an entry needs, and XLA copies them"
        )

    def run(self, implementation, device, rows, columns, x, y) -> Results:
        del device
        places = Coordinates(rows, columns, False, False)
        if implementation == "cuda":
            return (sparse_products_cuda.sampled_product(places, x, y),)
        return (sparse_products_xla.sampled_product(places, x, y, out_dtype=x.dtype),)


_LEAST_NUMBERS, _LEAST_UNSORTED = 2**20, 2**24
"""Elements of the sparse matrix, zeros included, from which the kernel is faster than XLA. The
second number is for entries that only the kernel needs sorted, which takes time."""
_WITHOUT_TF32 = 7
"""Factor by which a dense float32 product is slower if it may not use TF32."""
_DENSE = 69
"""Number of elements for each entry at which the sparse kernel takes as long as a dense product; between
76 in 16 bits and 62 in float32 by TF32."""
_COPY = 170
"""Columns of b whose dense product takes as long as the dense copy of the matrix before it."""
