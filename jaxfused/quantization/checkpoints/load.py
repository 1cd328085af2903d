"""load and from_tensors: quantised checkpoints as other libraries write them."""

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfused.quantization.checkpoints import (
    affine,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    files,
    fp8,
    gemma,
    gguf,
    gptq,
    hqq,
    modelopt,
    mxfp4,
    torchao,
)
from jaxfused.quantization.checkpoints.layer import (
    Build,
    Config,
    Parts,
    QuantizedLayer,
    names,
    on_device,
)
from jaxfused.quantization.checkpoints.placement import Placing, placed, placed_tensor

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Format:
    """A format: the names of a layer's tensors, and the function that checks a layer of this format."""

    plan: Callable[[Parts, Config], Build | None]
    parts: tuple[str, ...]
    marks: tuple[str, ...]
    """Names of tensors that a layer has only if it is quantised."""
    separators: tuple[str, ...] = (".",)
    """Strings that may separate a layer's name from a tensor's."""


_FORMATS = {
    "gptq": _Format(gptq.plan, gptq.PARTS, ("qweight",)),
    "awq": _Format(awq.plan, awq.PARTS, ("qweight",)),
    "compressed-tensors": _Format(
        compressed_tensors.plan, compressed_tensors.PARTS, ("weight_scale",)
    ),
    "fp8": _Format(fp8.plan, fp8.PARTS, ("weight_scale_inv", "weight_scale")),
    "fbgemm_fp8": _Format(fp8.plan, fp8.PARTS, ("weight_scale",)),
    "mxfp8": _Format(fp8.plan, fp8.PARTS, ("weight_scale_inv",)),
    "bitsandbytes": _Format(bitsandbytes.plan, bitsandbytes.PARTS, ("weight.absmax", "SCB")),
    "torchao": _Format(torchao.plan, torchao.PARTS, ("_weight_qdata",)),
    "hqq": _Format(hqq.plan, hqq.PARTS, ("W_q",)),
    "quanto": _Format(affine.plan_of_quanto, affine.QUANTO_PARTS, ("weight._scale",)),
    "metal": _Format(affine.plan_of_metal, affine.METAL_PARTS, ("qbiases",)),
    "bitnet": _Format(bitnet.plan, bitnet.PARTS, ("weight_scale",)),
    "gemma": _Format(gemma.plan, gemma.PARTS, ("weight_scale",)),
    "modelopt": _Format(modelopt.plan, modelopt.PARTS, ("weight_scale",)),
    "mxfp4": _Format(mxfp4.plan, mxfp4.PARTS, ("blocks",), ("_", ".")),
}
"""Formats by the `quant_method` of a checkpoint's config."""


def formats() -> tuple[str, ...]:
    """Returns the names of the formats that `load` reads, as configs have them in `quant_method`.

    Example:
      >>> import jaxfused
      >>> "gptq" in jaxfused.quantization.formats()
      True
    """
    return (*_FORMATS, "gguf")


def load(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    prefix: str = "",
    sharding: Placing | None = None,
    progress: Progress | bool = False,
) -> dict[str, QuantizedLayer | jax.Array]:
    """Reads a quantised checkpoint as another library has written it, bit for bit.

    The meaning of the tensors is taken from the `quantization_config` of config.json, or from a GGUF
    file's header, never from names.
    Everything is checked before memory is allocated: sizes of files, names that lead out of the folder,
    shapes, dtypes, and scales that are NaN. Files are mapped into memory, and layers are converted one
    after another on the device. No pickle is read.

    Args:
      path: a folder with config.json and .safetensors files, with or without an index (without one,
        model.safetensors alone if there is one, as in Transformers); or a .safetensors file, with its
        config.json next to it; or a .gguf file, any part of a split one.
      config: the `quantization_config`, in place of the one next to the files.
      prefix: only tensors whose names start with it are read; results have their whole names.
      sharding: where arrays are to be: a `jax.sharding.Sharding` for all, or a function of a name and
        a shape that returns one or None. It is about weights [..., D, F]; scales, bias and permutation
        follow. By default all are on JAX's default device.
      progress: True for a bar (of tqdm), or a function of the bytes that are read and of all.

    Returns:
      By the name of each quantised layer a `QuantizedLayer`, and by the name of each other tensor, such
      as norms, modules that were not converted, input scales or `k_scale`, an array as it is stored
      (without x64, of at most 32 bits a number).

    Raises:
      ValueError: the format is not known, the files are damaged, incomplete or not as the config says,
        or a shard would cut a group.

    Example:
      >>> import jax.numpy as jnp, jaxfused, pathlib, tempfile
      >>> w = jaxfused.quantize(jnp.eye(256), "int4", group_size=128)
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> jaxfused.quantization.save(folder, {"up": jaxfused.quantization.QuantizedLayer(w)})
      >>> jaxfused.quantization.load(folder)["up"].array.shape
      (256, 256)

    Source: https://huggingface.co/docs/transformers/quantization/overview and the libraries named on the
    page "Quantised checkpoints".
    """
    op = "load"
    path = Path(path)
    if path.suffix == ".gguf":
        plans, others = gguf.planned(op, files.parts_of_gguf(op, path), prefix)
        return _built(op, plans, others, sharding, progress)
    tensors, metadata = files.tensors_of(op, path)
    if prefix:
        tensors = {name: a for name, a in tensors.items() if name.startswith(prefix)}
        if not tensors:
            raise ValueError(f"{op}: no tensor's name starts with {prefix!r}; pass another prefix.")
    given = files.config_of(op, path) if config is None else config
    plans, others = planned(op, tensors, {"metadata": metadata, **given})
    return _built(op, plans, others, sharding, progress)


