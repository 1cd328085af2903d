"""Newton-Schulz iterations: many matrices at once, each brought close to an orthogonal one.

The products of a single matrix are too small for a GPU, and a model has many matrices of few shapes. So
matrices of one shape, or of one shape and its transpose, are one batch of products here.

Two of the three products of an iteration are symmetric. Their kernel multiplies the tiles on one side
of the diagonal, and makes the polynomial of a Gram matrix in the pass that squares it. The third is
with the matrices themselves, which are larger than their Gram matrices: wide ones are multiplied once
for several iterations.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.symmetric_product import symmetric_product
from jaxfused.reference.product import product
from jaxfused.reference.promotion import accumulator_dtype

PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
_LEAST_SCALE = 1e-8
"""Below it Optax does not scale by Gram matrices, whatever `eps` is."""
_MOST_ELEMENTS = 2**27
"""Of a batch. Larger ones make no GPU any fuller, but take memory for their copies."""
_MOST_AT_ONCE = 3
"""Iterations between two products with matrices that are at least twice as wide as they are high. Small
singular values grow up to 40-fold in three; in five, rounding turns them around."""

_product = functools.partial(symmetric_product, is_factor=True)


def orthogonalize(
    matrices: Sequence[jax.Array],
    coefficients: Sequence[Sequence[Any]],
    *,
    preconditioning: str,
    eps: Any,
    dtype: Any = None,
) -> list[jax.Array]:
    r"""Returns arrays [B, M, N] after the iterations, all matrices of each for themselves.

    .. math::
        X \leftarrow a X + b (X X^T) X + c (X X^T)^2 X
        = (a I + b G + c G^2) X, \quad G = X X^T

    Args:
      matrices: arrays of any numbers and sizes of matrices.
      coefficients: (a, b, c) of each iteration.
      preconditioning: what is divided first, and by what: with "frobenius" or "spectral" a matrix by
        this norm, with "aol" a row by the root of the sum of magnitudes in its row of G, with
        "schatten" a matrix by the root of G's norm.
      eps: is added to the norm.
      dtype: of what is multiplied; sums are in float32. None for the dtype of the matrices.
    """
    results: list[jax.Array | None] = [None] * len(matrices)
    for batch in _batches(matrices):
        upright = [_wide(matrices[i]) for i in batch]
        joined = upright[0] if len(upright) == 1 else jnp.concatenate(upright)
        joined = _iterate(joined, coefficients, preconditioning, eps, dtype)
        first = 0
        for i in batch:
            count, rows, columns = matrices[i].shape
            part = joined[first : first + count]
            results[i] = part if rows <= columns else part.mT
            first += count
    return [result for result in results if result is not None]


def _batches(matrices: Sequence[jax.Array]) -> list[list[int]]:
    """Returns which arrays are computed together."""
    batches: dict[Hashable, list[list[int]]] = {}
    for i, x in enumerate(matrices):
        # Arrays that are split over devices in different ways are not brought together.
        kind = (_wide(x).shape[1:], x.dtype, str(jax.typeof(x).sharding))
        of_kind = batches.setdefault(kind, [[]])
        if of_kind[-1] and sum(matrices[j].size for j in of_kind[-1]) + x.size > _MOST_ELEMENTS:
            of_kind.append([])
        of_kind[-1].append(i)
    return [batch for of_kind in batches.values() for batch in of_kind]


def _wide(x: jax.Array) -> jax.Array:
    """Returns matrices of at least as many columns as rows: their Gram matrices are the smaller ones."""
    return x if x.shape[1] <= x.shape[2] else x.mT


def _iterate(
    x: jax.Array,
    coefficients: Sequence[Sequence[Any]],
    preconditioning: str,
    eps: Any,
    dtype: Any,
) -> jax.Array:
    out_dtype = x.dtype
    dtype = out_dtype if dtype is None else dtype
    x = x.astype(accumulator_dtype(out_dtype))
    if preconditioning in ("frobenius", "spectral"):
        order: Any = "fro" if preconditioning == "frobenius" else 2
        x = x / (jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True) + eps)
        preconditioning = ""
    x = x.astype(dtype)
    size = _MOST_AT_ONCE if x.shape[2] >= 2 * x.shape[1] else 1
    for first in range(0, len(coefficients), size):
        x = _iterations(x, coefficients[first : first + size], preconditioning)
        preconditioning = ""
    return x.astype(out_dtype)


def _iterations(
    x: jax.Array, coefficients: Sequence[Sequence[Any]], preconditioning: str
) -> jax.Array:
    """Some iterations at once.

    With P the polynomial of an iteration, the next Gram matrix is P G P, and all of these commute and
    are symmetric: only the product of the polynomials is multiplied by x.
    """
    gram = _product(x)
    if preconditioning:
        wide = gram.astype(accumulator_dtype(gram.dtype))
        scale = _scale(wide, preconditioning)
        x, gram = (x * scale).astype(x.dtype), (wide * scale * scale.mT).astype(x.dtype)
    polynomial = _polynomial(gram, coefficients[0])
    total = polynomial
    for abc in coefficients[1:]:
        gram = _product(_product(polynomial, gram), polynomial)
        polynomial = _polynomial(gram, abc)
        total = _product(polynomial, total)
    return product("bij,bjk->bik", total, x, out_dtype=x.dtype)


def _polynomial(gram: jax.Array, abc: Sequence[Any]) -> jax.Array:
    """What an iteration multiplies by: a I + b G + c G^2.

    With a on the diagonal, that product needs no sum with x, which would be one more pass.
    """
    coefficients = jnp.stack([jnp.asarray(value) for value in abc])
    return _product(gram, matrix=gram, coefficients=coefficients)


def _scale(gram: jax.Array, preconditioning: str) -> jax.Array:
    """What the rows of matrices are multiplied by, from their Gram matrices."""
    if preconditioning == "aol":
        size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    else:
        size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    return jax.lax.rsqrt(jnp.maximum(size, _LEAST_SCALE))
