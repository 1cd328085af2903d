"""The call of `jaxfused.conv_transpose`, with Flax's arguments, that nnx and linen share."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import why_complex, why_given, why_intercepted
from jaxfused.modules.linear import promoted
from jaxfused.modules.promotion import floating
from jaxfused.ops.conv import conv_transpose


def why_flax(layer: Any, default_promotion: Any, *dtypes: Any) -> str | None:
    """Returns why Flax's own code must compute a call of the layer, such as an argument, or None."""
    # Flax pads by another rule where "SAME" is in lower case: that of a convolution.
    named = isinstance(layer.padding, str) and layer.padding not in ("SAME", "VALID")
    return (
        why_intercepted()
        or why_given(
            mask=layer.mask is not None,
            promote_dtype=layer.promote_dtype is not default_promotion,
            preferred_element_type=layer.preferred_element_type is not None,
            **{f"padding={layer.padding!r}": named},
        )
        or why_complex(*dtypes)
    )


def transposed(
    inputs: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    kernel_size: Sequence[int],
    strides: int | Sequence[int] | None,
    padding: Any,
    kernel_dilation: int | Sequence[int] | None,
    transpose_kernel: bool,
    activation: str | None,
    residual: jax.Array | None,
    implementation: Implementation | None,
    dtype: Any,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Runs `jaxfused.conv_transpose` with any number of batch axes; None means 1, as in Flax."""
    x = promoted(inputs, kernel, bias, dtype=dtype)
    batch = x.shape[: x.ndim - len(kernel_size) - 1]

    def fold(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(batch), *array.shape[len(batch) :])

    y = conv_transpose.conv_transpose(
        fold(x),
        floating(kernel, x.dtype),
        floating(bias, x.dtype),
        strides=1 if strides is None else strides,
        padding=padding,
        kernel_dilation=1 if kernel_dilation is None else kernel_dilation,
        transpose_kernel=transpose_kernel,
        activation=activation,
        residual=None if residual is None else fold(residual),
        precision=precision,
        implementation=implementation,
    )
    return y.reshape(*batch, *y.shape[1:])
