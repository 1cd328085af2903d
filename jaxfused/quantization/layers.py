"""The linear layers and convolutions of a model, nnx or Linen, and the replacement of their kernels.

A layer is identified by its path: the keys of the mappings, lists and attributes that lead to it. A
layer of an nnx module that is used in several places has one path, the first.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta
from flax.nnx.nn.dtypes import promote_dtype

from jaxfused.modules.fallback import why_given
from jaxfused.modules.linear import KernelStandIn, QuantizedKernel
from jaxfused.nnx.conv import Conv
from jaxfused.nnx.quantized_linear import Frozen, QuantizedLinear
from jaxfused.runtime.quantized_array import assembled

Path = tuple[Any, ...]
Replace = Callable[[Path, jax.Array, int], KernelStandIn | None]
"""Function (path, kernel, taps) -> replacement of a kernel [..., D, F], or None for no change.

A convolution is a product with all numbers of its window, which has `taps` positions; a linear layer has
1.
"""


def name_of(path: Path) -> str:
    """Returns a path as text, its keys joined by "/"; the rules' patterns are searched in this text."""
    return "/".join(str(key) for key in path)


LeaveOut = Callable[[Path, str], None]
"""Function (path, reason) -> None, called for each layer whose kernel is not replaced."""


def replace_kernels(
    op: str,
    module_or_params: Any,
    replace: Replace,
    leave_out: LeaveOut | None = None,
    *,
    takes_shapes: bool = False,
) -> Any:
    """Returns a copy of a module or tree of parameters with other kernels in its layers.

    Args:
      takes_shapes: whether kernels of an nnx module's linear layers may be `jax.ShapeDtypeStruct`s.
    """
    told: LeaveOut = leave_out or (lambda path, reason: None)
    if isinstance(module_or_params, nnx.Module):
        return _replace_in_module(module_or_params, replace, told, takes_shapes)
    if isinstance(module_or_params, Mapping):
        return _replace_in_tree(module_or_params, (), frozenset(), frozenset(), replace, told)
    raise TypeError(
        f"{op}: module_or_params is a {type(module_or_params).__name__}, but it has to be an nnx module"
        " or a tree of mappings; pass one of them."
    )


def _replace_in_tree(
    tree: Any,
    path: Path,
    siblings: frozenset[str],
    depths: frozenset[int],
    replace: Replace,
    leave_out: LeaveOut,
) -> Any:
    """Returns a tree of Linen's parameters in which `replace` has replaced kernels.

    Args:
      siblings: the names in the parent tree, including this tree's.
      depths: the numbers of stacked axes that the layers around this tree suggest.
    """
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        items = [
            _replace_in_tree(value, (*path, i), siblings, depths, replace, leave_out)
            for i, value in enumerate(tree)
        ]
        return type(tree)(items)
    if not isinstance(tree, Mapping):
        return tree
    depths = _depths_of_stacks(tree) or depths
    names = frozenset(map(str, tree))
    result = {
        key: _replace_in_tree(value, (*path, key), names, depths, replace, leave_out)
        for key, value in tree.items()
    }
    box = tree.get("kernel")
    kernel = _unboxed(box)
    if kernel is None or isinstance(box, KernelStandIn) or isinstance(kernel, Mapping):
        return result
    reading = _why_no_layer(tree, kernel, box) or _axes_of(tree, path, siblings, depths)
    if isinstance(reading, str):
        leave_out(path, reading)
        return result
    matrix, taps = _as_matrix(jnp.asarray(kernel), reading)
    instead = replace(path, matrix, taps)
    if instead is not None:
        if isinstance(box, linen.Partitioned) and isinstance(instead, QuantizedKernel):
            instead = _boxed(instead, box, kernel.ndim)
        result["kernel"] = instead
    return result


def _unboxed(leaf: Any) -> Any:
    """Returns the value of a leaf that may be boxed with a sharding, which is not applied."""
    if isinstance(leaf, linen.Partitioned):
        return leaf.value
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


def _why_no_layer(tree: Mapping[Any, Any], kernel: Any, box: Any) -> str | None:
    """Returns why a tree's kernel cannot be replaced, whatever its axes (see `_axes_of`), or None."""
    if not isinstance(kernel, jax.Array | np.ndarray):
        return (
            f"its kernel is a {type(kernel).__name__} and no array; of shapes call quantize_params under"
            " jax.eval_shape"
        )
    if isinstance(box, meta.AxisMetadata) and not isinstance(box, linen.Partitioned):
        return f"its kernel is in a {type(box).__name__}; pass flax.linen.meta.unbox(params)"
    others = [str(key) for key in tree if key not in ("kernel", "bias")]
    return f"it has {', '.join(others)} beside a kernel and a bias" if others else None


