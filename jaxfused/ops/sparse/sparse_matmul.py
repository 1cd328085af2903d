"""sparse_matmul and sampled_matmul: products with JAX's sparse matrices, and parts of products."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.sparse import sparse_products, sparse_products_xla
from jaxfused.ops.sparse.coordinates import (
    Container,
    Coordinates,
    SparseMatrix,
    check_dense,
    check_sparse,
    coordinates,
)
from jaxfused.ops.sparse.sparse_products import Options
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.promotion import common_dtype
from jaxfused.runtime.runner import Runner


@python_numbers
def sparse_matmul(
    a: SparseMatrix,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A sparse matrix times a dense one.

    .. math::
        y_i = \sum_{e \,:\, \text{row}_e = i} \text{data}_e \, b_{\text{column}_e}

    Entries are read as JAX reads them: those of one row and column add up, their order does not matter,
    and one whose row or column is beyond the matrix, as in padding, is ignored. Negative indices count
    from the end (unless `indices_sorted`, where negative rows are ignored). Only entries are
    multiplied, so that NaN and infinity in row k of b reach only results with an entry in column k of
    a. Sums are in float32 (float64 for float64) and rounded once, also in bfloat16 and float16.

    The gradient of the entries, in `a.data`, is a sampled product, that of b a product with the
    transpose, for which the entries are sorted. Differentiate by `jax.experimental.sparse.grad`, or by
    the data. For denser matrices on a GPU, XLA's faster dense product runs,
    which multiplies by the zeros too. Results repeat bit for bit, except with implementation "xla" on a
    GPU, whose scatters have no order.
    `jax.linear_transpose`, which `gmres` and `bicgstab` of `jax.scipy.sparse.linalg` call, needs
    `a @ b` in place of it; `cg` does not.

    Args:
      a: a BCOO or BCSR of `jax.experimental.sparse`, [M, K], float32, bfloat16 or float16 (float64 with
        implementation "xla"), without batch axes. Without `indices_sorted` a BCOO is sorted first.
      b: [K, N], or [K].
      transpose_a: whether a is [K, M].
      precision: of the product where it runs as a dense one, as in `jax.lax.dot`.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      y, [M, N] or [M], of the operands' common dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> from jax.experimental.sparse import BCOO
      >>> a = BCOO.fromdense(jnp.array([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
      >>> jaxfused.sparse_matmul(a, jnp.array([1.0, 10.0, 100.0]))
      Array([ 20., 301.], dtype=float32)

    Source: Yang, Buluç, Owens, "Design Principles for Sparse Matrix Multiplication on the GPU", 2018,
    https://arxiv.org/abs/1803.08601
    """
    op = "sparse_matmul"
    check_sparse(op, "a", a)
    check_dense(op, "b", b)
    [b] = as_arrays(b)
    check_floating(op, dict(a=a.data, b=b))
    rows, depth = a.shape[::-1] if transpose_a else a.shape
    if b.ndim not in (1, 2) or b.shape[0] != depth:
        raise ValueError(
            f"{op}: b has shape {b.shape}, but a has {depth} {'rows' if transpose_a else 'columns'};"
            f" pass b of shape ({depth}, columns)."
        )
    places = coordinates(a)
    if transpose_a:
        places = places.transposed
    columns = b[:, None] if b.ndim == 1 else b
    y = _sparse_matmul(op, a.data, places, columns, rows, precision, implementation)
    return y[:, 0] if b.ndim == 1 else y


