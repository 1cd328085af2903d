"""Values of a quantised array that share a scale: groups along an axis, or blocks of a matrix."""

import jax
import jax.numpy as jnp


def is_group_size(group_size: int | tuple[int, int] | None, axis: int) -> bool:
    """Returns whether `group_size` is valid for scales along `axis`, which counts from the last."""
    if isinstance(group_size, tuple):
        return axis == -2 and len(group_size) == 2 and min(group_size) > 0
    return group_size is None or group_size > 0


def scale_fits(
    scale: tuple[int, ...],
    shape: tuple[int, ...],
    axis: int,
    group_size: int | tuple[int, int] | None = None,
) -> bool:
    """Returns whether an array of shape `shape` can have scales of shape `scale`.

    Args:
      axis: the array's axis, counted from the last.
      group_size: as in a `QuantizedArray`.
    """
    sides, split = sides_of(axis, group_size), (axis, -1) if axis == -2 else (axis,)

    def fits(i: int) -> bool:
        entries, size = scale[i], shape[i]
        if i in sides:
            return entries == -(-size // sides[i])
        return entries in (1, size) or (i in split and entries > 0 and size % entries == 0)

    return len(scale) == len(shape) and all(fits(i) for i in range(-len(shape), 0))


def blocks_that_fit_too(
    scale: tuple[int, ...], shape: tuple[int, ...], axis: int
) -> tuple[int, int] | None:
    """Returns (axis, size) of a usual block size that fits the scales like equal groups, or None."""
    for split in (axis, -1) if axis == -2 else (axis,):
        entries, values = scale[split], shape[split]
        for side in _USUAL_SIDES:
            if 1 < entries < values and side * entries != values and -(-values // side) == entries:
                return split, side
    return None


_USUAL_SIDES = (128, 64, 32, 16, 256, 512)
"""Block sizes of scales in checkpoints, tried in this order."""


def spread(
    scale: jax.Array,
    shape: tuple[int, ...],
    axis: int = -1,
    group_size: int | tuple[int, int] | None = None,
) -> jax.Array:
    """Repeats each scale over its group, so that scales broadcast against an array of `shape`.

    Args:
      axis: the array's axis along which `group_size` values share a scale.
      group_size: as in a `QuantizedArray`; None if groups are equal.
    """
    sides = sides_of(axis, group_size)
    for i in range(-len(shape), 0):
        entries, size = scale.shape[i], shape[i]
        if entries not in (1, size):
            scale = repeated(scale, i, sides.get(i) or size // entries, size)
    return scale


def of_each_column(scale: jax.Array, columns: int) -> jax.Array:
    """Repeats scales or zero points that groups of columns share: one for each of `columns` columns."""
    groups = scale.shape[:-1]
    return jnp.broadcast_to(spread(scale, (*groups, columns)), (*groups, columns))


def repeated(scale: jax.Array, axis: int, times: int, size: int) -> jax.Array:
    """Repeats each entry `times` times along the axis, and returns the first `size` entries."""
    axis = axis % scale.ndim
    # A broadcast, unlike jnp.repeat, keeps shardings that types state (Explicit mesh axes).
    each = jnp.expand_dims(scale, axis + 1)
    longer = jnp.broadcast_to(each, (*scale.shape[: axis + 1], times, *scale.shape[axis + 1 :]))
    longer = longer.reshape(
        *scale.shape[:axis], times * scale.shape[axis], *scale.shape[axis + 1 :]
    )
    if longer.shape[axis] == size:
        return longer
    return jax.lax.slice_in_dim(longer, 0, size, axis=axis)


def sides_of(axis: int, group_size: int | tuple[int, int] | None) -> dict[int, int]:
    """Returns the group size of each axis along which `group_size` sets one."""
    if group_size is None:
        return {}
    sizes = group_size if isinstance(group_size, tuple) else (group_size,)
    return dict(zip((axis, -1), sizes, strict=False))
