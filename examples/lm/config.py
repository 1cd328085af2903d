"""The shape of a language model, read from its config.json in the form of Hugging Face transformers.

Every key of the file is used, known not to change the logits, or refused: an ignored key could
mean another model.

Source: the configuration files of transformers 5.23.0.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jaxfused
from examples.errors import ExampleError


class Rope(NamedTuple):
    """The rotation of a layer's queries and keys: the arguments of `jaxfused.rope_tables`."""

    rotary_dim: int
    theta: float
    scaling: jaxfused.RopeScaling | None = None


class Mixture(NamedTuple):
    """The mixture of experts of gpt-oss, in place of a gated MLP: `examples.lm.experts.Experts`."""

    experts: int
    experts_of_token: int
    alpha: float
    """Factor of the gate inside the logistic function."""
    limit: float
    """Upper bound of the gate, and bound of the magnitude of the factor that the gate multiplies."""


class Routed(NamedTuple):
    """Several gated MLPs in place of one; a router sends each token to a few: `jaxfused.nnx.MoE`."""

    experts: int
    experts_of_token: int


@dataclass(frozen=True)
class Config:
    """Sizes and options of a decoder of any family."""

    vocabulary: int
    width: int
    depth: int
    heads: int
    key_heads: int
    head_size: int
    hidden: int
    """Number of features inside the gated MLP."""
    max_length: int
    ropes: tuple[Rope | None, ...]
    """Rotary embedding of each layer; None for a layer without one."""
    windows: tuple[int | None, ...]
    """Keys that a query of each layer attends to, its own included; None for all."""
    scale: float
    """Scale of the attention's logits."""
    epsilon: float = 1e-6
    activation: str = "silu"
    is_tied: bool = False
    """True if the head is the transposed embedding."""
    qkv_bias: bool = False
    project_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """True if the queries and keys of each head are normalised."""
    branch_norms: bool = False
    """True if the results of attention and MLP are normalised before they are added."""
    scale_offset: float = 0.0
    """Number added to the norms' scales: Gemma stores scale - 1."""
    embedding_scale: float = 1.0
    attention_cap: float | None = None
    final_cap: float | None = None
    has_sinks: bool = False
    """True if each query head has a learned logit in the softmax's denominator alone, with no value."""
    mixture: Mixture | None = None
    routed: Routed | None = None

    @property
    def layers(self) -> str | None:
        """Name of the list of layers that all-gather their own parameters under FSDP; None with experts.

        Such a layer's result for a text may not depend on other texts, but the load of experts is
        balanced over the batch.
        """
        return "blocks" if self.routed is None and self.mixture is None else None


