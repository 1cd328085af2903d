"""Newton-Schulz iterations: many matrices at once, each brought close to an orthogonal one.

The products of a single matrix are too small for a GPU, and a model has many matrices of few shapes.
Matrices of one shape, or of one shape and its transpose, are therefore one batch of products here.

Two of the three products of an iteration are symmetric. Their kernel multiplies the tiles on one side
of the diagonal, and computes the polynomial of a Gram matrix in the pass that squares it. The third
multiplies the matrices themselves, which are larger than their Gram matrices: wide matrices are
multiplied once for several iterations.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.linear.symmetric_product import product_both_ways, symmetric_product
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype

PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
_LEAST_SCALE = 1e-8
"""Least norm or row sum of a Gram matrix; matrices are divided by its root. It is Optax's constant."""
_MOST_ELEMENTS = 2**28
"""Largest number of elements of a batch of matrices. A larger batch would not fill a GPU better, but
its concatenation takes more memory."""
_MOST_AT_ONCE = 3
"""Most iterations that share one product with the matrices [B, M, N], if N is at least 2 M. Three
iterations multiply small singular values by up to 40; with five, rounding can change their sign."""

_product = functools.partial(symmetric_product, is_factor=True)


def rows(coefficients: Any, steps: int) -> list[Any]:
    """Returns (a, b, c) of each iteration, from one triple for all or from an array of triples."""
    if coefficients.ndim == 1:
        return [coefficients] * int(steps)
    return list(coefficients[: int(steps)])


def orthogonalize(
    matrices: Sequence[jax.Array],
    coefficients: jax.Array,
    steps: Any,
    *,
    preconditioning: str,
    eps: Any,
    clamps_norm: bool = False,
    dtype: Any = None,
) -> list[jax.Array]:
    r"""Returns arrays of matrices [B, M, N] after the iterations.

    .. math::
        X \leftarrow a X + b (X X^T) X + c (X X^T)^2 X
        = (a I + b G + c G^2) X, \quad G = X X^T

    Args:
      matrices: arrays of any numbers and sizes of matrices.
      coefficients: (a, b, c), [3], or those of each iteration, [steps, 3].
      steps: the number of iterations, which may be traced.
      preconditioning: the first scaling: "frobenius" and "spectral" divide a matrix by this norm, "aol"
        a row by the root of the sum of magnitudes in its row of G, "schatten" a matrix by the root of
        G's norm.
      eps: is added to the norm.
      clamps_norm: take the norm as at least `eps` instead.
      dtype: dtype of the products' operands; sums are in float32. None for the dtype of the matrices.
    """
    results: list[jax.Array | None] = [None] * len(matrices)
    for batch in batches(matrices):
        upright = [_wide(matrices[i]) for i in batch]
        joined = upright[0] if len(upright) == 1 else jnp.concatenate(upright)
        joined = _iterate(joined, coefficients, steps, preconditioning, eps, clamps_norm, dtype)
        first = 0
        for i in batch:
            count, rows, columns = matrices[i].shape
            part = joined[first : first + count]
            results[i] = part if rows <= columns else part.mT
            first += count
    return [result for result in results if result is not None]


def batches(matrices: Sequence[jax.Array]) -> list[list[int]]:
    """Returns lists of indices of the arrays of matrices that are concatenated into one batch."""
    kinds: dict[Hashable, list[int]] = {}
    for i, x in enumerate(matrices):
        # Arrays with different shardings are not concatenated.
        upright = _wide(x)
        kind = (upright.shape[1:], x.dtype, str(jax.typeof(upright).sharding))
        kinds.setdefault(kind, []).append(i)
    return [batch for of_kind in kinds.values() for batch in _parts(matrices, of_kind)]


