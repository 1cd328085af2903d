"""Quantised weights of a checkpoint that a package wrote, and the package's own dequantised weights."""

import hashlib
from pathlib import Path

import jax
import numpy as np

import jaxfused

ULPS = {"bitsandbytes-int8": 1}
"""Differences in units in the last place, for formats that are not equal bit for bit."""


def layer_in(folder: Path) -> jaxfused.quantization.QuantizedLayer:
    """Reads the quantised layer of a checkpoint that has one."""
    found = jaxfused.quantization.load(next(iter(folder.glob("*.gguf")), folder))
    (layer,) = (a for a in found.values() if not isinstance(a, jax.Array))
    return layer


def weights_in(layer: jaxfused.quantization.QuantizedLayer, dtype) -> np.ndarray:
    """Returns a layer's weights [..., outputs, inputs], with zeros of positive sign."""
    weights = np.swapaxes(np.asarray(layer.dequantize(dtype)), -1, -2)
    return positive_zeros(weights)


def positive_zeros(weights: np.ndarray) -> np.ndarray:
    """Returns weights with zeros of positive sign; products with negative scales have others."""
    return np.where(weights == 0, np.zeros((), weights.dtype), weights)


def digest(weights: np.ndarray) -> str:
    """Returns a hash of the weights' bits, with one form of NaN and one of zero."""
    bits = positive_zeros(weights).copy()
    bits[np.isnan(bits)] = np.nan
    return hashlib.sha256(np.ascontiguousarray(bits).tobytes()).hexdigest()
