"""The rotation that a model's config.json describes, in the format of Hugging Face transformers."""

import math
from collections.abc import Mapping
from typing import Any

from jaxfused.ops.rope.rope_layers import Layer, layers_of, type_rotates
from jaxfused.ops.rope.rope_scaling import (
    DynamicNTKRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeScaling,
    YarnRope,
)
from jaxfused.runtime.checks import python_numbers

_SHARED = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "llama3": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        }
    ),
    "longrope": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
        }
    ),
    "proportional": frozenset({"factor"}),
}
"""Keys of the config for each rope type, next to those that all types have."""


@python_numbers
def rope_from_config(
    config: Mapping[str, Any],
    *,
    layer: int | None = None,
    layer_type: str | None = None,
    head_size: int | None = None,
) -> dict[str, Any] | None:
    """The arguments of `rope` and of `RotaryEmbedding` that a model's config.json asks for.

    Both forms are read: `rope_parameters`, and the older `rope_scaling` with `rope_theta` next to
    it and `type` for `rope_type`; also `partial_rotary_factor` and
    `original_max_position_embeddings` in or next to them, and `rotary_dim`. The types are "default",
    "linear", "dynamic", "yarn", "llama3", "longrope" ("su") and "proportional".

    Whether pairs are interleaved or halves, and whether the attention's scale takes
    `YarnRope.logit_factor`, is part of a model's code and not of its config.

    Args:
      config: the whole config.json, as `json.load` or transformers' `to_dict` give it; for a model of
        several parts, that of the language model.
      layer: the number of a layer, from 0, where layers differ.
      layer_type: "full_attention" or "sliding_attention", in its place where layers of one type agree.
      head_size: H, by default `qk_rope_head_dim`, `head_dim`, or `hidden_size` divided by
        `num_attention_heads`; of Gemma 4's full layers `global_head_dim`.

    Returns:
      `rotary_dim`, `theta` and `scaling`, the latter None for unscaled frequencies. None in place of
      all of them where the layer, or layers of that type, do not rotate: every fourth of SmolLM3 and
      Llama 4, those of Cohere 2 and EXAONE 4 that see all tokens.

    Raises:
      ValueError: the type or a key of the rotation is not known, one is missing, or layers differ
        and neither `layer` nor `layer_type` says which.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> config = {
      ...     "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5,
      ...     "rope_scaling": {"type": "linear", "factor": 4.0}}
      >>> options = jaxfused.rope_from_config(config)
      >>> options
      {'rotary_dim': 16, 'theta': 500000.0, 'scaling': LinearRope(factor=4.0)}
      >>> jaxfused.rope(jnp.ones((2, 5, 4, 16)), **options).shape
      (2, 5, 4, 16)

    Source: modeling_rope_utils.py of transformers 5.23.0.
    """
    given = {key: value for key, value in config.items() if value is not None}
    for part in ("text_config", "llm_config", "thinker_config", "language_config"):
        if part in given and not given.keys() & {"hidden_size", "head_dim"}:
            raise ValueError(
                f"rope_from_config: the config is that of several models, of which {part} is the"
                f" language model; pass config[{part!r}]."
            )
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(given.get(key, {}), Mapping):
            raise ValueError(
                f"rope_from_config: {key} is {given[key]!r}, but it has the rotation's parameters by"
                " their names; pass a dict, or leave it out."
            )
    layers = layers_of(config)
    if layer is not None:
        layer_type = _type_of(layers, layer, layer_type)
    if not _rotates(config, layers, layer, layer_type):
        return None
    parameters = _of_layer(given, layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"rope_from_config: rope_type is {kind!r}, but the types are {', '.join(_KEYS)}; make the"
            " tables of another rotation yourself and pass them as cos and sin."
        )
    unknown = sorted(parameters.keys() - _SHARED - _KEYS[kind])
    if unknown:
        raise ValueError(
            f"rope_from_config: {unknown[0]}={parameters[unknown[0]]!r} is not a known key of"
            f" rope_type {kind!r}, and leaving it out may be another rotation; make the tables"
            " yourself, or drop the key where it says nothing."
        )
    fraction = float(
        parameters.get(
            "partial_rotary_factor",
            given.get("partial_rotary_factor", given.get("rotary_pct", 1.0)),
        )
    )
    whole = _head_size(given, layer_type) if head_size is None else head_size
    # GPT-J, CodeGen and MiniMax M2 give the number of rotating features itself.
    turning = int(given.get("rotary_dim", int(whole * fraction)))
    theta = parameters.get("rope_theta", given.get("rope_theta", given.get("rotary_emb_base")))
    if theta is None:
        raise ValueError(
            "rope_from_config: the config has no rope_theta, and what models take then differs from"
            " one to the other; add the model's own, which is often 10000."
        )
    return dict(
        rotary_dim=whole if kind == "proportional" else turning,
        theta=_positive("rope_theta", theta),
        scaling=_scaling(kind, parameters, given, fraction),
    )


