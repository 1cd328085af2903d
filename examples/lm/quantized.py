"""Concatenates a checkpoint's quantised q, k and v layers into the one kernel that the model has."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from jaxfused.quantization import QuantizedLayer


def quantized_kernel(layers: Sequence[QuantizedLayer | None]) -> jaxfused.QuantizedKernel | None:
    """Returns the layers' kernels concatenated along the outputs; None if their formats differ."""
    kernels = [layer.kernel for layer in layers if layer is not None]
    if len(kernels) < len(layers):
        return None
    first, arrays = kernels[0], [kernel.array for kernel in kernels]
    if len(arrays) == 1:
        return first
    fits = all(
        _form(array) == _form(arrays[0])
        and array.scale.shape[-1] == array.shape[-1]
        and _equal(kernel.permutation, first.permutation)
        for kernel, array in zip(kernels, arrays, strict=True)
    )
    if not fits:
        return None

    def joined(name: str, axis: int = -1) -> Any:
        parts = [getattr(array, name) for array in arrays]
        return None if parts[0] is None else jnp.concatenate(parts, axis)

    array = dataclasses.replace(
        arrays[0],
        values=joined("values", -2 if arrays[0].layout == "columns" else -1),
        **{name: joined(name) for name in ("scale", "zero_point", "offset")},
    )
    return dataclasses.replace(first, array=array)


def _form(array: jaxfused.QuantizedArray) -> tuple[Any, ...]:
    """Returns the shapes, dtypes and formats that arrays must share to be concatenated."""
    parts = (array.values, array.scale, array.zero_point, array.offset)
    dtypes = tuple(None if part is None else part.dtype for part in parts)
    static = array.axis, array.layout, array.group_size, array.codebook
    return array.shape[0], array.scale.shape[-2], dtypes, static


def _equal(first: jax.Array | None, second: jax.Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return bool(jnp.array_equal(first, second))
