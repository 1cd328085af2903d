# requires: torchao==0.18.0 torch==2.13.0
"""torchao: int8, float8 and integers of few bits."""

import torch
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType
from written import matrix, write


def case(name, config, zero_row=False):
    model = torch.nn.Sequential(torch.nn.Linear(256, 16))
    model[0].weight.data = torch.from_numpy(matrix(16, 256))
    if zero_row:
        model[0].weight.data[3] = 0
    quantize_(model, config)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    expected = model[0].weight.dequantize()
    tensors = {key[1:]: t for key, t in tensors.items()}
    saved = {"quant_method": "torchao", "quant_type": {}}
    write(f"torchao-{name}", tensors, saved, expected, metadata, layer="0")


case("int8", Int8WeightOnlyConfig(version=2))
case("float8", Float8WeightOnlyConfig(version=2), zero_row=True)
for kind in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
    case(
        f"int4-{kind.name.lower()}",
        IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=kind, version=2
        ),
    )
