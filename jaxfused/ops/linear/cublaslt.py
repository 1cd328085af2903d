"""Finds cuBLASLt, which jaxfused does not link, in the nvidia-cublas wheel of JAX's CUDA plugin.

The handlers of ffi/ look the library up by its file name alone. That succeeds once this module has
opened it.
"""

import ctypes
import functools
import importlib.util
from pathlib import Path

from jaxfused.runtime import cuda_library


@functools.cache
def why_unavailable() -> str | None:
    """Returns None if the FFI handlers find cuBLASLt, else the reason. The first call opens cuBLASLt."""
    reason = cuda_library.why_unavailable()
    if reason is not None:
        return reason
    name = cuda_library.cublaslt_name()
    if not name:
        return (
            "jaxfused's CUDA library was built without cublasLt.h; install jaxfused again where the"
            " CUDA toolkit or the nvidia-cublas wheel has it"
        )
    for path in (name, *_in_wheels(name)):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return None
    return f"{name} is not there; pip install nvidia-cublas brings it, as does jax[cuda13]"


def _in_wheels(name: str) -> list[str]:
    """Returns the paths of library `name` in NVIDIA's wheels: nvidia/cu13/lib or nvidia/cublas/lib."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return [str(path) for root in roots for path in sorted(Path(root).glob(f"*/lib/{name}"))]