def _positive(key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(
            f"rope_from_config: {key} is {value!r}, but it is a positive number; pass the config.json"
            " that belongs to the weights."
        )
    return float(value)


def _type_of(layers: list[Layer], layer: int, layer_type: str | None) -> str | None:
    """Returns a layer's attention type, after a check that `layer_type` does not contradict it."""
    if layers and not 0 <= layer < len(layers):
        raise ValueError(
            f"rope_from_config: layer is {layer}, but the model has {len(layers)} layers; pass one from"
            f" 0 to {len(layers) - 1}."
        )
    own = layers[layer].type if layers else None
    if layer_type is not None and own not in (None, layer_type):
        raise ValueError(
            f"rope_from_config: layer_type is {layer_type!r}, but layer {layer} is of {own!r}; pass"
            " one of the two."
        )
    return layer_type if own is None else own


def _rotates(
    config: Mapping[str, Any], layers: list[Layer], layer: int | None, layer_type: str | None
) -> bool:
    """Returns whether the chosen layer applies rope; if layers differ, the caller has to choose one."""
    parameters = config.get("rope_parameters") or {}
    if layer_type in parameters and parameters[layer_type] is None:
        return False
    if config.get("position_embedding_type") == "nope":
        return False
    if layers and layer is not None:
        return layers[layer].rotates
    if not type_rotates(config, layer_type):
        return False
    meant = [
        (index, one.rotates)
        for index, one in enumerate(layers)
        if type_rotates({}, one.type) and layer_type in (None, one.type)
    ]
    still = [index for index, rotates in meant if not rotates]
    if still and len(still) < len(meant):
        raise ValueError(
            f"rope_from_config: layers {', '.join(map(str, still))} of this model do not rotate and"
            " others do; pass layer, the number of one."
        )
    return not still


def _of_layer(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Returns the parameters of the rotation in layers of `layer_type`, without those that are None."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if not layers and parameters and config.get("model_type") == "olmo3":
        # OLMo 3's older form states a scaling that only the layers with full attention have.
        theta = parameters.get("rope_theta", config.get("rope_theta"))
        layers = {"full_attention": parameters, "sliding_attention": {"rope_theta": theta}}
    elif not layers and "rope_local_base_freq" in config:
        # Gemma 3's older form states a scaling that only the layers with full attention have.
        full = {"rope_theta": config.get("rope_theta"), **parameters}
        sliding = {"rope_theta": config["rope_local_base_freq"]}
        layers = {"full_attention": full, "sliding_attention": sliding}
    elif not layers and "global_rope_theta" in config:
        # ModernBERT has one key for the theta of each layer type.
        full, sliding = (
            {"rope_theta": config.get(key)} for key in ("global_rope_theta", "local_rope_theta")
        )
        layers = {"full_attention": full, "sliding_attention": sliding}
    if layers and layer_type not in layers:
        raise ValueError(
            f"rope_from_config: layer_type is {layer_type!r}, but the config has rotations of"
            f" {', '.join(layers)}; pass one of them."
        )
    own = parameters if layer_type is None or not layers else layers[layer_type]
    return {key: value for key, value in own.items() if value is not None}


def _head_size(config: Mapping[str, Any], layer_type: str | None) -> int:
    """Returns the head size of layers of `layer_type`; Gemma 4's full layers have larger heads."""
    own = {int(index): layer for index, layer in config.get("per_layer_config", {}).items()}
    sizes = {
        own[index]["head_dim"]
        for index, kind in enumerate(config.get("layer_types", ()))
        if kind == layer_type and "head_dim" in own.get(index, {})
    }
    if layer_type == "full_attention" and "global_head_dim" in config:
        sizes.add(config["global_head_dim"])
    if len(sizes) > 1:
        raise ValueError(
            f"rope_from_config: layers of {layer_type!r} have heads of {sorted(sizes)} features; pass"
            " head_size, for one of them at a time."
        )
    if sizes:
        return int(sizes.pop())
    for key in ("qk_rope_head_dim", "head_dim"):
        if key in config:
            return int(config[key])
    if "hidden_size" not in config or "num_attention_heads" not in config:
        raise ValueError(
            "rope_from_config: the config has neither head_dim nor hidden_size and"
            " num_attention_heads, so how many features rotate is not known; pass head_size."
        )
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def _scaling(
    kind: str, parameters: Mapping[str, Any], config: Mapping[str, Any], fraction: float
) -> RopeScaling | None:

    def needed(key: str, *, within: Mapping[str, Any]) -> Any:
        if key not in within:
            raise ValueError(
                f"rope_from_config: rope_type {kind!r} needs {key}, which the config does not have;"
                " add it."
            )
        return within[key]

    def trained_length() -> int:
        key = "original_max_position_embeddings"
        if key in config:
            return int(_positive(key, config[key]))
        if key in parameters:
            return int(_positive(key, parameters[key]))
        key = "max_position_embeddings"
        return int(_positive(key, needed(key, within=config)))

    def factor() -> float:
        if "factor" in parameters:
            return _positive("factor", parameters["factor"])
        return needed("max_position_embeddings", within=config) / trained_length()

    def optional(**names: str) -> dict[str, Any]:
        return {ours: parameters[key] for ours, key in names.items() if key in parameters}

    match kind:
        case "linear":
            return LinearRope(needed("factor", within=parameters))
        case "dynamic":
            length = needed("max_position_embeddings", within=config)
            return DynamicNTKRope(needed("factor", within=parameters), length)
        case "yarn":
            return YarnRope(
                factor(),
                trained_length(),
                **optional(
                    beta_fast="beta_fast",
                    beta_slow="beta_slow",
                    attention="attention_factor",
                    truncate="truncate",
                    mscale="mscale",
                    mscale_all_dim="mscale_all_dim",
                ),
            )
        case "llama3":
            return Llama3Rope(
                needed("factor", within=parameters),
                trained_length(),
                needed("low_freq_factor", within=parameters),
                needed("high_freq_factor", within=parameters),
            )
        case "longrope":
            return LongRope(
                needed("short_factor", within=parameters),
                needed("long_factor", within=parameters),
                trained_length(),
                factor(),
                **optional(attention="attention_factor"),
            )
        case "proportional":
            return ProportionalRope(fraction, **optional(factor="factor"))
    return None
