"""Finds the files of a checkpoint and reads its config. Pickles are refused, since they run code."""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxfused.quantization.checkpoints import safetensors_file

_MOST_CONFIG_BYTES = 100_000_000
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors_of(op: str, path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns all tensors of a checkpoint, mapped into memory, and the files' merged metadata."""
    tensors: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    files, of_tensor = _files(op, path)
    for file in files:
        found, more = safetensors_file.read(op, file)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise ValueError(
                f"{op}: {file} has tensor {twice[0]!r}, which another file of {path} has too; pass the"
                " file that you mean."
            )
        wanted = {name for name, of in of_tensor.items() if of == file}
        missing = sorted(wanted - found.keys())
        if missing:
            raise ValueError(
                f"{op}: {file} has no tensor {missing[0]!r}, which the index says it has; download the"
                " checkpoint again."
            )
        tensors |= found
        metadata |= more
    return tensors, metadata


def config_of(op: str, path: Path) -> dict[str, Any]:
    """Returns the quantization config from the config files in the folder of a checkpoint's tensors."""
    folder = path if path.is_dir() else path.parent
    config = json_of(op, folder / "config.json") if (folder / "config.json").exists() else {}
    candidates: list[Any] = [config, config.get("text_config")]
    found = [
        c.get(name)
        for c in candidates
        if isinstance(c, dict)
        for name in ("quantization_config", "compression_config")
    ]
    if (folder / "hf_quant_config.json").exists():
        modelopt = json_of(op, folder / "hf_quant_config.json").get("quantization")
        found.append({"quant_method": "modelopt", **modelopt} if modelopt else None)
    if (folder / "quanto_qmap.json").exists():
        quanto = json_of(op, folder / "quanto_qmap.json")
        found.append({"quant_method": "quanto", "quantization_map": quanto})
    for name, method in _OWN_CONFIGS.items():
        if (folder / name).exists():
            found.append({"quant_method": method, **json_of(op, folder / name)})
    result = next((c for c in found if isinstance(c, dict)), None)
    if result is None:
        raise ValueError(
            f"{op}: {folder} has no config.json with a quantization_config, which says what the tensors"
            " mean; pass config=, or if it is not quantised, read it by jaxfused.quantization's"
            " read_tensors."
        )
    return result


_OWN_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Config files of AutoGPTQ and AutoAWQ, from before config.json held their settings, and the method that
each stands for."""


def _files(op: str, path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Returns a checkpoint's files, and the file of each tensor that an index lists."""
    if not path.exists():
        raise ValueError(f"{op}: {path} does not exist; pass a checkpoint's folder or file.")
    if not path.is_dir():
        return [_regular(op, path.parent, path.name, ".safetensors")], {}
    if (path / _INDEX).exists():
        weight_map = json_of(op, path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ValueError(
                f"{op}: {path / _INDEX} has no weight_map of names; download the checkpoint again."
            )
        names = sorted(set(weight_map.values()))
        files = {name: _regular(op, path, name, ".safetensors") for name in names}
        return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if _WHOLE in names:
        # Beside it may lie the same weights under other names, as consolidated.safetensors.
        names = [_WHOLE]
    if names:
        return [_regular(op, path, name, ".safetensors") for name in names], {}
    others = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if others:
        raise ValueError(
            f"{op}: {path} has {others[0]}, a pickle, which runs code when it is read; convert it by"
            " safetensors.torch.save_file where you trust it."
        )
    raise ValueError(
        f"{op}: {path} has no .safetensors files; pass a checkpoint's folder or file, of GGUF the file."
    )


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def parts_of_gguf(op: str, path: Path) -> list[Path]:
    """Returns a GGUF file, or all parts of a split one."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if split is None:
        return [_regular(op, path.parent, path.name, ".gguf")]
    stem, count = split[1], int(split[2])
    names = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    return [_regular(op, path.parent, name, ".gguf") for name in names]


def _regular(op: str, folder: Path, name: str, suffix: str) -> Path:
    """Returns a file in the folder, after checks that it exists and lies in the folder.

    Links are followed within the folder, and to the blobs folder of the Hugging Face hub's cache, whose
    snapshots consist of links.
    """
    parts = PurePosixPath(name).parts
    if (
        not parts
        or PurePosixPath(name).is_absolute()
        or ".." in parts
        or "\\" in name
        or "\0" in name
    ):
        raise ValueError(
            f"{op}: the index of {folder} names the file {name!r}, which leads out of the folder;"
            " download the checkpoint from somebody you trust."
        )
    file = folder / name
    if file.suffix in _PICKLES:
        raise ValueError(
            f"{op}: {file} is a pickle, which runs code when it is read; convert it by"
            " safetensors.torch.save_file where you trust it."
        )
    if file.suffix != suffix:
        raise ValueError(f"{op}: {file} is no {suffix} file; pass a checkpoint's folder or file.")
    if not file.exists():
        raise ValueError(f"{op}: {file} does not exist; download the checkpoint again.")
    home = folder.resolve()
    inside = [home]
    if home.parent.name == "snapshots":
        inside.append(home.parent.parent / "blobs")
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in inside) or not target.is_file():
        raise ValueError(
            f"{op}: {file} is {target}, which is no file in the checkpoint's folder; copy the"
            " checkpoint's files there."
        )
    return file


def json_of(op: str, path: Path) -> dict[str, Any]:
    """Returns the object that a .json file holds, after checks of the file and its size."""
    path = _regular(op, path.parent, path.name, ".json")
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{op}: {path} is no JSON ({error}); download the checkpoint again."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{op}: {path} is no JSON object; download the checkpoint again.")
    return content
