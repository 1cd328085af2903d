"""Records the tables of transformers' rotations in rope.npz.

Run in an environment with torch and transformers 5.23.0: `python -m tests.recorded.record_rope`.
"""

import copy
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.recorded.values import save

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = {**BASE, "rope_theta": 1e4}
FACTORS = {
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.4, 2.0, 3.5, 6.0, 11.0, 18.0, 25.0],
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
PHI = {**LLAMA, "original_max_position_embeddings": 32}
GEMMA = {**BASE, "head_dim": 16}

# name: (config, class of the module, layer type, positions)
CONFIGS: dict[str, Any] = {
    "default": (LLAMA, LlamaRotaryEmbedding, None, [0, 1, 7, 127]),
    "linear": (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 500],
    ),
    "dynamic within": (
        {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 127],
    ),
    "dynamic beyond": (
        {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 299],
    ),
    "yarn": (
        {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 127],
    ),
    "yarn of gpt-oss": (
        {**LLAMA, "head_dim": 64, "rope_theta": 150000.0, "max_position_embeddings": 131072}
        | {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        },
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 4095],
    ),
    "yarn of DeepSeek-V3": (
        {**LLAMA, "head_dim": 64, "max_position_embeddings": 163840}
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            }
        },
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 4095],
    ),
    "yarn of DeepSeek-V2-Lite": (
        {**LLAMA, "head_dim": 64, "max_position_embeddings": 163840}
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 4096,
            }
        },
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 4095],
    ),
    "yarn with a factor of attention": (
        {**LLAMA, "rope_scaling": {"type": "yarn", **YARN, "attention_factor": 0.8}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 127],
    ),
    "llama3": (
        {**LLAMA, "head_dim": 64, "rope_theta": 5e5, "max_position_embeddings": 131072}
        | {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 4095],
    ),
    "longrope within": (
        {**PHI, "rope_scaling": {"type": "longrope", **FACTORS}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 31],
    ),
    "longrope beyond": (
        {**PHI, "rope_scaling": {"type": "longrope", **FACTORS}},
        LlamaRotaryEmbedding,
        None,
        [0, 1, 7, 32],
    ),
    "a quarter of the head": (
        {**BASE, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000},
        GPTNeoXRotaryEmbedding,
        None,
        [0, 1, 7, 127],
    ),
    "proportional": (
        {**GEMMA, "model_type": "gemma4_text", "global_head_dim": 32, "num_hidden_layers": 6}
        | {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        Gemma4TextRotaryEmbedding,
        "full_attention",
        [0, 1, 7, 127],
    ),
    "Gemma 3, full": (
        {**GEMMA, "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        Gemma3RotaryEmbedding,
        "full_attention",
        [0, 1, 7, 127],
    ),
    "Gemma 3, sliding": (
        {**GEMMA, "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        Gemma3RotaryEmbedding,
        "sliding_attention",
        [0, 1, 7, 127],
    ),
}


def main() -> None:
    rows = {}
    for name, (config, embedding, layer_type, positions) in CONFIGS.items():
        options = dict(config=config, layer_type=layer_type, positions=positions)
        given = copy.deepcopy(config)
        module = embedding(AutoConfig.for_model(given.pop("model_type"), **given))
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        cos, sin = module(torch.zeros(1, 1), torch.tensor([positions]), **keywords)
        half = cos.shape[-1] // 2
        assert torch.equal(cos[..., :half], cos[..., half:])
        rows[name] = ({"options": options}, {"cos": cos[0, :, :half], "sin": sin[0, :, :half]})
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    save("rope.npz", versions, rows)


if __name__ == "__main__":
    main()
