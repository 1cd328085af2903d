"""deform_conv in plain JAX: gathers the samples and multiplies them with the weights."""

import jax
import jax.numpy as jnp

from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.shapes import merge_axes, split_axis


def deform_conv(
    x: jax.Array,
    w: jax.Array,
    offset: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    *,
    strides: tuple[int, int],
    low: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    parts: int,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Returns y [B, H', W', O]; `low` counts zeros before each axis, `parts` the groups of offsets."""
    _, height, width, channels = x.shape
    out = offset.shape[1:3]
    rows, columns, _, features = w.shape
    taps = rows * columns
    wide = accumulator_dtype(x.dtype)
    moved = split_axis(offset.astype(wide), 3, parts, taps, 2)
    # Rows and columns of x that each weight (tap) of the window reads for each pixel of y at offset 0.
    starts = [jnp.arange(n) * step - pad for n, step, pad in zip(out, strides, low, strict=True)]
    inner = [jnp.arange(k) * d for k, d in zip((rows, columns), dilation, strict=True)]
    # Shapes: down [1, H', 1, 1, taps], right [1, 1, W', 1, taps].
    down = (starts[0][:, None] + jnp.repeat(inner[0], columns)[None])[None, :, None, None]
    right = (starts[1][:, None] + jnp.tile(inner[1], rows)[None])[None, None, :, None]
    samples = _samples(
        split_axis(merge_axes(x.astype(wide), 1), 2, parts, channels // parts),
        moved[..., 0] + down.astype(wide),
        moved[..., 1] + right.astype(wide),
        (height, width),
    )
    if mask is not None:
        samples = samples * split_axis(mask.astype(wide), 3, parts, taps)[..., None]
    # Shapes: [B, H', W', parts, taps, C / parts] -> [B, H', W', taps, groups, C / groups]
    patches = merge_axes(jnp.moveaxis(samples, 3, 4), 4)
    patches = split_axis(patches, 4, groups, channels // groups)
    kernel = split_axis(merge_axes(w.astype(x.dtype), 0), 2, groups, features // groups)
    y = jnp.einsum(
        "bhwtgc,tcgo->bhwgo",
        patches.astype(x.dtype),
        kernel,
        precision=precision,
        preferred_element_type=wide,
    )
    y = merge_axes(y, 3)
    if bias is not None:
        y = y + bias.astype(wide)[None, None, None]
    return y.astype(x.dtype)


def _samples(x: jax.Array, down: jax.Array, right: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Samples x [B, H W, parts, D] at rows `down`, columns `right`, both [B, H', W', parts, taps]."""
    height, width = size
    # Infinite positions become -2, which is outside of x too: inf - inf below would be NaN.
    down, right = (jnp.where(jnp.isinf(place), -2, place) for place in (down, right))
    is_nan = jnp.isnan(down) | jnp.isnan(right)
    top, left = jnp.floor(down), jnp.floor(right)
    total = jnp.zeros((), x.dtype)
    for row in (0, 1):
        for column in (0, 1):
            y, x_place = top + row, left + column
            weight = (1 - jnp.abs(down - y)) * (1 - jnp.abs(right - x_place))
            inside = (y >= 0) & (y < height) & (x_place >= 0) & (x_place < width)
            places = jnp.where(inside, y * width + x_place, 0).astype(jnp.int32)
            # In the shape [B, H' W' taps, parts] one gather along axis 1 reads all samples of an image.
            flat = merge_axes(jnp.moveaxis(places, 3, 4), 1, 3)
            found = jnp.take_along_axis(x, flat[..., None], axis=1, mode="clip")
            found = split_axis(found, 1, *places.shape[1:3], places.shape[4])
            weight = jnp.where(inside | is_nan, weight, 0)
            total = total + jnp.moveaxis(found, 4, 3) * weight[..., None]
    return total
