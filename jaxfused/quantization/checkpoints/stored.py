"""read_tensors and read_metadata: the content of a checkpoint's files, as stored."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxfused.quantization.checkpoints import files, gguf_file


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the tensors of a checkpoint's safetensors as they are stored, quantised or not.

    Files are mapped into memory, and a tensor is read when it is used. They are checked as `load` checks
    them: their sizes against their headers, and that no name or link leads out of the folder.

    Args:
      path: a folder with .safetensors files, with or without an index; or a .safetensors file.

    Returns:
      Arrays by their names, of NumPy's dtypes or those of ml_dtypes (bfloat16, float8).

    Raises:
      ValueError: the files are damaged, incomplete or of another format.

    Example:
      >>> import jax.numpy as jnp, jaxfused, pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> jaxfused.quantization.save(folder, {"norm.weight": jnp.ones(4, jnp.bfloat16)})
      >>> jaxfused.quantization.read_tensors(folder)["norm.weight"].dtype
      dtype(bfloat16)

    Source: https://github.com/huggingface/safetensors
    """
    return files.tensors_of("read_tensors", Path(path))[0]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the metadata of a checkpoint's files: of GGUF, the model's shape and vocabulary.

    Args:
      path: as for `load`; of a split GGUF file any part.

    Returns:
      By their keys texts, numbers and lists of these; of safetensors texts alone.

    Raises:
      ValueError: the files are damaged, incomplete or of another format.

    Example:
      >>> import jax.numpy as jnp, jaxfused, pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> jaxfused.quantization.save(folder, {"norm.weight": jnp.ones(4)})
      >>> jaxfused.quantization.read_metadata(folder)
      {'format': 'pt'}

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    op, path = "read_metadata", Path(path)
    if path.suffix != ".gguf":
        return dict(files.tensors_of(op, path)[1])
    found: dict[str, Any] = {}
    for part in files.parts_of_gguf(op, path):
        found |= gguf_file.metadata(op, part)
    return found
