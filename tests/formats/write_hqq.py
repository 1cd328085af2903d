# requires: hqq==0.2.8.post1 torch==2.13.0 transformers==5.23.0
"""HQQ: 8 to 2 bits, and groups that lie across rows."""

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from written import dotted, matrix, write


def case(name, bits, size=64, n=16, k=256):
    linear = torch.nn.Linear(k, n, bias=True)
    linear.weight.data = torch.from_numpy(matrix(n, k))
    layer = HQQLinear(
        linear,
        BaseQuantizeConfig(nbits=bits, group_size=size),
        compute_dtype=torch.float32,
        device="cpu",
    )
    expected = layer.dequantize()
    write(f"hqq-{name}", dotted(layer.state_dict()), {"quant_method": "hqq"}, expected)


for bits in (4, 3, 2, 8):
    case(f"{bits}bit", bits)
case("4bit-across-rows", 4, k=200, n=16)
