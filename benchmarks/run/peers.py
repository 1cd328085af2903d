"""Finds which peers are installed, and why others cannot be used."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def _torch() -> None:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("torch is installed, but torch.cuda.is_available() is False")


def _liger() -> None:
    _torch()
    importlib.import_module("liger_kernel.ops")


def _torchvision() -> None:
    _torch()
    importlib.import_module("torchvision")


def _kornia() -> None:
    _torch()
    importlib.import_module("kornia")


def _tokamax() -> None:
    importlib.import_module("tokamax")


def _flash_attn3() -> None:
    importlib.import_module("flash_attn3_jax")


def _jla() -> None:
    importlib.import_module("jla.ops")


def _nothing() -> None:
    """Does nothing: XLA and cuDNN come with JAX."""


PROBES: dict[str, Callable[[], object]] = {
    "xla": _nothing,
    "cudnn": _nothing,
    "cudnn_padded": _nothing,
    "jax_pages": _nothing,
    "jax_csr": _nothing,
    "dense": _nothing,
    "dense_tf32": _nothing,
    "flash_attn3": _flash_attn3,
    "cusparse": _torch,
    "torch_compile": _torch,
    "torch_cudnn": _torch,
    "torch_flash": _torch,
    "torch_grouped": _torch,
    "torchvision": _torchvision,
    "kornia": _kornia,
    "liger": _liger,
    "tokamax": _tokamax,
    "tokamax_triton": _tokamax,
    "tokamax_tiles": _tokamax,
    "jla": _jla,
}


def missing(names: Iterable[str] = tuple(PROBES)) -> dict[str, str]:
    """Returns the import error of each of `names` that cannot be used here."""
    reasons = {}
    for name in names:
        # A broken peer may raise anything while it is imported.
        try:
            PROBES[name]()
        except Exception as error:
            reasons[name] = describe(error)
    return reasons


def describe(error: BaseException) -> str:
    """Returns an error in one line, short enough for a table and a JSON file."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"
