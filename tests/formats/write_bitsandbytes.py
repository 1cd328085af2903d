# requires: bitsandbytes==0.50.2 torch==2.13.0
"""bitsandbytes: NF4 and FP4 with and without quantised scales, and LLM.int8."""

import bitsandbytes as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from written import dotted, matrix, write


def four(name, kind, n=8, k=256, nested=False, dtype=torch.float32):
    layer = bnb.nn.Linear4bit(
        k, n, bias=True, quant_type=kind, compress_statistics=nested, compute_dtype=dtype
    )
    w = torch.from_numpy(matrix(n, k)).to(dtype)
    layer.weight = bnb.nn.Params4bit(
        w, requires_grad=False, quant_type=kind, compress_statistics=nested, module=layer
    )
    layer = layer.to("cpu")
    state = layer.weight.quant_state
    expected = bnb.functional.dequantize_4bit(layer.weight.data, state)
    if k % state.blocksize:
        # The package's kernel for CPUs begins a block at each row, which quantising does not.
        packed = layer.weight.data.reshape(-1)
        expected = _dequantize_4bit_compute(packed, state.absmax, state.code, 64, (n, k), dtype)
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_skip_modules": ["lm_head"],
    }
    write(f"bitsandbytes-{name}", dotted(layer.state_dict()), config, expected)


four("nf4", "nf4")
four("nf4-nested", "nf4", nested=True, n=64)
four("nf4-bf16", "nf4", dtype=torch.bfloat16)
four("nf4-across-rows", "nf4", k=96)
four("nf4-odd", "nf4", n=3, k=33)
four("fp4", "fp4")

layer = bnb.nn.Linear8bitLt(256, 8, bias=True, has_fp16_weights=False)
w = torch.from_numpy(matrix(8, 256)).half()
layer.weight = bnb.nn.Int8Params(w, has_fp16_weights=False, requires_grad=False)
layer = layer.to("cpu")
expected = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
write(
    "bitsandbytes-int8",
    dotted(layer.state_dict()),
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    expected,
)
