# requires: auto-gptq==0.7.1 torch==2.13.0 transformers==5.23.0
"""GPTQ of AutoGPTQ, which packs zero points of symmetric weights as GPTQModel does."""

import importlib.util
import sys
import types

import torch

# AutoGPTQ's packages import what Transformers no longer has; its layers do not need that.
for name in ("auto_gptq", "auto_gptq.nn_modules"):
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package

from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear  # noqa: E402
from written import dotted, matrix, write  # noqa: E402


def case(name, bits, size=64, k=256, n=32):
    w = torch.from_numpy(matrix(n, k))
    runs = w.reshape(n, k // size, size)
    scales = runs.abs().amax(-1) * 2 / (2**bits - 1)
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = w
    layer = QuantLinear(bits, size, k, n, False, use_cuda_fp16=False)
    layer.pack(linear, scales.half().float(), zeros, None)
    layer.scales = layer.scales.half()
    expected = layer(torch.eye(k, dtype=torch.float16)).T
    state = {
        k: v for k, v in layer.state_dict().items() if k in ("qweight", "qzeros", "scales", "g_idx")
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "sym": True,
        "desc_act": False,
    }
    write(f"autogptq-{name}", dotted(state), config, expected)


for bits in (2, 3, 4, 8):
    case(f"{bits}bit", bits)
