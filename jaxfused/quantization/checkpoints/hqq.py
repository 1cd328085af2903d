"""HQQ: codes in groups of the flattened weights, with zero points that are no integers."""

import functools
import math

import jax
import jax.numpy as jnp

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    flat_groups,
    on_device,
    stored_codes,
    weights,
)

_SETTINGS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
PARTS = ("W_q", "scale", "zero", "bias", *_SETTINGS)
_SHIFTS = {8: (0,), 4: (4, 0), 3: tuple(range(27, -1, -3)), 2: (6, 4, 2, 0)}
"""By bits, the right shifts that extract an element's codes, those of the first rows first."""


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    del config
    bits, size = _setting(parts, "nbits"), _setting(parts, "group_size")
    if bits not in _SHIFTS or _setting(parts, "axis") != 1:
        parts.fail("it has nbits or an axis that are not read, which are 8, 4, 3, 2 and 1.")
    for name in ("view_as_float", "quant_scale", "quant_zero"):
        if parts.get(name) is not None and _setting(parts, name):
            parts.fail(f"it has {name}, which is not read; quantise without it.")
    columns, features = parts.take("shape", ("int64", "int32"), (2,)).tolist()
    shape = (columns, features)
    count = math.prod(shape)
    if min(shape) < 1 or size < 1 or count % size:
        parts.fail(f"its shape is {shape}, which groups of {size} do not fill.")
    rows = count // size
    packed = parts.take("W_q", ("int32",) if bits == 3 else ("uint8",), (None, size))
    if packed.shape[0] != -(-rows // len(_SHIFTS[bits])):
        parts.fail(f"W_q has shape {packed.shape}, but {rows} rows of {bits} bits were packed.")
    scale, group = flat_groups(parts.scales("scale", FLOATS, (rows, 1)), size, shape)
    zero, _ = flat_groups(parts.scales("zero", FLOATS, (rows, 1)), size, shape)
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _codes(on_device(packed), bits, shape)
        if bits == 8:
            # The int8 values are codes minus 128: the zero point is lowered by 128 too, which may
            # round it.
            array = weights(codes_around_0(codes), scale, zero_point=zero - 128, group_size=group)
        else:
            held = 2 if bits == 2 and features % 4 == 0 else 4
            book = tuple(map(float, range(2**held)))
            stored = stored_codes(codes, held)
            array = weights(stored, scale, zero_point=zero, group_size=group, codebook=book)
        return QuantizedLayer(array, None, bias())

    return build


def _setting(parts: Parts, name: str) -> int:
    value = parts.take(name, ("int32", "int64", "uint8"))
    if value.size != 1:
        parts.fail(f"{name} has shape {value.shape}, but it is one number.")
    return int(value.reshape(()))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _codes(packed: jax.Array, bits: int, shape: tuple[int, int]) -> jax.Array:
    parts = [(packed >> shift) & (2**bits - 1) for shift in _SHIFTS[bits]]
    flat = jnp.concatenate(parts).reshape(-1)[: math.prod(shape)]
    return flat.reshape(shape).astype(jnp.uint8)


def codes_around_0(codes: jax.Array) -> jax.Array:
    """Returns unsigned 8-bit codes minus 128, as int8."""
    return jax.lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8)
