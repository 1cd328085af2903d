"""Records logits of transformers' language models in lm.npz, with the config.json that it saves.

Run in an environment with torch and transformers 5.23.0: `python -m tests.recorded.record_lm`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.recorded.recorder import record, save

BASE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TOKENS = torch.tensor(
    [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9], [3, 23, 8, 46, 26, 43, 3, 8, 32, 7, 9, 5]]
)


def logits(name: str, model_type: str, **options: Any) -> None:
    config = AutoConfig.for_model(model_type, **BASE | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
    run = dict(config=written, tokens=TOKENS.tolist())
    record(name, model, lambda model: model(TOKENS).logits, run)


def models() -> None:
    llama3 = dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    logits("Llama 3", "llama", head_dim=None, rope_parameters=llama3)
    logits("Llama with biases", "llama", attention_bias=True, mlp_bias=True)
    logits("Qwen2", "qwen2", tie_word_embeddings=True)
    windows = dict(use_sliding_window=True, sliding_window=4, max_window_layers=2)
    logits("Qwen2 with windows", "qwen2", **windows)
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
    logits("Qwen3", "qwen3", rope_parameters=yarn)
    caps = dict(attn_logit_softcapping=1.0, final_logit_softcapping=2.0)
    logits("Gemma 2", "gemma2", sliding_window=4, query_pre_attn_scalar=24, **caps)
    logits(
        "Gemma 3", "gemma3_text", sliding_window=4, query_pre_attn_scalar=24, num_hidden_layers=7
    )
    logits("SmolLM3", "smollm3")
    mixture = dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=4)
    logits("gpt-oss", "gpt_oss", intermediate_size=32, **mixture)


if __name__ == "__main__":
    models()
    save("lm.npz", transformers)
