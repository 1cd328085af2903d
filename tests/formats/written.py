"""What the writers of tests/formats share: a checkpoint as a folder, with the package's own result.

A writer runs in an environment of its own, with one package and torch and without JAX. `of_formats.py`
reads what it has written.
"""

import json
import sys
from pathlib import Path

import numpy as np

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("written")


def matrix(n, k, seed=0):
    """Returns weights [n, k] of unlike rows."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, k)) * 2.0 ** rng.uniform(-3, 3, (n, 1))).astype(np.float32)


def write(name, tensors, config, expected, metadata=None, layer="up", **files):
    """Writes torch's tensors of a layer, its config, and the weights [N, K] of the package."""
    from safetensors.torch import save_file

    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{layer}{part}": t.contiguous() for part, t in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata)
    save_file({"weight": expected.contiguous()}, folder / "expected.safetensors.of")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    print("wrote", name)


def dotted(state):
    """Returns a module's state with a dot before the names."""
    return {f".{name}": t.detach().clone() for name, t in state.items()}
