"""Symmetric products of many matrices, the gradient, and the choice of implementation."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch, sharding
from jaxfused.ops.kernel_call import Axes, Results, Runner, takes_reference
from jaxfused.ops.linear import allows_tf32
from jaxfused.reference.product import product
from pallas_kernels.product import symmetric

_FEWEST_ROWS = 512
"""Of a matrix, below which little of it lies on one side of the diagonal's tiles."""


def symmetric_product(
    x: jax.Array,
    y: jax.Array | None = None,
    *,
    matrix: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    is_factor: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    r"""Returns products of matrices that are known to be symmetric, or more of them.

    .. math:: Z = a I + b S + c X Y^T

    Args:
      x: [B, M, K], the matrices X.
      y: [B, M, K] of x's dtype, the matrices Y. Each X Y^T is symmetric, as it is where Y is X, or where
        both are polynomials of one symmetric matrix. None for x.
      matrix: S, [B, M, M] of x's dtype, each of them symmetric. With None the result is X Y^T.
      coefficients: (a, b, c), [3], with `matrix`.
      is_factor: whether the result is for further products alone, so that the kernel may round float32
        to the 10 bits of tf32 that these take.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      [B, M, M] of x's dtype: sums are in float32, and rounded once.
    """
    op = "symmetric_product"
    device = dispatch.current_device(x)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    if not sharding.is_in_one_piece(x):
        missing["pallas"] = "it takes matrices of one device, and x may be spread over several"
    if takes_reference(op, implementation, device, x, missing=missing):
        return _by_reference(x, y, matrix, coefficients)
    if coefficients is not None:
        coefficients = coefficients.astype(jnp.float32)
    return _run(Runner(implementation, device), is_factor, x, y, matrix, coefficients)


def _by_reference(
    x: jax.Array,
    y: jax.Array | None,
    matrix: jax.Array | None,
    coefficients: jax.Array | None,
) -> jax.Array:
    y = x if y is None else y
    result = product("bik,bjk->bij", x, y.conj())
    if matrix is not None:
        assert coefficients is not None
        a, b, c = coefficients.astype(result.dtype)
        result = b * matrix + c * result + a * jnp.eye(x.shape[1], dtype=result.dtype)
    return result.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(run: Runner, is_factor: bool, *operands):
    [result] = run(_Symmetric(is_factor), *operands)
    return result


def _run_fwd(run, is_factor, *operands):
    return _run(run, is_factor, *operands), operands


def _run_bwd(run, is_factor, operands, dy):
    del run, is_factor
    _, pull_back = jax.vjp(_by_reference, *operands)
    return pull_back(dy)


_run.defvjp(_run_fwd, _run_bwd)


@dataclass(frozen=True)
class _Symmetric:
    """(Z [B, M, M],) of x, y [B, M, K], S [B, M, M] and the coefficients [3]; all but x may be None."""

    is_factor: bool

    @property
    def name(self) -> str:
        return "symmetric_product forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("bmk", "bnk", "bmn", "c"), ("bmn",), whole="mnkc")

    def reasons(self, device, x, *others) -> Mapping[str, str | None]:
        del others
        reason = symmetric.why_unsupported(
            compute_capability=device.compute_capability,
            shape=x.shape,
            dtype=x.dtype,
            allows_tf32=allows_tf32(None),
        )
        reasons = {"pallas": reason, "xla": None}
        if x.shape[1] < _FEWEST_ROWS:
            return dispatch.preferring("xla", reasons)
        return reasons

    def configs(self, implementation, device, x, *others) -> Sequence[Hashable]:
        del device, others
        return symmetric.candidates(x.dtype) if implementation == "pallas" else ()

    def run(self, implementation, device, *operands, config: Any = None) -> Results:
        if implementation == "pallas":
            multiprocessors = device.multiprocessors
            run = functools.partial(
                symmetric.symmetric_product,
                is_factor=self.is_factor,
                multiprocessors=multiprocessors,
                config=config,
            )
            return (run(*operands),)
        return (_by_reference(*operands),)

    def batched(self, call, axis_size, in_batched, *operands) -> None:
        """Of a batch of batches the entries run one by one."""
        del call, axis_size, in_batched, operands
