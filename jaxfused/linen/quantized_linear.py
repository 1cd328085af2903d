"""A linear layer with a quantised kernel for Flax Linen."""

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer

from jaxfused.dispatch import Implementation
from jaxfused.modules.initial import in_float32, plain
from jaxfused.modules.linear import QuantizedKernel, linear, promoted
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.quantized_array import Layout


@python_number_fields
class QuantizedDense(linen.Module):
    r"""A linear layer whose kernel is quantised and frozen.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    The parameters are those that `jaxfused.quantize_params` computes from a `Dense`. Gradients are
    computed for x and for the bias.

    Attributes:
      features: F.
      kernel_dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2".
      group_size: input features that share a scale; by default all of them. A pair is of the sides of
        a block of the kernel: input and output features.
      symmetric: whether 0 stands for 0, as in `jaxfused.quantize`.
      input_dtype: to which x is quantised, row by row: "int8", "float8_e4m3fn" or "float8_e5m2";
        None leaves it as it is. No gradient goes to an x that is quantised.
      use_bias: whether there is a bias [F].
      dtype: of x and the result; None for what x and the bias promote to.
      param_dtype: of the bias, and of the kernel before it is quantised.
      kernel_init: initialises the kernel [D, F].
      bias_init: initialises the bias.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".
      layout: "rows", "columns", or None for what `jaxfused.quantize` chooses.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.QuantizedDense(8, kernel_dtype="int4")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 64)))[0].shape
      (2, 8)

    Source: `jaxfused.quantized_matmul`.
    """

    features: int
    kernel_dtype: str = "int8"
    group_size: int | tuple[int, int] | None = None
    symmetric: bool = True
    input_dtype: str | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    activation: str | None = None
    implementation: Implementation | None = None
    layout: Layout | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel; residual [..., F] is added last.

        Returns:
          [..., F], of the residual's dtype where there is one.
        """

        def quantized(key: jax.Array) -> QuantizedKernel:
            shape = (inputs.shape[-1], self.features)
            array = quantize(
                plain(
                    "linen.QuantizedDense",
                    in_float32(self.kernel_init)(key, shape, self.param_dtype),
                ),
                self.kernel_dtype,
                group_size=self.group_size,
                symmetric=self.symmetric,
                layout=self.layout,
            )
            return QuantizedKernel(array, self.input_dtype)

        inputs = jnp.asarray(inputs)
        kernel = self.param("kernel", quantized)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return linear(
            promoted(inputs, bias, dtype=self.dtype),
            kernel,
            bias,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
