"""Muon's momentum of matrices of one shape: one kernel writes the matrices and their transposes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.optimizer import muon_cuda as kernel
from jaxfused.runtime import cuda_library, sharding
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.reference_rules import with_reference_rules


def why_unsupported(
    device: dispatch.Device, matrices: Sequence[jax.Array], momenta: Sequence[jax.Array]
) -> str | None:
    """Returns None if the kernel takes gradients [B, M, N] or [B, N, M] and momenta, else the reason."""
    reason = cuda_library.why_unfit(device.compute_capability)
    if not sharding.is_in_one_piece(*matrices, *momenta):
        reason = reason or "its matrices may be spread over several devices"
    for matrix in matrices:
        reason = reason or cuda_library.why_dtype_unfit(matrix.dtype, "a matrix has")
        if matrix.shape[1] % 4 or matrix.shape[2] % 4:
            reason = reason or f"it takes sides of multiples of 4, and not {matrix.shape[1:]}"
    if len(matrices) > kernel.MAX_LEAVES:
        reason = reason or f"it takes {kernel.MAX_LEAVES} arrays, and not {len(matrices)}"
    return reason or cuda_library.why_unavailable()


def momentum_both_ways(
    gradients: Sequence[jax.Array],
    momenta: Sequence[jax.Array],
    *,
    beta: Any,
    factor: Any,
    of_momentum: Any,
    of_gradient: Any,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    r"""Returns the matrices to orthogonalise, their transposes, sums of squares, and the new momenta.

    .. math::
        m &\leftarrow \beta m + (1 - \beta) f g \\
        x &= c_m m + c_g f g

    Args:
      gradients: g, arrays [B, M, N] with M <= N and then ones [B, N, M], of one dtype.
      momenta: m, as many of the same shapes and one dtype.
      beta: the decay.
      factor: f.
      of_momentum: c_m.
      of_gradient: c_g.
      dtype: of x.

    Returns:
      (x [matrices, M, N], its transposes, float32 [matrices], the new m).
    """
    scalars = jnp.stack(
        [
            jnp.asarray(value, jnp.float32).reshape(())
            for value in (beta, 1 - beta, factor, of_momentum, of_gradient)
        ]
    )
    names = sharding.varying(*gradients, *momenta)
    scalars, *arrays = sharding.vary([scalars, *gradients, *momenta], names)
    call = _Call(len(gradients), jnp.dtype(dtype))
    results = with_reference_rules(call.by_kernel, call.by_reference)(scalars, *arrays)
    wide, tall, squares, *new = sharding.vary(results, names)
    return wide, tall, squares, new


@dataclass(frozen=True)
class _Call:
    """Static arguments of `momentum_both_ways`."""

    count: int
    """Number of gradients, which come first, and of momenta."""
    dtype: Any

    def by_kernel(self, scalars: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        wide, tall, squares, new = kernel.momentum_both_ways(
            scalars,
            arrays[: self.count],
            arrays[self.count :],
            dtype=self.dtype,
            is_factor=True,
        )
        return wide, tall, squares, *new

    def by_reference(self, scalars: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        beta, rest, factor, of_momentum, of_gradient = scalars
        new, wide = [], []
        for g, m in zip(arrays[: self.count], arrays[self.count :], strict=True):
            g = factor * g.astype(accumulator_dtype(g.dtype))
            moved = beta * m + rest * g
            x = of_momentum * moved + of_gradient * g
            wide.append(x if x.shape[1] <= x.shape[2] else x.mT)
            new.append(moved.astype(m.dtype))
        joined = jnp.concatenate(wide)
        squares = jnp.sum(jnp.square(joined), (1, 2))
        joined = joined.astype(self.dtype)
        return joined, joined.mT, squares, *new
