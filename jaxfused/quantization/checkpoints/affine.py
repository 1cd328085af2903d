"""Unsigned codes times a scale plus an offset: Transformers' "metal" and optimum-quanto."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.fp8 import FLOAT8, plan_of_scales
from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    flat_groups,
    groups_of,
    integer_weights,
    mapping,
    number,
    on_device,
    stored_codes,
    unpacked_bits,
    weights,
)
from jaxfused.runtime.quantized_array import QuantizedArray

METAL_PARTS = ("weight", "scales", "qbiases", "bias")
QUANTO_PARTS = ("weight._data", "weight._data._data", "weight._scale", "weight._shift", "bias")


def plan_of_metal(parts: Parts, config: Config) -> Build:
    """Checks a layer of codes packed along the inputs in 32-bit words; returns its building function."""
    bits = number(parts, config, ("bits",), (2, 4, 8))
    words = parts.take("weight", ("uint32",), (None, None))
    columns, features = words.shape[0], words.shape[-1] * 32 // bits
    size = number(parts, config, ("group_size",))
    groups = groups_of(parts, features, size)
    scale = parts.scales("scales", FLOATS, (columns, groups))
    offset = parts.scales("qbiases", FLOATS, (columns, groups))
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _of_words(on_device(words), bits)
        return QuantizedLayer(with_offset(codes, bits, scale, offset, size), None, bias())

    return build


_of_words = functools.partial(jax.jit, static_argnums=1)(unpacked_bits)


def with_offset(
    codes: jax.Array, bits: int, scale: np.ndarray, offset: np.ndarray, size: int | None
) -> QuantizedArray:
    """Returns weights `scale * code + offset` of codes [F, D]; 2-bit codes stay packed in 2 bits."""
    size = size if scale.shape[-1] > 1 else None
    if bits == 2 and codes.shape[-1] % 4 == 0:
        stored, book = stored_codes(codes, 2), (0.0, 1.0, 2.0, 3.0)
        return weights(stored, scale, offset=offset, group_size=size, codebook=book)
    zeros = np.zeros(scale.shape, np.uint8)
    return integer_weights(codes, max(bits, 4), scale, zeros, group_size=size, offset=offset)


def plan_of_quanto(parts: Parts, config: Config) -> Build:
    """Checks a layer, and returns the function that builds it.

    Weights of 4 and 2 bits are flattened and cut into rows, one for each group. A byte has one code of
    each half or quarter of these rows, so that its shape does not tell the number of outputs.
    """
    if parts.get("weight._data") is not None:
        arrays = {"weight": parts.arrays["weight._data"], **parts.arrays}
        return plan_of_scales(
            Parts(parts.op, parts.layer, arrays), "weight._scale", None, ("int8", *FLOAT8)
        )
    bits = _quanto_bits(parts, config)
    packed = parts.take("weight._data._data", ("uint8",), (None, None))
    rows, size = packed.shape[0] * 8 // bits, packed.shape[1]
    scale = parts.scales("weight._scale", FLOATS, (None, 1))
    shift = parts.scales("weight._shift", FLOATS, (None, 1))
    columns = _outputs(parts, config)
    # The rows are padded to a multiple of 8 / bits, the number of rows that share a byte.
    if not (scale.shape == shift.shape and 0 <= rows - len(scale) < 8 // bits) or (
        len(scale) % columns
    ):
        parts.fail(
            f"weight._data._data has shape {packed.shape}, _scale {scale.shape} and _shift"
            f" {shift.shape}, which are no rows of {columns} outputs; pass the tensors of one layer."
        )
    shape = (columns, len(scale) // columns * size)
    scales, group = flat_groups(scale, size, shape)
    shifts, _ = flat_groups(shift, size, shape)
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _of_halves(on_device(packed), bits, shape)
        return QuantizedLayer(with_offset(codes, bits, scales, -shifts, group), None, bias())

    return build


@functools.partial(jax.jit, static_argnums=(1, 2))
def _of_halves(packed: jax.Array, bits: int, shape: tuple[int, int]) -> jax.Array:
    """Returns the codes of bytes: low bits hold the first half (or quarter) of the rows of groups."""
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(parts).reshape(-1)[: shape[0] * shape[1]].reshape(shape)


def _quanto_bits(parts: Parts, config: Config) -> int:
    of_layer = mapping(parts, mapping(parts, config, "quantization_map"), parts.layer)
    name = str(of_layer.get("weights") or config.get("weights"))
    found = {"qint4": 4, "int4": 4, "qint2": 2, "int2": 2}.get(name)
    if found is None:
        parts.fail(
            f"the config says weights {name!r}, but those in _data._data are qint4 or qint2; pass the"
            " checkpoint's quanto_qmap.json as config['quantization_map']."
        )
    return found


def _outputs(parts: Parts, config: Config) -> int:
    bias = parts.get("bias")
    if bias is not None and bias.size:
        return bias.size
    shape: Any = mapping(parts, config, "shapes").get(parts.layer)
    whole = isinstance(shape, list | tuple) and len(shape) == 2 and type(shape[0]) is int
    if not whole or shape[0] < 1:
        parts.fail(
            "quanto flattens weights of 4 bits, and without a bias nothing says how many outputs they"
            " have; pass config['shapes'] with the [outputs, inputs] of each such layer."
        )
    return shape[0]
