"""The step of an optimizer over all leaves of a tree, by the kernels of optimizer_step.cu."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

LEAVES_A_CALL = 32
"""Largest number of leaves in one launch. A launch could take all leaves of a large tree, but XLA's
search for copies between operands and results that share a buffer takes time that grows faster than
their number: with 256 leaves a call, ViT-L/16's step compiles for minutes."""
_WARPS = 8
_TILE = 1024
"""Number of values in a tile if each thread updates one vector of 4; twice that for two vectors."""


class Leaf(NamedTuple):
    """Arrays of one leaf, all of one shape but the scales; absent ones are None."""

    gradient: jax.Array | None
    parameter: jax.Array
    first_moment: jax.Array | None = None
    second_moment: jax.Array | None = None
    average: jax.Array | None = None
    copy: jax.Array | None = None
    first_scale: jax.Array | None = None
    """Scales of the blocks of an int8 first moment; the second moment is then uint8."""
    second_scale: jax.Array | None = None


class Scalars(NamedTuple):
    """Scalars that a step reads from device memory, in the kernel's order; unused ones are 0."""

    learning_rate: Any = 0.0
    weight_decay: Any = 0.0
    b1: Any = 0.0
    one_minus_b1: Any = 0.0
    b2: Any = 0.0
    one_minus_b2: Any = 0.0
    eps: Any = 0.0
    eps_root: Any = 0.0
    moment_weight: Any = 0.0
    inverse_bias2: Any = 0.0
    gradient_weight: Any = 0.0
    max_norm: Any = 0.0
    inverse_loss_scale: Any = 1.0
    average_decay: Any = 0.0
    one_minus_average_decay: Any = 0.0
    unused: Any = 0.0

    def stacked(self) -> jax.Array:
        """Returns the float32 vector that the kernels read."""
        return jnp.stack([jnp.asarray(value, jnp.float32).reshape(()) for value in self])


_WRITTEN = {
    "lamb_moments": ("first_moment", "second_moment"),
    "lamb_write": ("parameter", "average", "copy"),
    "lamb_norms": (),
}
_TAKING_NORMS = ("lamb_moments", "lamb_norms")
_ALL_WRITTEN = tuple(field for field in Leaf._fields if field != "gradient")
RANDOM_WORDS = 16
"""Number of uint32 in a leaf's row of `random`: LeafRandom in ffi/common/stochastic_rounding.cuh."""
BLOCK = 256
"""Values of an 8-bit moment that share a scale."""


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, dtypes: Sequence[Any]
) -> str | None:
    """Returns None if a tree with arrays of these dtypes can be updated, else the reason."""
    reason = cuda_library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    for dtype in dtypes:
        if reason := cuda_library.why_dtype_unfit(dtype, "an array of the tree has"):
            return reason
    return cuda_library.why_unavailable()


def _vectors(leaf: Leaf) -> int:
    """Returns how many vectors a thread updates per tile: two if elements have few bytes, else one."""
    read = sum(array.dtype.itemsize for array in leaf[:5] if array is not None)
    # With two vectors of 4 per thread, a warp holds all 256 values of an 8-bit moment's block.
    return 1 if read >= 12 and leaf.first_scale is None else 2


def _bits(streams: Sequence[str]) -> np.int32:
    return np.int32(sum(1 << Leaf._fields.index(name) for name in streams))


def _is_bfloat16(array: jax.Array | None) -> bool:
    return array is not None and array.dtype == jnp.bfloat16


def step(
    rule: str,
    scalars: jax.Array,
    stats: jax.Array | None,
    leaves: Sequence[Leaf],
    decays: Sequence[bool],
    *,
    clips: bool,
    skips_nonfinite: bool,
    nesterov: bool,
    norms: jax.Array | None = None,
    random: jax.Array | None = None,
    rounded: Sequence[str] = (),
) -> tuple[list[Leaf], jax.Array | None]:
    """Returns the leaves after the step, in the buffers of the leaves before it.

    Args:
      rule: "adam", "adam_8bit", "lion", "sgd", or one of LAMB's two passes. The first returns the
        squared norms of each leaf's parameter and direction, and the second reads them. With moments in
        float32 they are "lamb_moments", which updates the moments, and "lamb_write", which reads these
        instead of the gradient. With narrower moments they are "lamb_norms", which writes nothing, and
        "lamb_whole", because the direction of rounded moments would have another norm.
      scalars: `Scalars.stacked`.
      stats: from `gradient_norm.sum_of_squares`, if the step clips or skips.
      leaves: leaves that have the same arrays, in the same dtypes.
      decays: for each leaf, whether weight decay applies.
      clips: scale gradients down to the global norm `max_norm`.
      skips_nonfinite: change nothing if a gradient is not finite.
      nesterov: use Nesterov momentum.
      norms: [leaves, 2], which LAMB's second pass reads.
      random: uint32 [leaves, RANDOM_WORDS], which random rounding and "adam_8bit" read.
      rounded: the arrays of a leaf that are rounded at random if they are in bfloat16.

    Returns:
      (leaves, norms), where norms are None but for LAMB's first pass.
    """
    cuda_library.register()
    streams = [
        name for name, array in zip(Leaf._fields, leaves[0], strict=True) if array is not None
    ]
    written = [name for name in _WRITTEN.get(rule, _ALL_WRITTEN) if name in streams]
    vectors = _vectors(leaves[0])
    tile = _TILE * vectors
    new_leaves: list[Leaf] = []
    new_norms = []
    for first in range(0, len(leaves), LEAVES_A_CALL):
        part = slice(first, first + LEAVES_A_CALL)
        operands = [getattr(leaf, name) for leaf in leaves[part] for name in streams]
        results = [getattr(leaf, name) for leaf in leaves[part] for name in written]
        places = [
            4 + i * len(streams) + streams.index(name)
            for i in range(len(leaves[part]))
            for name in written
        ]
        tiles = sum(-(-leaf.parameter.size // tile) for leaf in leaves[part])
        is_first_pass = rule in _TAKING_NORMS
        call = jax.ffi.ffi_call(
            "jaxfused_optimizer_step",
            (
                jax.ShapeDtypeStruct((tiles, _WARPS, 2) if is_first_pass else (0,), jnp.float32),
                jax.ShapeDtypeStruct(
                    (len(leaves[part]), 2) if is_first_pass else (0,), jnp.float32
                ),
                *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in results),
            ),
            input_output_aliases={place: 2 + i for i, place in enumerate(places)},
        )
        absent = jnp.zeros_like(scalars, shape=(0,))
        _, norms_of_part, *arrays = call(
            scalars,
            absent if stats is None else stats,
            absent if norms is None else norms[part],
            absent if random is None else random[part],
            *operands,
            rule=rule,
            decays=np.array(decays[part], np.int64),
            streams=_bits(streams),
            clips=np.bool_(clips),
            skips_nonfinite=np.bool_(skips_nonfinite),
            nesterov=np.bool_(nesterov),
            vectors=np.int32(vectors),
            rounded=_bits([name for name in rounded if _is_bfloat16(getattr(leaves[0], name))]),
        )
        new_norms.append(norms_of_part)
        remaining = iter(arrays)
        new_leaves += [
            leaf._replace(**{name: next(remaining) for name in written}) for leaf in leaves[part]
        ]
    if rule not in _TAKING_NORMS:
        return new_leaves, None
    return new_leaves, new_norms[0] if len(new_norms) == 1 else jnp.concatenate(new_norms)
