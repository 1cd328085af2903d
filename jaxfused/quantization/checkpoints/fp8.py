"""float8 weights and their scales: Transformers' "fp8" (DeepSeek's blocks) and "fbgemm_fp8"."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    on_device,
    weights,
)

PARTS = ("weight", "weight_scale_inv", "weight_scale", "bias")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = (*FLOATS, "float8_e8m0fnu")


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple | None):
        parts.fail(f"the config has weight_block_size {block!r}, but it has to be two sides.")
    name = "weight_scale_inv" if "weight_scale_inv" in parts.arrays else "weight_scale"
    return plan_of_scales(parts, name, None if block is None else tuple(block))


def plan_of_scales(
    parts: Parts, name: str, block: tuple[int, int] | None, dtypes: tuple[str, ...] = FLOAT8
) -> Build:
    """Checks a layer of values [..., F, D] that are multiplied by scales.

    Args:
      name: the tensor of scales: one in all ([] or [1]), one a column ([F] or [F, 1]), or one a block.
      block: the numbers of outputs and of inputs in a block that shares a scale.
      dtypes: allowed dtypes of the values.
    """
    values = parts.take("weight", dtypes, (..., None, None))
    columns, features = values.shape[-2:]
    is_exponent = str(parts.take(name, (*_SCALES, "uint8")).dtype) == "uint8"
    scale = e8m0(parts, name) if is_exponent else parts.scales(name, _SCALES)
    size = None
    if scale.size == 1 and values.ndim == 2:
        scale = scale.reshape(1, 1)
    elif block is None:
        scale = scale[..., None] if scale.ndim < values.ndim else scale
        _check_grid(parts, name, scale, (*values.shape[:-1], 1))
    else:
        if len(block) != 2 or any(type(side) is not int or side < 1 for side in block):
            parts.fail(f"the config has blocks of {block}; they have two positive sides.")
        grid = (-(-columns // block[0]), -(-features // block[1]))
        _check_grid(parts, name, scale, (*values.shape[:-2], *grid))
        size = (block[1], block[0])
    bias = parts.bias()
    return lambda: QuantizedLayer(weights(on_device(values), scale, group_size=size), None, bias())


def _check_grid(parts: Parts, name: str, scale: np.ndarray, wanted: tuple[int, ...]) -> None:
    if scale.shape != wanted:
        parts.fail(
            f"{name} has shape {scale.shape}, but weights of shape {parts.arrays['weight'].shape} have"
            f" scales {wanted} by the config; pass the config that the checkpoint came with."
        )


def e8m0(parts: Parts, name: str, shape: Any = None) -> np.ndarray:
    """Returns scales stored as E8M0 exponents (powers of two), after a check that none is NaN (255)."""
    scale = parts.take(name, ("uint8", "float8_e8m0fnu"), shape).view(np.uint8)
    if (scale == 255).any():
        where = tuple(int(i) for i in np.argwhere(scale == 255)[0])
        parts.fail(f"{name} has byte 255, NaN, at {where}; quantise the layer again.")
    return scale.view(jnp.float8_e8m0fnu)
