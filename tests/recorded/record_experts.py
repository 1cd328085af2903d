"""Records mixtures of experts of transformers in experts.npz: routes, and whole blocks.

Run in an environment with torch and transformers 5.23.0: `python -m tests.recorded.record_experts`.
"""

import importlib
from typing import Any

import torch
import transformers

from tests.recorded.recorder import given, record, save

TOKENS, FEATURES, EXPERTS = 24, 32, 8
BASE = dict(
    hidden_size=FEATURES,
    intermediate_size=48,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=48,
    num_local_experts=EXPERTS,
    num_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_k=2,
    moe_num_experts=EXPERTS,
    n_shared_experts=1,
    moe_num_shared_experts=1,
    hidden_act="silu",
)


GAIN = 8.0
"""Factor of the experts' matrices, which then have unit gain as the layers have."""


def block(name: str, module: str, block_class: str, router: str, **config: Any) -> None:
    """Records a block's result, and its router's weights by expert, [T, E]."""
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    config_class = next(
        c
        for n, c in sorted(vars(configuration).items(), key=lambda item: "Text" not in item[0])
        if isinstance(c, type) and n.endswith("Config") and n != "PreTrainedConfig"
    )
    made = config_class(**BASE | config)
    made._experts_implementation = "eager"
    layer = getattr(code, block_class)(made)
    x = given(name, "x", 1, TOKENS, FEATURES)
    dense = {}

    def keep(module: Any, args: Any, outputs: Any) -> None:
        if len(outputs) == 2:  # Llama 4 returns them by expert.
            dense["weights"] = outputs[0]
            return
        _, weights, indices = outputs
        kept = torch.zeros(TOKENS, EXPERTS)
        dense["weights"] = kept.scatter(1, indices.long(), weights.float())

    def run(layer: Any) -> dict[str, torch.Tensor]:
        for value in layer.parameters():
            if value.ndim == 3:
                value *= GAIN
        for key, value in layer.named_buffers():
            value.copy_(0.2 * given(name, key, *value.shape))
        gate = layer.get_submodule(router)
        handle = gate.register_forward_hook(keep)
        y = layer(x)
        handle.remove()
        y = y[0] if isinstance(y, tuple) else y
        return {"y": y.reshape(TOKENS, FEATURES), **dense}

    record(name, layer, run, dict(gain=GAIN))


def blocks() -> None:
    block("Mixtral", "mixtral", "MixtralSparseMoeBlock", "gate")
    block("Qwen2-MoE", "qwen2_moe", "Qwen2MoeSparseMoeBlock", "gate", norm_topk_prob=False)
    block("Qwen3-MoE", "qwen3_moe", "Qwen3MoeSparseMoeBlock", "gate", norm_topk_prob=True)
    groups = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
    limited = dict(topk_method="group_limited_greedy", **groups)
    block("DeepSeek-V2", "deepseek_v2", "DeepseekV2Moe", "gate", **limited)
    block("DeepSeek-V3", "deepseek_v3", "DeepseekV3MoE", "gate", norm_topk_prob=True, **groups)
    alone = dict(norm_topk_prob=True, n_group=1, topk_group=1)
    block("GLM-4.5", "glm4_moe", "Glm4MoeMoE", "gate", **alone)
    block("Ernie 4.5", "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "gate")
    block("Granite", "granitemoe", "GraniteMoeMoE", "router")
    block("MiniMax-M2", "minimax_m2", "MiniMaxM2SparseMoeBlock", "gate")
    block("Llama 4", "llama4", "Llama4TextMoe", "router", num_experts_per_tok=1)


if __name__ == "__main__":
    blocks()
    save("experts.npz", transformers)
