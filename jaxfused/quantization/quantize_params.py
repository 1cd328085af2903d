"""quantize_params: the linear layers of a trained model, quantised by rules over their paths."""

import re
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfused.modules.fallback import why_given
from jaxfused.modules.linear import QuantizedKernel
from jaxfused.nnx.quantized_linear import QuantizedLinear
from jaxfused.quantization.quantize import quantize
from jaxfused.quantization.quantized_array import Layout


@dataclass(frozen=True)
class QuantizationRule:
    """Which layers are quantised, and how.

    Attributes:
      pattern: a regular expression, searched for in the path of a layer, such as "blocks/3/mlp/up".
        The empty one is found in every path.
      dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2"; None leaves the layer as it is.
      group_size: input features that share a scale; by default all of them.
      symmetric: whether 0 stands for 0, as in `jaxfused.quantize`.
      input_dtype: to which the layer's inputs are quantised, row by row: "int8", "float8_e4m3fn" or
        "float8_e5m2"; None leaves them as they are.
      layout: "columns" as the kernels read weights, else "rows": see `jaxfused.quantize`.

    Example:
      >>> import jaxfused
      >>> jaxfused.QuantizationRule("mlp/(up|down)$", "int4", group_size=64).dtype
      'int4'
    """

    pattern: str
    dtype: str | None
    group_size: int | None = None
    symmetric: bool = True
    input_dtype: str | None = None
    layout: Layout = "rows"


def quantize_params(module_or_params: Any, rules: str | Sequence[QuantizationRule]) -> Any:
    """Quantises the kernels of linear layers; the first rule that fits a layer's path decides.

    Of an nnx module every `nnx.Linear`, this package's or Flax's, becomes a
    `jaxfused.nnx.QuantizedLinear`, and `MLP`, `GatedMLP` and `TransformerBlock` run on those. Of a
    tree of Linen's parameters every kernel with two axes becomes a `jaxfused.QuantizedKernel`, which
    `Dense`, `QuantizedDense`, `MLP`, `GatedMLP` and `TransformerBlock` of `jaxfused.linen` read in its
    place; Flax's own modules do not. Everything else stays as it is, convolutions, embeddings and the
    projections of multi-head attention too.

    Args:
      module_or_params: an nnx module, or nested mappings of arrays, with or without "params" on top.
      rules: one after another until one fits; or the dtype of a single rule for all layers.

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
    if isinstance(rules, str):
        rules = [QuantizationRule("", rules)]
    chooser = _Chooser(rules)
    if isinstance(module_or_params, nnx.Module):
        result = _quantize_module(module_or_params, chooser)
    elif isinstance(module_or_params, Mapping):
        result = _quantize_tree(module_or_params, (), chooser)
    else:
        raise TypeError(
            f"quantize_params: module_or_params is a {type(module_or_params).__name__}, but it has to"
            " be an nnx module or a tree of mappings; pass one of them."
        )
    chooser.check_all_used()
    return result


class _Chooser:
    """The first rule that fits a path, and which rules never were."""

    def __init__(self, rules: Sequence[QuantizationRule]):
        self.rules = rules
        self.used: set[QuantizationRule] = set()
        self.paths: list[str] = []

    def __call__(self, path: Sequence[Any]) -> QuantizationRule | None:
        """The rule for the layer at `path`, or None where the layer stays as it is."""
        name = "/".join(str(key) for key in path)
        self.paths.append(name)
        rule = next((rule for rule in self.rules if re.search(rule.pattern, name)), None)
        if rule is None:
            return None
        self.used.add(rule)
        return None if rule.dtype is None else rule

    def check_all_used(self) -> None:
        for rule in self.rules:
            if rule not in self.used:
                paths = ", ".join(repr(path) for path in self.paths) or "none"
                raise ValueError(
                    f"quantize_params: the rule for {rule.pattern!r} decides over no layer; pass one"
                    f" whose pattern is found, before other rules', in one of these: {paths}."
                )


def _quantize_tree(tree: Any, path: tuple[str, ...], choose: _Chooser) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    result = {key: _quantize_tree(value, (*path, key), choose) for key, value in tree.items()}
    kernel = tree.get("kernel")
    if isinstance(kernel, jax.Array) and kernel.ndim == 2 and tree.keys() <= {"kernel", "bias"}:
        rule = choose(path)
        if rule is not None:
            assert rule.dtype is not None
            array = quantize(
                kernel,
                rule.dtype,
                group_size=rule.group_size,
                symmetric=rule.symmetric,
                layout=rule.layout,
            )
            result["kernel"] = QuantizedKernel(array, rule.input_dtype)
    return result


def _quantize_module(module: nnx.Module, choose: _Chooser) -> nnx.Module:
    if isinstance(module, nnx.Linear):
        rule = choose(())
        return module if rule is None else _quantize_linear(module, rule)
    module = nnx.clone(module)
    quantized: dict[int, QuantizedLinear] = {}
    for path, parent in list(nnx.iter_modules(module)):
        for key, child in list(_children(parent)):
            if not isinstance(child, nnx.Linear):
                continue
            if id(child) not in quantized:
                rule = choose((*path, key))
                if rule is None:
                    continue
                quantized[id(child)] = _quantize_linear(child, rule)
            if isinstance(parent, MutableSequence | MutableMapping):
                parent[key] = quantized[id(child)]
            else:
                setattr(parent, key, quantized[id(child)])
    return module


def _children(parent: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(parent, MutableSequence):
        yield from enumerate(parent)
    elif isinstance(parent, MutableMapping):
        yield from parent.items()
    else:
        yield from vars(parent).items()


def _quantize_linear(layer: nnx.Linear, rule: QuantizationRule) -> QuantizedLinear:
    """A `QuantizedLinear` of the layer's numbers and of what it does beside its product."""
    reason = why_given(
        dot_general=layer.dot_general is not jax.lax.dot_general,
        promote_dtype=layer.promote_dtype is not promote_dtype,
        preferred_element_type=layer.preferred_element_type is not None,
        precision=layer.precision is not None,
    )
    if reason is not None:
        raise ValueError(
            f"quantize_params: a layer of {layer.in_features} inputs and {layer.out_features} outputs"
            f" cannot be quantised because {reason}; leave that out, or pass a rule of dtype None for"
            " it."
        )
    kernel = layer.kernel[...]
    bias = None if layer.bias is None else layer.bias[...]
    assert rule.dtype is not None
    return QuantizedLinear(
        layer.in_features,
        layer.out_features,
        kernel_dtype=rule.dtype,
        group_size=rule.group_size,
        symmetric=rule.symmetric,
        layout=rule.layout,
        input_dtype=rule.input_dtype,
        use_bias=bias is not None,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=lambda key, shape, dtype: kernel,
        bias_init=lambda key, shape, dtype: bias,
        rngs=nnx.Rngs(0),
        activation=getattr(layer, "activation", None),
        implementation=getattr(layer, "implementation", None),
    )
