# requires: nvidia-modelopt==0.47.0 torch==2.13.0 transformers==5.23.0 requests
"""ModelOpt's NVFP4, under the names of its exported checkpoints."""

import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from written import matrix, write

w = torch.from_numpy(matrix(16, 256))
w[2] = 0
array, scale, whole = NVFP4QTensor.quantize(w, 16)
expected = array.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
write(
    "modelopt-nvfp4",
    {".weight": array._quantized_data, ".weight_scale": scale, ".weight_scale_2": whole},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]},
    expected,
)
