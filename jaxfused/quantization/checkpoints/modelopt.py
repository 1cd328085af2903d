"""NVIDIA's ModelOpt: FP8; and NVFP4, whose groups' scales are multiplied by one scale of the tensor."""

import fnmatch

import numpy as np

from jaxfused.quantization.checkpoints.compressed_tensors import e2m1
from jaxfused.quantization.checkpoints.fp8 import FLOAT8, plan_of_scales
from jaxfused.quantization.checkpoints.layer import Build, Config, Parts, groups_of, names, number

PARTS = ("weight", "weight_scale", "weight_scale_2", "bias")
_GROUP = 16


def plan(parts: Parts, config: Config) -> Build | None:
    """Checks a layer, and returns the function that builds it; None if the config excludes the layer."""
    left_out = names(parts, config, "exclude_modules") + names(parts, config, "ignore")
    if any(fnmatch.fnmatchcase(parts.layer, pattern) for pattern in left_out):
        return None
    kind = config.get("quant_algo")
    if kind == "FP8":
        return plan_of_scales(parts, "weight_scale", None)
    if kind != "NVFP4":
        parts.fail(f"the config has quant_algo {kind!r}, but NVFP4 and FP8 are read.")
    packed = parts.take("weight", ("uint8",), (None, None))
    size = number(parts, config, ("group_size",)) if config.get("group_size") else _GROUP
    groups = groups_of(parts, 2 * packed.shape[-1], size)
    scale = parts.scales("weight_scale", FLOAT8, (packed.shape[-2], groups))
    whole = parts.scales("weight_scale_2", ("float32",))
    if whole.size != 1:
        parts.fail(f"weight_scale_2 has shape {whole.shape}, but it is one number.")
    return e2m1(parts, packed, scale * np.float32(whole.reshape(())), size)
