# requires: transformers==5.23.0 torch==2.13.0 accelerate==1.14.0
"""What Transformers itself writes: float8 in blocks and gpt-oss's MXFP4."""

import types

import torch
from transformers.integrations import finegrained_fp8, mxfp4
from transformers.utils.quantization_config import FineGrainedFP8Config
from written import matrix, write


def fp8(name, n, k, **options):
    config = FineGrainedFP8Config(**options)
    quantizer = types.SimpleNamespace(quantization_config=config)
    w = torch.from_numpy(matrix(n, k))
    w[:128, :128] = 0
    state = finegrained_fp8.Fp8Quantize(quantizer).convert({"up.weight": w})
    expected = finegrained_fp8.Fp8Dequantize(quantizer)._dequantize_one(
        state["up.weight"], state["up.weight_scale_inv"], torch.float32
    )
    saved = {
        "quant_method": "fp8",
        "weight_block_size": list(config.weight_block_size),
        "scale_fmt": config.scale_fmt,
        "modules_to_not_convert": ["lm_head"],
    }
    write(f"transformers-{name}", {key[2:]: t for key, t in state.items()}, saved, expected)


fp8("fp8", 128, 256)
fp8("fp8-ue8m0", 128, 256, scale_fmt="ue8m0")
fp8("fp8-small-blocks", 192, 96, weight_block_size=(64, 32))

blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8, generator=torch.manual_seed(0))
scales = torch.randint(120, 130, (3, 8, 4), dtype=torch.uint8)
expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
write(
    "transformers-mxfp4",
    {"_blocks": blocks, "_scales": scales, "_bias": torch.ones(3, 8)},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    expected.transpose(-1, -2),
    layer="model.layers.0.mlp.experts.gate_up_proj",
)
