# requires: compressed-tensors==0.20.0 torch==2.13.0 transformers==5.23.0
"""Checkpoints of compressed-tensors."""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from written import dotted, matrix, write


def group(args):
    """Returns a config with one group."""
    return {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}


def qparams(w, args, whole=None):
    """Returns scales and zero points by the smallest and largest weight of each group."""
    n, k = w.shape
    if args.strategy == "tensor":
        low, high = w.min().reshape(1), w.max().reshape(1)
    elif args.strategy == "block":
        a, b = args.block_structure
        blocks = w.reshape(n // a, a, k // b, b)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        size = args.group_size if args.strategy in ("group", "tensor_group") else k
        runs = w.reshape(n, k // size, size)
        low, high = runs.amin(-1), runs.amax(-1)
    return calculate_qparams(low, high, args, global_scale=whole)


def case(name, form, n=16, k=256, dtype=torch.float32, order=None, **options):
    args = QuantizationArgs(**options)
    w = torch.from_numpy(matrix(n, k)).to(dtype)
    if order is not None:
        w = w[:, order]
    state, whole = {"weight": w}, None
    if args.strategy == "tensor_group":
        whole = generate_gparam(w.min(), w.max())
        state["weight_global_scale"] = whole.float().reshape(1)
    scale, zero = qparams(w, args, whole)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    compressed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(compressed), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": group(args),
        "ignore": ["lm_head"],
    }
    write(f"compressed-tensors-{name}", dotted(compressed), config, expected)


case("int4-sym", "pack-quantized", num_bits=4, strategy="group", group_size=128)
case(
    "int4-sym-bf16",
    "pack-quantized",
    dtype=torch.bfloat16,
    num_bits=4,
    strategy="group",
    group_size=32,
)
case(
    "int4-asym",
    "pack-quantized",
    n=12,
    num_bits=4,
    strategy="group",
    group_size=64,
    symmetric=False,
)
case("int4-odd", "pack-quantized", k=40, num_bits=4, strategy="channel", symmetric=False)
case("int3", "pack-quantized", k=100, num_bits=3, strategy="channel", symmetric=False)
case("w8a16", "pack-quantized", num_bits=8, strategy="channel")
case("w8a8", "int-quantized", num_bits=8, strategy="channel")
case("w8a8-asym", "int-quantized", num_bits=8, strategy="group", group_size=64, symmetric=False)
for strategy in ("channel", "tensor"):
    case(f"fp8-{strategy}", "float-quantized", num_bits=8, type="float", strategy=strategy)
case(
    "fp8-block",
    "float-quantized",
    n=128,
    num_bits=8,
    type="float",
    strategy="block",
    block_structure=[64, 128],
)
case(
    "nvfp4",
    "nvfp4-pack-quantized",
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)
MX = dict(type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
case("mxfp4", "mxfp4-pack-quantized", num_bits=4, **MX)
case("mxfp8", "mxfp8-quantized", num_bits=8, **MX)
