"""Conversion of qwix's and AQT's quantised arrays to `QuantizedArray`.

The arrays are recognised by their attributes, so that neither package has to be installed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime.packing import pack_codes, pack_int4, pack_words
from jaxfused.runtime.quantized_array import CODEBOOKS, Layout, QuantizedArray, layout_of

_QWIX = ("qvalue", "scale", "zero_point", "qtype")
_AQT = ("qvalue", "scale", "scale_t", "bias", "tiling_state")


def is_of_qwix(array: Any) -> bool:
    """Returns whether this is a `qwix.QArray`."""
    return all(hasattr(array, name) for name in _QWIX)


def is_of_aqt(array: Any) -> bool:
    """Returns whether this is AQT's `QTensor`."""
    return all(hasattr(array, name) for name in _AQT)


def converted(op: str, array: Any, axis: int, *, packs: bool) -> QuantizedArray:
    """Converts a quantised array of qwix or AQT to a `QuantizedArray` of the same numbers.

    Args:
      axis: the axis along which values share a scale, counted from the last.
      packs: whether int4 values are packed, in the kernels' layout if their shape allows it; else they
        stay one an element.
    """
    values, zero_point, offset, codebook = array.qvalue, None, None, None
    if is_of_qwix(array):
        scale, zero_point = array.scale, array.zero_point
        codebook = CODEBOOKS["nf4"] if str(array.qtype) == "nf4" else None
    else:
        scale, offset = _of_aqt(op, array)
    if zero_point is not None:
        zero_point = jnp.broadcast_to(zero_point, scale.shape)
    groups, size = scale.shape[axis], values.shape[axis]
    layout: Layout = "rows"
    if packs:
        values, layout = _packed(values, axis)
    return QuantizedArray(
        values,
        scale,
        zero_point,
        axis,
        layout,
        size // groups if 1 < groups < size else None,
        offset=offset,
        codebook=codebook,
    )


def _of_aqt(op: str, array: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns the product of an AQT tensor's scales, and minus the sum of its biases, or None."""
    sparse = getattr(array, "sparsity_mask", None) is not None
    if array.qvalue is None or not array.scale or array.tiling_state is not None or sparse:
        raise ValueError(
            f"{op}: an array of AQT has no values or no scale, or is tiled or sparse; pass"
            " jaxfused.quantize(array.dequant())."
        )
    scale, offset = array.scale[0], None
    for factor in array.scale[1:]:
        scale = scale * factor
    for bias in array.bias:
        added = jnp.broadcast_to(-bias, scale.shape)
        offset = added if offset is None else offset + added
    return scale, offset


def _packed(values: jax.Array, axis: int) -> tuple[jax.Array, Layout]:
    """Returns unpacked values as a `QuantizedArray` stores them, and the name of their layout."""
    layout = layout_of(str(values.dtype), values.shape, axis)
    if layout == "columns":
        values, axis = values.mT, -1
    packs = values.shape[axis] % 2 == 0
    if values.dtype == jnp.uint4 and packs:
        values = pack_codes(values.astype(jnp.uint8), axis, 4)
    elif values.dtype == jnp.int4 and packs:
        wide = values.astype(jnp.int8)
        values = pack_words(wide) if layout == "columns" else pack_int4(wide, axis)
    return values, layout
