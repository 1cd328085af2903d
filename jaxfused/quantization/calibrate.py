"""calibrate: quantisation of a model by statistics of its layers' inputs, with a report of errors."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.modules.linear import QuantizedKernel
from jaxfused.quantization.calibrated_layer import CalibratedLayer, plain_array, rounding_of
from jaxfused.quantization.layers import Path, name_of, replace_kernels
from jaxfused.quantization.model_smoothing import check_folds, divisors_of_model
from jaxfused.quantization.observe import Call, call_by_default, observe
from jaxfused.quantization.report import LayerError, QuantizationReport
from jaxfused.quantization.rules import Chooser, QuantizationRule, as_rules
from jaxfused.quantization.smoothing import Fold, folded_groups, with_divided_norms


@dataclass(frozen=True)
class Calibration:
    """The batches and options of a calibration.

    Attributes:
      batches: inputs of the model, one call each. A few hundred rows a layer are enough for ranges;
        rounding "gptq" needs several times as many rows as a layer has features.
      call: `call(module_or_params, batch)` runs the model as inference does, and may be traced. By
        default an nnx module is called with the batch alone; parameters of Linen need it.
      folds: norms that take the divisors of smoothing. Other layers divide their inputs themselves.
      damping: of rounding "gptq", in units of the mean square of a layer's inputs.
      sampled_rows: number of each layer's input rows from which percentiles and errors are computed.

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
    """Inputs of a layer in a calibration, before smoothing.

    Attributes:
      low: [D], the smallest value of each feature, in all rows; a convolution's features are all numbers
        of its windows, without padding. 0 where there was only padding.
      high: [D], the largest.
      rows: [N, D], some of the rows, sampled.
      inside: [N, D], whether a number of `rows` is a value, and not padding of a convolution; None where
        all are.
    """

    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray
    inside: np.ndarray | None = None

    def percentile(self, percent: float) -> np.ndarray:
        """Returns [D], the magnitude below which `percent` percent of each feature's values lie."""
        if self.inside is None:
            return np.percentile(np.abs(self.rows), percent, axis=0)
        read = self.inside.any(axis=0)
        magnitudes = np.where(self.inside, np.abs(self.rows), np.nan)[:, read]
        result = np.zeros(read.shape)
        result[read] = np.nanpercentile(magnitudes, percent, axis=0)
        return result


@dataclass(frozen=True)
class Calibrated:
    """The result of `jaxfused.calibrate`.

    Attributes:
      quantized: the new module or tree, as `jaxfused.quantize_params` returns it.
      report: the errors of its layers.
      inputs: the inputs of each layer, by the paths of the report.
    """

    quantized: Any
    report: QuantizationReport
    inputs: Mapping[str, LayerInputs]


def calibrate(
    module_or_params: Any,
    rules: str | Sequence[QuantizationRule],
    calibration: Calibration | Iterable[Any],
) -> Calibrated:
    """Quantises a model by the inputs of its layers on some batches, and reports the errors by layer.

    The float model runs on the batches once, while the inputs of the layers to quantise are recorded.
    Then each layer is smoothed, where its rule says so, gets its scales, and is rounded. A layer that is
    rounded with "gptq" never has a larger error on the batches than with rounding to nearest.

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
    first, inputs = _observed(op, module_or_params, calibration, call, chosen)
    smooth = {name: paths[name] for name, rule in chosen.items() if rule.smoothing is not None}
    groups = folded_groups(module_or_params, calibration.folds, smooth)
    divided, norms = divisors_of_model(op, module_or_params, chosen, inputs, groups)
    folded = {name for _, names in groups for name in names}
    if norms:
        check_folds(op, module_or_params, call, first, norms, {n: divided[n] for n in folded})

    errors: list[LayerError] = []
    read: dict[str, LayerInputs] = {}

    def quantized(path: Path, kernel: jax.Array, taps: int) -> QuantizedKernel | None:
        name = name_of(path)
        if name not in chosen:
            return None
        if inputs[name].flat[0] is None:
            return QuantizedKernel(
                plain_array(name, kernel, chosen[name], taps), chosen[name].input_dtype
            )
        stack, leading = [], kernel.shape[:-2]
        for index in np.ndindex(leading):
            layer = CalibratedLayer(
                name + "".join(f"[{i}]" for i in index),
                chosen[name],
                kernel[index],
                inputs[name][index],
                divided[name][index] if name in divided else None,
                name in folded,
                taps,
                calibration.damping,
                calibration.sampled_rows,
            )
            one, error = layer.quantized()
            stack.append(one)
            errors.append(error)
            seen = layer.inputs
            most = calibration.sampled_rows
            rows, inside = seen.rows(most), seen.inside_rows(most)
            read[layer.name] = LayerInputs(seen.low, seen.high, rows, inside)
        if not leading:
            return stack[0]
        return jax.tree.map(lambda *a: jnp.stack(a).reshape(*leading, *a[0].shape), *stack)

    base = with_divided_norms(module_or_params, norms) if norms else module_or_params
    result = replace_kernels(op, base, quantized)
    return Calibrated(result, QuantizationReport(layers=tuple(errors)), read)


def _observed(
    op: str,
    module_or_params: Any,
    calibration: Calibration,
    call: Call,
    chosen: Mapping[str, QuantizationRule],
) -> tuple[Any, dict[str, Any]]:
    """Returns the first batch, and a dict from layers to quantise to the statistics of their inputs."""
    batches = iter(calibration.batches)
    first = next(batches, None)
    if first is None:
        raise ValueError(f"{op}: calibration has no batches; pass at least one.")
    inputs = observe(
        op,
        module_or_params,
        itertools.chain([first], batches),
        call,
        wanted={name: rounding_of(rule) == "gptq" for name, rule in chosen.items()},
        sampled_rows=calibration.sampled_rows,
    )
    for name, rule in chosen.items():
        if inputs[name].flat[0] is None and rule.needs_calibration is not None:
            raise ValueError(
                f"{op}: the rule for {rule.pattern!r} has {rule.needs_calibration}, but {name!r}"
                " convolves channels in groups, whose inputs are not looked at; pass a rule without it"
                " for this layer."
            )
    return first, inputs


def _choose(
    op: str, module_or_params: Any, rules: str | Sequence[QuantizationRule]
) -> tuple[dict[str, QuantizationRule], dict[str, Path]]:
    """Returns two dicts, from layers to quantise to their rules and paths; raises for bad rules."""
    choose = Chooser(as_rules(rules))
    chosen: dict[str, QuantizationRule] = {}
    paths: dict[str, Path] = {}

    def note(path: Path, kernel: jax.Array, taps: int) -> None:
        rule = choose(path)
        if rule is not None:
            name = name_of(path)
            chosen[name], paths[name] = rule, path
            jax.eval_shape(lambda w: plain_array(name, w, rule, taps), kernel)

    replace_kernels(op, module_or_params, note, choose.leave_out)
    choose.check_all_used()
    return chosen, paths
