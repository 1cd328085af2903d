"""The linear layers and convolutions of a model, nnx or Linen, and the replacement of their kernels.

A layer is known by its path: the keys of the mappings, lists and attributes that lead to it. A layer
of an nnx module that is used in several places has one path, the first.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfused.modules.fallback import why_given
from jaxfused.modules.linear import KernelStandIn
from jaxfused.nnx.conv import Conv
from jaxfused.nnx.quantized_linear import Frozen, QuantizedLinear

Path = tuple[Any, ...]
Replace = Callable[[Path, jax.Array, int], KernelStandIn | None]
"""What stands for a layer's kernel [..., D, F] from now on, or None for no change.

It is called with the layer's path, the kernel, and the weights of a convolution's window, which are 1 of
a linear layer: a convolution's kernel is seen as that of the product with all numbers of a window.
"""


def name_of(path: Path) -> str:
    """A path as rules search it."""
    return "/".join(str(key) for key in path)


def replace_kernels(op: str, module_or_params: Any, replace: Replace) -> Any:
    """Returns a new module or tree with other kernels in its layers; the old one stays."""
    if isinstance(module_or_params, nnx.Module):
        return _replace_in_module(module_or_params, replace)
    if isinstance(module_or_params, Mapping):
        return _replace_in_tree(module_or_params, (), replace)
    raise TypeError(
        f"{op}: module_or_params is a {type(module_or_params).__name__}, but it has to be an nnx module"
        " or a tree of mappings; pass one of them."
    )


def _replace_in_tree(tree: Any, path: Path, replace: Replace) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    result = {key: _replace_in_tree(value, (*path, key), replace) for key, value in tree.items()}
    kernel = tree.get("kernel")
    if not isinstance(kernel, jax.Array | np.ndarray) or not tree.keys() <= {"kernel", "bias"}:
        return result
    # Kernels of three axes are those of attention, too.
    bias_fits = "bias" not in tree or np.shape(tree["bias"]) == kernel.shape[-1:]
    if kernel.ndim == 2 or (kernel.ndim > 3 and bias_fits):
        matrix, taps = _as_matrix(jnp.asarray(kernel), kernel.ndim - 2)
        instead = replace(path, matrix, taps)
        if instead is not None:
            result["kernel"] = instead
    return result


def _as_matrix(kernel: jax.Array, axes: int) -> tuple[jax.Array, int]:
    """A kernel [..., *window, I, O] with so many axes of a window as [..., D, O], and its weights."""
    leading, window = kernel.shape[: kernel.ndim - axes - 2], kernel.shape[-axes - 2 : -2]
    return kernel.reshape(*leading, -1, kernel.shape[-1]), math.prod(window)


def _replace_in_module(module: nnx.Module, replace: Replace) -> nnx.Module:
    if isinstance(module, nnx.Linear | nnx.Conv):
        return _replace_in_layer((), module, replace) or module
    module = nnx.clone(module)
    replaced: dict[int, nnx.Module] = {}
    for path, parent in list(nnx.iter_modules(module)):
        for key, child in list(_children(parent)):
            if not isinstance(child, nnx.Linear | nnx.Conv):
                continue
            if id(child) not in replaced:
                instead = _replace_in_layer((*path, key), child, replace)
                if instead is None:
                    continue
                replaced[id(child)] = instead
            if isinstance(parent, MutableSequence | MutableMapping):
                parent[key] = replaced[id(child)]
            else:
                setattr(parent, key, replaced[id(child)])
    return module


def _replace_in_layer(
    path: Path, layer: nnx.Linear | nnx.Conv, replace: Replace
) -> nnx.Module | None:
    """A new layer, or None for no change."""
    kernel = layer.kernel.get_value()
    if not isinstance(kernel, jax.Array):
        return None  # It is quantised already.
    if isinstance(layer, nnx.Linear):
        instead = replace(path, kernel, 1)
        return None if instead is None else _with_kernel(layer, instead)
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
    """A `QuantizedLinear` with this kernel, and with what the layer does beside its product."""
    _check_plain(
        layer,
        f"a layer of {layer.in_features} inputs and {layer.out_features} outputs",
        dot_general=layer.dot_general is not jax.lax.dot_general,
    )
    bias = None if layer.bias is None else layer.bias[...]
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
    # The layer's own product of low rank goes on around the quantised kernel.
    adapted = nnx.clone(layer.lora)
    adapted.base_module = nnx.data(quantized)
    return adapted


def _conv_with_kernel(layer: nnx.Conv, kernel: KernelStandIn) -> Conv:
    """The convolution with this kernel, as `jaxfused.nnx.Conv`."""
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
    """Checks that a layer multiplies as usual; `given` says which arguments of its own it was given."""
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
