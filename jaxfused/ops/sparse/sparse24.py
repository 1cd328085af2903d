"""Sparse24: a matrix that keeps two of each four numbers, packed for Hopper's sparse tensor cores."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime.checks import as_arrays, check_floating, check_word, python_numbers
from jaxfused.runtime.serialization import serializable
from jaxfused.runtime.shapes import in_parts, merge_axes, split_axis
from jaxfused.runtime.stated_gradient import stated_gradient

GROUP, KEPT = 4, 2
_STEP = 64
"""Rows of the matrix whose metadata one 32-bit word of each thread of a warpgroup holds."""
_TILE = 128
"""Multiple to which the metadata's columns are padded: columns of a kernel's tile."""

MetadataOrder = Literal["rows", "cutlass"]


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Sparse24:
    """A matrix [D, F] of which two of each four numbers along D are kept, for `sparse24_matmul`.

    It is a pytree, of which `values` alone has a gradient.

    Attributes:
      values: [F, D / 2], the numbers that are kept, in their order along D.
      metadata: uint32 [ceil(D / 64), 2 ceil(F / 128), 128], the positions of the values in their groups
        of four, in the order in which the threads of Hopper's `wgmma.mma_async.sp` hold them.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> dense = jnp.tile(jnp.array([[1.0], [-4.0], [3.0], [-200.0]]), (16, 8))
      >>> weight = jaxfused.Sparse24.from_dense(dense)
      >>> weight.values[0, :4], weight.shape
      (Array([  -4., -200.,   -4., -200.], dtype=float32), (64, 8))

    Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021,
    https://arxiv.org/abs/2104.08378; the PTX ISA on `wgmma.mma_async.sp`.
    """

    values: jax.Array
    metadata: jax.Array

    @classmethod
    def from_dense(cls, weight: jax.Array) -> Self:
        """Returns a matrix that keeps the two numbers of greatest magnitude of each four along axis 0.

        Among equal ones the first are kept. The gradient reaches those that are kept.

        Args:
          weight: [D, F], floating-point, D a multiple of 4.

        Raises:
          ValueError: the shape or dtype does not fit.
        """
        [weight] = as_arrays(weight)
        _check_matrix("Sparse24", weight)
        places = greatest_places(weight)
        return cls(taken(weight, places), packed(places))

    @classmethod
    @python_numbers
    def from_torch(
        cls, values: jax.Array, metadata: jax.Array, *, order: MetadataOrder = "cutlass"
    ) -> Self:
        """Returns a matrix from the values and metadata of PyTorch's semi-structured sparsity.

        Args:
          values: [F, D / 2], of a `SparseSemiStructuredTensorCUTLASS` of shape [F, D], as `nn.Linear`
            has its weights.
          metadata: int16 [F, D / 16], four groups of four bits in a word.
          order: of the words: "cutlass", in which torch's conversion leaves them (F a multiple of 32 and
            D of 64), or "rows", each word in its own row.

        Raises:
          ValueError: shapes, dtypes or values do not fit.
        """
        op = "Sparse24"
        values, metadata = as_arrays(values, metadata)
        check_floating(op, dict(values=values))
        check_word(op, "order", order, MetadataOrder)
        if (
            values.ndim != 2
            or values.shape[1] % 8
            or metadata.shape
            != (
                values.shape[0],
                values.shape[1] // 8,
            )
        ):
            raise ValueError(
                f"{op}: values have shape {values.shape} and metadata {metadata.shape}; pass values"
                " [F, D / 2] and metadata [F, D / 16]."
            )
        if metadata.dtype not in (jnp.int16, jnp.uint16):
            raise ValueError(
                f"{op}: metadata has dtype {metadata.dtype}, but torch has words of 16 bits for 16-bit"
                " values; pass int16."
            )
        words = metadata.astype(jnp.uint16)
        if order == "cutlass":
            if values.shape[0] % 32 or values.shape[1] % 32:
                raise ValueError(
                    f"{op}: values have shape {values.shape}, but CUTLASS's order is of multiples of 32"
                    " rows and 64 columns; pass order='rows', or such a matrix."
                )
            words = words.reshape(-1)[_cutlass_places(*metadata.shape)]
        codes = words[..., None] >> (4 * np.arange(4, dtype=np.uint16))[None, None] & 15
        codes = codes.reshape(values.shape[0], values.shape[1] // 2).T
        places = jnp.stack([codes & 3, codes >> 2], axis=1).astype(jnp.int32)
        return cls(values, packed(places))

    @property
    def shape(self) -> tuple[int, ...]:
        """(D, F)."""
        *batch, features, kept = self.values.shape
        return (*batch, GROUP // KEPT * kept, features)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def places(self) -> jax.Array:
        """The positions (0 to 3) of the kept numbers in their groups of four, int32 [D / 4, 2, F]."""
        return unpacked(self.metadata, *self.shape)

    def to_dense(self) -> jax.Array:
        """Returns the matrix [D, F]."""
        return spread(self.values, self.places)


@python_numbers
def prune24(weight: jax.Array, *, straight_through: bool = False) -> jax.Array:
    """A matrix of which two of each four numbers along the first axis are kept, and the others zero.

    Those of the greatest magnitude are kept, among equal ones the first.

    Args:
      weight: [D, F], floating-point, D a multiple of 4.
      straight_through: whether the gradient reaches all numbers, as if nothing had been pruned, so that
        the choice can change in training; False for a gradient of the kept numbers only.

    Returns:
      The pruned matrix, of weight's dtype.

    Raises:
      ValueError: the shape or dtype does not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.prune24(jnp.array([[1.0], [-4.0], [3.0], [-200.0]])).ravel()
      Array([   0.,   -4.,    0., -200.], dtype=float32)

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
    2021, https://arxiv.org/abs/2102.04010
    """
    [weight] = as_arrays(weight)
    _check_matrix("prune24", weight)
    weight = in_parts(weight, 0, len(weight) // GROUP)
    places = greatest_places(weight)
    if straight_through:
        return unpruned_gradient(weight, places)
    return spread(taken(weight, places), places)


def _check_matrix(op: str, weight: jax.Array) -> None:
    check_floating(op, dict(weight=weight))
    if weight.ndim != 2 or weight.shape[0] % GROUP:
        raise ValueError(
            f"{op}: weight has shape {weight.shape}, but two of each {GROUP} rows are kept; pass a"
            f" matrix of a multiple of {GROUP} rows."
        )


# --- values ---------------------------------------------------------------------------------------


def greatest_places(weight: jax.Array) -> jax.Array:
    """Returns the positions (0 to 3, ascending) of each four's greatest two, int32 [D / 4, 2, F]."""
    groups = jax.lax.stop_gradient(weight).reshape(-1, GROUP, weight.shape[1])
    magnitudes = jnp.abs(groups)
    # NaN counts as the greatest magnitude, so that it is kept and reaches the results.
    magnitudes = jnp.where(jnp.isnan(magnitudes), jnp.inf, magnitudes)
    index = np.arange(GROUP)
    other, own = magnitudes[:, None], magnitudes[:, :, None]
    earlier = (index[None] < index[:, None])[None, :, :, None]
    ahead = jnp.sum((other > own) | ((other == own) & earlier), axis=2)
    kept = ahead < KEPT
    first = jnp.argmax(kept, axis=1)
    last = GROUP - 1 - jnp.argmax(kept[:, ::-1], axis=1)
    return jnp.stack([first, last], axis=1).astype(jnp.int32)


