"""Gemma's own checkpoints in Transformers: integers of 8, 4 or 2 bits with one scale a row."""

import functools

import jax
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    integer_weights,
    is_matched,
    mapping,
    number,
    on_device,
    unpacked_bits,
    weights,
)

PARTS = ("weight", "weight_scale", "bias")


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    options = {"num_bits": config.get("num_bits", 4)}
    for pattern, changes in mapping(parts, config, "module_quant_configs").items():
        if is_matched(parts, pattern, anywhere=True):
            if not isinstance(changes, dict):
                parts.fail(f"the config has options {changes!r} for it, which are no mapping.")
            options |= changes
            break
    bits = number(parts, options, ("num_bits",), (2, 4, 8))
    values = parts.take("weight", ("int8",) if bits == 8 else ("uint8",), (None, None))
    scale = parts.scales("weight_scale", FLOATS, (values.shape[0], 1))
    bias = parts.bias()

    def build() -> QuantizedLayer:
        stored = on_device(values)
        if bits == 8:
            return QuantizedLayer(weights(stored, scale), None, bias())
        # 2-bit numbers (codes 0 to 3 minus a zero point of 2) are stored as int4.
        zeros = None if bits == 4 else np.full(scale.shape, 2, np.uint8)
        return QuantizedLayer(integer_weights(_codes(stored, bits), 4, scale, zeros), None, bias())

    return build


_codes = functools.partial(jax.jit, static_argnums=1)(unpacked_bits)
