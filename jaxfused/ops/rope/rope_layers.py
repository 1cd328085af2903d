"""Layers of a Hugging Face model: the attention type of each, and whether it applies rope.

Both are read from the model's config.json.

Source: the configuration and modelling files of transformers 5.23.0.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

_WINDOWS_ALONE = frozenset(
    {
        "afmoe",
        "beam",
        "cohere2",
        "cohere2_moe",
        "exaone4",
        "exaone4_5_text",
        "exaone_moe",
        "flint",
        "kolibri1",
    }
)
"""Model types in which only the layers with a sliding window apply rope."""

_EVERY_FOURTH_DOES_NOT = frozenset({"llama4_text", "smollm3"})
"""Model types in which every fourth layer applies no rope, if the config has no list of layers."""

_INTERVALS = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma3_text": 6,
    "olmo3": 4,
}
"""Interval of the layers with full attention, by model type, for configs that do not state it."""


class Layer(NamedTuple):
    """Attention type of a layer, and whether it applies rope."""

    type: str | None
    rotates: bool


def layers_of(config: Mapping[str, Any]) -> list[Layer]:
    """Returns the layers of a model; an empty list if the config states nothing of layers."""
    count = config.get("num_hidden_layers")
    turning = config.get("no_rope_layers")
    if not isinstance(turning, list | tuple | None):
        raise ValueError(
            f"rope_from_config: no_rope_layers is {turning!r}; pass a list with 1 or 0 for each layer."
        )
    if not turning and count is not None:
        interval = config.get("no_rope_layer_interval")
        if interval is None and config.get("model_type") in _EVERY_FOURTH_DOES_NOT:
            interval = 4
        # In spite of its name, `no_rope_layers` has 1 where a layer applies rope.
        turning = interval and [int((index + 1) % interval != 0) for index in range(count)]
    types = config.get("layer_types") or _types(config)
    if not types:
        types = [None] * len(turning or ())
    turning = turning or [1] * len(types)
    if len(turning) != len(types):
        raise ValueError(
            f"rope_from_config: no_rope_layers has {len(turning)} numbers, but there are {len(types)}"
            " layers; pass one for each."
        )
    return [
        Layer(kind, bool(turns) and type_rotates(config, kind, index))
        for index, (kind, turns) in enumerate(zip(types, turning, strict=True))
    ]


def _types(config: Mapping[str, Any]) -> list[str]:
    """Returns the layers' attention types, from a pattern or interval in the config; [] without one."""
    interval = config.get("sliding_window_pattern", config.get("global_attn_every_n_layers"))
    if interval is None:
        interval = _INTERVALS.get(config.get("model_type", ""))
    count = config.get("num_hidden_layers")
    if not interval or count is None:
        return []
    if isinstance(interval, str):
        windows = [interval[index % len(interval)] == "L" for index in range(count)]
    else:
        windows = [bool((index + 1) % interval) for index in range(count)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def type_rotates(config: Mapping[str, Any], kind: str | None, index: int | None = None) -> bool:
    """Returns whether a layer of type `kind` applies rope, which in cohere2_moe depends on its index."""
    if kind is None:
        return True
    if not kind.endswith("attention") or kind == "linear_attention":
        return False
    model = config.get("model_type")
    if model not in _WINDOWS_ALONE or kind == "sliding_attention":
        return True
    if model in ("exaone4", "exaone4_5_text", "exaone_moe", "kolibri1"):
        return config.get("sliding_window", 4096) is None
    dense = config.get("mlp_layer_types")
    is_first = model == "cohere2_moe" and config.get("prefix_dense_sliding_window_pattern", 1) == 1
    return bool(is_first and dense and index is not None and dense[index] == "dense")
