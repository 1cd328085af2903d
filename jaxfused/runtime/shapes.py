"""Shapes and axes of operands, and symbolic sizes of exported programs (`jax.export.symbolic_shape`)."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxfused.runtime import resharding, sharding


def is_symbolic(*arrays: Any) -> bool:
    """Returns whether an array, which may be None, has a size that is only known when the program runs.

    Such a symbolic size cannot be compared with a number.
    """
    return any(
        not isinstance(size, int) for array in arrays if array is not None for size in array.shape
    )


def why_symbolic(*arrays: Any) -> str | None:
    """Returns why no kernel runs on the arrays if a size is symbolic, else None."""
    return (
        "kernels are made for known sizes, and these are symbolic" if is_symbolic(*arrays) else None
    )


def shapes_of(operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    """Returns the shapes and dtypes of the operands; None for an absent operand."""
    return tuple(
        None if operand is None else jax.ShapeDtypeStruct(operand.shape, operand.dtype)
        for operand in operands
    )


# Under Explicit mesh axes a reshape may split one axis, or merge adjacent axes into one, at a time.


def in_parts(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """Returns x with an axis gathered if devices cannot share this many parts of it evenly."""
    of = jax.typeof(x).sharding
    if of.mesh.explicit_axes and parts % sharding.devices_along(of.mesh, of.spec[axis]):
        return resharding.unsplit(x, [axis])
    return x


def split_axis(x: jax.Array, axis: int, *sizes: int) -> jax.Array:
    """Splits an axis of x into axes of these sizes."""
    x = in_parts(x, axis, sizes[0]) if sizes else x
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def merge_axes(x: jax.Array, first: int, count: int = 2) -> jax.Array:
    """Merges `count` axes of x, from axis `first` on, into one; devices share no more than the first."""
    end = first + count
    x = resharding.unsplit(x, range(first + 1, end))
    return x.reshape(*x.shape[:first], math.prod(x.shape[first:end]), *x.shape[end:])


def reshaped(x: jax.Array, *shape: int) -> jax.Array:
    """Returns x in another shape, of which one size may be -1, in splits and merges of one axis."""
    if is_symbolic(x) or 0 in x.shape:
        return x.reshape(shape)
    sizes = [math.prod(x.shape) // -math.prod(shape) if n == -1 else n for n in shape]
    done = list(x.shape)
    # From the last axis on: x has the axes `done[:axis]`, then the result's axes `sizes[wanted:]`.
    axis, wanted = len(done), len(sizes)
    while axis or wanted:
        first, start = axis, wanted
        if axis and wanted and done[axis - 1] == sizes[wanted - 1]:
            axis, wanted = axis - 1, wanted - 1
            continue
        while True:
            old, new = math.prod(done[first:axis]), math.prod(sizes[start:wanted])
            if old == new and (first, start) != (axis, wanted):
                break
            if (old <= new and first) or not start:
                first -= 1
            else:
                start -= 1
        if axis - first != 1:
            x = merge_axes(x, first, axis - first)
        if wanted - start != 1:
            x = split_axis(x, first, *sizes[start:wanted])
        axis, wanted = first, start
    return x
