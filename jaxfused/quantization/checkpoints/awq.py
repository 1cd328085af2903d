"""AWQ: the tensors qweight, qzeros and scales of AutoAWQ's versions "gemm" and "gemv"."""

import functools

import jax
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    groups_of,
    integer_weights,
    number,
    on_device,
    unpacked_bits,
)

PARTS = ("qweight", "qzeros", "scales", "bias")
_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_COLUMN = np.argsort(_COLUMN_OF_NIBBLE)


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "gemv"):
        parts.fail(f"the config has version {version!r}, but gemm and gemv are read; convert it.")
    number(parts, config, ("bits", "w_bit"), (4,))
    group_size = number(parts, config, ("group_size", "q_group_size"))
    qweight = parts.take("qweight", ("int32",), (None, None))
    rows, words = qweight.shape[-2:]
    features, columns = (rows, 8 * words) if version == "gemm" else (8 * words, rows)
    groups = groups_of(parts, features, group_size)
    if features % groups:
        parts.fail(f"it has {features} inputs, but groups of {group_size} of them are whole.")
    if version == "gemm":
        scale = parts.scales("scales", FLOATS, (groups, columns)).T
        packed = parts.take("qzeros", ("int32",), (groups, columns // 8)).view(np.uint32)
        zeros = _in_columns(unpacked_bits(packed, 4)).T
    else:
        # The zero points of a column are padded to whole 32-bit words, of 8 groups each.
        padded = parts.take("qzeros", ("int32",), (columns, None)).view(np.uint32)
        scale = parts.scales("scales", FLOATS, (columns, 8 * padded.shape[-1]))[:, :groups]
        zeros = unpacked_bits(padded, 4)[:, :groups]
        if zeros.shape[-1] != groups:
            parts.fail(f"qzeros has {zeros.shape[-1]} groups, but {features} inputs have {groups}.")
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _codes(on_device(qweight.view(np.uint32)), version)
        size = group_size if groups > 1 else None
        return QuantizedLayer(
            integer_weights(codes, 4, scale, zeros, group_size=size), None, bias()
        )

    return build


def _in_columns(nibbles):
    """Returns the eight 4-bit numbers of each 32-bit word in the order of their columns."""
    words = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    return words[..., _NIBBLE_OF_COLUMN].reshape(nibbles.shape)


@functools.partial(jax.jit, static_argnums=1)
def _codes(words: jax.Array, version: str) -> jax.Array:
    codes = unpacked_bits(words, 4)
    return codes if version == "gemv" else _in_columns(codes).T
