"""Smoothing: the range of a layer's inputs is moved into its kernel, where rounding costs less.

Input feature j is divided by s_j and row j of the kernel multiplied by it, which does not change the
product. If the inputs come from a norm that only these layers read, its scale and bias are divided
instead.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2022, https://arxiv.org/abs/2211.10438
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jaxfused.quantization.layers import Path

_LEAST = 1e-5
"""Least range of a feature; a feature that is always 0 would otherwise be multiplied by infinity."""


def divisors(magnitudes: np.ndarray, of_kernel: np.ndarray, share: float) -> np.ndarray:
    """Returns the divisors [D], from input features' largest magnitudes and those of their weights.

    A divisor is magnitudes^share / of_kernel^(1 - share), all [D].
    """
    of_inputs = np.maximum(magnitudes, _LEAST)
    of_kernel = np.maximum(of_kernel, _LEAST)
    s = of_inputs**share / of_kernel ** (1.0 - share)
    # A feature that is always 0, or whose divisor would not be finite, is not divided.
    return np.where((magnitudes > 0) & np.isfinite(s), s, 1.0).astype(np.float32)


@dataclass(frozen=True)
class Fold:
    """A norm and the layers that alone read its result, so that the norm can divide their inputs.

    Names are relative to a part of the model that has both, such as a block; layers that the part lacks
    are skipped. `jaxfused.calibrate` checks on the first batch that the model's result stays the same.

    Attributes:
      norm: the path of a module with a scale [D] and perhaps a bias [D].
      layers: the paths of all linear layers that read its result.

    Example:
      >>> import jaxfused
      >>> jaxfused.Fold("norm2", ("mlp/gate", "mlp/up")).norm
      'norm2'
    """

    norm: str
    layers: tuple[str, ...]


def folded_groups(
    module_or_params: Any, folds: Sequence[Fold], layers: Mapping[str, Path]
) -> list[tuple[Path, list[str]]]:
    """Returns, for each norm to fold into, its path and the names of the layers that read it.

    Args:
      module_or_params: the model.
      folds: the folds that the user allows.
      layers: the paths of all linear layers to smooth, by name.
    """
    groups: list[tuple[Path, list[str]]] = []
    for fold in folds:
        ends = ["/" + layer for layer in fold.layers]
        parents = {
            name[: len(name) - len(end) + 1]
            for name in layers
            for end in ends
            if ("/" + name).endswith(end)
        }
        for parent in sorted(parents):
            present = [
                parent + layer
                for layer in fold.layers
                if _at(module_or_params, _split(parent + layer)) is not None
            ]
            norm = _split(parent + fold.norm)
            found = _at(module_or_params, norm)
            if found is not None and _scale_of(found) is not None and set(present) <= set(layers):
                groups.append((norm, present))
    return groups


def _split(name: str) -> Path:
    return tuple(name.split("/"))


def _at(module_or_params: Any, path: Path) -> Any:
    """Returns the submodule or subtree of a model at a path, or None."""
    here = module_or_params
    for key in path:
        if isinstance(here, Mapping):
            here = here.get(key)
        elif isinstance(here, Sequence):
            here = here[int(key)] if key.isdigit() and int(key) < len(here) else None
        else:
            here = getattr(here, key, None)
        if here is None:
            return None
    return here


def _scale_of(norm: Any) -> Any:
    return norm.get("scale") if isinstance(norm, Mapping) else getattr(norm, "scale", None)


def with_divided_norms(module_or_params: Any, norms: Mapping[Path, np.ndarray]) -> Any:
    """Returns a new model whose norms at these paths have their results divided by divisors [..., D]."""
    if not isinstance(module_or_params, nnx.Module):
        return _divided_in_tree(module_or_params, (), norms)
    module = nnx.clone(module_or_params)
    for path, s in norms.items():
        norm = _at(module, path)
        offset = getattr(norm, "scale_offset", 0.0)
        norm.scale[...] = _divided(norm.scale[...], s, offset)
        if getattr(norm, "bias", None) is not None:
            norm.bias[...] = _divided(norm.bias[...], s)
    return module


def _divided_in_tree(tree: Any, path: Path, norms: Mapping[Path, np.ndarray]) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    s = norms.get(path)
    return {
        key: _divided(value, s)
        if s is not None and key in ("scale", "bias")
        else _divided_in_tree(value, (*path, key), norms)
        for key, value in tree.items()
    }


def _divided(parameter: Any, s: np.ndarray, offset: float = 0.0) -> Any:
    """Returns a norm's parameter divided by s; the norm multiplies by parameter + offset."""
    if isinstance(parameter, meta.AxisMetadata):
        return parameter.replace_boxed(_divided(meta.unbox(parameter), s, offset))
    wide = (jnp.asarray(parameter, jnp.float32) + offset) / s - offset
    return wide.astype(parameter.dtype)
