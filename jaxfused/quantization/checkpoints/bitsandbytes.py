"""bitsandbytes: NF4 and FP4 in blocks of the flattened weights, and LLM.int8.

Two 4-bit codes share a byte, the first in its high bits. The blocks' scales may be quantised as well.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    Build,
    Config,
    Parts,
    QuantizedLayer,
    flat_groups,
    on_device,
    stored_codes,
    weights,
)

_STATE = "weight.quant_state.bitsandbytes__"
PARTS = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    f"{_STATE}nf4",
    f"{_STATE}fp4",
    "SCB",
    "weight_format",
    "bias",
)


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    del config
    return _plan_int8(parts) if parts.get("SCB") is not None else _plan_4bit(parts)


def _plan_int8(parts: Parts) -> Build:
    """Checks a layer of int8 rows; its tensor SCB has the largest magnitude of each row."""
    values = parts.take("weight", ("int8",), (None, None))
    largest = parts.scales("SCB", ("float32",), values.shape[:1])
    form = parts.get("weight_format")
    if form is not None and form.any():
        parts.fail(f"weight_format is {form}, a layout of one GPU; save the model on a CPU.")
    scale = (largest / np.float32(127))[:, None]
    bias = parts.bias()
    return lambda: QuantizedLayer(weights(on_device(values), scale), None, bias())


def _plan_4bit(parts: Parts) -> Build:
    state = _state(parts)
    shape, block = tuple(state.get("shape") or ()), state.get("blocksize", 0)
    if len(shape) != 2 or any(type(n) is not int or n < 1 for n in (*shape, block)):
        parts.fail(f"its quant_state has shape {shape} and blocksize {block}; layers are matrices.")
    columns, features = shape
    count = columns * features
    packed = parts.take("weight", ("uint8",)).reshape(-1)
    if packed.size != -(-count // 2):
        parts.fail(
            f"weight has {packed.size} bytes, but weights of shape {shape} have {-(-count // 2)};"
            " pass the tensors of one layer."
        )
    numbers = parts.scales("weight.quant_map", ("float32",), (16,))
    scale, size = flat_groups(_scales(parts, state, -(-count // block)), block, shape)
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _codes(on_device(packed), columns, features)
        codebook = tuple(numbers.tolist())
        array = weights(codes, scale, group_size=size, codebook=codebook)
        return QuantizedLayer(array, None, bias())

    return build


def _codes(packed: jax.Array, columns: int, features: int) -> jax.Array:
    """Returns codes [F, D] packed low bits first, from bytes whose first code is in the high bits."""
    swapped = packed >> 4 | packed << 4
    if features % 2 == 0:
        return swapped.reshape(columns, -1)
    pairs = jnp.stack([swapped & 15, swapped >> 4], axis=-1)
    return stored_codes(pairs.reshape(-1)[: columns * features].reshape(columns, features), 4)


def _state(parts: Parts) -> dict[str, Any]:
    """Returns the settings that bitsandbytes writes as JSON in bytes."""
    for kind in ("nf4", "fp4"):
        if parts.get(_STATE + kind) is not None:
            content = parts.take(_STATE + kind, ("uint8",)).tobytes()
            try:
                state = json.loads(content)
            except (ValueError, RecursionError):
                state = None
            if not isinstance(state, dict):
                parts.fail(f"{_STATE}{kind} is no JSON object; download the checkpoint again.")
            return state
    parts.fail("it has no quant_state of nf4 or fp4; save the model by bitsandbytes 0.41 or later.")


def _scales(parts: Parts, state: dict[str, Any], blocks: int) -> np.ndarray:
    """Returns the scale of each block, in float32."""
    if parts.get("weight.nested_absmax") is None:
        return parts.scales("weight.absmax", ("float32",), (blocks,))
    codes = parts.take("weight.absmax", ("uint8",), (blocks,))
    size = state.get("nested_blocksize")
    if type(size) is not int or size < 1:
        parts.fail(f"its quant_state has nested_blocksize {size!r}; it has to be positive.")
    outer = parts.scales("weight.nested_absmax", ("float32",), (-(-blocks // size),))
    numbers = parts.scales("weight.nested_quant_map", ("float32",), (256,))
    offset = np.float32(state.get("nested_offset") or 0)
    scale = numbers[codes] * np.repeat(outer, size)[:blocks] + offset
    if np.isnan(scale).any():
        parts.fail("its scales are NaN; quantise the layer again.")
    return scale