@functools.partial(stated_gradient, linear=(0,))
def taken(weight: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the numbers of a matrix [D, F] at `places` of each four along D: [F, D / 2]."""
    groups = weight.reshape(-1, GROUP, weight.shape[1])
    kept = jnp.take_along_axis(groups, places, axis=1, mode="clip")
    return kept.reshape(-1, weight.shape[1]).T


@functools.partial(stated_gradient, linear=(0,))
def spread(values: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the matrix [D, F] with values [F, D / 2] at their positions and zeros elsewhere."""
    kept = values.T.reshape(-1, KEPT, values.shape[0])
    index = jnp.arange(GROUP, dtype=places.dtype)[None, :, None]
    zero = jnp.zeros((), values.dtype)
    parts = [
        jnp.where(places[:, i : i + 1] == index, kept[:, i : i + 1], zero) for i in range(KEPT)
    ]
    return jnp.where(parts[0] != 0, parts[0], parts[1]).reshape(-1, values.shape[0])


@functools.partial(stated_gradient, linear=(0,))
def unpruned_gradient(weight: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the pruned matrix; its gradient goes to all numbers, pruned ones too."""
    return spread(taken(weight, places), places)


unpruned_gradient.defvjp(
    lambda weight, places: (unpruned_gradient(weight, places), None),
    lambda saved, dweight: (dweight, None),
)
taken.defvjp(
    lambda weight, places: (taken(weight, places), places),
    lambda places, dvalues: (spread(dvalues, places), None),
)
spread.defvjp(
    lambda values, places: (spread(values, places), places),
    lambda places, dweight: (taken(dweight, places), None),
)


# --- metadata -------------------------------------------------------------------------------------
#
# The metadata of 64 rows k and 64 columns f of the matrix is one 32-bit word per thread of 128. The word
# of thread (warp, g, c) is for columns 16 warp + g (lower half) and 16 warp + g + 8 (upper half), and
# for rows 16 c to 16 c + 15: four bits per group of four rows, the first kept number's position in the
# lower two bits.


_HALVES, _FOURS = 16 * np.arange(2, dtype=np.uint32), 4 * np.arange(4, dtype=np.uint32)
_SHIFTS = (_HALVES[:, None] + _FOURS[None]).reshape(1, 1, 1, 1, 1, 2, 4)
"""Bit shifts in a word, for its two halves (columns) and the four groups of four rows in a half."""


def packed(places: jax.Array) -> jax.Array:
    """Packs positions [D / 4, 2, F] into metadata words (the layout above)."""
    groups, _, features = places.shape
    codes = (places[:, 0] | places[:, 1] << 2).astype(jnp.uint32)
    whole_groups = -(-groups // (_STEP // GROUP)) * (_STEP // GROUP)
    missing = (whole_groups - groups, -features % _TILE)
    codes = jnp.pad(codes, [(0, missing[0]), (0, missing[1])], constant_values=0b0100)
    steps, tiles = codes.shape[0] // 16, codes.shape[1] // 64
    # Axes of rows: step, c, group of four. Axes of columns: tile, warp, half, g.
    codes = split_axis(split_axis(codes, 1, tiles, 4, 2, 8), 0, steps, 4, 4)
    codes = codes.transpose(0, 3, 4, 6, 1, 5, 2) << _SHIFTS
    return jnp.sum(codes, axis=(5, 6), dtype=jnp.uint32).reshape(steps, tiles, 128)


def unpacked(metadata: jax.Array, rows: int, features: int) -> jax.Array:
    """Unpacks metadata words into positions, int32 [D / 4, 2, F]."""
    words = split_axis(metadata, 2, 4, 8, 4, 1, 1)
    codes = (words >> _SHIFTS & 15).transpose(0, 4, 6, 1, 2, 5, 3)
    codes = merge_axes(merge_axes(codes, 3, 4), 0, 3)[: rows // GROUP, :features]
    return jnp.stack([codes & 3, codes >> 2], axis=1).astype(jnp.int32)


def _cutlass_places(rows: int, columns: int) -> jax.Array:
    """Returns where CUTLASS stores each word of metadata [rows, columns], for 16-bit values."""
    row = jnp.arange(rows)[:, None]
    column = jnp.arange(columns)[None, :]
    place = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
    # The two off-diagonal words of each 2 x 2 square are swapped.
    up = ((place % 2 == 0) & (column % 2 == 1)).astype(jnp.int32)
    down = ((place % 2 == 1) & (column % 2 == 0)).astype(jnp.int32)
    place, column = place + up - down, column - up + down
    return column // 2 * (2 * rows) + place * 2 + column % 2
