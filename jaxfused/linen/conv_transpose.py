"""ConvTranspose for Flax Linen: Flax's own parameters, this package's operator."""

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.modules.conv_transpose import transposed, why_flax
from jaxfused.modules.fallback import call_flax
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class ConvTranspose(linen.ConvTranspose):
    r"""`flax.linen.ConvTranspose` with a residual and an activation in the same kernel.

    .. math:: y = \text{activation}(\operatorname{conv\_transpose}(x, \text{kernel}) + \text{bias}
              + \text{residual})

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other
    and gives the same output. Differences:

    - Bias, residual and activation are applied in float32 and the result is rounded then, where
      Flax rounds after every step.
    - A mask, padding "CIRCULAR", a `promote_dtype` or `preferred_element_type` other than Flax's and
      complex numbers run Flax's code, and `jaxfused.explain` lists the call. Together with `residual`
      or a named kernel such a call raises an error.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    The other attributes are those of `flax.linen.ConvTranspose`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.ConvTranspose(4, (2, 2), strides=(2, 2), activation="relu")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 16, 16, 8)))[0].shape
      (2, 32, 32, 4)

    Source: `jaxfused.conv_transpose`.
    """

    activation: str | None = None
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Enlarges inputs [..., *spatial, I].

        Args:
          inputs: [..., *spatial, I], any number of batch axes.
          residual: of the result's shape, is added before the activation.

        Returns:
          [..., *spatial', O].

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        reason = why_flax(self, promote_dtype, inputs.dtype, self.dtype, self.param_dtype)
        if reason is not None:
            return call_flax(
                "jaxfused.linen.ConvTranspose",
                reason,
                lambda: flax_call(ConvTranspose)(self, inputs),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
                adds_first=True,
            )
        size = self.kernel_size
        size = (size,) if isinstance(size, int) else tuple(size)
        channels = inputs.shape[-1], self.features
        shape = (*size, *(channels[::-1] if self.transpose_kernel else channels))
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return transposed(
            inputs,
            kernel,
            bias,
            kernel_size=size,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            dtype=self.dtype,
            precision=self.precision,
            activation=self.activation,
            residual=residual,
            implementation=self.implementation,
        )
