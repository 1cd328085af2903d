"""Checkpoints of llama.cpp: one GGUF file with the shape, the arrays and the vocabulary.

jaxfused.quantization reads the file and decodes its formats of few bits. This module undoes the changes
of llama.cpp's converter: names, permuted rows of q and k, and Gemma's norms with 1 added.

Source: convert_hf_to_gguf.py and gguf-py/gguf/constants.py of llama.cpp, with gguf 0.19.0.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxfused
from examples.errors import ExampleError
from examples.lm.config import Config, Rope, read_config
from examples.lm.weights import Read
from jaxfused.quantization import QuantizedLayer

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
}
_PERMUTED = ("llama", "smollm3")
"""Architectures whose files store rows of q and k as interleaved pairs for rope, not as two halves."""
_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and number of layers of the models of 27 B parameters. Their attention scale is
(width / heads) ** -0.5, which no key of the file states."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
_READ_BELOW = frozenset(
    {
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base_swa",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class DividedRope(jaxfused.RopeScaling):
    """Rope with frequencies divided by numbers of the file, as llama.cpp stores Llama 3's scaling."""

    divisors: tuple[float, ...]

    def frequencies(self, rotary_dim: int, theta: float) -> np.ndarray:
        return super().frequencies(rotary_dim, theta) / np.array(self.divisors)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Contents of a GGUF file."""

    config: Config
    arrays: Mapping[str, Read]
    """Functions that read the arrays, by the arrays' names in transformers."""
    fields: Mapping[str, Any]
    """Fields of the vocabulary, by their names without the prefix "tokenizer."."""

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Reads a file's metadata; its arrays are read when they are used.

        Raises:
          ExampleError: the file cannot be read, or is no model of these families.
        """
        try:
            fields = jaxfused.quantization.read_metadata(path)
            found = jaxfused.quantization.load(path)
        except (OSError, ValueError) as error:
            raise ExampleError(
                f"a model must be a readable GGUF file, but {path} is not ({error}); pass another file."
            ) from error
        tensors = _tensors(found)
        architecture = fields.get("general.architecture")
        config = _config(architecture, fields, tensors)
        arrays = {
            _name(name, config): _read(name, tensor, architecture, config)
            for name, tensor in tensors.items()
            if name != _FACTORS
        }
        vocabulary = {
            name.removeprefix("tokenizer."): value
            for name, value in fields.items()
            if name.startswith("tokenizer.")
        }
        return cls(config, arrays, vocabulary)


def _tensors(found: Mapping[str, QuantizedLayer | jax.Array]) -> dict[str, Read]:
    """Returns functions that read the tensors [outputs, inputs], by their names in the file."""
    tensors: dict[str, Read] = {}
    for name, array in found.items():
        if isinstance(array, jax.Array):
            tensors[name] = lambda array=array: array
            continue
        tensors[f"{name}.weight"] = lambda layer=array: layer.dequantize().T
        if array.bias is not None:
            tensors[f"{name}.bias"] = lambda layer=array: layer.bias
    return tensors


def _config(architecture: Any, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    if architecture not in _FAMILIES:
        raise ExampleError(
            f"a GGUF model must be one of {', '.join(_FAMILIES)}, but general.architecture is"
            f" {architecture!r}; pass a model of one of these families."
        )
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in fields.items()
        if name.startswith(f"{architecture}.")
    }
    if unknown := sorted(own.keys() - _KEYS.keys() - _READ_BELOW):
        raise ExampleError(
            f"the file has {architecture}.{unknown[0]}={own[unknown[0]]!r}, which is not known here, and"
            " leaving it out may be another model; pass another file."
        )
    config = {_KEYS[name]: value for name, value in own.items() if name in _KEYS}
    config |= dict(
        model_type=_FAMILIES[architecture],
        vocab_size=own.get("vocab_size", len(fields.get("tokenizer.ggml.tokens", ()))),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )
    config.setdefault("rope_theta", 10_000.0)
    config["rope_scaling"] = _scaling(own)
    if architecture.startswith("gemma"):
        config["query_pre_attn_scalar"] = config.get("head_dim", 256)
        if (architecture, own.get("block_count")) in _LARGEST_GEMMAS:
            heads = config["num_attention_heads"]
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads
    if architecture == "gemma3":
        config["rope_local_base_freq"] = own.get("rope.freq_base_swa", 10_000.0)
    # A GGUF file stores Gemma's norm scales with 1 added, so the model must not add it again.
    found = dataclasses.replace(read_config(config), scale_offset=0.0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, found.head_size) != found.head_size:
            raise ExampleError(
                f"{key} must be the size of a head, {found.head_size}, but the file has {own[key]};"
                " pass another model."
            )
    if _FACTORS in tensors:
        if config["rope_scaling"] is not None:
            raise ExampleError(
                f"the file has both {_FACTORS} and rope.scaling.type, of which only one is known to be"
                " applied; pass another file."
            )
        factors = tensors[_FACTORS]()
        if factors.shape != (found.head_size // 2,):
            raise ExampleError(
                f"{_FACTORS} must have {found.head_size // 2} numbers, one for each two features of a"
                f" head, but has shape {list(factors.shape)}; pass another file."
            )
        divided = DividedRope(tuple(float(factor) for factor in factors))
        ropes = tuple(r and Rope(r.rotary_dim, r.theta, divided) for r in found.ropes)
        found = dataclasses.replace(found, ropes=ropes)
    return found


def _scaling(own: Mapping[str, Any]) -> dict[str, Any] | None:
    # A factor without a type is linear, and 0 stands for 1, as in llama.cpp.
    kind = own.get("rope.scaling.type", "linear" if own.get("rope.scaling.factor") else "none")
    if kind == "none":
        return None
    scaling = dict(rope_type=kind, factor=own.get("rope.scaling.factor"))
    if "rope.scaling.original_context_length" in own:
        scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return scaling


def _name(name: str, config: Config) -> str:
    """Returns the name in transformers; an unknown name stays as it is and is refused later."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, ending = match.groups()
        table = _NAMES | (_GEMMA_NORMS if config.branch_norms else _NORMS)
        return f"layers.{layer}.{table.get(part, part)}.{ending}"
    part, _, ending = name.rpartition(".")
    return f"{_WHOLE.get(part, part)}.{ending}"


def _read(name: str, tensor: Read, architecture: str, config: Config) -> Read:
    """Returns a function that reads a tensor with its rows in transformers' order."""
    heads = {"attn_q": config.heads, "attn_k": config.key_heads}
    part = name.split(".")[-2]
    if architecture not in _PERMUTED or part not in heads:
        return tensor

    def read() -> np.ndarray | jax.Array:
        array = tensor()
        pairs = array.reshape(heads[part], config.head_size // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return read
