"""deform_conv: validation of the arguments."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import deform_conv_xla
from jaxfused.ops.conv.conv_padding import Padding, geometry
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import check_floating, check_shape, python_numbers
from jaxfused.runtime.gate import reference_only


@python_numbers
def deform_conv(
    x: jax.Array,
    w: jax.Array,
    offset: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Convolution whose windows read x at given offsets, between pixels too (version 2, with a mask).

    .. math:: y_{b, p, o} = \text{bias}_o + \sum_{t, c} w_{t, c, o} \, m_{b, p, t} \,
              x_{b, \, s p + d t - \text{low} + \Delta_{b, p, t}, \, c}

    where x between pixels is bilinear and beyond its edges zero, also at infinity; at NaN it is NaN. It
    is differentiable by all arrays.

    Args:
      x: [B, H, W, I], of any floating-point dtype.
      w: [kh, kw, I / feature_group_count, O], Flax's layout. Any float dtype; it is rounded to x's.
      offset: [B, H', W', 2 G kh kw] in pixels. The last axis has, for each of G groups of x's channels
        and each weight of the window (row by row), the row offset and the column offset: torchvision's
        order of channels.
      mask: [B, H', W', G kh kw], the factor of each sample of x; None for 1.
      bias: [O].
      strides: as in `jaxfused.conv`.
      padding: "SAME", "SAME_LOWER" or "VALID", or how much: an int, or for each axis an int or a pair.
      kernel_dilation: as in `jaxfused.conv`.
      feature_group_count: as in `jaxfused.conv`.
      precision: of the products, as in `jax.lax.dot_general`.
      implementation: None or "xla".

    Returns:
      y, [B, H', W', O] of x's dtype; sample positions, their weights and sums are float32 (float64 for
      float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(4.0).reshape(1, 1, 4, 1)
      >>> half = jnp.tile(jnp.array([0.0, 0.5]), (1, 1, 4, 1))
      >>> jaxfused.deform_conv(x, jnp.ones((1, 1, 1, 1)), half)[0, 0, :, 0]
      Array([0.5, 1.5, 2.5, 1.5], dtype=float32)

    All samples are gathered into an array [B, H' W', kh kw, I] before the product. On a GPU the gradient
    of x is a scatter whose order of additions XLA does not fix: its last bits may vary from run to run
    unless `xla_gpu_deterministic_ops` is set.

    Source: Zhu et al., "Deformable ConvNets v2: More Deformable, Better Results", 2018,
    https://arxiv.org/abs/1811.11168; `torchvision.ops.deform_conv2d`.
    """
    op = "deform_conv"
    x, w, offset = jnp.asarray(x), jnp.asarray(w), jnp.asarray(offset)
    mask = None if mask is None else jnp.asarray(mask)
    bias = None if bias is None else jnp.asarray(bias)
    check_floating(op, dict(x=x, w=w, offset=offset, mask=mask, bias=bias))
    if x.ndim != 4 or 0 in x.shape[1:] or w.ndim != 4 or 0 in w.shape:
        raise ValueError(
            f"{op}: x has shape {x.shape} and w {w.shape}; pass x of shape [batch, height, width,"
            " channels] and w of shape [rows, columns, channels / feature_group_count, features]."
        )
    channels, features = x.shape[-1], w.shape[-1]
    groups = feature_group_count
    if groups < 1 or channels % groups or features % groups or w.shape[2] != channels // groups:
        raise ValueError(
            f"{op}: x has {channels} channels, w shape {w.shape}, and feature_group_count is {groups},"
            " but w has channels / feature_group_count in its third axis, and groups divide its last;"
            " pass another w or feature_group_count."
        )
    window = geometry(
        op,
        x,
        w.shape[:2],
        strides=strides,
        padding=padding,
        input_dilation=1,
        kernel_dilation=kernel_dilation,
        feature_group_count=groups,
    )
    pads = window["padding"]
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[:2], window["kernel_dilation"], strict=True)]
    if isinstance(pads, str) and pads in ("SAME", "SAME_LOWER", "VALID"):
        pads = jax.lax.padtype_to_pads(x.shape[1:3], reach, window["strides"], pads)
    if isinstance(pads, str) or not all(isinstance(pair, tuple) for pair in pads):
        raise ValueError(
            f"{op}: padding is {padding!r}, but beyond its edges x is zero; pass 'SAME', 'VALID' or"
            " numbers."
        )
    size = tuple(
        (n + low + high - r) // step + 1
        for n, (low, high), r, step in zip(
            x.shape[1:3], pads, reach, window["strides"], strict=True
        )
    )
    taps = w.shape[0] * w.shape[1]
    parts = offset.shape[-1] // (2 * taps) if offset.ndim == 4 else 0
    if parts < 1 or channels % parts or min(size) < 1:
        raise ValueError(
            f"{op}: offset has shape {offset.shape}, but for a window of {w.shape[0]} x {w.shape[1]} and"
            f" results of {size[0]} x {size[1]} it has 2 * {taps} channels for each group of x's"
            f" channels, and the number of groups divides {channels}; pass offset of shape"
            f" {(x.shape[0], *size, 2 * taps)}, say."
        )
    rule = f"x has shape {x.shape}, w has shape {w.shape} and there are {parts} groups of offsets"
    check_shape(op, "offset", offset, (x.shape[0], *size, 2 * taps * parts), rule)
    check_shape(op, "mask", mask, (x.shape[0], *size, taps * parts), rule)
    check_shape(op, "bias", bias, (features,), f"w has {features} features in its last axis")
    reference_only(op, implementation, x)
    x, w, offset, mask, bias = sharding.align(  # type: ignore[assignment]
        (x, w, offset, mask, bias),
        operand_axes=("bhwc", "ijko", "buvs", "buvt", "o"),
        whole="hwcijkuvst" + "o" * (groups > 1),
    )
    return deform_conv_xla.deform_conv(
        x,
        w,
        offset,
        mask,
        bias,
        strides=window["strides"],
        low=tuple(pair[0] for pair in pads),
        dilation=window["kernel_dilation"],
        groups=groups,
        parts=parts,
        precision=precision,
    )
