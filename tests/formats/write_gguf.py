# requires: gguf==0.19.0 torch==2.13.0
"""GGUF files: blocks that the package can encode, and crafted ones that it can decode alone."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import save_file
from written import OUT, matrix


def crafted(kind, n, k):
    """Returns random blocks whose float16 scales are moderate."""
    rng = np.random.default_rng(0)
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n * k // values, size), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = rng.normal(size=len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}


def case(kind, n=8, k=512):
    w = matrix(n, k)
    w[2] = 0
    data = crafted(kind, n, k) if kind in HALVES else gguf.quants.quantize(w, kind)
    expected = gguf.quants.dequantize(data, kind)
    folder = OUT / f"gguf-{kind.name.lower()}"
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    right = torch.from_numpy(np.array(expected, np.float32))
    save_file({"weight": right.contiguous()}, folder / "expected.safetensors.of")
    print("wrote", folder.name)


for kind in (
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.MXFP4,
    Kind.TQ2_0,
    *HALVES,
):
    case(kind)
