"""Weights of a checkpoint that a package has written, and those that it stands for by that package."""

import hashlib
from pathlib import Path

import jax
import numpy as np

import jaxfused

ULPS = {"bitsandbytes-int8": 1}
"""What is not bit for bit, and by how many units in the last place."""


def layer_in(folder: Path) -> jaxfused.quantization.QuantizedLayer:
    """Reads the only quantised layer of a checkpoint."""
    found = jaxfused.quantization.load(next(iter(folder.glob("*.gguf")), folder))
    (layer,) = (a for a in found.values() if not isinstance(a, jax.Array))
    return layer


def weights_in(layer: jaxfused.quantization.QuantizedLayer, dtype) -> np.ndarray:
    """Returns a layer's weights [..., outputs, inputs], with zeros of positive sign."""
    weights = np.swapaxes(np.asarray(layer.dequantize(dtype)), -1, -2)
    return positive_zeros(weights)


def positive_zeros(weights: np.ndarray) -> np.ndarray:
    """Returns weights in which a zero is positive; that of a product with a negative scale is not."""
    return np.where(weights == 0, np.zeros((), weights.dtype), weights)


def digest(weights: np.ndarray) -> str:
    """Returns a hash of the bits of weights, NaN and zeros each of one kind."""
    bits = positive_zeros(weights).copy()
    bits[np.isnan(bits)] = np.nan
    return hashlib.sha256(np.ascontiguousarray(bits).tobytes()).hexdigest()
