"""compressed-tensors, as llm-compressor and vLLM write and read them.

The config has groups, each of several targets and one scheme. A target is the class of layers, a layer's
name, or "re:" followed by a pattern of names.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.fp8 import FLOAT8, e8m0, plan_of_scales
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
    names,
    number,
    on_device,
    order_of_groups,
    unpacked_bits,
    weights,
)
from jaxfused.runtime.quantized_array import CODEBOOKS

PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "bias",
)


def plan(parts: Parts, config: Config) -> Build | None:
    """Checks a layer, and returns the function that builds it."""
    scheme = _scheme(parts, config)
    if scheme is None:
        return None
    name = scheme.get("format") or config.get("format")
    plans = {
        "pack-quantized": _packed,
        "int-quantized": _values,
        "naive-quantized": _values,
        "float-quantized": _values,
        "nvfp4-pack-quantized": _nvfp4,
        "mxfp4-pack-quantized": _mxfp4,
        "mxfp8-quantized": _mxfp8,
    }
    if str(name) not in plans:
        parts.fail(
            f"the config has format {name!r}, but {', '.join(plans)} are read; decompress the checkpoint"
            " by compressed-tensors."
        )
    return plans[str(name)](parts, mapping(parts, scheme, "weights"))


def _scheme(parts: Parts, config: Config) -> Config | None:
    """Returns the scheme of the config group that targets the layer; None if the layer is ignored."""
    if any(_fits(parts, target) for target in names(parts, config, "ignore")):
        return None
    of_name = mapping(parts, config, "config_groups")
    groups = [mapping(parts, of_name, name) for name in of_name]
    targets = [names(parts, group, "targets") for group in groups]
    pairs = list(zip(groups, targets, strict=True))
    by_name = [g for g, those in pairs if any(_fits(parts, t) for t in those)]
    by_class = [g for g, those in pairs if "Linear" in those]
    if not by_name + by_class:
        parts.fail(
            "no group of the config has it as a target, or class Linear; pass the config that the"
            " checkpoint came with."
        )
    return (by_name + by_class)[0]


def _fits(parts: Parts, target: str) -> bool:
    if target.startswith("re:"):
        return is_matched(parts, target[3:])
    return target == parts.layer


def _strategy(parts: Parts, args: Config, features: int) -> tuple[int, tuple[int, int] | None]:
    """Returns (scales along the inputs, None), or for blocks 0 and the block's two sides."""
    strategy = args.get("strategy")
    if strategy in ("tensor", "channel"):
        return 1, None
    if strategy in ("group", "tensor_group"):
        return groups_of(parts, features, number(parts, args, ("group_size",))), None
    if strategy == "block":
        sides: Any = args.get("block_structure")
        return 0, tuple(sides) if isinstance(sides, list | tuple) else ()
    parts.fail(
        f"the config has strategy {strategy!r}, but tensor, channel, group and block are read."
    )


def _packed(parts: Parts, args: Config) -> Build:
    """Checks a layer of integers packed along the inputs, with zero points packed along the outputs."""
    bits = number(parts, args, ("num_bits",), range(1, 9))
    words = parts.take("weight_packed", ("int32",), (..., None, None))
    stack = words.shape[:-2]
    shape = parts.take("weight_shape", ("int64", "int32"), (None,)).tolist()
    columns, features = (*shape, 0, 0)[:2] if len(shape) <= 2 else shape[-2:]
    if words.shape[-2:] != (columns, -(-features * bits // 32)):
        parts.fail(
            f"weight_packed has shape {words.shape}, but weight_shape says {shape} with {bits} bits;"
            " pass the tensors and the config of one checkpoint."
        )
    groups, block = _strategy(parts, args, features)
    if block is not None:
        parts.fail("the config has blocks of packed integers, which are not read.")
    scale = _scale(parts, args, (*stack, columns, groups))
    zeros = _packed_zeros(parts, args, bits, (*stack, columns, groups))
    size = number(parts, args, ("group_size",)) if groups > 1 else None
    order = _order(parts, features, size)
    bias = parts.bias()

    def build() -> QuantizedLayer:
        permutation = None if order is None else jnp.array(order)
        codes = _codes(on_device(words.view(np.uint32)), permutation, bits, features)
        array = integer_weights(codes, bits, scale, zeros, group_size=size)
        return QuantizedLayer(array, permutation, bias())

    return build


def _is_of_tensor(parts: Parts, args: Config, name: str, stack: tuple[int, ...]) -> bool:
    """Returns whether a tensor is one number for each matrix, which has no axis of outputs."""
    array = parts.get(name)
    is_one = array is not None and array.shape in (stack, (*stack, 1))
    return is_one and args.get("strategy") == "tensor"


def _scale(parts: Parts, args: Config, shape: tuple[int, ...]) -> np.ndarray:
    """Returns scales [..., F, groups], or [..., 1, groups] where all outputs share them."""
    *stack, columns, groups = shape
    if _is_of_tensor(parts, args, "weight_scale", tuple(stack)):
        return parts.scales("weight_scale", FLOATS).reshape(*stack, 1, 1)
    scale = parts.scales("weight_scale", FLOATS, (*stack, None, groups))
    if scale.shape[-2] not in (1, columns):
        parts.fail(f"weight_scale has shape {scale.shape}, but there are {columns} outputs.")
    return scale


def _packed_zeros(
    parts: Parts, args: Config, bits: int, shape: tuple[int, ...]
) -> np.ndarray | None:
    if parts.get("weight_zero_point") is None:
        return None
    *stack, columns, groups = shape
    if _is_of_tensor(parts, args, "weight_zero_point", tuple(stack)):
        # One number is not packed: it is that of signed integers.
        zero = parts.take("weight_zero_point", ("int8",)).astype(np.int16) + 2 ** (bits - 1)
        return zero.astype(np.uint8).reshape(*stack, 1, 1)
    rows = -(-columns * bits // 32)
    packed = parts.take("weight_zero_point", ("int32",), (*stack, rows, groups)).view(np.uint32)
    padded = _whole_runs(np.swapaxes(packed, -1, -2), bits, np)
    return np.swapaxes(unpacked_bits(padded, bits)[..., :columns], -1, -2)


def _whole_runs(words: Any, bits: int, of: Any) -> Any:
    """Returns words padded to a multiple of `bits` words, since codes end at a word's end only there."""
    missing = -words.shape[-1] % bits if 32 % bits else 0
    return of.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, missing)])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _codes(words: jax.Array, order: jax.Array | None, bits: int, features: int) -> jax.Array:
    codes = unpacked_bits(_whole_runs(words, bits, jnp), bits)[..., :features]
    return codes if order is None else jnp.take(codes, order, axis=-1)


