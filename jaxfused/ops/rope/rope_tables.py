"""Cosines and sines of the angles by which `rope` rotates, and checks of tables that a caller made."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.rope import rope_xla
from jaxfused.ops.rope.rope_scaling import RopeScaling
from jaxfused.runtime.checks import (
    as_array,
    check_constant,
    check_floating,
    check_shape,
    python_numbers,
)

THETA = 10_000.0
"""The default base of the frequencies."""


@python_numbers
def rope_tables(
    positions: jax.Array,
    rotary_dim: int,
    *,
    theta: float = THETA,
    scaling: RopeScaling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The cosines and sines that `rope` takes, computed once for all layers that use them.

    Args:
      positions: [..., T], integers or floats.
      rotary_dim: R, the number of features that rotate; even.
      theta: the base of the frequencies theta^(-2 i / R).
      scaling: such as `YarnRope`; None for unscaled frequencies.

    Returns:
      (cos, sin), each [..., T, R/2] of float32, times the scaling's attention factor.

    Raises:
      ValueError: rotary_dim is odd or not positive, or theta or scaling is not valid.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> cos, sin = jaxfused.rope_tables(jnp.arange(5), 64, scaling=jaxfused.LinearRope(4.0))
      >>> cos.shape
      (5, 32)

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864
    """
    return tables_of("rope_tables", positions, rotary_dim, theta, scaling)


