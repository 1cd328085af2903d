"""Conv for Flax Linen: Flax's own parameters, this package's operator."""

import math
from typing import Any

import jax
from flax import linen
from flax.linen.dtypes import promote_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.linen.linear import stand_in
from jaxfused.modules.conv import convolve
from jaxfused.modules.fallback import call_flax, why_complex, why_given, why_intercepted
from jaxfused.modules.linear import Kernel, shape_of
from jaxfused.ops.conv.conv import Convolved
from jaxfused.ops.conv.conv_input import ConvInput, as_array, as_input
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class Conv(linen.Conv):
    r"""`flax.linen.Conv` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}(\operatorname{conv}(x, \text{kernel}) + \text{bias}
              + \text{residual})

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other
    and gives the same output. Differences:

    - Bias, residual and activation are applied in float32 and the result is rounded then, where
      Flax rounds after every step.
    - A mask, a `conv_general_dilated`, `conv_general_dilated_cls` or `promote_dtype` other than
      Flax's and complex numbers run Flax's code, and `jaxfused.explain` lists the call. Together
      with `residual` or a named kernel such a call raises an error.
    - The kernel may be a `jaxfused.QuantizedKernel`, as `jaxfused.quantize_params` puts it there.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      padding_mode: with what to pad where `padding` says how much, as in `jaxfused.conv`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    The other attributes are those of `flax.linen.Conv`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.Conv(8, (3, 3), strides=2, activation="relu")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 16, 16, 3)))[0].shape
      (2, 8, 8, 8)

    Source: `jaxfused.conv`.
    """

    activation: str | None = None
    implementation: Implementation | None = None
    padding_mode: str = "zeros"

    def __call__(self, inputs: ConvInput, *, residual: jax.Array | None = None) -> jax.Array:
        """Convolves inputs [..., *spatial, I].

        Args:
          inputs: [..., *spatial, I], any number of batch axes.
          residual: of the result's shape, is added before the activation.

        Returns:
          [..., *spatial', O].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        return self._run(inputs, residual=residual).y

    @linen.compact
    def _run(
        self,
        inputs: ConvInput,
        *,
        residual: jax.Array | None = None,
        return_input: bool = False,
        statistics: bool = False,
    ) -> Convolved:
        """Implements `__call__`; blocks also ask for x (`return_input`) and y's `statistics`."""
        inputs = as_input(inputs)
        reason = (
            why_intercepted()
            or why_given(
                mask=self.mask is not None,
                conv_general_dilated=self.conv_general_dilated is not None,
                conv_general_dilated_cls=self.conv_general_dilated_cls is not None,
                promote_dtype=self.promote_dtype is not promote_dtype,
            )
            or why_complex(inputs.dtype, self.dtype, self.param_dtype)
        )
        if reason is not None:
            x = as_array(inputs)
            y = call_flax(
                "jaxfused.linen.Conv",
                reason,
                lambda: flax_call(Conv)(self, x),
                residual=residual,
                activation=self.activation,
                padding_mode=self.padding_mode,
                implementation=self.implementation,
                adds_first=True,
            )
            return Convolved(y, x, None)
        size = self.kernel_size
        size = (size,) if isinstance(size, int) else tuple(size)
        shape = (*size, inputs.shape[-1] // self.feature_group_count, self.features)
        kernel = conv_kernel(self, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return convolve(
            inputs,
            kernel,
            bias,
            kernel_size=size,
            strides=self.strides,
            padding=self.padding,
            padding_mode=self.padding_mode,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            dtype=self.dtype,
            precision=self.precision,
            return_input=return_input,
            statistics=statistics,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )


def conv_kernel(layer: Any, shape: tuple[int, ...]) -> Kernel:
    """Returns the kernel of a `Conv`; a quantised one has the shape [window positions * I, O]."""
    kernel = stand_in(layer)
    if kernel is None:
        return layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    wanted = (math.prod(shape[:-1]), shape[-1])
    if shape_of(kernel) not in (shape, wanted):
        raise ValueError(
            f"{layer.name}: the {type(kernel).__name__} has shape {shape_of(kernel)}, but the layer's"
            f" kernel is of shape {shape}; pass one of shape {wanted}."
        )
    return kernel
