"""The report of quantisation errors, of weights and of results, layer by layer."""

from dataclasses import dataclass

import numpy as np

from jaxfused.quantization.rules import QuantizationRule


@dataclass(frozen=True)
class LayerError:
    """The relative errors of one layer: the norm of the difference over that of the truth.

    Attributes:
      path: the layer's path, with its number in brackets if layers are stacked.
      format: the format of weights and inputs, and the methods that keep the error small.
      weights: the error of the kernel.
      nearest: the error of the layer's result on inputs from the calibration, with every weight rounded
        to nearest and neither smoothing nor a fixed scale of the inputs.
      result: the error of the layer's result as it is now.
    """

    path: str
    format: str
    weights: float
    nearest: float
    result: float


@dataclass(frozen=True)
class QuantizationReport:
    """The errors of all layers that were quantised; `str` draws a table.

    Attributes:
      layers: a `LayerError` each.

    Example:
      >>> from jaxfused import LayerError, QuantizationReport
      >>> print(QuantizationReport((LayerError("mlp/up", "int4, gptq", 0.125, 0.1, 0.0625),)))
      layer   format      weights  nearest  result
      mlp/up  int4, gptq   12.50%   10.00%   6.25%
    """

    layers: tuple[LayerError, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "format", "weights", "nearest", "result")]
        for layer in self.layers:
            errors = (layer.weights, layer.nearest, layer.result)
            rows.append((layer.path, layer.format, *(f"{error:.2%}" for error in errors)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
            cells += [row[i].rjust(widths[i]) for i in range(2, 5)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def describe(rule: QuantizationRule, *, rounding: str) -> str:
    """Returns a rule's format in words."""
    words = [str(rule.dtype)]
    if isinstance(rule.group_size, tuple):
        words[0] += f" blocks of {rule.group_size[0]} x {rule.group_size[1]}"
    elif rule.group_size is not None:
        words[0] += f" groups of {rule.group_size}"
    if not rule.symmetric:
        words[0] += " with zero points"
    if rule.input_dtype is not None:
        words[0] += f" x {rule.input_dtype}"
    if rounding != "nearest":
        words.append(rounding)
    if rule.smoothing is not None:
        words.append(f"smoothing {rule.smoothing:g}")
    if rule.input_percentile is not None:
        words.append(f"inputs at {rule.input_percentile:g} %")
    return ", ".join(words)


def relative_error(actual: np.ndarray, truth: np.ndarray) -> float:
    """Returns norm(actual - truth) / norm(truth); 0 if both arrays are zeros."""
    actual, truth = np.asarray(actual, np.float64), np.asarray(truth, np.float64)
    error, size = np.linalg.norm(actual - truth), np.linalg.norm(truth)
    return float(error / size) if size > 0 else float(np.where(error == 0, 0.0, np.inf))