def from_tensors(
    tensors: Mapping[str, Any], config: Mapping[str, Any], *, name: str = ""
) -> QuantizedLayer:
    """Reads one quantised layer from its tensors, as `load` does.

    Args:
      tensors: the layer's tensors, of NumPy or JAX, by their names in the checkpoint, with or without
        the layer's name before them.
      config: the checkpoint's `quantization_config`.
      name: the layer's name, where those of tensors are without it; some configs treat layers apart.

    Returns:
      The layer.

    Raises:
      ValueError: as `load` does, or there is not exactly one layer.

    Example:
      >>> import numpy as np, jaxfused
      >>> tensors = {
      ...     "up.weight": np.ones((4, 8), np.int8), "up.weight_scale": np.ones((4, 1), np.float32)
      ... }
      >>> args = dict(num_bits=8, type="int", strategy="channel")
      >>> config = dict(
      ...     quant_method="compressed-tensors", format="int-quantized",
      ...     config_groups={"group_0": dict(targets=["Linear"], weights=args)},
      ... )
      >>> jaxfused.quantization.from_tensors(tensors, config).array.shape
      (8, 4)

    Source: `jaxfused.quantization.load`.
    """
    op = "from_tensors"
    arrays = {f"{name}.{part}" if name else part: np.asarray(a) for part, a in tensors.items()}
    plans, _ = planned(op, arrays, config)
    if len(plans) != 1:
        names = ", ".join(map(repr, plans)) or "none"
        raise ValueError(
            f"{op}: the tensors are those of {len(plans)} quantised layers ({names}); pass those of one,"
            " or a folder to jaxfused.quantization.load."
        )
    ((build, _),) = plans.values()
    return build()


_Plans = dict[str, tuple[Build, int]]
"""Maps a layer's name to the function that builds it and its number of bytes."""


def planned(
    op: str, tensors: Mapping[str, np.ndarray], config: Config
) -> tuple[_Plans, dict[str, np.ndarray]]:
    """Checks the layers; returns their building functions, and the tensors that belong to no layer."""
    form = _format(op, config)
    others = dict(tensors)
    plans: _Plans = {}
    for layer, separator in _layers(op, form, tensors, config):
        full = {part: f"{layer}{separator}{part}" for part in form.parts}
        arrays = {part: tensors[name] for part, name in full.items() if name in tensors}
        build = form.plan(Parts(op, layer, arrays), config)
        if build is not None:
            plans[layer] = build, sum(a.nbytes for a in arrays.values())
            for part in arrays:
                del others[full[part]]
    return plans, others


def _format(op: str, config: Config) -> _Format:
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{op}: config is a {type(config).__name__}; pass the quantization_config, a mapping."
        )
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        why = _NOT_READ.get(str(method), "")
        raise ValueError(
            f"{op}: the config has quant_method {method!r}, but {', '.join(_FORMATS)} are read{why};"
            " pass the quantization_config of one of them, or dequantise the checkpoint by its library."
        )
    return _FORMATS[method]


_NOT_READ = dict.fromkeys(
    ("higgs", "aqlm", "vptq", "spqr", "quip"), " (this one has a codebook of vectors)"
) | dict.fromkeys(("fp_quant", "fouroversix", "sinq"), " (this one rotates or scales the inputs)")


def _layers(
    op: str, form: _Format, tensors: Mapping[str, Any], config: Config
) -> list[tuple[str, str]]:
    """Returns (name, separator) of each quantised layer that the config does not exclude."""
    lists = [names(Parts(op, "", {}), config, key) for key in _LEFT_OUT]
    left_out = [module for found in lists for module in found]
    ends = [(separator, separator + mark) for separator in form.separators for mark in form.marks]
    found: dict[str, str] = {}
    for name in tensors:
        if name in form.marks:
            found[""] = ""
            continue
        for separator, end in ends:
            layer = name.removesuffix(end)
            if layer != name and not any(_is_within(layer, module) for module in left_out):
                found[layer] = separator
    return list(found.items())


_LEFT_OUT = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
"""Config keys under which configs list modules that were not converted."""


def _is_within(layer: str, module: str) -> bool:
    """Returns whether a module's name is a run of whole dot-separated parts of a layer's name."""
    return re.search(rf"(^|\.){re.escape(module)}(\.|$)", layer) is not None


def _built(
    op: str,
    plans: _Plans,
    others: Mapping[str, np.ndarray],
    sharding: Placing | None,
    progress: Progress | bool,
) -> dict[str, QuantizedLayer | jax.Array]:
    """Reads all layers and tensors one after another."""
    total = sum(size for _, size in plans.values()) + sum(a.nbytes for a in others.values())
    tell, done = _progress(op, progress, total), 0
    result: dict[str, QuantizedLayer | jax.Array] = {}
    for layer, (build, size) in plans.items():
        result[layer] = placed(op, layer, build(), sharding)
        done += size
        tell(done, total)
    for name, array in others.items():
        if name in result:
            raise ValueError(
                f"{op}: the checkpoint has a layer {name!r} and a tensor of this name, of which one"
                " would be lost; pass prefix=, or rename the tensor."
            )
        result[name] = placed_tensor(op, name, on_device(array), sharding)
        done += array.nbytes
        tell(done, total)
    return result


def _progress(op: str, progress: Progress | bool, total: int) -> Progress:
    if progress is False:
        return lambda done, total: None
    if callable(progress):
        return progress
    if progress is not True:
        raise ValueError(
            f"{op}: progress is {progress!r}; pass True, or a function of bytes read and of all bytes."
        )
    if importlib.util.find_spec("tqdm") is None:
        raise ValueError(
            f"{op}: progress=True needs tqdm; install it, or pass a function of bytes read and of all."
        )
    bar = importlib.import_module("tqdm").tqdm(total=total, unit="B", unit_scale=True)

    def tell(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return tell
