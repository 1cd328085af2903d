"""with_kernels: puts a checkpoint's quantised weights into the linear layers of a model."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxfused.modules.linear import QuantizedKernel
from jaxfused.quantization.checkpoints.layer import QuantizedLayer
from jaxfused.quantization.layers import Path, name_of, replace_kernels
from jaxfused.runtime.quantized_array import QuantizedArray


def with_kernels(
    module_or_params: Any, kernels: Mapping[str, QuantizedLayer | QuantizedKernel | QuantizedArray]
) -> Any:
    """Puts quantised kernels into the linear layers of a model, as `jaxfused.quantize_params` does.

    Weights that `jaxfused.quantization.load` reads from a checkpoint thus run in a module. Biases remain
    the model's own, because they are its parameters.

    Args:
      module_or_params: an nnx module, whose parameters may be shapes (as `nnx.eval_shape` makes them, so
        that no kernel of floats is ever made), or a tree of Linen's parameters.
      kernels: quantised layers, kernels or arrays [D, F] by the paths of the model's layers, such as
        "blocks/0/qkv".

    Returns:
      A new module or tree; module_or_params is not changed.

    Raises:
      ValueError: a path is that of no linear layer, or a kernel has another shape.
      TypeError: module_or_params is neither of the two.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, jaxfused, jaxfused.nnx
      >>> model = jaxfused.nnx.MLP(8, 16, rngs=nnx.Rngs(0))
      >>> up = jaxfused.quantize(jnp.ones((8, 16)))
      >>> jaxfused.quantization.with_kernels(model, {"up": up}).up.kernel.array.dtype
      'int8'

    Source: `jaxfused.quantize_params`.
    """
    op = "with_kernels"
    used, others = set(), []

    def kernel_of(path: Path, kernel: jax.Array, taps: int) -> QuantizedKernel | None:
        del taps
        name = name_of(path)
        if name not in kernels:
            others.append(name)
            return None
        used.add(name)
        given = kernels[name]
        if isinstance(given, QuantizedLayer):
            given = given.kernel
        elif isinstance(given, QuantizedArray):
            given = QuantizedKernel(given)
        elif not isinstance(given, QuantizedKernel):
            raise ValueError(
                f"{op}: the kernel for {name!r} is a {type(given).__name__}; pass what load returns for"
                " a quantised layer, or jaxfused.quantize(kernel)."
            )
        if given.array.shape != kernel.shape:
            raise ValueError(
                f"{op}: the kernel for {name!r} has shape {given.array.shape}, but the layer's has"
                f" {kernel.shape}; pass the kernel of this layer."
            )
        return given

    result = replace_kernels(op, module_or_params, kernel_of, takes_shapes=True)
    if unknown := sorted(kernels.keys() - used):
        names = ", ".join(map(repr, sorted({*others, *used})[:8])) or "none"
        raise ValueError(
            f"{op}: {unknown[0]!r} is the path of no linear layer; pass paths of the model's layers:"
            f" {names}."
        )
    return result
