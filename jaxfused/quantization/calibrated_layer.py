"""The quantisation of one layer by its calibration inputs: rounding, divisors, input scale, errors."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.modules.linear import QuantizedKernel, linear
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.quantization.error_feedback import rounded_weights
from jaxfused.quantization.observe import Inputs
from jaxfused.quantization.report import LayerError, describe, relative_error
from jaxfused.quantization.rules import QuantizationRule
from jaxfused.runtime import rounding
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray


def rounding_of(rule: QuantizationRule) -> str:
    """Returns a rule's rounding under calibration: by default integers use error feedback ("gptq")."""
    if rule.rounding is not None:
        return rule.rounding
    return "gptq" if rule.dtype in ("int8", "int4") else "nearest"


def plain_array(name: str, kernel: jax.Array, rule: QuantizationRule, taps: int) -> QuantizedArray:
    """Returns the kernel of the layer `name` in the rule's format, rounded to nearest.

    A convolution's kernel, of `taps` positions, lies in rows unless the rule says otherwise: that is
    how convolutions read it, and columns would be transposed in each call.

    Raises:
      ValueError: the kernel does not fit the rule.
    """
    assert rule.dtype is not None
    try:
        return quantize(
            kernel,
            rule.dtype,
            group_size=rule.group_size,
            symmetric=rule.symmetric,
            layout=rule.layout or ("rows" if taps > 1 else None),
        )
    except ValueError as error:
        raise ValueError(
            f"quantize_params: layer {name!r} does not fit the rule for {rule.pattern!r}: {error}"
        ) from error


@dataclass(frozen=True)
class CalibratedLayer:
    """A layer to quantise, which may be one of a stack of layers."""

    name: str
    rule: QuantizationRule
    kernel: jax.Array
    inputs: Inputs
    divisor: np.ndarray | None
    """Smoothing divisor of each input feature, or None without smoothing."""
    is_folded: bool
    """True if a norm before the layer divides the layer's inputs, so that the layer does not."""
    taps: int
    """Number of positions of a convolution's window; 1 for a linear layer."""
    damping: float
    """Multiple of the mean of the inputs' Gram matrix's diagonal that is added to the diagonal."""
    sampled_rows: int

    def quantized(self) -> tuple[QuantizedKernel, LayerError]:
        """Returns the layer's new kernel and its errors."""
        truth = self.kernel.astype(jnp.float32)
        rows = self.inputs.rows(self.sampled_rows)
        if not np.isfinite(rows).all():
            raise ValueError(
                f"quantize_params: the layer {self.name!r} reads numbers that are not finite in the"
                " calibration; pass batches on which the model's activations are finite."
            )
        s = None if self.divisor is None else np.tile(self.divisor, self.taps)
        divided_rows = rows if s is None else rows / s
        kernel = QuantizedKernel(
            self._array(truth if s is None else truth * s[:, None], s),
            self.rule.input_dtype,
            None if self.divisor is None or self.is_folded else jnp.asarray(self.divisor),
            self._input_scale(divided_rows, s),
        )
        plain = QuantizedKernel(self._plain(truth), self.rule.input_dtype)
        weights = kernel.array.dequantize()
        weights = weights if s is None else weights / s[:, None]
        expected = _exact_product(rows, truth)
        error = LayerError(
            self.name,
            describe(self.rule, rounding=rounding_of(self.rule)),
            relative_error(np.asarray(weights), np.asarray(truth)),
            relative_error(self._product(rows, plain), expected),
            relative_error(self._product(divided_rows, kernel), expected),
        )
        return kernel, error

    def _plain(self, w: jax.Array) -> QuantizedArray:
        return plain_array(self.name, w, self.rule, self.taps)

    def _array(self, w: jax.Array, s: np.ndarray | None) -> QuantizedArray:
        plain = self._plain(w)
        if rounding_of(self.rule) == "nearest":
            return plain
        gram = self.inputs.gram
        assert gram is not None
        if s is not None:
            gram = gram / np.multiply.outer(s, s).astype(np.float64)
        rounded = rounded_weights(
            w,
            gram,
            plain.dtype,
            plain.scale,
            plain.zero_point,
            damping=self.damping,
        )
        # The rounded weights lie on the grid of their scale, so that encoding does not change them.
        return rounding.encode(
            rounded, plain.dtype, plain.scale, plain.zero_point, plain.axis, plain.layout
        )

    def _input_scale(self, rows: np.ndarray, s: np.ndarray | None) -> jax.Array | None:
        """Returns one float32 scale for all inputs, or None if the rule sets no percentile.

        It comes from that percentile of the magnitudes of `rows` [N, D], without padding; `s` [D]
        are the smoothing divisors.
        """
        percentile = self.rule.input_percentile
        if percentile is None:
            return None
        magnitudes = self.inputs.magnitudes()
        magnitudes = magnitudes if s is None else magnitudes / s
        # The largest magnitude is known for all rows, not only for the sampled ones.
        largest = magnitudes.max()
        inside = self.inputs.inside_rows(self.sampled_rows)
        read = abs(rows) if inside is None else abs(rows)[inside]
        if percentile < 100.0 and read.size:
            largest = np.percentile(read, percentile)
        scale = max(float(largest), float(jnp.finfo(jnp.float32).tiny))
        return jnp.asarray(scale / FORMATS[str(self.rule.input_dtype)].largest, jnp.float32)

    def _product(self, rows: np.ndarray, kernel: QuantizedKernel) -> np.ndarray:
        """Returns the layer's result for rows (or windows) already divided by the smoothing divisors."""
        scale = kernel.input_scale
        if self.taps > 1 and kernel.input_dtype is not None and scale is None:
            # `linear` gives each row a scale, but the windows of one image share one. Which image a
            # sampled row is from is unknown, so all rows share a scale.
            largest = max(float(np.abs(rows).max()), float(jnp.finfo(jnp.float32).tiny))
            scale = jnp.asarray(largest / FORMATS[kernel.input_dtype].largest, jnp.float32)
        kernel = QuantizedKernel(kernel.array, kernel.input_dtype, None, scale)
        return np.asarray(linear(jnp.asarray(rows), kernel, None, implementation="xla"))


def _exact_product(rows: np.ndarray, kernel: jax.Array) -> np.ndarray:
    return np.asarray(jnp.matmul(jnp.asarray(rows), kernel, precision="highest"))
