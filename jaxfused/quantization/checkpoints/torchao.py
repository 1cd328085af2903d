"""torchao: tensors as flatten_tensor_state_dict writes them, with types in the files' metadata."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.fp8 import FLOAT8, plan_of_scales
from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    integer_weights,
    mapping,
    on_device,
    weights,
)

PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "bias")
_TYPES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    kind, data = _type(parts, config)
    if kind == "Float8Tensor":
        return _plan_float8(parts, data)
    values = parts.take("_weight_qdata", ("int8",), (None, None))
    columns, features = values.shape[-2:]
    scale = parts.scales("_weight_scale", FLOATS, (None, None))
    groups = scale.shape[-1]
    if scale.shape[0] not in (1, columns) or groups < 1 or features % groups:
        parts.fail(f"_weight_scale has shape {scale.shape}, but the weights {values.shape}.")
    zeros = parts.get("_weight_zero_point")
    if zeros is not None:
        zeros = parts.take("_weight_zero_point", ("int8",), scale.shape)
    target = mapping(parts, data, "target_dtype")
    is_narrow = target.get("_data") in ("int1", "int2", "int3", "int4")
    if is_narrow and values.size and (values.min() < -8 or values.max() > 7):
        parts.fail("_weight_qdata has numbers that int4 does not hold; download it again.")
    size = features // groups if groups > 1 else None
    bias = parts.bias()

    def build() -> QuantizedLayer:
        nonlocal zeros
        if zeros is not None and not zeros.any():
            zeros = None
        if is_narrow:
            codes = (on_device(values) + 8).astype(jnp.uint8)
            around = None if zeros is None else (zeros.astype(np.int16) + 8)
            array = integer_weights(codes, 4, scale, around, group_size=size)
        else:
            array = weights(on_device(values), scale, zero_point=zeros, group_size=size)
        return QuantizedLayer(array, None, bias())

    return build


def _plan_float8(parts: Parts, data: dict[str, Any]) -> Build:
    values = parts.take("_weight_qdata", FLOAT8, (None, None))
    sides: Any = data.get("block_size")
    whole = (
        isinstance(sides, list) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides)
    )
    block = tuple(sides) if whole and sides[1] < values.shape[-1] else None
    arrays = {"weight": values, "scale": parts.take("_weight_scale", FLOATS), **parts.arrays}
    return plan_of_scales(Parts(parts.op, parts.layer, arrays), "scale", block)


def _type(parts: Parts, config: Config) -> tuple[str, dict[str, Any]]:
    """Returns the type of a layer's weights and its attributes, from the file's metadata."""
    name = f"{parts.layer}.weight" if parts.layer else "weight"
    text = mapping(parts, config, "metadata").get(name, "{}")
    try:
        entry = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        entry = {}
    entry = entry if isinstance(entry, dict) else {}
    kind, data = entry.get("_type"), entry.get("_data")
    if kind not in _TYPES or not isinstance(data, dict):
        parts.fail(
            f"the metadata of its file say that it is a {kind}, but {', '.join(_TYPES)} are read; save"
            " it by torchao's flatten_tensor_state_dict, and pass config['metadata'] with tensors."
        )
    return kind, data
