"""max_pool and avg_pool with Flax's arguments, which `jaxfused.nnx` and `jaxfused.linen` share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import pooling

from jaxfused import dispatch
from jaxfused.ops.pool import avg_pool as avg_pool_operator
from jaxfused.ops.pool import max_pool as max_pool_operator
from jaxfused.runtime.promotion import common_dtype

Padding = str | Sequence[tuple[int, int]]


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """`flax.linen.max_pool` by `jaxfused.max_pool`, which computes the gradient in a kernel too.

    The first of equal values gets the gradient. Integers, negative padding and windows larger than the
    inputs run Flax's code, and `jaxfused.explain` lists the call.

    Args:
      inputs: [..., *spatial, C], any number of batch axes.
      window_shape: its size along each spatial axis.
      strides: steps between windows; None for 1.
      padding: "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial axis.

    Returns:
      [..., *spatial', C] of the inputs' dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.linen
      >>> jaxfused.linen.max_pool(jnp.ones((2, 8, 8, 3)), (2, 2), strides=(2, 2)).shape
      (2, 4, 4, 3)

    Source: `jaxfused.max_pool`.
    """
    return _pooled("max_pool", max_pool_operator.max_pool, inputs, window_shape, strides, padding)


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """`flax.linen.avg_pool` by `jaxfused.avg_pool`, which sums in float32.

    Integers, negative padding and windows larger than the inputs run Flax's code, and
    `jaxfused.explain` lists the call.

    Args:
      inputs: [..., *spatial, C], any number of batch axes.
      window_shape: its size along each spatial axis.
      strides: steps between windows; None for 1.
      padding: "SAME", "SAME_LOWER", "VALID", or (low, high) for each spatial axis.
      count_include_pad: whether padding counts in the divisor.

    Returns:
      [..., *spatial', C] of the dtype that Flax's result has: that of the inputs, and where padding does
      not count at least JAX's default float.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.linen
      >>> jaxfused.linen.avg_pool(jnp.ones((2, 8, 8, 3)), (2, 2), strides=(2, 2)).shape
      (2, 4, 4, 3)

    Source: `jaxfused.avg_pool`.
    """
    options: dict[str, Any] = dict(count_include_pad=count_include_pad)
    inputs = jnp.asarray(inputs)
    if not count_include_pad and jnp.issubdtype(inputs.dtype, jnp.floating):
        inputs = inputs.astype(common_dtype(inputs.dtype, jnp.result_type(float)))
    return _pooled(
        "avg_pool", avg_pool_operator.avg_pool, inputs, window_shape, strides, padding, **options
    )


def _pooled(
    name: str,
    op: Callable[..., jax.Array],
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
    **options: Any,
) -> jax.Array:
    """Runs pooling by `op` with any number of batch axes, or by Flax's `name` where `op` refuses it."""
    inputs = jnp.asarray(inputs)
    window = tuple(window_shape)
    steps = tuple(strides) if strides else (1,) * len(window)
    batch, image = inputs.shape[: -len(window) - 1], inputs.shape[-len(window) - 1 :]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(image[:-1], window, steps, padding)
    pairs = tuple((low, high) for low, high in padding)
    reason = _why_flax(inputs.dtype, image, window, pairs)
    if reason is not None:
        dispatch.note_fallback(name, reason)
        return getattr(pooling, name)(inputs, window, steps, pairs, **options)
    images = inputs.reshape(math.prod(batch), *image)
    y = op(images, window, strides=steps, padding=pairs, **options)
    return y.reshape(*batch, *y.shape[1:])


def _why_flax(
    dtype: Any,
    image: tuple[int, ...],
    window: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
) -> str | None:
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"{dtype} is no floating-point dtype"
    if 0 in image:
        return "the inputs have no values"
    if any(side < 0 for pair in pairs for side in pair):
        return "padding is negative"
    padded = (n + low + high for n, (low, high) in zip(image, pairs, strict=False))
    if len(image) != len(window) + 1 or any(
        n < size for n, size in zip(padded, window, strict=False)
    ):
        return "the window is larger than the inputs"
    return None
