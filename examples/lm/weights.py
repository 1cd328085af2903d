"""Parameters of a `LanguageModel` from a checkpoint with the names of Hugging Face transformers.

The checkpoint stores linear layers as [out, in], with queries, keys and values separate; the model's
kernels are [in, out], and one kernel has the columns of queries, keys and values.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.lm.config import Config, read_config
from examples.lm.model import LanguageModel
from examples.lm.quantized import quantized_kernel
from jaxfused.quantization import QuantizedLayer

Read = Callable[[], np.ndarray | jax.Array | jaxfused.QuantizedArray]
"""Function that reads one array of a checkpoint."""
Layers = Mapping[str, QuantizedLayer]
"""Quantised layers of a checkpoint, by the names that float weights would have."""

_LAYER = {
    "norm1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "project": ("self_attn.o_proj",),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.up": ("mlp.up_proj",),
    "mlp.down": ("mlp.down_proj",),
    "mlp.router": ("mlp.router",),
}
_NORMS = {"norm2": ("post_attention_layernorm",)}
_GEMMA_NORMS = {
    "norm_of_attention": ("post_attention_layernorm",),
    "norm2": ("pre_feedforward_layernorm",),
    "norm_of_mlp": ("post_feedforward_layernorm",),
}
_WHOLE = {
    "sinks": "self_attn.sinks",
    "mlp.gate_up": "mlp.experts.gate_up_proj",
    "mlp.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.down": "mlp.experts.down_proj",
    "mlp.down_bias": "mlp.experts.down_proj_bias",
}
"""Parameters of a layer that a checkpoint stores in the same shape, and their names there."""
_ENDINGS = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NOT_OF_TEXT = ("vision_tower.", "multi_modal_projector.")
_COMPUTED = ("rotary_emb.inv_freq",)
"""Suffixes of ignored arrays of old checkpoints: rope frequencies, which config.json determines."""


def load_model(
    directory: Path, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike | None = None
) -> LanguageModel:
    """Returns the model of a downloaded directory with config.json and *.safetensors.

    Args:
      directory: of the files.
      dtype: of the computation.
      param_dtype: of the parameters, by default `dtype`.

    Raises:
      ExampleError: a file is missing or cannot be read, or is no model of these families.
    """
    given = _read_json(directory / "config.json")
    config = read_config(given)
    if given.get("quantization_config") is not None:
        arrays, layers = _open_quantized(directory)
    else:
        arrays, layers = open_safetensors(directory), {}
    return assemble(config, arrays, layers, dtype=dtype, param_dtype=param_dtype)


def assemble(
    config: Config,
    arrays: Mapping[str, Read],
    layers: Layers = types.MappingProxyType({}),
    *,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike | None = None,
) -> LanguageModel:
    """Returns a model with the arrays of a checkpoint, which are read one by one.

    Quantised linear layers of the blocks stay quantised, except for queries, keys and values of
    different formats: these are dequantised, because the model has one kernel for them.

    Raises:
      ExampleError: an array is missing, has another shape, or has no place in the model.
    """
    param_dtype = dtype if param_dtype is None else param_dtype
    arrays, layers = _text_only(arrays), _text_only(layers)
    if config.is_tied and _HEAD in arrays:
        # A head that is not the embedding counts, whatever config.json says, as in transformers.
        embedding = arrays.setdefault(_EMBEDDING, arrays[_HEAD])
        if not np.array_equal(arrays[_HEAD](), embedding()):
            config = dataclasses.replace(config, is_tied=False)
    model = nnx.eval_shape(
        lambda: LanguageModel(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    )
    used: set[str] = set()
    kernels = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Linear) and path[0] == "blocks":
            names = _names(".".join(map(str, (*path, "kernel"))), config)
            kernel = quantized_kernel([layers.get(name) for name in names])
            if kernel is not None:
                kernels["/".join(map(str, path))] = kernel
                used.update(names)
    graphdef, shapes = nnx.split(jaxfused.quantization.with_kernels(model, kernels))

    def parameter(path: tuple[Any, ...], shape: Any) -> jax.Array | jaxfused.QuantizedArray:
        if isinstance(shape, jax.Array):
            return shape  # `with_kernels` has already put this quantised kernel into the model.
        whole = jax.tree_util.keystr(path, simple=True, separator=".")
        names = _names(whole, config)
        used.update(names)
        return _parameter(names, arrays, shape, is_kernel=whole.endswith(".kernel"))

    state = jax.tree_util.tree_map_with_path(parameter, nnx.to_pure_dict(shapes))
    if config.is_tied:
        used.add(_HEAD)
    if unknown := sorted(name for name in arrays.keys() - used if not name.endswith(_COMPUTED)):
        raise ExampleError(
            f"every array of a checkpoint must have a place in the model, but {unknown[0]!r} has none;"
            " pass the config.json that belongs to the weights."
        )
    nnx.replace_by_pure_dict(shapes, state)
    return nnx.merge(graphdef, shapes)


def open_safetensors(directory: Path) -> dict[str, Read]:
    """Returns functions that read the arrays of a directory's *.safetensors, which are memory-mapped.

    Raises:
      ExampleError: there are none, or one cannot be read.
    """
    found = _read(jaxfused.quantization.read_tensors, directory)
    return {name: lambda array=array: array for name, array in found.items()}


def _read(read: Callable[[Path], Mapping[str, Any]], directory: Path) -> Mapping[str, Any]:
    """Returns the tensors that `read` loads from a directory; its errors become an ExampleError."""
    try:
        return read(directory)
    except (OSError, ValueError) as error:
        raise ExampleError(
            f"the weights must be in readable safetensors files, but those of {directory} are not"
            f" ({error}); pass a directory with all of them."
        ) from error


def _open_quantized(directory: Path) -> tuple[dict[str, Read], Layers]:
    """Returns the arrays and layers of a directory with weights that another library has quantised.

    Stacks of experts are among the arrays, and stay quantised.

    Raises:
      ExampleError: there are none, or one cannot be read.
    """
    found = _read(jaxfused.quantization.load, directory)
    arrays: dict[str, Read] = {}
    layers: dict[str, QuantizedLayer] = {}
    for name, array in found.items():
        if isinstance(array, jax.Array):
            arrays[name] = lambda array=array: array
            continue
        is_stack = array.array.ndim > 2
        if is_stack:
            arrays[name] = lambda layer=array: layer.array
        else:
            layers[f"{name}.weight"] = array
            arrays[f"{name}.weight"] = lambda layer=array: layer.dequantize().T
        if array.bias is not None:
            arrays[f"{name}_bias" if is_stack else f"{name}.bias"] = lambda layer=array: layer.bias
    return arrays, layers


def _text_only[T](arrays: Mapping[str, T]) -> dict[str, T]:
    """Returns the arrays of the decoder, by their names within it.

    Names begin with "model.layers", with "model.language_model.layers" (transformers 5) or
    "language_model.model.layers" (4) in a model with images, and with "layers" in a decoder alone.
    """
    short = {
        name.replace("language_model.", "").removeprefix("model."): read
        for name, read in arrays.items()
    }
    return {name: read for name, read in short.items() if not name.startswith(_NOT_OF_TEXT)}


def _names(path: str, config: Config) -> tuple[str, ...]:
    """Returns the checkpoint's names of the arrays that one parameter consists of."""
    *owner, leaf = path.split(".")
    if owner[0] == "blocks" and (whole := ".".join([*owner[2:], leaf])) in _WHOLE:
        return (f"layers.{owner[1]}.{_WHOLE[whole]}",)
    ending = _ENDINGS[leaf]
    if owner[0] == "blocks":
        layer, name = owner[1], ".".join(owner[2:])
        table = _LAYER | (_GEMMA_NORMS if config.branch_norms else _NORMS)
        return tuple(f"layers.{layer}.{part}.{ending}" for part in table[name])
    return {
        "embed": (_EMBEDDING,),
        "norm": (f"norm.{ending}",),
        "head": (_HEAD,),
    }[owner[0]]


