"""Upsample for Flax Linen."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

import jaxfused.linen
from jaxfused.dispatch import Implementation
from jaxfused.modules.upsample import (
    Method,
    check_axes_of_learned,
    check_method,
    enlarge,
    of_learned,
)
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class Upsample(linen.Module):
    r"""Images enlarged by whole factors: repeated, bilinearly, or by weights that are learned.

    "nearest" and "bilinear" are `jaxfused.upsample`, without parameters. "learned" is a transposed
    convolution whose window and strides are the factor, so that each pixel of x becomes a block:

    .. math:: y_{b, f i + j} = x_{b, i} W_{j} + \text{bias}, \qquad 0 \le j < f

    The parameters are those of a Flax module with a `ConvTranspose` called `conv`.

    Attributes:
      method: "nearest", "bilinear" or "learned".
      factor: one int for all spatial axes, of which x has two if it is learned; or one for each, and
        then x has any number of batch axes.
      features: O, where the method is "learned"; None for I.
      use_bias: whether there is a bias [O].
      dtype: of the computation and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernel [*factor, I, O].
      bias_init: initialises the bias.
      implementation: None for the fastest that can run, or a name as `jaxfused.upsample` or the
        transposed convolution takes it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.Upsample("learned", features=8)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 3)))[0].shape
      (2, 16, 16, 8)

    Source: `jax.image.resize`, `flax.linen.ConvTranspose`.
    """

    method: Method = "bilinear"
    factor: int | Sequence[int] = 2
    features: int | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros_init()
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Enlarges x [..., *spatial, I].

        Args:
          x: [..., *spatial, I].

        Returns:
          [..., *spatial * factor, O], with O = I where nothing is learned.

        Raises:
          ValueError: x has other axes than the factor.
        """
        check_method(self.method, self.features)
        if self.method != "learned":
            return enlarge(
                x,
                self.factor,
                method=self.method,
                dtype=self.dtype,
                implementation=self.implementation,
            )
        check_axes_of_learned(x, self.factor)
        conv = jaxfused.linen.ConvTranspose(
            x.shape[-1] if self.features is None else self.features,
            **of_learned(self.factor, self.implementation),
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name="conv",
        )
        return conv(x)
