"""GGUF's blocks: llama.cpp's formats of 2 to 8 bits, as gguf-py decodes them.

A block stores its scales next to its codes. A block of 256 values has smaller groups, whose scales are
integers times the block's scale.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxfused.quantization.checkpoints import gguf_file
from jaxfused.quantization.checkpoints.fp8 import e8m0
from jaxfused.quantization.checkpoints.gguf_file import TYPES, Tensor
from jaxfused.quantization.checkpoints.layer import (
    Build,
    Parts,
    QuantizedLayer,
    integer_weights,
    on_device,
    stored_codes,
    weights,
)
from jaxfused.runtime.quantized_array import CODEBOOKS

FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
}
"""Types whose tensors are plain arrays."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class _Scales(NamedTuple):
    """Scales [..., blocks, groups of a block], and offsets of the same shape or None."""

    scale: np.ndarray
    offset: np.ndarray | None = None


class _Form(NamedTuple):
    """A type of blocks: bits of a code, and functions that read scales and codes from its bytes."""

    bits: int
    """Bits of a code. Codes are centred on 2^(bits - 1), or start at 0 if there is an offset."""
    scales: Callable[[np.ndarray], _Scales]
    codes: Callable[[Any], Any]
    """Returns the codes [..., blocks, values] of blocks [..., blocks, bytes]."""
    codebook: tuple[float, ...] | None = None


def planned(
    op: str, paths: list[Path], prefix: str
) -> tuple[dict[str, tuple[Build, int]], dict[str, np.ndarray]]:
    """Returns a dict from layers to (function that builds the layer, bytes), and the other tensors."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = gguf_file.read(op, path)
        for name in found.keys() & tensors.keys():
            raise ValueError(
                f"{op}: {path} has tensor {name!r}, which another part has too; download or split"
                " it again."
            )
        tensors |= found
    plans, others = {}, {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        if tensor.kind in FLOATS:
            others[name] = tensor.bytes.view(FLOATS[tensor.kind]).reshape(tensor.shape)
            continue
        layer = name.removesuffix(".weight")
        if len(tensor.shape) < 2 or 0 in tensor.shape:
            raise ValueError(
                f"{op}: tensor {name!r} has shape {tensor.shape} in blocks of {tensor.kind}, but only"
                " weights are read so; convert it to F32 by llama.cpp."
            )
        bias = tensors.get(f"{layer}.bias")
        is_plain = bias is not None and bias.kind in FLOATS
        added = bias.bytes.view(FLOATS[bias.kind]) if bias is not None and is_plain else None
        if bias is not None and bias.shape not in (tensor.shape[:-1], tensor.shape[-2:-1]):
            raise ValueError(
                f"{op}: tensor '{layer}.bias' has shape {bias.shape}, but its layer has outputs of shape"
                f" {tensor.shape[:-1]}; convert the model again."
            )
        if layer in plans:
            raise ValueError(
                f"{op}: the file has both {layer!r} and '{layer}.weight', which would be one layer;"
                " convert the model again."
            )
        plans[layer] = plan(Parts(op, layer, {}), tensor, added), tensor.bytes.nbytes
    for layer in plans:
        others.pop(f"{layer}.bias", None)
    return plans, others


def plan(parts: Parts, tensor: Tensor, bias: np.ndarray | None) -> Build:
    """Checks a tensor of weights, and returns the function that builds its layer."""
    of = next(form for form in TYPES.values() if form.name == tensor.kind)
    form = _FORMS[tensor.kind]
    blocks = tensor.bytes.reshape(*tensor.shape[:-1], -1, of.size)
    if tensor.kind == "MXFP4":
        found = _Scales(e8m0(Parts(parts.op, parts.layer, {"scales": blocks[..., :1]}), "scales"))
    else:
        with np.errstate(invalid="ignore"):
            found = form.scales(blocks)
        for part in found:
            if part is not None and np.isnan(part).any():
                parts.fail("it has scales that are NaN; quantise it again.")
    scale, offset = (
        None if part is None else part.reshape(*tensor.shape[:-1], -1) for part in found
    )
    assert scale is not None
    groups = scale.shape[-1]
    size = tensor.shape[-1] // groups if groups > 1 else None

    def build() -> QuantizedLayer:
        stored = _codes(on_device(blocks), tensor.kind)
        if form.codebook is not None:
            array = weights(
                stored_codes(stored, form.bits),
                scale,
                offset=offset,
                group_size=size,
                codebook=form.codebook,
            )
        else:
            zeros = None if offset is None else np.zeros(scale.shape, np.uint8)
            array = integer_weights(stored, form.bits, scale, zeros, group_size=size, offset=offset)
        return QuantizedLayer(array, None, None if bias is None else on_device(bias))

    return build


@functools.partial(jax.jit, static_argnums=1)
def _codes(blocks: jax.Array, kind: str) -> jax.Array:
    codes = _FORMS[kind].codes(blocks)
    return codes.reshape(*blocks.shape[:-2], -1)


# --- codes ----------------------------------------------------------------------------------------


def _planes(part: Any, run: int, bits: int) -> Any:
    """Returns the `bits`-bit codes of uint8 bytes [..., n], by runs of `run` bytes.

    A run's codes are those in the lowest bits of all its bytes, then those in the next bits, and so
    on.
    """
    runs = part.reshape(*part.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (runs >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*part.shape[:-1], -1)


def _fifth_bits(words: Any) -> Any:
    """Returns the bits of uint8 bytes [..., n], lowest first, as uint8 [..., 8 n] of 0 and 1."""
    bits = (words[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return bits.reshape(*words.shape[:-1], -1)


def _bytes_as_codes(blocks: Any) -> Any:
    """Returns a block's int8 values, which follow its 2-byte scale, plus 128 as uint8 codes."""
    return blocks[..., 2:] ^ np.uint8(128)