def _parts(matrices: Sequence[jax.Array], indices: Sequence[int]) -> list[list[int]]:
    """Splits `indices` into the fewest lists of at most _MOST_ELEMENTS, of about equal size."""
    total = sum(matrices[i].size for i in indices)
    count = max(1, -(-total // _MOST_ELEMENTS))
    parts: list[list[int]] = [[]]
    taken = 0
    for i in indices:
        taken += matrices[i].size
        if parts[-1] and taken * count > len(parts) * total:
            parts.append([])
        parts[-1].append(i)
    return parts


def _wide(x: jax.Array) -> jax.Array:
    """Returns tall matrices [B, M, N], M > N, transposed: wide ones have smaller Gram matrices."""
    return x if x.shape[1] <= x.shape[2] else x.mT


def _iterate(
    x: jax.Array,
    coefficients: jax.Array,
    steps: Any,
    preconditioning: str,
    eps: Any,
    clamps_norm: bool,
    dtype: Any,
) -> jax.Array:
    out_dtype = x.dtype
    dtype = out_dtype if dtype is None else dtype
    x = x.astype(accumulator_dtype(out_dtype))
    if preconditioning in ("frobenius", "spectral"):
        order: Any = "fro" if preconditioning == "frobenius" else 2
        norm = jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True)
        x = x / _divisor(norm, eps, clamps_norm)
        preconditioning = ""
    x = x.astype(dtype)
    if isinstance(steps, jax.core.Tracer):
        return _counted(x, coefficients, steps, preconditioning).astype(out_dtype)
    every, size = rows(coefficients, steps), _at_once(x)
    for first in range(0, len(every), size):
        x = _iterations(x, every[first : first + size], preconditioning)
        preconditioning = ""
    return x.astype(out_dtype)


def _counted(x: jax.Array, coefficients: jax.Array, steps: Any, preconditioning: str) -> jax.Array:
    """Runs a traced number `steps` of iterations on x [B, M, N], each with its own product with x."""
    if coefficients.ndim == 1:
        coefficients = coefficients[None]
    first = jnp.where(steps > 0, _iterations(x, [coefficients[0]], preconditioning), x)

    def iteration(index: jax.Array, x: jax.Array) -> jax.Array:
        abc = coefficients[jnp.minimum(index, len(coefficients) - 1)]
        return _iterations(x, [abc], "")

    return jax.lax.fori_loop(1, jnp.asarray(steps, jnp.int32), iteration, first)


def _divisor(norm: jax.Array, eps: Any, clamps_norm: bool) -> jax.Array:
    return jnp.maximum(norm, eps) if clamps_norm else norm + eps


def orthogonalize_both_ways(
    wide: jax.Array,
    tall: jax.Array,
    squares: jax.Array,
    coefficients: Sequence[Any],
    *,
    first_tall: int,
    eps: Any,
    clamps_norm: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns matrices [B, M, N] and their transposes after the iterations, by GPU kernels.

    Products in tf32 sum along the last axes of both operands. A Gram matrix reads the wide matrices in
    this way, and the product with the polynomial reads the tall ones. The last product writes the
    matrices both ways, so that no separate pass transposes them, not even for the tall leaves.

    Args:
      wide: [B, M, N] with M <= N, which kernels take according to `why_not_both_ways`.
      tall: [B, N, M], the transpose of `wide`.
      squares: [B], float32, each matrix's sum of squares.
      coefficients: (a, b, c) of each iteration.
      first_tall: the number of the first matrix that the caller reads from the second result; it reads
        the matrices before it from the first.
      eps: is added to the norm that a matrix is divided by.
      clamps_norm: take the norm as at least `eps` instead.
    """
    size = _at_once(wide)
    scale = 1 / _divisor(jnp.sqrt(squares), eps, clamps_norm)
    # No separate pass scales a matrix: the epilogues of its Gram matrix and of its product with the
    # polynomials multiply by the matrix's scale.
    gram = _product(wide, scales=scale**2)
    last = len(coefficients) - size
    for first in range(0, len(coefficients), size):
        if first:
            gram = _product(wide)
        total = _total(gram, coefficients[first : first + size])
        wide, tall = product_both_ways(
            total,
            tall,
            scales=None if first else scale,
            first_turned=first_tall if first >= last else None,
            is_factor=first < last,
        )
    return wide, tall


def _at_once(x: jax.Array) -> int:
    """Returns the number of iterations that share one product with x [B, M, N]."""
    return _MOST_AT_ONCE if x.shape[2] >= 2 * x.shape[1] else 1


def _iterations(x: jax.Array, coefficients: Sequence[Any], preconditioning: str) -> jax.Array:
    """Runs iterations on x [B, M, N] that share one product with x.

    Unless `preconditioning` is "", x is first scaled by `_scale`.
    """
    gram = _product(x)
    if preconditioning:
        wide = gram.astype(accumulator_dtype(gram.dtype))
        scale = _scale(wide, preconditioning)
        x, gram = (x * scale).astype(x.dtype), (wide * scale * scale.mT).astype(x.dtype)
    return product("bij,bjk->bik", _total(gram, coefficients), x, out_dtype=x.dtype)


def _total(gram: jax.Array, coefficients: Sequence[Any]) -> jax.Array:
    """Returns [B, M, M], the product of the polynomials of some iterations at a Gram matrix G [B, M, M].

    With P the polynomial of an iteration, the next Gram matrix is P G P. All of these are symmetric and
    commute, so that x is multiplied once, by the product of the polynomials.
    """
    polynomial = _polynomial(gram, coefficients[0])
    total = polynomial
    for abc in coefficients[1:]:
        gram = _product(_product(polynomial, gram), polynomial)
        polynomial = _polynomial(gram, abc)
        total = _product(polynomial, total)
    return total


def _polynomial(gram: jax.Array, abc: Sequence[Any]) -> jax.Array:
    """Returns an iteration's polynomial a I + b G + c G^2, [B, M, M], of a Gram matrix G.

    Its diagonal includes a, so its product with x needs no separate addition of a x.
    """
    coefficients = jnp.stack([jnp.asarray(value) for value in abc])
    return _product(gram, matrix=gram, coefficients=coefficients)


def _scale(gram: jax.Array, preconditioning: str) -> jax.Array:
    """Returns factors of the rows of matrices [B, M, N] from their Gram matrices [B, M, M].

    "aol" has one factor for each row, [B, M, 1]; otherwise a matrix has one, [B, 1, 1].
    """
    if preconditioning == "aol":
        size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    else:
        size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    return jax.lax.rsqrt(jnp.maximum(size, _LEAST_SCALE))
