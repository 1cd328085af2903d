"""Sizes that a program is exported for without knowing them: `jax.export.symbolic_shape`."""

from typing import Any


def is_symbolic(*arrays: Any) -> bool:
    """Whether a size of an array, which may be None, is known only where the exported program runs.

    Such a size compares with no number.
    """
    return any(
        not isinstance(size, int) for array in arrays if array is not None for size in array.shape
    )


def why_symbolic(*arrays: Any) -> str | None:
    """Why no kernel runs on arrays of symbolic sizes, or None."""
    return (
        "kernels are made for known sizes, and these are symbolic" if is_symbolic(*arrays) else None
    )
