"""save: quantised layers as a checkpoint of compressed-tensors, which vLLM and Transformers read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.quantization.checkpoints import files, safetensors_file
from jaxfused.quantization.checkpoints.layer import QuantizedLayer
from jaxfused.runtime.quantized_array import CODEBOOKS, QuantizedArray

Tensors = dict[str, np.ndarray]


def save(
    path: str | os.PathLike[str], layers: Mapping[str, QuantizedLayer | QuantizedArray | jax.Array]
) -> None:
    """Writes quantised layers and other arrays as a checkpoint in compressed-tensors' format.

    int4 is written as "pack-quantized", int8 as "int-quantized", float8 as "float-quantized", and E2M1
    with E8M0 scales as "mxfp4-pack-quantized", each with its scales as they are.
    `jaxfused.quantization.load` reads the same numbers again.

    Args:
      path: a folder, created if missing; model.safetensors is written to it, and the
        `quantization_config` to its config.json, next to what this has already.
      layers: by their names, quantised layers or arrays [D, F] of axis -2, and other arrays, which are
        written under their names.

    Raises:
      ValueError: compressed-tensors has no format for an array: one with offsets or another codebook,
        of a layer with a permutation, float8 with zero points, or integers with blocks; two arrays have
        one name, or a name is none that safetensors have; or the folder has other .safetensors files or
        an index of them, which some libraries read too.

    Example:
      >>> import jax.numpy as jnp, jaxfused, pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> jaxfused.quantization.save(folder, {"up": jaxfused.quantize(jnp.ones((4, 8)))})
      >>> sorted(file.name for file in folder.iterdir())
      ['config.json', 'model.safetensors']

    Source: https://github.com/vllm-project/compressed-tensors
    """
    folder = Path(path)
    others = _config_there(folder)
    tensors: Tensors = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, given in layers.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(
                f"save: an array has the name {name!r}, but names are strings, and '__metadata__' stands"
                " for what safetensors say of themselves; pass it under another name."
            )
        if not isinstance(given, QuantizedLayer | QuantizedArray):
            _put(tensors, {name: _numbers(name, given)})
            continue
        layer = QuantizedLayer(given) if isinstance(given, QuantizedArray) else given
        parts, form, args = _written(name, layer)
        _put(tensors, {f"{name}.{part}": array for part, array in parts.items()})
        key = json.dumps([form, args])
        group = groups.setdefault(key, dict(targets=[], weights=args, format=form))
        group["targets"].append(name)
    forms = {group["format"] for group in groups.values()}
    config: dict[str, Any] = dict(
        quant_method="compressed-tensors",
        format=forms.pop() if len(forms) == 1 else "mixed-precision",
        quantization_status="compressed",
        config_groups={f"group_{i}": group for i, group in enumerate(groups.values())},
        ignore=[],
    )
    folder.mkdir(parents=True, exist_ok=True)
    safetensors_file.write(folder / _FILE, tensors, {"format": "pt"})
    text = json.dumps({**others, "quantization_config": config}, indent=2)
    (folder / _CONFIG).write_text(text, "utf-8")


_FILE, _CONFIG = "model.safetensors", "config.json"


def _config_there(folder: Path) -> dict[str, Any]:
    """Returns the folder's config.json, {} if it has none.

    Raises:
      ValueError: the config cannot be read, or the folder has files that some libraries read too.
    """
    weights = sorted(file.name for file in folder.glob("*.safetensors*") if file.name != _FILE)
    if weights:
        raise ValueError(
            f"save: {folder} has {weights[0]}, which would be read with the layers or in their place;"
            " pass another folder, or delete it."
        )
    return files.json_of("save", folder / _CONFIG) if (folder / _CONFIG).exists() else {}


def _put(tensors: Tensors, more: Tensors) -> None:
    """Adds tensors; none may replace another of the same name."""
    for name in more.keys() & tensors.keys():
        raise ValueError(
            f"save: two arrays would be written as {name!r}, one of them as a part of a layer; rename"
            " one."
        )
    tensors |= more


def _numbers(name: str, given: Any) -> np.ndarray:
    """Returns an array as NumPy's, after a check that safetensors has its dtype.

    Raises:
      ValueError: `given` is no array of numbers, or of a dtype that safetensors lacks.
    """
    array = np.asarray(given)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not safetensors_file.is_held(array.dtype):
        raise ValueError(
            f"save: {name!r} is a {type(given).__name__} of dtype {array.dtype}, but a checkpoint holds"
            " quantised layers and arrays of real numbers; pass one of them."
        )
    return array


def _written(name: str, layer: QuantizedLayer) -> tuple[Tensors, str, dict[str, Any]]:
    """Returns a layer's tensors, their compressed-tensors format and the format's arguments."""
    array = layer.array
    if array.axis != -2 or array.ndim != 2:
        _fail(
            name,
            f"it has axis {array.axis} and shape {array.shape}, but layers are [D, F] of axis -2",
        )
    if array.offset is not None:
        _fail(name, "it has offsets")
    if layer.permutation is not None:
        _fail(
            name, "it has a permutation of its inputs, which compressed-tensors 0.20 does not read"
        )
    values, scale = np.asarray(array.unpacked()).T, np.asarray(_floats(array.scale)).T
    zeros = None if array.zero_point is None else np.asarray(array.zero_point).T
    if zeros is not None and (zeros.dtype != np.int8 or array.dtype not in ("int8", "int4")):
        _fail(name, f"it has zero points of {zeros.dtype} beside values of {array.dtype}")
    args = _strategy(name, array)
    parts: Tensors
    if array.dtype == "int4":
        parts = {"weight_packed": _words(values), "weight_scale": scale}
        parts["weight_shape"] = np.array(values.shape, np.int64)
        if zeros is not None:
            if zeros.size and (zeros.min() < -8 or zeros.max() > 7):
                _fail(name, "it has zero points that int4 does not hold")
            parts["weight_zero_point"] = np.ascontiguousarray(_words(zeros.T).T)
        form, kind = "pack-quantized", dict(num_bits=4, type="int")
    else:
        if array.dtype == "int8":
            parts = {"weight": values, "weight_scale": scale}
            if zeros is not None:
                parts["weight_zero_point"] = zeros
            form, kind = "int-quantized", dict(num_bits=8, type="int")
        elif array.dtype.startswith("float8"):
            parts = {"weight": values, "weight_scale": scale}
            form, kind = "float-quantized", dict(num_bits=8, type="float")
        elif array.codebook == CODEBOOKS["e2m1"] and array.scale.dtype == jnp.float8_e8m0fnu:
            if args.get("group_size") != 32:
                _fail(name, "its groups are not of 32, as those of MXFP4 are")
            packed = values[:, ::2] | values[:, 1::2] << 4
            parts = {"weight_packed": packed, "weight_scale": scale.view(np.uint8)}
            form, kind = "mxfp4-pack-quantized", dict(num_bits=4, type="float")
        else:
            _fail(name, f"it has values of {array.dtype} of no format")
    if layer.bias is not None:
        parts["bias"] = np.asarray(layer.bias)
    args |= kind | dict(symmetric=zeros is None, dynamic=False)
    return parts, form, args


def _fail(name: str, why: str) -> NoReturn:
    raise ValueError(
        f"save: layer {name!r} cannot be written in compressed-tensors' format: {why}; quantise a"
        " matrix [D, F] by jaxfused.quantize to int8, int4, float8 or mxfp4, or save the array by Orbax."
    )


def _floats(scale: jax.Array) -> jax.Array:
    return scale.astype(jnp.float32) if scale.dtype == jnp.float8_e4m3fn else scale


def _strategy(name: str, array: QuantizedArray) -> dict[str, Any]:
    """Returns compressed-tensors' arguments that say which weights share a scale."""
    groups, columns = array.scale.shape
    features, outputs = array.shape
    if array.scale.size == 1 and (features, outputs) != (1, 1):
        return dict(strategy="tensor")
    if columns == outputs and groups == 1:
        return dict(strategy="channel")
    size = array.group_size
    rows = size[0] if isinstance(size, tuple) else size or features // groups
    if columns == outputs:
        if features % rows:
            _fail(name, f"its last group of {rows} inputs is smaller")
        return dict(strategy="group", group_size=rows)
    if not array.dtype.startswith("float8") or groups == 1 or columns == 1:
        _fail(name, f"its scales have shape {array.scale.shape} beside values of {array.dtype}")
    return dict(strategy="block", block_structure=[array.columns_alike, rows])


def _words(values: np.ndarray) -> np.ndarray:
    """Returns integers -8 to 7 [F, D] plus 8 in 32-bit words [F, D / 8], the last padded with zeros."""
    codes = np.pad((values + 8).astype(np.uint32), ((0, 0), (0, -values.shape[1] % 8)))
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = (codes.reshape(len(codes), -1, 8) << shifts).sum(-1, dtype=np.uint32)
    return words.view(np.int32)
