"""Symbolic sizes of exported programs: `jax.export.symbolic_shape`."""

from typing import Any


def is_symbolic(*arrays: Any) -> bool:
    """Returns whether an array, which may be None, has a size that is only known when the program runs.

    Such a size cannot be compared with a number.
    """
    return any(
        not isinstance(size, int) for array in arrays if array is not None for size in array.shape
    )


def why_symbolic(*arrays: Any) -> str | None:
    """Returns why no kernel runs on the arrays if a size is symbolic, else None."""
    return (
        "kernels are made for known sizes, and these are symbolic" if is_symbolic(*arrays) else None
    )
