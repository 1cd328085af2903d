"""A linear layer with a quantised kernel for Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer

from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32, plain
from jaxfused.modules.linear import KernelStandIn, QuantizedKernel, linear, promoted
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.quantized_array import Layout


class Frozen(nnx.Variable):
    """A variable that is not trained: `nnx.grad` and optimizers over `nnx.Param` ignore it."""


class QuantizedLinear(nnx.Module):
    r"""A linear layer whose kernel is quantised and frozen.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    `jaxfused.quantize_params` creates this layer from the linear layers of a trained module. Gradients
    are computed for x and for the bias.

    Args:
      in_features: D.
      out_features: F.
      kernel_dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2".
      group_size: input features that share a scale; by default all of them. A pair is of the sides of
        a block of the kernel: input and output features.
      symmetric: whether 0 stands for 0, as in `jaxfused.quantize`.
      layout: "rows", "columns", or None for what `jaxfused.quantize` chooses.
      input_dtype: to which x is quantised, row by row: "int8", "float8_e4m3fn" or "float8_e5m2";
        None leaves it as it is. No gradient goes to an x that is quantised.
      use_bias: whether there is a bias [F].
      dtype: of x and the result; None for what x and the bias promote to.
      param_dtype: of the bias, and of the kernel before it is quantised.
      kernel_init: initialises the kernel [D, F].
      bias_init: initialises the bias.
      rngs: gives the initialisers their keys.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".
      kernel: a `jaxfused.QuantizedKernel` in place of one that is initialised and then quantised;
        kernel_dtype, group_size, symmetric, layout, input_dtype and kernel_init say nothing then.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.QuantizedLinear(64, 8, kernel_dtype="int4", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 64))).shape
      (2, 8)

    Source: `jaxfused.quantized_matmul`.
    """

    @python_numbers
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_dtype: str = "int8",
        group_size: int | tuple[int, int] | None = None,
        symmetric: bool = True,
        layout: Layout | None = None,
        input_dtype: str | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
        activation: str | None = None,
        implementation: Implementation | None = None,
        kernel: KernelStandIn | None = None,
    ):
        if kernel is None:
            shape = (in_features, out_features)
            floats = in_float32(kernel_init)(rngs.params(), shape, param_dtype)
            floats = plain("nnx.QuantizedLinear", floats)
            array = quantize(
                floats, kernel_dtype, group_size=group_size, symmetric=symmetric, layout=layout
            )
            kernel = QuantizedKernel(array, input_dtype)
        self.kernel = Frozen(kernel)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype))
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.activation = activation
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel; residual [..., F] is added last.

        Returns:
          [..., F], of the residual's dtype where there is one.
        """
        bias = None if self.bias is None else self.bias[...]
        return linear(
            promoted(jnp.asarray(inputs), bias, dtype=self.dtype),
            self.kernel.get_value(),
            bias,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