def _axes_of(
    tree: Mapping[Any, Any], path: Path, siblings: frozenset[str], depths: frozenset[int]
) -> int | str:
    """Returns the number of a kernel's window axes (0 for a linear layer), or why it has none.

    Axes before the window and the last two axes belong to stacked layers, as `nn.scan` makes them. A
    bias has the stack's axes and the last one, from which the window of most kernels follows.
    """
    kernel = np.shape(_unboxed(tree["kernel"]))
    if len(kernel) < 2:
        return f"its kernel has {len(kernel)} axes"
    if len(kernel) == 2:
        return 0
    name = str(path[-1]) if path else ""
    if siblings >= set(_PROJECTIONS[:3]) and name in _PROJECTIONS:
        return "attention reads its projections over several axes, as floats"
    (depth,) = depths if len(depths) == 1 else (None,)
    if "bias" in tree:
        bias = np.shape(_unboxed(tree["bias"]))
        stacks = bias == (*kernel[: len(bias) - 1], kernel[-1])
        projects = len(bias) > 1 and bias == kernel[-len(bias) :]
        if stacks and projects:
            stacks = depth == len(bias) - 1
            if depth is None:
                return (
                    f"its kernel {kernel} may be of stacked layers or of several axes of a result"
                )
        if stacks and len(kernel) - len(bias) > 0:
            return len(kernel) - len(bias) - 1
        return f"its kernel {kernel} and bias {bias} are of a product over several axes"
    window = len(kernel) - 2 - (depth or 0)
    if window == 0 or window > 1:
        return window
    return (
        f"without a bias nothing tells whether its kernel {kernel} is of stacked layers, of a"
        " convolution along one axis, or of a product over several axes; in place of it put"
        " jaxfused.QuantizedKernel(jaxfused.quantize(kernel)) for the first, with kernel.reshape(-1,"
        " kernel.shape[-1]) for the second"
    )


_PROJECTIONS = ("query", "key", "value", "out")
"""Names of attention's projections in Flax."""


def _depths_of_stacks(tree: Mapping[Any, Any]) -> frozenset[int]:
    """Returns the numbers of stacked axes that the norms and biases of a tree suggest."""
    found: set[int] = set()
    for value in tree.values():
        if not isinstance(value, Mapping):
            continue
        if "scale" in value and value.keys() <= {"scale", "bias"}:
            found.add(max(len(_shape(value["scale"])), 1) - 1)
        elif value.keys() == {"kernel", "bias"}:
            kernel, bias = (_shape(value[key]) for key in ("kernel", "bias"))
            stacks = bias == (*kernel[: len(bias) - 1], *kernel[-1:])
            if stacks and (len(bias) == 1 or bias != kernel[-len(bias) :]):
                found.add(len(bias) - 1)
        else:
            found |= _depths_of_stacks(value)
    return frozenset(found)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(_unboxed(leaf), "shape", ()))


def _boxed(kernel: QuantizedKernel, box: Any, ndim: int) -> QuantizedKernel:
    """Returns a quantised kernel whose arrays are boxed with the axis names of the float kernel.

    Three axes get no name: the merged axis of a convolution's window, the axis of the few groups of the
    scales, and the axis of a stack that was made without a name.
    """
    array = kernel.array
    names = (None,) * (ndim - len(box.names)) + tuple(box.names)
    stack, (rows, columns) = names[: array.ndim - 2], names[-2:]
    rows = rows if ndim == array.ndim else None

    def boxed(part: jax.Array | None, *names: Any) -> Any:
        return None if part is None else box.replace(value=part, names=(*stack, *names))

    def of_columns(part: jax.Array | None) -> Any:
        each = part is not None and part.shape[-1] == array.shape[-1]
        return boxed(part, None, columns if each else None)

    pair = (columns, rows) if array.layout == "columns" else (rows, columns)
    parts = assembled(
        boxed(array.values, *pair),
        of_columns(array.scale),
        of_columns(array.zero_point),
        array.axis,
        array.layout,
        array.group_size,
    )
    divisor, scale = boxed(kernel.input_divisor, rows), boxed(kernel.input_scale)
    return QuantizedKernel(parts, kernel.input_dtype, divisor, scale)


def _as_matrix(kernel: jax.Array, axes: int) -> tuple[jax.Array, int]:
    """Returns a kernel [..., *window, I, O] as [..., D, O], and the window's number of positions."""
    leading, window = kernel.shape[: kernel.ndim - axes - 2], kernel.shape[-axes - 2 : -2]
    return kernel.reshape(*leading, -1, kernel.shape[-1]), math.prod(window)


