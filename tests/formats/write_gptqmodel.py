# requires: gptqmodel==7.7.0 torch==2.14.1 transformers==5.23.0
"""GPTQ of GPTQModel, formats v1 and v2, with groups in the order of activations too."""

import numpy as np
import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from written import dotted, matrix, write


class Config:
    """What the conversion reads of a config."""

    pack_dtype = torch.int32

    def __init__(self, bits):
        self.bits = bits


def case(
    name,
    bits=4,
    size=128,
    sym=True,
    version="gptq",
    order=None,
    k=256,
    n=32,
    positive=False,
    bias=False,
):
    w = torch.from_numpy(matrix(n, k))
    if positive:
        # All weights of some columns are positive, so that their zero points are 0.
        w[::3] = w[::3].abs()
    group = size if size > 0 else k
    g_idx = torch.arange(k) // group if order is None else torch.empty(k, dtype=torch.long)
    if order is not None:
        g_idx[torch.from_numpy(order)] = torch.arange(k) // group
    groups, largest = -(-k // group), 2**bits - 1
    scales, zeros = torch.empty(n, groups), torch.empty(n, groups)
    for g in range(groups):
        part = w[:, g_idx == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            scales[:, g] = part.abs().amax(1) * 2 / largest
            zeros[:, g] = 2 ** (bits - 1)
        else:
            scales[:, g] = (high - low) / largest
            zeros[:, g] = torch.round(-low / scales[:, g])
    linear = torch.nn.Linear(k, n, bias=bias)
    linear.weight.data = w
    layer = TorchLinear(
        bits=bits,
        group_size=size,
        sym=sym,
        desc_act=order is not None,
        in_features=k,
        out_features=n,
        bias=bias,
    )
    layer.pack_block(linear, scales.half(), zeros, g_idx.int())
    layer.post_init()
    expected = layer.dequantize_weight().T
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, Config(bits))
    state = {
        k: v
        for k, v in layer.state_dict().items()
        if k in ("qweight", "qzeros", "scales", "g_idx", "bias")
    }
    config = {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "bits": bits,
        "group_size": size,
        "sym": sym,
        "desc_act": order is not None,
    }
    write(f"gptqmodel-{name}", dotted(state), config, expected)


ORDER = np.random.default_rng(5).permutation(256)
case("v1")
case("v1-asym", sym=False, positive=True)
case("v2-asym", sym=False, positive=True, version="gptq_v2", bias=True)
case("order", order=ORDER)
case("order-asym-g32", order=ORDER, sym=False, size=32)
case("v1-2bit", bits=2, sym=False, size=64, positive=True)
case("v1-3bit", bits=3, sym=False, size=64, positive=True)
case("v1-8bit", bits=8, sym=False, positive=True)
case("column", size=-1)
case("partial", size=64, k=160)
