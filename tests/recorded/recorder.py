"""Shared code of the recorders: torch modules with the parameters of a row, and their results."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tests.recorded import values
from tests.recorded.values import numbers, parameter

ROWS: dict[str, Any] = {}


def fill(name: str, module: torch.nn.Module) -> dict[str, Any]:
    """Gives a module the parameters of a row; returns their shapes."""
    shapes = {}
    for key, value in module.named_parameters():
        shapes[key] = list(value.shape)
        value.data = torch.from_numpy(parameter(f"{name}/{key}", tuple(value.shape))).to(
            value.dtype
        )
    return shapes


def given(name: str, key: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(numbers(f"{name}/input {key}", shape))


def record(
    name: str, module: torch.nn.Module, run: Callable[..., Any], options: Any = None
) -> None:
    module = module.eval()
    shapes = fill(name, module)
    with torch.no_grad():
        results = run(module)
    results = results if isinstance(results, dict) else {"y": results}
    ROWS[name] = (
        dict(shapes=shapes, options=options or {}),
        {key: value.float().numpy() for key, value in results.items()},
    )


def save(file: str, library: ModuleType) -> None:
    """Writes the rows recorded so far, with the versions of the libraries."""
    versions = {library.__name__: library.__version__, "torch": torch.__version__}
    values.save(file, versions, ROWS)
