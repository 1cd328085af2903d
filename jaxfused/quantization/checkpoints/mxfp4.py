"""MXFP4 of gpt-oss: E2M1 in groups of 32, whose scales are powers of two, stored as exponents.

The codes of a layer's E experts are one tensor, [E, F, D / 32, 16 bytes].
"""

from jaxfused.quantization.checkpoints.compressed_tensors import e2m1
from jaxfused.quantization.checkpoints.fp8 import e8m0
from jaxfused.quantization.checkpoints.layer import Build, Config, Parts

PARTS = ("blocks", "scales", "bias")
_GROUP, _BYTES = 32, 16


def plan(parts: Parts, config: Config) -> Build:
    """Checks a layer's tensors `parts`, and returns the function that builds the layer."""
    del config
    blocks = parts.take("blocks", ("uint8",), (..., None, None, _BYTES))
    scale = e8m0(parts, "scales", blocks.shape[:-1])
    return e2m1(parts, blocks.reshape(*blocks.shape[:-2], -1), scale, _GROUP)
