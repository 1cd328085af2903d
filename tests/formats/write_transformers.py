# requires: transformers==5.23.0 torch==2.13.0 accelerate==1.14.0
"""What Transformers itself writes: float8 in blocks, gpt-oss's MXFP4, BitNet, Gemma, Metal."""

import types

import torch
from transformers.integrations import (
    bitnet,
    finegrained_fp8,
    gemma_quant,
    metal_quantization,
    mxfp4,
)
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

ternary = torch.randint(-1, 2, (16, 64), generator=torch.manual_seed(1))
packed = bitnet.pack_weights(ternary.clone())
for kind, scale in (("bitlinear", 4.0), ("autobitlinear", 0.3)):
    one = torch.tensor([scale])
    values = ternary.float()
    write(
        f"transformers-bitnet-{kind}",
        {".weight": packed, ".weight_scale": one},
        {"quant_method": "bitnet", "linear_class": kind},
        values * (1 / one) if kind == "bitlinear" else values * one,
    )

for bits in (8, 4, 2):
    layer = gemma_quant.QuantizedLinear(64, 16, num_bits=bits)
    stored = torch.randint(0, 256, layer.weight.shape, generator=torch.manual_seed(2))
    layer.weight.data = (stored - 128).to(torch.int8) if bits == 8 else stored.to(torch.uint8)
    layer.weight_scale.data = torch.rand(16, 1)
    state = {key: layer.state_dict()[key] for key in ("weight", "weight_scale")}
    options = {"^up$": {"num_bits": bits}}
    write(
        f"transformers-gemma-{bits}bit",
        {f".{key}": t for key, t in state.items()},
        {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": options},
        layer._dequantize_weights(),
    )

for bits in (8, 4, 2):
    w = torch.from_numpy(matrix(16, 256))
    words, scales, biases = metal_quantization._affine_quantize_tensor(w, 64, bits)
    write(
        f"transformers-metal-{bits}bit",
        {".weight": words, ".scales": scales, ".qbiases": biases},
        {"quant_method": "metal", "bits": bits, "group_size": 64},
        metal_quantization._affine_dequantize_tensor(words, scales, biases, 64, bits),
    )
