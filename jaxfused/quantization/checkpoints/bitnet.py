"""BitNet of Transformers: ternary numbers, four a byte, one from each quarter of the outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints.layer import (
    FLOATS,
    Build,
    Config,
    Parts,
    QuantizedLayer,
    on_device,
    stored_codes,
    stored_integers,
    weights,
)
from jaxfused.runtime.quantized_array import CODEBOOKS

PARTS = ("weight", "weight_scale", "bias")


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer, and returns the function that builds it.

    The config's linear_class says whether weight_scale divides ("bitlinear") or multiplies.
    """
    packed = parts.take("weight", ("uint8",), (None, None))
    scale = parts.scales("weight_scale", FLOATS).reshape(-1)
    kind = config.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear") or scale.size != 1 or scale[0] == 0:
        parts.fail(f"its linear_class is {kind!r} and its weight_scale {scale}, one number not 0.")
    one = scale.reshape(1, 1)
    factor = np.float32(1) / one if kind == "bitlinear" else one
    bias = parts.bias()

    def build() -> QuantizedLayer:
        codes = _codes(on_device(packed))
        if codes.shape[-1] % 4:
            values, layout = stored_integers(codes + 7, 4)
            return QuantizedLayer(weights(values, factor, layout=layout), None, bias())
        stored = stored_codes(codes, 2)
        return QuantizedLayer(weights(stored, factor, codebook=CODEBOOKS["ternary"]), None, bias())

    return build


@functools.partial(jax.jit)
def _codes(packed: jax.Array) -> jax.Array:
    return jnp.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])
