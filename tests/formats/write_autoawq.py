# requires: autoawq==0.2.9 torch==2.13.0 transformers==5.23.0 datasets==2.21.0
"""AWQ of AutoAWQ, versions gemm and gemv."""

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.modules.linear.gemv import WQLinear_GEMV
from awq.utils.packing_utils import dequantize_gemm
from written import dotted, matrix, write


def case(name, kind, size=128, k=256, n=32):
    w = torch.from_numpy(matrix(n, k))
    w[3] = 0
    group = size if size > 0 else k
    runs = w.reshape(n, k // group, group)
    high, low = runs.amax(-1), runs.amin(-1)
    scales = (high - low).clamp(min=1e-5) / 15
    zeros = (-torch.round(low / scales)).clamp(0, 15)
    linear = torch.nn.Linear(k, n, bias=False)
    codes = torch.clamp(torch.round(runs / scales[..., None]) + zeros[..., None], 0, 15)
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).reshape(n, k)
    of = {"gemm": (scales.T.contiguous(), zeros.T.contiguous()), "gemv": (scales, zeros)}[kind]
    cls = {"gemm": WQLinear_GEMM, "gemv": WQLinear_GEMV}[kind]
    layer = cls.from_linear(linear.half(), 4, group, scales=of[0].half(), zeros=of[1])
    if kind == "gemm":
        expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).T
    else:
        # GEMV runs on a GPU alone: its numbers are those that were packed.
        expected = ((codes.half() - zeros[..., None].half()) * scales.half()[..., None]).reshape(
            n, k
        )
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "version": kind,
        "zero_point": True,
    }
    write(f"autoawq-{name}", dotted(layer.state_dict()), config, expected)


case("gemm", "gemm")
case("gemm-g32", "gemm", size=32)
case("gemm-column", "gemm", size=-1)
case("gemv", "gemv")
case("gemv-g64", "gemv", size=64, k=640)
