"""The linear layers of a model and the replacement of their kernels, for nnx and Linen alike.

A layer is known by its path: the keys of the mappings, lists and attributes that lead to it. A layer
of an nnx module that is used in several places has one path, the first.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfused.modules.fallback import why_given
from jaxfused.modules.linear import KernelStandIn
from jaxfused.nnx.quantized_linear import QuantizedLinear

Path = tuple[Any, ...]
Replace = Callable[[Path, jax.Array], KernelStandIn | None]
"""What stands for a layer's kernel [..., D, F] from now on, of the layer's path; None for no change."""


def name_of(path: Path) -> str:
    """A path as rules search it."""
    return "/".join(str(key) for key in path)


def replace_kernels(op: str, module_or_params: Any, replace: Replace) -> Any:
    """Returns a new module or tree with other kernels in its linear layers; the old one stays."""
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
    is_layer = tree.keys() <= {"kernel", "bias"}
    if isinstance(kernel, jax.Array | np.ndarray) and kernel.ndim == 2 and is_layer:
        instead = replace(path, jnp.asarray(kernel))
        if instead is not None:
            result["kernel"] = instead
    return result


def _replace_in_module(module: nnx.Module, replace: Replace) -> nnx.Module:
    if isinstance(module, nnx.Linear):
        instead = replace((), module.kernel[...])
        return module if instead is None else _with_kernel(module, instead)
    module = nnx.clone(module)
    replaced: dict[int, nnx.Module] = {}
    for path, parent in list(nnx.iter_modules(module)):
        for key, child in list(_children(parent)):
            if not isinstance(child, nnx.Linear):
                continue
            if id(child) not in replaced:
                instead = replace((*path, key), child.kernel[...])
                if instead is None:
                    continue
                replaced[id(child)] = _with_kernel(child, instead)
            if isinstance(parent, MutableSequence | MutableMapping):
                parent[key] = replaced[id(child)]
            else:
                setattr(parent, key, replaced[id(child)])
    return module


def _children(parent: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(parent, MutableSequence):
        yield from enumerate(parent)
    elif isinstance(parent, MutableMapping):
        yield from parent.items()
    else:
        yield from vars(parent).items()


def _with_kernel(layer: nnx.Linear, kernel: KernelStandIn) -> nnx.Module:
    """A `QuantizedLinear` with this kernel, and with what the layer does beside its product."""
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
