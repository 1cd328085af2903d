"""Records layers of transformers' text models in text.npz.

Run in an environment with torch and transformers 5.23.0: `python -m tests.recorded.record_text`.
"""

import copy
import importlib
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from tests.recorded.recorder import given, record, save

B, T, D = 2, 8, 32
BASE = dict(
    hidden_size=D,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    num_hidden_layers=4,
    vocab_size=11,
    max_position_embeddings=64,
    attention_dropout=0.0,
)


def config_of(model: str, **options: Any) -> Any:
    config = AutoConfig.for_model(model, **copy.deepcopy(BASE | options))
    config._attn_implementation = "eager"
    return config


def causal(window: int | None = None, bidirectional: bool = False) -> torch.Tensor:
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = torch.ones(T, T, dtype=torch.bool) if bidirectional else j <= i
    if window is not None:
        seen = seen & ((i - j).abs() < window)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


def attention(
    name: str,
    model: str,
    attention_class: str,
    rotary_class: str | None,
    *,
    layer: int | None = 0,
    mask: torch.Tensor | None = None,
    layer_type: str | None = None,
    text_model: str | None = None,
    **options: Any,
) -> None:
    config = config_of(text_model or model, **options)
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(code, attention_class)(config, *([] if layer is None else [layer]))

    def run(module: torch.nn.Module) -> torch.Tensor:
        x = given(name, "x", B, T, D)
        tables = None
        if rotary_class is not None:
            keywords = {} if layer_type is None else {"layer_type": layer_type}
            tables = getattr(code, rotary_class)(config)(x, torch.arange(T)[None], **keywords)
        return module(
            x,
            position_embeddings=tables,
            attention_mask=causal() if mask is None else mask,
        )[0]

    rope = config.rope_parameters
    if layer_type is not None:
        rope = rope[layer_type]
    kept = dict(head_dim=getattr(config, "head_dim", D // 4), rope_parameters=rope)
    record(name, module, run, dict(config=kept))


def attentions() -> None:
    attention("Llama", "llama", "LlamaAttention", "LlamaRotaryEmbedding")
    attention("Mistral", "mistral", "MistralAttention", "MistralRotaryEmbedding", mask=causal(3))
    attention(
        "Gemma 2",
        "gemma2",
        "Gemma2Attention",
        "Gemma2RotaryEmbedding",
        mask=causal(3),
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
    )
    attention(
        "Gemma 3",
        "gemma3",
        "Gemma3Attention",
        "Gemma3RotaryEmbedding",
        text_model="gemma3_text",
        mask=causal(3),
        layer_type="sliding_attention",
        query_pre_attn_scalar=24,
    )
    attention("Qwen 2", "qwen2", "Qwen2Attention", "Qwen2RotaryEmbedding")
    attention("Qwen 3", "qwen3", "Qwen3Attention", "Qwen3RotaryEmbedding")
    attention("OLMo 2", "olmo2", "Olmo2Attention", "Olmo2RotaryEmbedding")
    attention("Cohere", "cohere", "CohereAttention", "CohereRotaryEmbedding", use_qk_norm=True)
    attention("GLM 4", "glm4", "Glm4Attention", "Glm4RotaryEmbedding")
    attention("GLM 4.5 MoE", "glm4_moe", "Glm4MoeAttention", "Glm4MoeRotaryEmbedding")
    attention("GPT-NeoX", "gpt_neox", "GPTNeoXAttention", "GPTNeoXRotaryEmbedding")
    attention("gpt-oss", "gpt_oss", "GptOssAttention", "GptOssRotaryEmbedding", mask=causal(3))
    attention("Phi-3", "phi3", "Phi3Attention", "Phi3RotaryEmbedding", pad_token_id=0)
    attention(
        "Granite", "granite", "GraniteAttention", "GraniteRotaryEmbedding", attention_multiplier=0.3
    )
    attention(
        "SmolLM3 without rope", "smollm3", "SmolLM3Attention", "SmolLM3RotaryEmbedding", layer=3
    )
    attention("NanoChat", "nanochat", "NanoChatAttention", "NanoChatRotaryEmbedding")
    attention("EXAONE 4", "exaone4", "Exaone4Attention", "Exaone4RotaryEmbedding")
    attention("Qwen3-Next", "qwen3_next", "Qwen3NextAttention", "Qwen3NextRotaryEmbedding")


def mrope(name: str, model: str, config_name: str, rotary_class: str, section: list[int]) -> None:
    """Records tables of positions on three axes, by the model's own choice of pairs."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=section)
    config = config_of(config_name, rope_parameters=rope)
    code = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(code, rotary_class)(config)
    positions = torch.tensor([[0, 1, 2, 2, 2, 2], [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]])[:, None]

    def run(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        cos, sin = module(torch.zeros(1), positions)
        return dict(cos=cos[0, :, :8], sin=sin[0, :, :8])

    record(name, module, run, dict(positions=positions[:, 0].tolist(), section=section))


def others() -> None:
    mrope("Qwen2-VL", "qwen2_vl", "qwen2_vl_text", "Qwen2VLRotaryEmbedding", [2, 3, 3])
    mrope("Qwen3-VL", "qwen3_vl", "qwen3_vl_text", "Qwen3VLTextRotaryEmbedding", [4, 2, 2])

    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = config_of(
        "deepseek_v3",
        head_dim=8,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=4,
        rope_interleave=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=16,
        ),
    )
    tables = deepseek.DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(T)[None])
    record(
        "DeepSeek-V3",
        deepseek.DeepseekV3Attention(config, 0),
        lambda module: module(given("DeepSeek-V3", "x", B, T, D), tables, causal())[0],
        dict(config=dict(head_dim=8, rope_parameters=config.rope_parameters)),
    )

    from transformers.models.modernbert import modeling_modernbert as modernbert

    config = config_of("modernbert", head_dim=8, local_attention=4)
    rotary = modernbert.ModernBertRotaryEmbedding(config)
    tables = rotary(torch.zeros(1), torch.arange(T)[None], layer_type="sliding_attention")
    # local_attention=4 is a distance of at most 2 on each side.
    record(
        "ModernBERT",
        modernbert.ModernBertAttention(config, 1),
        lambda module: module(
            given("ModernBERT", "x", B, T, D), tables, causal(3, bidirectional=True)
        )[0],
        dict(theta=config.rope_parameters["sliding_attention"]["rope_theta"]),
    )

    from transformers.models.t5 import modeling_t5 as t5

    config = AutoConfig.for_model("t5", d_model=D, d_kv=8, num_heads=4, d_ff=48)
    module = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)

    def of_t5(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        x = given("T5", "x", B, T, D)
        return dict(y=module(x)[0], bias=module.compute_bias(T, T))

    record("T5", module, of_t5)

    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    kinds = ["sliding_attention", "full_attention"]
    config = config_of(
        "gemma4_text", layer_types=kinds, num_hidden_layers=2, global_head_dim=32, head_dim=16
    )
    rotary = gemma4.Gemma4TextRotaryEmbedding(config)
    tables = rotary(torch.zeros(1), torch.arange(T)[None], layer_type="full_attention")
    record(
        "Gemma 4",
        gemma4.Gemma4TextAttention(config, 1),
        lambda module: module(
            given("Gemma 4", "x", B, T, D), tables, causal(), shared_kv_states={}
        )[0],
        dict(config=dict(head_dim=32, rope_parameters=config.rope_parameters["full_attention"])),
    )

    from transformers.models.gptj import modeling_gptj as gptj

    config = AutoConfig.for_model("gptj", n_embd=D, n_head=4, rotary_dim=4, n_positions=16)
    record(
        "GPT-J",
        gptj.GPTJAttention(config, 0),
        lambda module: module(
            given("GPT-J", "x", B, T, D),
            attention_mask=causal(),
            position_ids=torch.arange(T)[None].expand(B, T),
        )[0],
    )
    norms()
    perceptrons()


def norms() -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    for name, norm in (
        ("Llama's norm", LlamaRMSNorm(D, eps=1e-5)),
        ("Gemma's norm", GemmaRMSNorm(D, eps=1e-5)),
        ("OLMo 2's norm", Olmo2RMSNorm(D, eps=1e-5)),
        ("gpt-oss's norm", GptOssRMSNorm(D, eps=1e-5)),
        ("Cohere's norm", CohereLayerNorm(D, eps=1e-5)),
    ):
        x = given(name, "x", B, T, D)

        def in_two_dtypes(module: torch.nn.Module, x: torch.Tensor = x) -> dict[str, torch.Tensor]:
            y = module(x)
            return dict(y=y, y16=module.to(torch.bfloat16)(x.to(torch.bfloat16)))

        record(name, norm, in_two_dtypes)
    name = "Nemotron's norm"
    record(name, NemotronLayerNorm1P(D), lambda m: m(given(name, "x", B, T, D)))
    gated = "Mamba 2's norm"
    record(
        gated,
        MambaRMSNormGated(D, group_size=8),
        lambda m: m(given(gated, "x", B, T, D), given(gated, "gate", B, T, D)),
    )
    after = "Qwen3-Next's norm"
    record(
        after,
        Qwen3NextRMSNormGated(D),
        lambda m: m(given(after, "x", B, T, D), given(after, "gate", B, T, D)),
    )


def perceptrons() -> None:
    from transformers.models.clip.modeling_clip import CLIPMLP
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.nemotron.modeling_nemotron import NemotronMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    clip = AutoConfig.for_model(
        "clip_vision_model", hidden_size=D, intermediate_size=48, num_attention_heads=4
    )
    for name, module in (
        ("Llama's perceptron", LlamaMLP(config_of("llama"))),
        ("Gemma's perceptron", GemmaMLP(config_of("gemma"))),
        ("Phi-3's perceptron", Phi3MLP(config_of("phi3", pad_token_id=0))),
        ("Nemotron's perceptron", NemotronMLP(config_of("nemotron"))),
        ("CLIP's perceptron", CLIPMLP(clip)),
        ("GPT-2's perceptron", GPT2MLP(48, AutoConfig.for_model("gpt2", n_embd=D))),
    ):
        record(name, module, lambda module, name=name: module(given(name, "x", B, T, D)))


def main() -> None:
    attentions()
    others()
    save("text.npz", transformers)


if __name__ == "__main__":
    main()
