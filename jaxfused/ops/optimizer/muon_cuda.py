"""Muon's momentum of the leaves of a tree, by the kernel of ffi/optimizer/muon.cu."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

_SIDE = 64
"""Number of rows, and of columns, of a kernel's tile."""
MAX_LEAVES = 256
"""Largest number of arrays in one launch."""


def momentum_both_ways(
    scalars: jax.Array,
    gradients: Sequence[jax.Array],
    momenta: Sequence[jax.Array],
    *,
    dtype: Any,
    is_factor: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """Returns the matrices to orthogonalise, their transposes, sums of squares, and the momenta.

    Args:
      scalars: beta, 1 - beta, the factor of the gradients, and the weights of new momentum and gradient
        in the matrix to orthogonalise; float32.
      gradients: arrays [B, M, N] with M <= N, and then ones [B, N, M], of one dtype.
      momenta: as many of the same shapes and one dtype; their buffers become the results'.
      dtype: of the first two results.
      is_factor: True to round float32 to tf32 in them.

    Returns:
      ([matrices, M, N], [matrices, N, M], float32 [matrices], momenta).
    """
    cuda_library.register()
    sides = sorted(gradients[0].shape[1:])
    batches = [g.shape[0] for g in gradients]
    count = sum(batches)
    tiles = count * int(np.prod([-(-side // _SIDE) for side in sides]))
    call = jax.ffi.ffi_call(
        "jaxfused_muon_momentum",
        (
            jax.ShapeDtypeStruct((count, *sides), dtype),
            jax.ShapeDtypeStruct((count, *sides[::-1]), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
            jax.ShapeDtypeStruct((tiles,), jnp.float32),
            *(jax.ShapeDtypeStruct(m.shape, m.dtype) for m in momenta),
        ),
        input_output_aliases={2 + 2 * i: 4 + i for i in range(len(momenta))},
    )
    pairs = zip(gradients, momenta, strict=True)
    wide, tall, squares, _, *new = call(
        scalars,
        *(array for pair in pairs for array in pair),
        batches=np.array(batches, np.int64),
        rows=np.array([g.shape[1] for g in gradients], np.int64),
        rounds=np.bool_(is_factor),
    )
    return wide, tall, squares, new
