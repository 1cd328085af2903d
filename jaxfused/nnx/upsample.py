"""Upsample for Flax NNX."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

import jaxfused.nnx
from jaxfused.dispatch import Implementation
from jaxfused.modules.upsample import (
    Method,
    check_axes_of_learned,
    check_method,
    enlarge,
    of_learned,
)
from jaxfused.runtime.checks import python_numbers


class Upsample(nnx.Module):
    r"""Images enlarged by whole factors: repeated, bilinearly, or by weights that are learned.

    "nearest" and "bilinear" are `jaxfused.upsample`, without parameters. "learned" is a transposed
    convolution whose window and strides are the factor, so that each pixel of x becomes a block:

    .. math:: y_{b, f i + j} = x_{b, i} W_{j} + \text{bias}, \qquad 0 \le j < f

    The parameters are those of a Flax module with a `ConvTranspose` called `conv`.

    Args:
      method: "nearest", "bilinear" or "learned".
      factor: one int for all spatial axes, of which x has two if it is learned; or one for each, and
        then x has any number of batch axes.
      in_features: I, where the method is "learned".
      out_features: O, where the method is "learned"; None for I.
      use_bias: whether there is a bias [O].
      dtype: of the computation and the result; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the products, as in Flax.
      kernel_init: initialises the kernel [*factor, I, O].
      bias_init: initialises the bias.
      rngs: gives the initialisers their keys, where the method is "learned".
      implementation: None for the fastest that can run, or a name as `jaxfused.upsample` or the
        transposed convolution takes it.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> x = jnp.ones((2, 8, 8, 3))
      >>> jaxfused.nnx.Upsample("nearest")(x).shape
      (2, 16, 16, 3)
      >>> jaxfused.nnx.Upsample("learned", in_features=3, out_features=8, rngs=nnx.Rngs(0))(x).shape
      (2, 16, 16, 8)

    Source: `jax.image.resize`, `flax.nnx.ConvTranspose`.
    """

    @python_numbers
    def __init__(
        self,
        method: Method = "bilinear",
        factor: int | Sequence[int] = 2,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs | None = None,
        implementation: Implementation | None = None,
    ):
        check_method(method, out_features)
        self.method = method
        self.factor = factor if isinstance(factor, int) else tuple(factor)
        self.dtype = dtype
        self.implementation = implementation
        self.conv: nnx.ConvTranspose | None = nnx.data(None)
        if method == "learned":
            if in_features is None or rngs is None:
                raise ValueError(
                    "Upsample: in_features or rngs is None, but 'learned' weights need both; pass them."
                )
            self.conv = jaxfused.nnx.ConvTranspose(
                in_features,
                in_features if out_features is None else out_features,
                **of_learned(factor, implementation),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Enlarges x [..., *spatial, I].

        Args:
          x: [..., *spatial, I].

        Returns:
          [..., *spatial * factor, O], with O = I where nothing is learned.

        Raises:
          ValueError: x has other axes than the factor.
        """
        if self.conv is not None:
            check_axes_of_learned(x, self.factor)
            return self.conv(x)
        return enlarge(
            x,
            self.factor,
            method=self.method,
            dtype=self.dtype,
            implementation=self.implementation,
        )