def _parameter(
    names: tuple[str, ...],
    arrays: Mapping[str, Read],
    like: jax.ShapeDtypeStruct,
    *,
    is_kernel: bool,
) -> jax.Array | jaxfused.QuantizedArray:
    for name in names:
        if name not in arrays:
            raise ExampleError(
                f"the checkpoint must hold {name!r}, but does not; pass the config.json that belongs to"
                " the weights, and all of their files."
            )
    parts = [arrays[name]() for name in names]
    array: Any
    if isinstance(parts[0], jaxfused.QuantizedArray):
        array = parts[0]
    else:
        array = _joined(parts, is_kernel, like.dtype) if len({p.ndim for p in parts}) == 1 else None
    if array is None or array.shape != like.shape:
        raise ExampleError(
            f"{' and '.join(names)} must make an array of {list(like.shape)}, but"
            f" {'their shapes are' if len(parts) > 1 else 'its shape is'}"
            f" {', '.join(str(list(part.shape)) for part in parts)}; pass the config.json that belongs"
            " to the weights."
        )
    return array


def _joined(parts: list[np.ndarray | jax.Array], is_kernel: bool, dtype: Any) -> jax.Array:
    """Concatenates arrays along axis 0; kernels [out, in] are then transposed to [in, out]."""
    # The array is copied, because memory-mapped data changes with the file.
    array = jnp.array(parts[0]) if len(parts) == 1 else jnp.concatenate(parts)
    return (array.T if is_kernel else array).astype(dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ExampleError(
            f"a model's directory must hold a readable {path.name}, but {path} is not ({error}); pass"
            " the directory of a downloaded checkpoint."
        ) from error
    if not isinstance(found, dict):
        raise ExampleError(
            f"{path} must hold an object, but holds a {type(found).__name__}; pass the directory of a"
            " downloaded checkpoint."
        )
    return found
