"""calibrate: quantisation that looks at what the layers of a model read, and says what it cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.modules.linear import ObservedKernel, QuantizedKernel, linear
from jaxfused.quantization import rounding
from jaxfused.quantization.error_feedback import rounded_weights
from jaxfused.quantization.layers import Path, name_of, replace_kernels
from jaxfused.quantization.observe import Inputs, call_by_default, compiled, observe
from jaxfused.quantization.quantize import quantize
from jaxfused.quantization.quantized_array import FORMATS, QuantizedArray
from jaxfused.quantization.report import LayerError, QuantizationReport, describe, relative_error
from jaxfused.quantization.rules import Chooser, QuantizationRule, as_rules
from jaxfused.quantization.smoothing import Fold, divisors, folded_groups, with_divided_norms


@dataclass(frozen=True)
class Calibration:
    """What a calibration runs, beside the rules.

    Attributes:
      batches: what the model is called with, one after another. A few hundred rows a layer are enough
        for ranges; rounding "gptq" wants several times as many rows as a layer has features.
      call: `call(module_or_params, batch)` runs the model as inference does, and may be traced. By
        default an nnx module is called with the batch alone; parameters of Linen need it.
      folds: norms that take the divisors of smoothing. Other layers divide their inputs themselves.
      damping: of rounding "gptq", in units of the mean square of a layer's inputs.
      sampled_rows: the rows of each layer's inputs by which percentiles and errors are computed.

    Example:
      >>> import jaxfused
      >>> jaxfused.Calibration([], folds=(jaxfused.Fold("norm1", ("qkv",)),)).damping
      0.01
    """

    batches: Iterable[Any]
    call: Callable[[Any, Any], Any] | None = None
    folds: Sequence[Fold] = ()
    damping: float = 0.01
    sampled_rows: int = 4096

    def __post_init__(self) -> None:
        if not (np.isfinite(self.damping) and self.damping >= 0.0):
            raise ValueError(
                f"Calibration: damping is {self.damping!r}, but it is added to squares; pass a number of"
                " 0 or more, such as 0.01."
            )
        if self.sampled_rows < 1:
            raise ValueError(f"Calibration: sampled_rows is {self.sampled_rows!r}; pass 1 or more.")


@dataclass(frozen=True)
class LayerInputs:
    """What a layer has read in a calibration, before smoothing.

    Attributes:
      low: [D], the smallest value of each feature, in all rows; a convolution's features are all numbers
        of its windows.
      high: [D], the largest.
      rows: [N, D], some of the rows, drawn evenly.
    """

    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray

    def percentile(self, percent: float) -> np.ndarray:
        """[D], of each feature the magnitude below which so many percent of its values lie."""
        return np.percentile(np.abs(self.rows), percent, axis=0)


@dataclass(frozen=True)
class Calibrated:
    """What `jaxfused.calibrate` returns.

    Attributes:
      quantized: the new module or tree, as `jaxfused.quantize_params` returns it.
      report: the errors of its layers.
      inputs: what each layer has read, by the paths of the report.
    """

    quantized: Any
    report: QuantizationReport
    inputs: Mapping[str, LayerInputs]


def calibrate(
    module_or_params: Any,
    rules: str | Sequence[QuantizationRule],
    calibration: Calibration | Iterable[Any],
) -> Calibrated:
    """Quantises a model by what its layers read on some batches, and reports the errors by layer.

    The float model runs on the batches once, while its quantised layers' inputs are looked at. Then each
    layer is smoothed, where its rule says so, gets its scales, and is rounded. A layer that is rounded
    with "gptq" never has a larger error on the batches than with rounding to nearest.

    Args:
      module_or_params: as for `jaxfused.quantize_params`, as are the rules.
      rules: see there.
      calibration: batches, or a `Calibration`.

    Returns:
      A `Calibrated`.

    Raises:
      ValueError: as `jaxfused.quantize_params` does; there is no batch, a layer is not reached or reads
        numbers that are not finite, or a fold changes the model's result.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused
      >>> layer = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
      >>> x = jax.random.normal(jax.random.key(0), (256, 64)) @ jnp.ones((64, 64)).at[0].set(3.0)
      >>> rules = [jaxfused.QuantizationRule("", "int4", group_size=32)]
      >>> error = jaxfused.calibrate(layer, rules, [x]).report.layers[0]
      >>> error.format, error.result <= error.nearest
      ('int4 groups of 32, gptq', True)

    Source: `jaxfused.QuantizationRule` says what can be chosen; Frantar et al., "GPTQ", 2022,
    https://arxiv.org/abs/2210.17323; Xiao et al., "SmoothQuant", 2022,
    https://arxiv.org/abs/2211.10438
    """
    op = "quantize_params"
    if not isinstance(calibration, Calibration):
        calibration = Calibration(calibration)
    call = calibration.call or call_by_default(op, module_or_params)
    chosen, paths = _choose(op, module_or_params, rules)
    batches = iter(calibration.batches)
    first = next(batches, None)
    if first is None:
        raise ValueError(f"{op}: calibration has no batches; pass at least one.")
    inputs = observe(
        op,
        module_or_params,
        _chain(first, batches),
        call,
        wanted={name: _rounding(rule) == "gptq" for name, rule in chosen.items()},
        sampled_rows=calibration.sampled_rows,
    )
    for name, rule in chosen.items():
        if inputs[name].flat[0] is None and rule.needs_calibration is not None:
            raise ValueError(
                f"{op}: the rule for {rule.pattern!r} has {rule.needs_calibration}, but {name!r}"
                " convolves channels in groups, whose inputs are not looked at; pass a rule without it"
                " for this layer."
            )
    smooth = {name: paths[name] for name, rule in chosen.items() if rule.smoothing is not None}
    groups = folded_groups(module_or_params, calibration.folds, smooth)
    divided, norms = _divisors(op, module_or_params, chosen, inputs, groups)
    folded = {name for _, names in groups for name in names}
    if norms:
        _check_folds(op, module_or_params, call, first, norms, {n: divided[n] for n in folded})

    errors: list[LayerError] = []
    read: dict[str, LayerInputs] = {}

    def quantized(path: Path, kernel: jax.Array, taps: int) -> QuantizedKernel | None:
        name = name_of(path)
        if name not in chosen:
            return None
        if inputs[name].flat[0] is None:
            return QuantizedKernel(plain_array(kernel, chosen[name]), chosen[name].input_dtype)
        stack, leading = [], kernel.shape[:-2]
        for index in np.ndindex(leading):
            layer = _Layer(
                name + "".join(f"[{i}]" for i in index),
                chosen[name],
                kernel[index],
                inputs[name][index],
                divided[name][index] if name in divided else None,
                name in folded,
                taps,
                calibration,
            )
            one, error = layer.quantized()
            stack.append(one)
            errors.append(error)
            seen = layer.inputs
            rows = seen.rows(calibration.sampled_rows)
            read[layer.name] = LayerInputs(seen.low, seen.high, rows)
        if not leading:
            return stack[0]
        return jax.tree.map(lambda *a: jnp.stack(a).reshape(*leading, *a[0].shape), *stack)

    base = with_divided_norms(module_or_params, norms) if norms else module_or_params
    result = replace_kernels(op, base, quantized)
    return Calibrated(result, QuantizationReport(layers=tuple(errors)), read)


def _chain(first: Any, others: Iterable[Any]) -> Iterable[Any]:
    yield first
    yield from others


def _rounding(rule: QuantizationRule) -> str:
    if rule.rounding is not None:
        return rule.rounding
    return "gptq" if rule.dtype in ("int8", "int4") else "nearest"


def _choose(
    op: str, module_or_params: Any, rules: str | Sequence[QuantizationRule]
) -> tuple[dict[str, QuantizationRule], dict[str, Path]]:
    """The rules and the paths of the layers that are to be quantised, by name; bad rules raise."""
    choose = Chooser(as_rules(rules))
    chosen: dict[str, QuantizationRule] = {}
    paths: dict[str, Path] = {}

    def note(path: Path, kernel: jax.Array, taps: int) -> None:
        del taps
        rule = choose(path)
        if rule is not None:
            chosen[name_of(path)], paths[name_of(path)] = rule, path
            jax.eval_shape(lambda w: plain_array(w, rule), kernel)

    replace_kernels(op, module_or_params, note)
    choose.check_all_used()
    return chosen, paths


def plain_array(kernel: jax.Array, rule: QuantizationRule) -> QuantizedArray:
    """The kernel as the rule says, rounded to nearest."""
    assert rule.dtype is not None
    return quantize(
        kernel,
        rule.dtype,
        group_size=rule.group_size,
        symmetric=rule.symmetric,
        layout=rule.layout,
    )


# --- smoothing ------------------------------------------------------------------------------------


def _divisors(
    op: str,
    module_or_params: Any,
    chosen: Mapping[str, QuantizationRule],
    inputs: Mapping[str, Any],
    groups: Sequence[tuple[Path, list[str]]],
) -> tuple[dict[str, np.ndarray], dict[Path, np.ndarray]]:
    """What divides the inputs [..., D] of each smoothed layer, and the results of each folded norm."""
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
        # Layers that share their inputs share what divides these, as the weights of a window do.
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
    """[..., I], the largest magnitude by which a kernel [..., taps * I, O] multiplies each feature."""
    *leading, rows, _ = kernel.shape
    return np.abs(kernel).max(axis=-1).reshape(*leading, taps, rows // taps).max(axis=-2)


def _check_folds(
    op: str,
    module_or_params: Any,
    call: Callable[[Any, Any], Any],
    batch: Any,
    norms: Mapping[Path, np.ndarray],
    divided: Mapping[str, np.ndarray],
) -> None:
    """Checks that the float model gives the same result with folded norms and multiplied kernels."""

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
"""The relative difference of results that bfloat16 may make."""


def _look_away(layer: jax.Array, x: jax.Array | None) -> None:
    """Observes nothing."""


# --- one layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """A layer that is quantised: one of a stack, where layers are stacked."""

    name: str
    rule: QuantizationRule
    kernel: jax.Array
    inputs: Inputs
    divisor: np.ndarray | None
    """Of each feature of the inputs."""
    is_folded: bool
    """Whether a norm divides."""
    taps: int
    """Weights of a convolution's window."""
    calibration: Calibration

    def quantized(self) -> tuple[QuantizedKernel, LayerError]:
        """The layer's new kernel, and its errors."""
        truth = self.kernel.astype(jnp.float32)
        rows = self.inputs.rows(self.calibration.sampled_rows)
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
        plain = QuantizedKernel(plain_array(truth, self.rule), self.rule.input_dtype)
        weights = kernel.array.dequantize()
        weights = weights if s is None else weights / s[:, None]
        expected = _exact_product(rows, truth)
        error = LayerError(
            self.name,
            describe(self.rule, rounding=_rounding(self.rule)),
            relative_error(np.asarray(weights), np.asarray(truth)),
            relative_error(self._product(rows, plain), expected),
            relative_error(self._product(divided_rows, kernel), expected),
        )
        return kernel, error

    def _array(self, w: jax.Array, s: np.ndarray | None) -> QuantizedArray:
        plain = plain_array(w, self.rule)
        if _rounding(self.rule) == "nearest":
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
            damping=self.calibration.damping,
        )
        # What lies on the grid of its scale is rounded to itself.
        return rounding.encode(
            rounded, plain.dtype, plain.scale, plain.zero_point, plain.axis, plain.layout
        )

    def _input_scale(self, rows: np.ndarray, s: np.ndarray | None) -> jax.Array | None:
        """One for all inputs, of the percentile of their magnitudes."""
        percentile = self.rule.input_percentile
        if percentile is None:
            return None
        magnitudes = self.inputs.magnitudes()
        magnitudes = magnitudes if s is None else magnitudes / s
        # Of all rows, not only of those that were sampled, the largest magnitude is known.
        largest = magnitudes.max() if percentile == 100.0 else np.percentile(abs(rows), percentile)
        scale = max(float(largest), float(jnp.finfo(jnp.float32).tiny))
        return jnp.asarray(scale / FORMATS[str(self.rule.input_dtype)].largest, jnp.float32)

    def _product(self, rows: np.ndarray, kernel: QuantizedKernel) -> np.ndarray:
        """The product of rows that are divided already; of a convolution these are windows."""
        scale = kernel.input_scale
        if self.taps > 1 and kernel.input_dtype is not None and scale is None:
            # Windows of one image share a scale, and of these rows nobody knows the image.
            largest = max(float(np.abs(rows).max()), float(jnp.finfo(jnp.float32).tiny))
            scale = jnp.asarray(largest / FORMATS[kernel.input_dtype].largest, jnp.float32)
        kernel = QuantizedKernel(kernel.array, kernel.input_dtype, None, scale)
        return np.asarray(linear(jnp.asarray(rows), kernel, None, implementation="xla"))


def _exact_product(rows: np.ndarray, kernel: jax.Array) -> np.ndarray:
    return np.asarray(jnp.matmul(jnp.asarray(rows), kernel, precision="highest"))