def _q3_codes(blocks: Any) -> Any:
    return _planes(blocks[..., 32:96], 32, 2) | _planes(blocks[..., :32], 32, 1) << 2


def _q5k_codes(blocks: Any) -> Any:
    return _planes(blocks[..., 48:], 32, 4) | _planes(blocks[..., 16:48], 32, 1) << 4


def _q6_codes(blocks: Any) -> Any:
    return _planes(blocks[..., :128], 64, 4) | _planes(blocks[..., 128:192], 32, 2) << 4


# --- scales ---------------------------------------------------------------------------------------


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Returns the float16 at byte `start` of each block, as float32 [..., blocks, 1]."""
    pair = np.ascontiguousarray(blocks[..., start : start + 2])
    return pair.view(np.float16).astype(np.float32)


def _one(start: int) -> Callable[[np.ndarray], _Scales]:
    return lambda blocks: _Scales(_half(blocks, start))


def _two(blocks: np.ndarray) -> _Scales:
    return _Scales(_half(blocks, 0), _half(blocks, 2))


def _q2_scales(blocks: np.ndarray) -> _Scales:
    both = blocks[..., :16]
    scale = _half(blocks, 80) * (both & 15).astype(np.float32)
    return _Scales(scale, -(_half(blocks, 82) * (both >> 4).astype(np.float32)))


def _q3_scales(blocks: np.ndarray) -> _Scales:
    low, high = _planes(blocks[..., 96:104], 8, 4), _planes(blocks[..., 104:108], 4, 2)
    integers = (low | high << 4).astype(np.int8) - np.int8(32)
    return _Scales(_half(blocks, 108) * integers.astype(np.float32))


def _q4k_scales(blocks: np.ndarray) -> _Scales:
    scales, lows, rest = (blocks[..., start : start + 4] for start in (4, 8, 12))
    of_scale = np.concatenate([scales & 63, (rest & 15) | ((scales >> 2) & 48)], axis=-1)
    of_low = np.concatenate([lows & 63, (rest >> 4) | ((lows >> 2) & 48)], axis=-1)
    scale = _half(blocks, 0) * of_scale.astype(np.float32)
    return _Scales(scale, -(_half(blocks, 2) * of_low.astype(np.float32)))


def _q6_scales(blocks: np.ndarray) -> _Scales:
    integers = blocks[..., 192:208].view(np.int8)
    return _Scales(_half(blocks, 208) * integers.astype(np.float32))


def _iq4xs_scales(blocks: np.ndarray) -> _Scales:
    low = _planes(blocks[..., 4:8], 1, 4)
    high = _planes(blocks[..., 2:4], 1, 2)
    integers = (low | high << 4).astype(np.int8) - np.int8(32)
    return _Scales(_half(blocks, 0) * integers.astype(np.float32))


_FORMS = {
    "Q4_0": _Form(4, _one(0), lambda b: _planes(b[..., 2:], 16, 4)),
    "Q4_1": _Form(4, _two, lambda b: _planes(b[..., 4:], 16, 4)),
    "Q5_0": _Form(5, _one(0), lambda b: _planes(b[..., 6:], 16, 4) | _fifth_bits(b[..., 2:6]) << 4),
    "Q5_1": _Form(5, _two, lambda b: _planes(b[..., 8:], 16, 4) | _fifth_bits(b[..., 4:8]) << 4),
    "Q8_0": _Form(8, _one(0), _bytes_as_codes),
    "Q2_K": _Form(2, _q2_scales, lambda b: _planes(b[..., 16:80], 32, 2), (0.0, 1.0, 2.0, 3.0)),
    "Q3_K": _Form(3, _q3_scales, _q3_codes),
    "Q4_K": _Form(4, _q4k_scales, lambda b: _planes(b[..., 16:], 32, 4)),
    "Q5_K": _Form(5, _q4k_scales, _q5k_codes),
    "Q6_K": _Form(6, _q6_scales, _q6_codes),
    "IQ4_NL": _Form(4, _one(0), lambda b: _planes(b[..., 2:], 16, 4), _IQ4),
    "IQ4_XS": _Form(4, _iq4xs_scales, lambda b: _planes(b[..., 8:], 16, 4), _IQ4),
    "TQ2_0": _Form(2, _one(64), lambda b: _planes(b[..., :64], 32, 2), CODEBOOKS["ternary"]),
    "MXFP4": _Form(4, _one(0), lambda b: _planes(b[..., 1:], 16, 4), CODEBOOKS["e2m1"]),
}
