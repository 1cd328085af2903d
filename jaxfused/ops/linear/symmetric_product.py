"""Batched symmetric products, and products together with their transposes, with gradients."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear.linear_stages import allows_tf32
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.runner import Axes, Results, Runner
from pallas_kernels.gemm import symmetric

_FEWEST_ROWS = 512
"""Fewest rows M of a product [M, M] for which the kernel runs. A smaller product has few tiles, so
computing only one triangle of them saves little."""


def symmetric_product(
    x: jax.Array,
    y: jax.Array | None = None,
    *,
    matrix: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    scales: jax.Array | None = None,
    is_factor: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    r"""Returns symmetric products of matrices, or a polynomial of them.

    .. math:: Z = a I + b S + c X Y^T

    Args:
      x: [B, M, K], the matrices X.
      y: [B, M, K] of x's dtype, the matrices Y. Each X Y^T is symmetric, as it is where Y is X, or where
        both are polynomials of one symmetric matrix. None for x.
      matrix: S, [B, M, M] of x's dtype, each of them symmetric. With None the result is X Y^T.
      coefficients: (a, b, c), [3], with `matrix`.
      scales: [B], float32, the factor of each X Y^T, only without `matrix`; None for 1.
      is_factor: True if only further products read the result, so that the kernel may round float32 to
        tf32, as these products do.
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
        return _by_reference(x, y, matrix, coefficients, scales)
    if coefficients is not None:
        coefficients = coefficients.astype(jnp.float32)
    return _run(Runner(implementation, device), is_factor, x, y, matrix, coefficients, scales)


def _by_reference(
    x: jax.Array,
    y: jax.Array | None,
    matrix: jax.Array | None,
    coefficients: jax.Array | None,
    scales: jax.Array | None,
) -> jax.Array:
    y = x if y is None else y
    result = product("bik,bjk->bij", x, y.conj())
    if matrix is not None:
        assert coefficients is not None
        a, b, c = coefficients.astype(result.dtype)
        result = b * matrix + c * result + a * jnp.eye(x.shape[1], dtype=result.dtype)
    if scales is not None:
        result = result * scales[:, None, None].astype(result.dtype)
    return result.astype(x.dtype)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="symmetric_product", once=False)
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
    """Computes Z = a I + b S + c x y^T or s x y^T [B, M, M], for coefficients (a, b, c) and scales s.

    x is [B, M, K]. All operands but x may be None.
    """

    is_factor: bool

    @property
    def name(self) -> str:
        return "symmetric_product forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("bmk", "bnk", "bmn", "c", "b"), ("bmn",), whole="mnkc")

    def why_not(self, device, x, *others) -> Mapping[str, str | None]:
        del others
        reason = symmetric.why_unsupported(
            compute_capability=device.compute_capability,
            shape=x.shape,
            dtype=x.dtype,
            allows_tf32=allows_tf32(None),
        )
        return {"pallas": reason, "xla": None}

    def estimate(self, device, able, x, *others) -> Estimate:
        del device, able, others
        small = x.shape[1] < _FEWEST_ROWS
        return Rule(("xla",), f"the matrices have less than {_FEWEST_ROWS} rows") if small else None

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
        """Returns None: under `jax.vmap`, the entries of the outer batch run one by one."""
        del call, axis_size, in_batched, operands


def why_not_both_ways(device: dispatch.Device, shape: Sequence[int], dtype: Any) -> str | None:
    """Returns None if kernels can compute products [B, M, N] and their transposes, else the reason."""
    batch, rows, columns = shape
    for side, length in ((rows, columns), (columns, rows)):
        reason = symmetric.why_unsupported(
            compute_capability=device.compute_capability,
            shape=(batch, side, length),
            dtype=dtype,
            allows_tf32=allows_tf32(None),
        )
        if reason is not None:
            return reason
    if rows < _FEWEST_ROWS:
        return f"matrices of {rows} rows are too small for it"
    return None


def product_both_ways(
    x: jax.Array,
    y: jax.Array,
    *,
    scales: jax.Array | None = None,
    first_turned: int | None = None,
    is_factor: bool = False,
) -> tuple[jax.Array, jax.Array]:
    r"""Returns products of matrices and their transposes.

    .. math:: Z = s X Y^T, \quad Z^T

    Args:
      x: [B, M, K], the matrices X, for which `why_not_both_ways` returns None.
      y: [B, N, K] of x's dtype, the matrices Y.
      scales: s, float32 [B]; None for 1.
      first_turned: index in B from which only Z^T is computed; before it, only Z is. The other results
        are undefined. None to compute both for all matrices.
      is_factor: as in `symmetric_product`.

    Returns:
      [B, M, N] and [B, N, M] of x's dtype: sums are in float32, and rounded once.
    """
    run = Runner(None, dispatch.current_device(x))
    return _run_both_ways(run, first_turned, is_factor, x, y, scales)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="symmetric_product", once=False)
def _run_both_ways(run: Runner, first_turned: int | None, is_factor: bool, *operands):
    result, turned = run(_BothWays(first_turned, is_factor), *operands)
    return result, turned


def _both_ways_fwd(run, first_turned, is_factor, *operands):
    return _run_both_ways(run, first_turned, is_factor, *operands), operands


def _both_ways_bwd(run, first_turned, is_factor, operands, cotangents):
    del run, is_factor
    of_result, of_turned = cotangents
    if first_turned is not None:
        written = jnp.arange(len(of_result))[:, None, None] < first_turned
        of_result, of_turned = (
            jnp.where(written, of_result, 0).astype(of_result.dtype),
            jnp.where(written, 0, of_turned).astype(of_turned.dtype),
        )
    _, pull_back = jax.vjp(_both_ways_by_reference, *operands)
    return pull_back((of_result, of_turned))


_run_both_ways.defvjp(_both_ways_fwd, _both_ways_bwd)


def _both_ways_by_reference(
    x: jax.Array, y: jax.Array, scales: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    result = product("bmk,bnk->bmn", x, y)
    if scales is not None:
        result = result * scales[:, None, None]
    result = result.astype(x.dtype)
    return result, result.mT


@dataclass(frozen=True)
class _BothWays:
    """Computes (Z [B, M, N], Z^T [B, N, M]) from x [B, M, K], y [B, N, K] and scales [B] or None."""

    first_turned: int | None
    is_factor: bool

    @property
    def name(self) -> str:
        return "product_both_ways forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(("bmk", "bnk", "b"), ("bmn", "bnm"), whole="bmnk")

    def why_not(self, device, x, y, *others) -> Mapping[str, str | None]:
        del others
        shape = (x.shape[0], x.shape[1], y.shape[1])
        return {"pallas": why_not_both_ways(device, shape, x.dtype), "xla": None}

    def configs(self, implementation, device, x, *others) -> Sequence[Hashable]:
        del device, others
        return symmetric.product_candidates(x.dtype) if implementation == "pallas" else ()

    def run(self, implementation, device, *operands, config: Any = None) -> Results:
        if implementation == "pallas":
            return symmetric.product_both_ways(
                *operands,
                first_turned=self.first_turned,
                is_factor=self.is_factor,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return _both_ways_by_reference(*operands)

    def batched(self, call, axis_size, in_batched, *operands) -> None:
        """Returns None: under `jax.vmap`, the entries of the outer batch run one by one."""
        del call, axis_size, in_batched, operands
