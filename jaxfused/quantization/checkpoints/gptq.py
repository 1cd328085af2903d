"""GPTQ: AutoGPTQ's and GPTQModel's qweight, qzeros, scales and g_idx.

Weights are packed along the inputs, zero points along the outputs, the lowest bits first. Format "gptq"
(v1) stores each word of zero points minus a word with 1 as each number, so that a zero point of 0
borrows from the next higher bits. "gptq_v2" stores the words unchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    groups_of,
    integer_weights,
    is_matched,
    mapping,
    number,
    on_device,
    order_of_groups,
    unpacked_bits,
)

PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")
_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""By bits, the 32-bit word that v1 subtracts from a word of zero points: 1 as each packed number.
With 3 bits, v1 subtracts 1 from each zero point before packing."""


def plan(parts: Parts, config: Config) -> Build | None:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    own = _of_layer(parts, config)
    if own is None:
        return None
    name = own.get("checkpoint_format", own.get("format", "gptq"))
    if name not in _FORMATS:
        parts.fail(
            f"the checkpoint_format is {name!r}, but {' and '.join(_FORMATS)} are read; convert it by"
            " GPTQModel."
        )
    bits = number(parts, own, ("bits",), _BITS)
    qweight = parts.take("qweight", ("int32",), (None, None))
    features, columns = qweight.shape[-2] * 32 // bits, qweight.shape[-1]
    group_size = number(parts, own, ("group_size",))
    groups = groups_of(parts, features, group_size)
    if columns * bits % 32:
        parts.fail(
            f"qweight has {columns} columns, whose zero points of {bits} bits fill no words."
        )
    scale = parts.scales("scales", FLOATS, (groups, columns))
    words = parts.take("qzeros", ("int32",), (groups, columns * bits // 32)).view(np.uint32)
    if name == "gptq" and bits in _ONES:
        words = words + np.uint32(_ONES[bits])
    zeros = unpacked_bits(words, bits)
    if name == "gptq" and bits == 3:
        zeros = (zeros + 1) & 7
    is_symmetric = own.get("sym", False) and (zeros == 2 ** (bits - 1)).all()
    permutation = _permutation(parts, features, group_size, groups)
    bias = parts.bias()

    def build() -> QuantizedLayer:
        order = None if permutation is None else jnp.array(permutation)
        codes = _codes(on_device(qweight.view(np.uint32)), order, bits)
        array = integer_weights(
            codes,
            bits,
            scale.T,
            None if is_symmetric else zeros.T,
            group_size=group_size if groups > 1 else None,
        )
        return QuantizedLayer(array, order, bias())

    return build


@functools.partial(jax.jit, static_argnums=2)
def _codes(words: jax.Array, order: jax.Array | None, bits: int) -> jax.Array:
    codes = unpacked_bits(words.T, bits)
    return codes if order is None else jnp.take(codes, order, axis=-1)


def _permutation(parts: Parts, features: int, size: int, groups: int) -> np.ndarray | None:
    """Returns the indices that sort the inputs by their group in g_idx; None if they are sorted."""
    if parts.get("g_idx") is None:
        return None
    of_input = parts.take("g_idx", ("int32", "int64"), (features,))
    return order_of_groups(parts, "g_idx", of_input, size if groups > 1 else features)


def _of_layer(parts: Parts, config: Config) -> dict[str, Any] | None:
    """Returns the config of a layer, after GPTQModel's `dynamic` rules; None if not quantised."""
    for pattern, changes in mapping(parts, config, "dynamic").items():
        sign, name = (pattern[0], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+", pattern)
        if is_matched(parts, name):
            if not isinstance(changes, dict):
                parts.fail(f"the config has dynamic {pattern!r}: {changes!r}, which is no mapping.")
            return None if sign == "-" else {**config, **changes}
    return dict(config)
