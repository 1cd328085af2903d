"""quantize_params: the linear layers of a trained model, quantised by rules over their paths."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxfused.modules.linear import QuantizedKernel
from jaxfused.quantization.calibrate import Calibration, calibrate
from jaxfused.quantization.calibrated_layer import plain_array
from jaxfused.quantization.layers import Path, name_of, replace_kernels
from jaxfused.quantization.rules import Chooser, QuantizationRule, as_rules


def quantize_params(
    module_or_params: Any,
    rules: str | Sequence[QuantizationRule],
    *,
    calibration: Calibration | Iterable[Any] | None = None,
) -> Any:
    """Quantises the kernels of linear layers and convolutions; the first rule that fits a path decides.

    In an nnx module every `nnx.Linear`, this package's or Flax's, becomes a
    `jaxfused.nnx.QuantizedLinear`, and `MLP`, `GatedMLP` and `TransformerBlock` run on those; every
    `nnx.Conv` becomes a `jaxfused.nnx.Conv` with a quantised kernel. A `nnx.LoRALinear` becomes a
    `nnx.LoRA` around the quantised layer. In a tree of Linen's parameters every kernel of a linear layer
    or a convolution, also of layers that `nn.scan` or `nn.vmap` stack, becomes a
    `jaxfused.QuantizedKernel`, which the layers of `jaxfused.linen` read in its place; Flax's own
    modules do not. Parts of a partitioned kernel are partitioned. Everything else stays as it is,
    embeddings and the projections of multi-head attention too; a warning names kernels that stay though
    a rule is found in their path, and says why.

    A convolution's kernel is quantised as that of a product with all numbers of a window: groups are
    runs of these, and an image's inputs have one scale. `ConvNormAct` folds its batch norm into the
    scales.

    Args:
      module_or_params: an nnx module, or nested mappings of arrays, with or without "params" on top.
      rules: one after another until one fits; or the dtype of a single rule for all layers.
      calibration: batches that the model is called with, or a `jaxfused.Calibration`, by which to choose
        roundings, divisors and scales as the rules say; `jaxfused.calibrate` is the same and reports the
        errors too.

    Returns:
      A new module or tree; what was passed stays as it is.

    Raises:
      ValueError: a rule decides over no layer, a layer does not fit its rule (`quantize` says why), or
        it has a `dot_general`, `promote_dtype`, `preferred_element_type` or `precision` of its own.
      TypeError: module_or_params is neither of the two.

    Example:
      >>> from flax import nnx
      >>> import jaxfused, jaxfused.nnx
      >>> block = jaxfused.nnx.TransformerBlock(32, 4, rngs=nnx.Rngs(0))
      >>> block = jaxfused.quantize_params(block, [
      ...     jaxfused.QuantizationRule("^mlp/", "int4", group_size=16),
      ...     jaxfused.QuantizationRule("^project$", None),
      ...     jaxfused.QuantizationRule("", "int8"),
      ... ])
      >>> block.mlp.up.kernel.array.dtype, block.qkv.kernel.array.dtype, type(block.project).__name__
      ('int4', 'int8', 'Linear')

    Source: `jaxfused.quantize`.
    """
    if calibration is not None:
        return calibrate(module_or_params, rules, calibration).quantized
    choose = Chooser(as_rules(rules))

    def quantized(path: Path, kernel: jax.Array, taps: int) -> QuantizedKernel | None:
        rule = choose(path)
        if rule is None:
            return None
        if rule.needs_calibration is not None:
            raise ValueError(
                f"quantize_params: the rule for {rule.pattern!r} has {rule.needs_calibration}, which"
                " takes inputs of the layers to choose by; pass calibration=batches, or leave it out."
            )
        array = plain_array(name_of(path), kernel, rule, taps)
        return QuantizedKernel(array, rule.input_dtype)

    result = replace_kernels("quantize_params", module_or_params, quantized, choose.leave_out)
    choose.check_all_used()
    return result
