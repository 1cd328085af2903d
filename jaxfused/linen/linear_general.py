"""DenseGeneral for Flax Linen: Flax's own parameters, this package's operator."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call
from jaxfused.linen.linear import stand_in
from jaxfused.modules.fallback import (
    call_flax,
    is_stock_product,
    why_complex,
    why_given,
    why_intercepted,
)
from jaxfused.modules.linear_general import linear_general, why_not_a_matrix
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class DenseGeneral(linen.DenseGeneral):
    r"""`flax.linen.DenseGeneral` as one product of matrices, with bias and activation in its kernel.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other and
    gives the same output. Differences:

    - The bias is added in float32, before the one rounding of the result.
    - Axes other than the last ones, `batch_dims`, a `dot_general`, `dot_general_cls` or `promote_dtype`
      other than Flax's and complex numbers run Flax's code. Together with `residual` or a named kernel
      such a call raises an error.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    The other attributes are those of `flax.linen.DenseGeneral`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.DenseGeneral((4, 8))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 4, 8)

    Source: `jaxfused.linear`.
    """

    activation: str | None = None
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Multiplies the axes `axis` of the inputs by the kernel.

        Args:
          inputs: [..., *inputs].
          residual: [..., *features], is added last.

        Returns:
          [..., *features], of the residual's dtype where there is one.

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        axis, batch_dims = (_as_tuple(axes) for axes in (self.axis, self.batch_dims))
        reason = (
            why_intercepted()
            or why_given(
                dot_general=not is_stock_product(self.dot_general),
                dot_general_cls=self.dot_general_cls is not None,
                promote_dtype=self.promote_dtype is not promote_dtype,
            )
            or why_complex(inputs.dtype, self.dtype, self.param_dtype)
            or why_not_a_matrix(inputs, axis, len(batch_dims))
        )
        if reason is not None:
            return call_flax(
                "jaxfused.linen.DenseGeneral",
                reason,
                lambda: flax_call(DenseGeneral)(self, inputs),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        kernel, bias = general_parameters(
            self, inputs.shape[inputs.ndim - len(axis) :], _as_tuple(self.features)
        )
        return linear_general(
            inputs,
            kernel,
            bias,
            contracted=len(axis),
            dtype=self.dtype,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            implementation=self.implementation,
        )


@python_number_fields
class GeneralAffine(linen.Module):
    """The parameters of a `flax.linen.DenseGeneral`, for an operator that reads several layers'.

    Attributes:
      features: of the result.
      use_bias: whether there is a bias.
      param_dtype: of the parameters.
      kernel_init: initialises the kernel as a matrix.
      bias_init: initialises the bias as a vector.

    Example:
      >>> import jax
      >>> import jaxfused.linen.linear_general
      >>> affine = jaxfused.linen.linear_general.GeneralAffine((2, 4))
      >>> (kernel, bias), _ = affine.init_with_output(jax.random.key(0), (3,), method="parameters")
      >>> kernel.shape, bias.shape
      ((3, 2, 4), (2, 4))
    """

    features: tuple[int, ...]
    use_bias: bool = True
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros

    # The method is not `__call__`, whose results (the parameters) `capture_intermediates` would
    # store.
    @linen.compact
    def parameters(self, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
        """Returns (kernel [*inputs, *features], bias [*features] or None)."""
        return general_parameters(self, inputs, self.features)


def general_parameters(
    layer: Any, inputs: tuple[int, ...], features: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the kernel and the bias of a layer, initialised as a matrix and a vector as in Flax."""
    flat = (math.prod(inputs), math.prod(features))
    if stand_in(layer) is not None:
        raise ValueError(
            f"{layer.name}: a DenseGeneral, or a projection of attention, reads its kernel as floats,"
            " but the parameters have a quantised one; keep it by a rule of dtype None."
        )
    kernel = layer.param(
        "kernel", _flattened(layer.kernel_init, flat), (*inputs, *features), layer.param_dtype
    )
    bias = None
    if layer.use_bias:
        initialise = _flattened(layer.bias_init, flat[1:])
        bias = layer.param("bias", initialise, features, layer.param_dtype)
    return kernel, bias


def _flattened(initialise: Initializer, flat: tuple[int, ...]) -> Initializer:
    """Returns an initialiser that draws an array of shape `flat` and reshapes it to the requested shape.

    A partitioned parameter has its metadata, which name the axes of the requested shape.
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> Any:
        # The box of a partitioned parameter is a pytree, in which the map reshapes the array. Its
        # `unbox` would shard the flat array like one of the requested shape.
        return jax.tree.map(lambda drawn: jnp.reshape(drawn, shape), initialise(key, flat, dtype))

    return init


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,)
