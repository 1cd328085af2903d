"""Smoothing of a model: the divisors of its layers' inputs, and the check of folds into norms.

The formula and the folding into norms are in `jaxfused.quantization.smoothing`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.modules.linear import ObservedKernel
from jaxfused.quantization.layers import Path, name_of, replace_kernels
from jaxfused.quantization.observe import compiled
from jaxfused.quantization.report import relative_error
from jaxfused.quantization.rules import QuantizationRule
from jaxfused.quantization.smoothing import divisors, with_divided_norms


def divisors_of_model(
    op: str,
    module_or_params: Any,
    chosen: Mapping[str, QuantizationRule],
    inputs: Mapping[str, Any],
    groups: Sequence[tuple[Path, list[str]]],
) -> tuple[dict[str, np.ndarray], dict[Path, np.ndarray]]:
    """Returns the divisors of smoothed layers' inputs [..., D], and those of the norms to fold into."""
    kernels: dict[str, np.ndarray] = {}
    windows: dict[str, int] = {}

    def note(path: Path, kernel: jax.Array, taps: int) -> None:
        if name_of(path) in chosen and chosen[name_of(path)].smoothing is not None:
            kernels[name_of(path)] = np.asarray(kernel, np.float32)
            windows[name_of(path)] = taps

    replace_kernels(op, module_or_params, note)
    together = [names for _, names in groups]
    alone = [[name] for name in kernels if not any(name in names for names in together)]
    divided: dict[str, np.ndarray] = {}
    for names in [*together, *alone]:
        # Layers that read the same inputs share divisors, and so do the positions of a
        # convolution's window.
        ranges = [_largest_of_features(kernels[name], windows[name]) for name in names]
        of_kernels = np.max(ranges, axis=0)
        s = np.empty(of_kernels.shape, np.float32)
        share = chosen[names[0]].smoothing
        assert share is not None
        for index in np.ndindex(s.shape[:-1]):
            magnitudes = inputs[names[0]][index].magnitudes()
            of_inputs = magnitudes.reshape(windows[names[0]], -1).max(axis=0)
            s[index] = divisors(of_inputs, of_kernels[index], share)
        divided |= dict.fromkeys(names, s)
    return divided, {norm: divided[names[0]] for norm, names in groups}


def _largest_of_features(kernel: np.ndarray, taps: int) -> np.ndarray:
    """Returns the largest weight magnitude of each feature [..., I] in a kernel [..., taps * I, O]."""
    *leading, rows, _ = kernel.shape
    return np.abs(kernel).max(axis=-1).reshape(*leading, taps, rows // taps).max(axis=-2)


def check_folds(
    op: str,
    module_or_params: Any,
    call: Callable[[Any, Any], Any],
    batch: Any,
    norms: Mapping[Path, np.ndarray],
    divided: Mapping[str, np.ndarray],
) -> None:
    """Checks that norms with divided results and kernels multiplied by the divisors change no result."""

    def multiplied(path: Path, kernel: jax.Array, taps: int) -> ObservedKernel | None:
        s = divided.get(name_of(path))
        if s is None:
            return None
        s = np.tile(s, taps)
        kernel = (kernel.astype(jnp.float32) * s[..., None]).astype(kernel.dtype)
        return ObservedKernel(kernel, jnp.zeros(kernel.shape[:-2], jnp.int32), _look_away)

    folded = replace_kernels(op, with_divided_norms(module_or_params, norms), multiplied)
    results = [
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(result)])
        for result in (compiled(call, model)(batch) for model in (folded, module_or_params))
    ]
    error = relative_error(*results)
    if not error <= _SAME:
        names = ", ".join(repr(name_of(norm)) for norm in norms)
        raise ValueError(
            f"{op}: with divisors folded into {names} the float model's result changes by {error:.1%},"
            " so that other layers read these norms too, or the norms do more than scale; pass folds"
            " that name all layers which read a norm, or none."
        )


_SAME = 0.02
"""Largest relative difference of two results that rounding to bfloat16 can cause."""


def _look_away(layer: jax.Array, x: jax.Array | None, inside: jax.Array | None) -> None:
    """Ignores the inputs of a layer that an `ObservedKernel` reports."""