def _replace_in_module(
    module: nnx.Module, replace: Replace, leave_out: LeaveOut, takes_shapes: bool
) -> nnx.Module:
    if isinstance(module, nnx.Linear | nnx.Conv):
        return _replace_in_layer((), module, replace, takes_shapes) or module
    module = nnx.clone(module)
    replaced: dict[int, nnx.Module] = {}
    for path, parent in list(nnx.iter_modules(module)):
        if isinstance(getattr(parent, "kernel", None), nnx.Param) and not isinstance(
            parent, nnx.Linear | nnx.Conv
        ):
            leave_out(path, f"a {type(parent).__name__} reads its kernel as floats")
        for key, child in list(_children(parent)):
            if not isinstance(child, nnx.Linear | nnx.Conv):
                continue
            if id(child) not in replaced:
                instead = _replace_in_layer((*path, key), child, replace, takes_shapes)
                if instead is None:
                    continue
                replaced[id(child)] = instead
            if isinstance(parent, MutableSequence | MutableMapping):
                parent[key] = replaced[id(child)]
            else:
                setattr(parent, key, replaced[id(child)])
    return module


def _replace_in_layer(
    path: Path, layer: nnx.Linear | nnx.Conv, replace: Replace, takes_shapes: bool
) -> nnx.Module | None:
    """Returns a new layer, or None for no change."""
    kernel = layer.kernel.get_value()
    is_shape = takes_shapes and isinstance(kernel, jax.ShapeDtypeStruct)
    if not (is_shape or isinstance(kernel, jax.Array)):
        return None  # A quantised kernel stays as it is.
    if isinstance(layer, nnx.Linear):
        instead = replace(path, kernel, 1)
        return None if instead is None else _with_kernel(layer, instead)
    if is_shape:
        return None
    instead = replace(path, *_as_matrix(kernel, len(layer.kernel_size)))
    return None if instead is None else _conv_with_kernel(layer, instead)


def _children(parent: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(parent, MutableSequence):
        yield from enumerate(parent)
    elif isinstance(parent, MutableMapping):
        yield from parent.items()
    else:
        yield from vars(parent).items()


def _with_kernel(layer: nnx.Linear, kernel: KernelStandIn) -> nnx.Module:
    """Returns a `QuantizedLinear` with this kernel and the layer's bias, activation and LoRA."""
    _check_plain(
        layer,
        f"a layer of {layer.in_features} inputs and {layer.out_features} outputs",
        dot_general=layer.dot_general is not jax.lax.dot_general,
    )
    bias = None if layer.bias is None else layer.bias.get_value()
    quantized = QuantizedLinear(
        layer.in_features,
        layer.out_features,
        kernel=kernel,
        use_bias=bias is not None,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        bias_init=lambda key, shape, dtype: bias,
        rngs=nnx.Rngs(0),
        activation=getattr(layer, "activation", None),
        implementation=getattr(layer, "implementation", None),
    )
    if not isinstance(layer, nnx.LoRALinear):
        return quantized
    # LoRA adds its low-rank product to the product of the quantised kernel.
    adapted = nnx.clone(layer.lora)
    adapted.base_module = nnx.data(quantized)
    return adapted


def _conv_with_kernel(layer: nnx.Conv, kernel: KernelStandIn) -> Conv:
    """Returns the convolution with this kernel, as `jaxfused.nnx.Conv`."""
    _check_plain(
        layer,
        f"a convolution of {layer.in_features} and {layer.out_features} channels",
        mask=layer.mask is not None,
        conv_general_dilated=layer.conv_general_dilated is not jax.lax.conv_general_dilated,
    )
    bias = None if layer.bias is None else layer.bias[...]
    conv = Conv(
        layer.in_features,
        layer.out_features,
        layer.kernel_size,
        layer.strides,
        padding=layer.padding,
        input_dilation=layer.input_dilation,
        kernel_dilation=layer.kernel_dilation,
        feature_group_count=layer.feature_group_count,
        use_bias=bias is not None,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=nnx.initializers.zeros,
        bias_init=lambda key, shape, dtype: bias,
        rngs=nnx.Rngs(0),
        activation=getattr(layer, "activation", None),
        implementation=getattr(layer, "implementation", None),
    )
    frozen: Any = Frozen(kernel)
    conv.kernel = frozen
    return conv


def _check_plain(layer: nnx.Linear | nnx.Conv, name: str, **given: bool) -> None:
    """Checks that a layer computes the standard product; `given` flags other unusual arguments."""
    reason = why_given(
        **given,
        promote_dtype=layer.promote_dtype is not promote_dtype,
        preferred_element_type=layer.preferred_element_type is not None,
        precision=layer.precision is not None,
    )
    if reason is not None:
        raise ValueError(
            f"quantize_params: {name} cannot be quantised because {reason}; leave that out, or pass a"
            " rule of dtype None for it."
        )