@dataclass(frozen=True)
class Family:
    """Rules for a family's config.json that add to those of all families."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a file may leave out."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The one value that this program supports, for each of some keys; other values are refused."""
    features: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Config` that all models of the family share."""
    every: int | None = None
    """Layers in a period, of which all but the last have a window; read where a file has no layer_types.
    None for families without a period."""
    windows_without_rope: bool = False
    """True if layers without a rotary embedding have a window; read where a file has no layer_types."""
    more: frozenset[str] = frozenset()
    """Keys that only this family has."""


_WINDOW = "sliding_window"
_ATTENTION_CAP, _FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"

_USED = frozenset(
    {
        _WINDOW,
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
        # jaxfused.rope_from_config reads these keys.
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
    }
)

_HARMLESS = frozenset(
    {
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "max_sequence_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sliding_window_size",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys that do not change the logits: they concern training, sampling, or the file itself."""
_HARMLESS_NAME = re.compile(r"_|\w+_token_id$")

_FIXED: Mapping[str, Any] = {"pruned_heads": {}, "rope_interleaved": False}

_GEMMA = dict(
    tie_word_embeddings=True,
    head_dim=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
_GEMMA_KEYS = frozenset({_ATTENTION_CAP, _FINAL_CAP, "query_pre_attn_scalar"})
_GEMMA_FIXED = {"use_bidirectional_attention": False}
_GEMMA_FEATURES = dict(branch_norms=True, scale_offset=1.0)

_QWEN = dict(use_sliding_window=False, sliding_window=4096)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(dict(rope_theta=1e4)),
    "qwen2": Family(
        dict(_QWEN, rope_theta=1e4), fixed={"use_mrope": False}, features=dict(qkv_bias=True)
    ),
    "qwen3": Family(dict(_QWEN, rope_theta=1e4, head_dim=128), features=dict(head_norms=True)),
    "smollm3": Family(
        dict(use_sliding_window=False, rope_theta=2e6, tie_word_embeddings=True),
        windows_without_rope=True,
        more=frozenset({"no_rope_layer_interval", "no_rope_layers"}),
    ),
    "gemma2": Family(
        dict(_GEMMA, rope_theta=1e4, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        fixed=_GEMMA_FIXED,
        features=_GEMMA_FEATURES,
        every=2,
        more=_GEMMA_KEYS,
    ),
    # Gemma 3 files with an image part omit many keys, whose defaults are these.
    "gemma3_text": Family(
        dict(
            _GEMMA,
            vocab_size=262_208,
            max_position_embeddings=131_072,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        fixed=_GEMMA_FIXED,
        # Attention of Gemma 3 has no cap: transformers passes attn_logit_softcapping in Gemma 2 alone.
        features=dict(_GEMMA_FEATURES, head_norms=True, attention_cap=None),
        every=6,
        more=_GEMMA_KEYS
        | {"_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"},
    ),
    "gpt_oss": Family(
        dict(
            attention_bias=True,
            head_dim=64,
            num_experts_per_tok=4,
            rms_norm_eps=1e-5,
            rope_theta=1.5e5,
            sliding_window=128,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        ),
        fixed=dict(hidden_act="silu"),
        features=dict(has_sinks=True),
        every=2,
        more=frozenset(
            {
                "experts_per_token",
                "initial_context_length",
                "num_experts_per_tok",
                "num_local_experts",
                "output_router_logits",
                "router_aux_loss_coef",
                "swiglu_alpha",
                "swiglu_limit",
            }
        ),
    ),
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_config(config: Mapping[str, Any]) -> Config:
    """Returns the shape of the model that a config.json describes, by the keys of transformers 4 or 5.

    Raises:
      ExampleError: the family is not known, a key is missing, or one is not known.
    """
    name = config.get("model_type")
    if name == "gemma3" and isinstance(config.get("text_config"), Mapping):
        # text_config describes the language model; the image encoder is not loaded.
        return read_config({"model_type": "gemma3_text", **config["text_config"]})
    if not isinstance(name, str) or name not in FAMILIES:
        raise ExampleError(
            f"model_type must be one of {', '.join(FAMILIES)}, but config.json has {name!r}; pass a"
            " model of one of these families."
        )
    family = FAMILIES[name]
    given = {key: value for key, value in config.items() if value is not None}
    _check_keys(name, given, _FIXED | family.fixed, family.more)
    # A cap or window that is null in the file is absent, even if the family has one by default.
    none = (config.keys() - given.keys()) & {_WINDOW, _ATTENTION_CAP, _FINAL_CAP}
    read = _Reader({k: v for k, v in family.defaults.items() if k not in none} | given)

    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    key_heads = read.size("num_key_value_heads", heads)
    if heads % key_heads:
        raise ExampleError(
            f"num_key_value_heads must divide num_attention_heads, but config.json has {key_heads} and"
            f" {heads}; pass the file that belongs to the weights."
        )
    head_size = read.size("head_dim", width // heads)
    bias = read.flag("attention_bias")
    features = dict(
        qkv_bias=bias, project_bias=bias, attention_cap=read.number(_ATTENTION_CAP, None)
    ) | dict(family.features)
    windows = _windows(read, family, head_size)
    scalar = read.number("query_pre_attn_scalar", head_size)
    is_gemma = bool(features.get("branch_norms"))
    return Config(
        vocabulary=read.size("vocab_size"),
        width=width,
        depth=len(windows),
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        hidden=read.size("intermediate_size"),
        max_length=read.size("max_position_embeddings"),
        ropes=tuple(_rope(read.given, layer, windows, head_size) for layer in range(len(windows))),
        windows=windows,
        scale=scalar**-0.5,
        epsilon=read.number("rms_norm_eps", 1e-6),
        activation=_activation(read.given, is_gemma),
        is_tied=read.flag("tie_word_embeddings"),
        mlp_bias=read.flag("mlp_bias"),
        embedding_scale=width**0.5 if is_gemma else 1.0,
        final_cap=read.number(_FINAL_CAP, None),
        mixture=_mixture(read) if name == "gpt_oss" else None,
        **features,
    )


def _mixture(read: "_Reader") -> Mixture:
    experts, each = read.size("num_local_experts"), read.size("num_experts_per_tok")
    if each > experts or read.given.get("experts_per_token", each) != each:
        raise ExampleError(
            f"config.json must give each token some of {experts} experts, but has num_experts_per_tok="
            f"{each} and experts_per_token={read.given.get('experts_per_token')!r}; pass the file that"
            " belongs to the weights."
        )
    alpha, limit = (read.number(f"swiglu_{name}", None) for name in ("alpha", "limit"))
    return Mixture(experts, each, alpha, limit)


class _Reader:
    """Reads keys of a config; raises an ExampleError if a value is wrong or a size is missing."""

    def __init__(self, given: Mapping[str, Any]):
        self.given = given

    def size(self, key: str, default: int | None = None) -> int:
        value = self.given.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise ExampleError(
                f"config.json must have a positive integer as {key}, but has {str(value)[:80]}; pass the"
                " file that belongs to the weights."
            )
        return value

    def number(self, key: str, default: Any) -> Any:
        value = self.given.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= sys.float_info.max):
            raise ExampleError(
                f"config.json must have a positive number as {key}, but has {str(value)[:80]}; pass the"
                " file that belongs to the weights."
            )
        return value

    def flag(self, key: str) -> bool:
        value = self.given.get(key, False)
        if not isinstance(value, bool):
            raise ExampleError(
                f"config.json must have true or false as {key}, but has {value!r}; pass the file that"
                " belongs to the weights."
            )
        return value


def _check_keys(
    name: str, given: Mapping[str, Any], fixed: Mapping[str, Any], more: frozenset[str]
) -> None:
    for key, value in given.items():
        if key == "quantization_config":
            continue  # This key says how the weights are stored.
        if key in fixed:
            if value != fixed[key]:
                raise ExampleError(
                    f"config.json has {key}={value!r}, which changes the results, and this program"
                    f" computes only {fixed[key]!r}; pass another model."
                )
        elif not (key in _USED | more or key in _HARMLESS or _HARMLESS_NAME.match(key)):
            raise ExampleError(
                f"config.json has {key}={value!r}, which models of {name!r} are not known to have, and"
                " leaving it out may be another model; remove the key if it says nothing about the"
                " logits."
            )


def _windows(read: _Reader, family: Family, head_size: int) -> tuple[int | None, ...]:
    """Returns the window of each layer, None for full attention."""
    depth, window = read.size("num_hidden_layers"), read.given.get(_WINDOW)
    has_switch = "use_sliding_window" in read.given or "max_window_layers" in read.given
    if window is None or (has_switch and not read.flag("use_sliding_window")):
        return (None,) * depth
    kinds, every = read.given.get("layer_types"), family.every
    if kinds is None and every is not None:
        # Where a file has both keys, the one without an underscore counts.
        for key in ("_sliding_window_pattern", "sliding_window_pattern"):
            every = read.size(key, every)
        kinds = [_SLIDING if (i + 1) % every else _FULL for i in range(depth)]
    elif kinds is None and family.windows_without_rope:
        ropes = [_rope(read.given, layer, (None,) * depth, head_size) for layer in range(depth)]
        kinds = [_SLIDING if rope is None else _FULL for rope in ropes]
    elif kinds is None and has_switch:
        first = read.given.get("max_window_layers", 28)
        kinds = [_SLIDING if i >= first else _FULL for i in range(depth)]
    elif kinds is None:
        raise ExampleError(
            f"config.json has sliding_window={window!r}, but says nothing of which layers have it; add"
            " layer_types."
        )
    known = isinstance(kinds, list | tuple) and all(kind in (_SLIDING, _FULL) for kind in kinds)
    if not known or len(kinds) != depth:
        raise ExampleError(
            f"layer_types must name {_FULL!r} or {_SLIDING!r} for each of {depth} layers, but is"
            f" {kinds!r}; pass a model with such layers."
        )
    return tuple(read.size(_WINDOW) if kind == _SLIDING else None for kind in kinds)


_SLIDING, _FULL = "sliding_attention", "full_attention"


def _rope(
    config: Mapping[str, Any], layer: int, windows: tuple[int | None, ...], head_size: int
) -> Rope | None:
    kind = _FULL if windows[layer] is None else _SLIDING
    # The file's layer_types may list windows that use_sliding_window switches off.
    config = dict(config, layer_types=[_FULL if w is None else _SLIDING for w in windows])
    try:
        options = jaxfused.rope_from_config(
            config, layer=layer, layer_type=kind, head_size=head_size
        )
    except ValueError as error:
        raise ExampleError(str(error)) from error
    if options is None:
        return None
    rope = Rope(**options)
    if rope.rotary_dim != head_size:
        # transformers ignores the key in these families, where other programs rotate a part of a head.
        raise ExampleError(
            f"partial_rotary_factor must be 1, but config.json has one by which {rope.rotary_dim} of"
            f" {head_size} features of a head are rotated; pass another model."
        )
    if rope.scaling is not None and rope.scaling.depends_on_length:
        raise ExampleError(
            "the rotation must be the same for texts of all lengths, as a cache keeps rotated keys, but"
            f" config.json asks for a {type(rope.scaling).__name__}; pass another model."
        )
    return rope


def _activation(config: Mapping[str, Any], is_gemma: bool) -> str:
    # Gemma reads hidden_activation alone; a hidden_act next to it is unused.
    name = (
        config.get("hidden_activation", "gelu_pytorch_tanh")
        if is_gemma
        else config.get("hidden_act", "silu")
    )
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ExampleError(
            f"the activation must be one of {', '.join(_ACTIVATIONS)}, but config.json has {name!r};"
            " pass another model."
        )
    return _ACTIVATIONS[name]