def _order(parts: Parts, features: int, size: int | None) -> np.ndarray | None:
    if parts.get("weight_g_idx") is None or size is None:
        return None
    of_input = parts.take("weight_g_idx", ("int32", "int64"), (features,))
    return order_of_groups(parts, "weight_g_idx", of_input, size)


def _values(parts: Parts, args: Config) -> Build:
    """Checks a layer of int8 or float8 values."""
    is_float = args.get("type") == "float"
    values = parts.take("weight", FLOAT8 if is_float else ("int8",), (..., None, None))
    groups, block = _strategy(parts, args, values.shape[-1])
    if parts.get("weight_zero_point") is None and groups <= 1:
        dtypes = FLOAT8 if is_float else ("int8",)
        return plan_of_scales(parts, "weight_scale", block, dtypes)
    if block is not None:
        parts.fail("the config has blocks with zero points, which are not read.")
    scale = _scale(parts, args, (*values.shape[:-1], groups))
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        shape = parts.arrays["weight_scale"].shape
        zeros = parts.take("weight_zero_point", ("int8",), shape).reshape(scale.shape)
    size = number(parts, args, ("group_size",)) if groups > 1 else None
    bias = parts.bias()

    def build() -> QuantizedLayer:
        stored = on_device(values)
        array = weights(stored, scale, zero_point=zeros, group_size=size)
        return QuantizedLayer(array, None, bias())

    return build


def _float4(parts: Parts, size: int) -> tuple[np.ndarray, int]:
    """Returns E2M1 codes, two a byte, and the number of groups along the inputs."""
    packed = parts.take("weight_packed", ("uint8",), (..., None, None))
    return packed, groups_of(parts, 2 * packed.shape[-1], size)


def _nvfp4(parts: Parts, args: Config) -> Build:
    """Checks a layer of E2M1 in groups, whose E4M3 scales are divided by one scale of the tensor."""
    size = number(parts, args, ("group_size",))
    packed, groups = _float4(parts, size)
    scale = parts.scales("weight_scale", FLOAT8, (*packed.shape[:-1], groups))
    whole = parts.scales("weight_global_scale", ("float32",))
    if not (np.isfinite(whole) & (whole != 0)).all() or whole.size != 1:
        parts.fail(f"weight_global_scale is {whole}, but scales are divided by one number.")
    return e2m1(parts, packed, scale / whole.reshape(1, 1), size)


def _mxfp4(parts: Parts, args: Config) -> Build:
    """Checks a layer of E2M1 in groups of 32, whose scales are powers of two."""
    size = number(parts, args, ("group_size",), (32,))
    packed, groups = _float4(parts, size)
    return e2m1(parts, packed, e8m0(parts, "weight_scale", (*packed.shape[:-1], groups)), size)


def e2m1(parts: Parts, packed: np.ndarray, scale: np.ndarray, size: int) -> Build:
    """Returns the function that builds a layer of E2M1, two a byte along the inputs, the first low."""
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = on_device(packed)
        array = weights(codes, scale, group_size=size, codebook=CODEBOOKS["e2m1"])
        return QuantizedLayer(array, None, bias())

    return build


def _mxfp8(parts: Parts, args: Config) -> Build:
    """Checks a layer of float8 in groups of 32, whose scales are powers of two."""
    size = number(parts, args, ("group_size",), (32,))
    values = parts.take("weight", FLOAT8, (..., None, None))
    groups = groups_of(parts, values.shape[-1], size)
    scale = e8m0(parts, "weight_scale", (*values.shape[:-1], groups))
    bias = parts.bias()
    return lambda: QuantizedLayer(weights(on_device(values), scale, group_size=size), None, bias())