@python_numbers
def axial_rope_tables(
    height: int | None = None,
    width: int | None = None,
    rotary_dim: int | None = None,
    *,
    positions: Sequence[jax.Array] | jax.Array | None = None,
    features: Sequence[int] | None = None,
    theta: float = 100.0,
    turns: bool = False,
    order: Sequence[int] | None = None,
    frequencies: jax.Array | None = None,
    prefix: int = 0,
) -> tuple[jax.Array, jax.Array]:
    r"""The cosines and sines that `rope` takes for tokens with a position on each of several axes.

    .. math:: \alpha_{t i} = \sum_a p_{t a} \, \omega_{a i}

    for token t and pair i of features. By default each pair rotates by the position along one axis:
    the first `features[0]` features by the first axis, and so on, pair j of an axis with F features by
    :math:`\theta^{-2 j / F}` a unit of position, with `turns` that many whole turns (2 pi).

    `height`, `width` and `rotary_dim` describe an image of patches, row by row: half of its R/2 pairs
    rotate by the row 0, 1, ... and half by the column.

    Args:
      height: of an image, in patches; with `width` and `rotary_dim`, in place of `positions`.
      width: of the image, in patches.
      rotary_dim: R, the number of features that rotate; a multiple of 4.
      positions: a tuple with the [n] positions of each axis, integers or floats, of which the
        tokens are all combinations, the last axis fastest: a picture or a video. Or one array
        [..., T, axes] with the positions of each token.
      features: how many features turn by each axis, even numbers; their sum is R.
      theta: the base of the frequencies.
      turns: whether a frequency of 1 is a whole turn for each unit of position, not a radian.
      order: the axes in the order of their features, by default as in `positions`: (1, 0) for
        columns before rows.
      frequencies: [axes, R/2] radians a unit of position, in place of `features`, `theta` and
        `order`, where pairs turn by other frequencies than those, by several axes, or by a learned
        array; [axes, N, R/2] for heads that differ.
      prefix: number of tokens before these that are not rotated: class token, registers, text.

    Returns:
      (cos, sin), each [T, R/2] of float32, or [..., T, R/2], or with heads that differ
      [..., T, N, R/2]; T counts the prefix.

    Raises:
      ValueError: the arguments don't fit one another.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> cos, sin = jaxfused.axial_rope_tables(14, 14, 64)
      >>> jaxfused.rope(jnp.ones((1, 196, 12, 64)), cos=cos, sin=sin).shape
      (1, 196, 12, 64)

      The tables of DINOv3, for heads of 64 features, a class token and 4 registers:

      >>> place = lambda n: (2 * jnp.arange(n) + 1) / n - 1
      >>> cos, sin = jaxfused.axial_rope_tables(
      ...     positions=(place(14), place(14)), features=(32, 32), theta=100.0, turns=True, prefix=5)
      >>> cos.shape
      (201, 32)

    Source: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024,
    https://arxiv.org/abs/2403.13298; centred positions: Siméoni et al., "DINOv3", 2025,
    https://arxiv.org/abs/2508.10104
    """
    op = "axial_rope_tables"
    if positions is None:
        if height is None or width is None or rotary_dim is None or features is not None:
            raise ValueError(
                f"{op}: height, width and rotary_dim describe an image, and positions and features"
                " any tokens; pass the three, or those two."
            )
        _check_divides(op, rotary_dim, 4)
        if height < 0 or width < 0:
            raise ValueError(
                f"{op}: height is {height} and width {width}, but they count patches; pass numbers"
                " from 0 up."
            )
        if frequencies is not None and 2 * jnp.shape(frequencies)[-1] != rotary_dim:
            raise ValueError(
                f"{op}: frequencies has shape {jnp.shape(frequencies)}, but rotary_dim {rotary_dim}"
                f" is {rotary_dim // 2} pairs; pass a frequency for each pair."
            )
        positions = (jnp.arange(height), jnp.arange(width))
        features = None if frequencies is not None else (rotary_dim // 2, rotary_dim // 2)
    elif height is not None or width is not None or rotary_dim is not None:
        raise ValueError(
            f"{op}: height, width or rotary_dim was passed with positions; pass positions and"
            " features alone."
        )
    by_axis = _by_axis(positions)
    if frequencies is None:
        rows: Any = _axial_frequencies(len(by_axis), features, theta, order)
    elif features is not None or order is not None:
        raise ValueError(
            f"{op}: frequencies was passed with features or order, from which they are made; pass"
            " one of the two."
        )
    else:
        rows = jnp.asarray(frequencies)
    if rows.ndim not in (2, 3) or rows.shape[0] != len(by_axis):
        raise ValueError(
            f"{op}: frequencies has shape {rows.shape}, but positions have {len(by_axis)} axes;"
            f" pass frequencies of shape ({len(by_axis)}, pairs) or ({len(by_axis)}, heads, pairs)."
        )
    if prefix < 0:
        raise ValueError(
            f"{op}: prefix is {prefix}, but it counts tokens; pass a number from 0 up."
        )
    if turns:
        rows = rows * (2 * math.pi)
    return rope_xla.axial_tables(by_axis, rows, prefix)


def tables_of(
    op: str, positions: jax.Array, rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Computes `rope_tables` for the operator `op`."""
    _check_divides(op, rotary_dim, 2)
    _check_theta(op, theta)
    scaling = RopeScaling() if scaling is None else scaling
    if not isinstance(scaling, RopeScaling):
        raise ValueError(
            f"{op}: scaling is {scaling!r}, but it says how fast each pair rotates; pass a"
            " `jaxfused.RopeScaling` such as LinearRope(4.0), of a model's config"
            " jaxfused.rope_from_config(config)['scaling']."
        )
    positions = as_array(positions)
    if not any(jnp.issubdtype(positions.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise ValueError(
            f"{op}: positions have dtype {positions.dtype}, but they are integers or floats; pass"
            " positions.astype(jnp.int32)."
        )
    return rope_xla.tables(positions, rotary_dim, theta, scaling)


def _by_axis(positions: Sequence[jax.Array] | jax.Array) -> list[jax.Array]:
    """Returns a list of positions [..., T], one for each axis."""
    if not isinstance(positions, tuple | list):
        array = as_array(positions)
        if array.ndim < 2:
            raise ValueError(
                f"axial_rope_tables: positions has shape {array.shape}; pass an array [..., tokens,"
                " axes], or a tuple with the positions of each axis."
            )
        return list(jnp.moveaxis(array, -1, 0))
    axes = [as_array(axis) for axis in positions]
    if any(axis.ndim != 1 for axis in axes) or not axes:
        raise ValueError(
            "axial_rope_tables: positions is a tuple of arrays of shapes"
            f" {[axis.shape for axis in axes]}, but each has the positions along one axis of a grid;"
            " pass arrays [n], or one array [..., tokens, axes] with the positions of each token."
        )
    return [axis.reshape(-1) for axis in jnp.meshgrid(*axes, indexing="ij")]


def _axial_frequencies(
    axes: int, features: Sequence[int] | None, theta: float, order: Sequence[int] | None
) -> np.ndarray:
    """Returns frequencies [axes, R/2]; each pair rotates by one axis and has 0 for the others."""
    op = "axial_rope_tables"
    _check_theta(op, theta)
    if features is None or len(features) != axes or any(f < 0 or f % 2 for f in features):
        raise ValueError(
            f"{op}: features is {features}, but positions have {axes} axes; pass the even number of"
            " features that turn by each of them, or frequencies."
        )
    order = range(axes) if order is None else order
    if sorted(order) != list(range(axes)):
        raise ValueError(
            f"{op}: order is {tuple(order)}, but positions have {axes} axes; pass each of"
            f" {tuple(range(axes))} once."
        )
    rows = np.zeros((axes, sum(features) // 2))
    start = 0
    for axis in order:
        pairs = features[axis] // 2
        if pairs:
            own = RopeScaling().frequencies(features[axis], theta)
            rows[axis, start : start + pairs] = own
        start += pairs
    return rows


def _check_theta(op: str, theta: float) -> None:
    check_constant(op, "theta", theta)
    if not 0.0 < theta < math.inf:
        raise ValueError(
            f"{op}: theta is {theta}, but frequencies are its powers; pass a finite number greater"
            " than 0."
        )


def check_tables(
    op: str, shape: tuple[int, ...], cos: jax.Array | None, sin: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Checks that cos and sin are both given and fit queries of `shape` [..., T, N, H].

    Returns:
      (cos, sin), with as many axes as the queries if heads have their own angles.
    """
    if cos is None or sin is None:
        raise ValueError(f"{op}: one of cos and sin was passed; pass both.")
    check_floating(op, {"cos": cos, "sin": sin})
    rows, head_size = shape[:-2], shape[-1]
    fits = cos.ndim >= 2 and 0 < 2 * cos.shape[-1] <= head_size
    check_shape(op, "sin", sin, cos.shape, f"cos has shape {cos.shape}")
    if fits and cos.shape[:-1] in (rows[-1:], rows):
        return cos, sin
    if fits and cos.shape[:-1] == shape[-3:-1]:
        axes = (1,) * (len(shape) - cos.ndim)
        return cos.reshape(axes + cos.shape), sin.reshape(axes + cos.shape)
    leading = zip(cos.shape[: len(rows) - 1], rows[:-1], strict=False)
    of_heads = fits and cos.ndim == len(shape) and cos.shape[-3:-1] == shape[-3:-1]
    if of_heads and all(size in (1, needed) for size, needed in leading):
        return cos, sin
    raise ValueError(
        f"{op}: cos has shape {cos.shape}, but the angles of {rows} positions and heads of"
        f" {head_size} features are needed; pass cos of shape {(*rows[-1:], head_size // 2)},"
        f" with fewer features to rotate a part of the head, with the axes {rows}, or with"
        f" {(*rows, shape[-2])} where heads have their own."
    )


def _check_divides(op: str, rotary_dim: int, divisor: int) -> None:
    if rotary_dim <= 0 or rotary_dim % divisor:
        raise ValueError(
            f"{op}: rotary_dim is {rotary_dim}, but it is split into pairs;"
            f" pass a positive multiple of {divisor}."
        )