def _sparse_matmul(
    op: str,
    data: jax.Array,
    places: Coordinates,
    b: jax.Array,
    rows: int,
    precision: Any,
    implementation: str | None,
) -> jax.Array:
    dtype = common_dtype(data.dtype, b.dtype)
    if 0 in (rows, *data.shape, *b.shape):
        return jnp.zeros((rows, b.shape[1]), dtype)
    data, b = data.astype(dtype), b.astype(dtype)
    operands = (data, places.rows, places.columns, places.starts, places.indices, b)
    device = dispatch.current_device(b)
    missing = {"pallas": f"there is no Pallas kernel of {op} yet"}
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, b, data, missing=missing):
        # JAX's sparse product has no or a wrong gradient where Manual axes split an operand (0.11.2).
        is_split = sharding.is_explicit(b, data) or sharding.varying(data, places.columns, b)
        if (implementation == "xla" or device.platform != "gpu") and not is_split:
            y = sparse_products_xla.sparse_product(data, places, b, rows=rows, out_dtype=dtype)
            return named(y, op, "output")
        run = Runner("xla", device)
    options = Options(op, rows, places.in_order, places.is_unique, precision)
    aligned = sharding.align(operands, operand_axes=("e", "e", "e", "s", "ep", "kn"), whole="ekps")
    return sparse_products.sparse_product(run, options, *aligned)


@python_numbers
def sampled_matmul(
    x: jax.Array,
    y: jax.Array,
    pattern: SparseMatrix,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Any:
    r"""The elements of a dense product at the entries of a sparse matrix; no others are computed.

    .. math:: \text{data}_e = x_{\text{row}_e} \cdot y_{:, \text{column}_e}

    Entries are read as by `sparse_matmul`; those with the same row and column each get the element, and
    those beyond the matrix are 0. The values of `pattern` are not read. Sums are in float32 (float64
    for float64) and rounded once. Gradients are products with the sparse matrix of the cotangents.

    Args:
      x: [M, K], float32, bfloat16 or float16 (float64 with implementation "xla").
      y: [K, N].
      pattern: a BCOO or BCSR of `jax.experimental.sparse`, [M, N], without batch axes.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      A BCOO or BCSR like the pattern, with these numbers, of the operands' common dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> from jax.experimental.sparse import BCOO
      >>> pattern = BCOO.fromdense(jnp.eye(2, 3))
      >>> x, y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones((2, 3))
      >>> jaxfused.sampled_matmul(x, y, pattern).todense()
      Array([[3., 0., 0.],
             [0., 7., 0.]], dtype=float32)

    Source: Nisa et al., "Sampled Dense Matrix Multiplication for High-Performance Machine Learning",
    2018, https://doi.org/10.1109/HiPC.2018.00013
    """
    op = "sampled_matmul"
    check_sparse(op, "pattern", pattern)
    for name, factor in (("x", x), ("y", y)):
        check_dense(op, name, factor)
    x, y = as_arrays(x, y)
    check_floating(op, dict(x=x, y=y))
    if x.ndim != 2 or x.shape[0] != pattern.shape[0]:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but pattern has shape {pattern.shape}; pass x of shape"
            f" ({pattern.shape[0]}, features)."
        )
    if y.shape != (x.shape[1], pattern.shape[1]):
        raise ValueError(
            f"{op}: y has shape {y.shape}, but x has shape {x.shape} and pattern {pattern.shape}; pass y"
            f" of shape ({x.shape[1]}, {pattern.shape[1]})."
        )
    dtype = common_dtype(x.dtype, y.dtype)
    container, places = Container(pattern), coordinates(pattern)
    count = places.rows.shape[0]
    if 0 in (count, *x.shape, *y.shape):
        return container.with_data(jnp.zeros(count, dtype))
    x, y = x.astype(dtype), y.astype(dtype).T
    device = dispatch.current_device(x)
    missing = {"pallas": f"there is no Pallas kernel of {op} yet"}
    run = Runner(implementation, device)
    if takes_reference(op, implementation, device, x, y, missing=missing):
        if (implementation == "xla" or device.platform != "gpu") and not sharding.is_explicit(x, y):
            data = sparse_products_xla.sampled_product(places, x, y, out_dtype=dtype)
            return container.with_data(named(data, op, "output"))
        run = Runner("xla", device)
    options = Options(op, x.shape[0], places.in_order, places.is_unique, jax.lax.Precision.HIGHEST)
    operands = (places.rows, places.columns, x, y)
    aligned = sharding.align(operands, operand_axes=("e", "e", "md", "nd"), whole="emnd")
    return container.with_data(sparse_products.sampled_product(run, options, *aligned))
