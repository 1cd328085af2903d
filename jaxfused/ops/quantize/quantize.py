"""quantize, quantize_rows and fake_quantize: validation and choice of implementation."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.quantize import quantize_rows as rows_operator
from jaxfused.ops.quantize.quantize_codes import CODE_FORMATS, quantize_codes
from jaxfused.runtime import resharding, rounding
from jaxfused.runtime.checks import check_floating, check_shape, python_numbers
from jaxfused.runtime.packing import WORD_BLOCK
from jaxfused.runtime.quantized_array import FORMATS, LAYOUTS, Layout, QuantizedArray, layout_of
from jaxfused.runtime.scale_groups import blocks_that_fit_too, is_group_size, scale_fits


@python_numbers
def quantize(
    x: jax.Array,
    dtype: Any = "int8",
    *,
    axis: int = -2,
    group_size: int | tuple[int, int] | None = None,
    per_tensor: bool = False,
    symmetric: bool = True,
    scale: jax.Array | float | None = None,
    zero_point: jax.Array | int | None = None,
    layout: Layout | None = None,
) -> QuantizedArray:
    r"""Rounds an array to 8 or 4 bits, with one scale for each channel, group or tensor.

    .. math::
        q = \operatorname{clip}(\operatorname{round}(x / \text{scale} + \text{zero\_point})), \qquad
        x \approx \text{scale} \cdot (q - \text{zero\_point})

    Rounding is to nearest, half to even, and saturates: nothing wraps around. Chosen scales are so large
    that no value is clipped. Symmetric: largest magnitude over the largest number of the dtype
    (127, 7, 448, 57344). Asymmetric: the range from smallest to largest value, widened to contain 0,
    over all numbers of the dtype (-128 to 127, -8 to 7); 0 is exact.

    A group of zeros has the smallest normal float32 as scale, and gives zeros. A NaN or an infinity
    makes its whole group NaN; under a given `scale` a NaN becomes 0 in int8 and int4 and stays NaN in
    float8, and an infinity saturates. No gradient flows; `fake_quantize` has one.

    Args:
      x: of any float dtype; a weight [D, F] or a stack of them [..., D, F], as `quantized_matmul`
        reads it, or anything else with another `axis`.
      dtype: "int8", "int4", "float8_e4m3fn" or "float8_e5m2", or JAX's dtype of that name; or a format
        of floats of 4 bits: "nf4" (QLoRA's, in groups of 64 by default, scaled by their largest
        magnitude), "mxfp4" (groups of 32, scales are powers of two) or "nvfp4" (groups of 16, scales are
        numbers of float8_e4m3fn times one of the matrix, in float32).
      axis: along which scales are shared; for a product, the axis that it sums over. For int4 its size
        must be even: two values along it are packed into a byte.
      group_size: values along `axis` that share a scale (kernels take 32, 64 or 128); it divides the
        size of the axis. By default one scale serves the whole axis: for [D, F], one a channel. A pair,
        for axis -2, is of the sides of a block that shares a scale: (128, 128) as DeepSeek-V3 has them.
        With a given `scale` the last group may be smaller.
      per_tensor: one scale for all of x.
      symmetric: whether there is no zero point, so that code 0 stands for 0. float8 is always symmetric.
      scale: given instead of chosen, positive and finite (in a compiled program others become NaN, and
        make their groups NaN): a scalar, or an array of x's rank with one entry
        per group along `axis` (for axis -2 along the last axis too), and x's size or 1 elsewhere.
      zero_point: with `scale`, for int8 and int4; an integer in the dtype's range, of the scale's
        shape or a scalar.
      layout: order of the numbers in memory: "rows" as x has them; "columns" with the summed axis
        contiguous, as the kernels of products read weights [..., D, F] of axis -2; for int4 128 must
        then divide D. None is "columns" where it can be, else "rows". The kernels of `quantized_conv`
        read "rows".

    Returns:
      A `QuantizedArray`.

    Raises:
      ValueError: dtype, shapes or options do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> q = jaxfused.quantize(jnp.array([[0.5, 1.0], [-1.0, 127.0]]))
      >>> q.unpacked()
      Array([[  64,    1],
             [-127,  127]], dtype=int8)
      >>> q.layout, q.values.tolist()  # The columns are contiguous.
      ('columns', [[64, -127], [1, 127]])
      >>> jaxfused.quantize(jnp.ones((256, 8)), "int4", group_size=64).scale.shape
      (4, 8)
      >>> jaxfused.quantize(jnp.ones((256, 8)), "mxfp4").scale.dtype
      dtype(float8_e8m0fnu)
      >>> jaxfused.quantize(jnp.ones((256, 512)), "float8_e4m3fn", group_size=(128, 128)).scale.shape
      (2, 4)

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2017, https://arxiv.org/abs/1712.05877; Micikevicius et al.,
    "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433
    """
    op = "quantize"
    x = jax.lax.stop_gradient(jnp.asarray(x))
    name = _check_array(op, x, dtype, axis, CODE_FORMATS)
    if layout is None:
        layout = layout_of(name, x.shape, _from_the_end(axis, x))
    _check_layout(op, layout, x, name, axis)
    if name in CODE_FORMATS:
        _check_scales_are_chosen(op, name, per_tensor, symmetric, scale, zero_point)
        return quantize_codes(op, x, name, _from_the_end(axis, x), group_size, layout)
    scale, zero_point = _scale_and_zero_point(
        op, x, name, axis, group_size, per_tensor, symmetric, scale, zero_point
    )
    axis = _from_the_end(axis, x)
    sides = _sides_to_keep(scale, x, axis, group_size)
    return rounding.encode(x, name, scale, zero_point, axis, layout, sides)


@python_numbers
def quantize_rows(
    x: jax.Array,
    dtype: Any = "int8",
    *,
    implementation: dispatch.Implementation | None = None,
) -> QuantizedArray:
    r"""Quantises activations during a call, each row by its own largest magnitude.

    .. math::
        \text{scale}_m = \max_d |x_{md}| / \text{largest}, \qquad
        q_{md} = \operatorname{round}(x_{md} / \text{scale}_m)

    Args:
      x: [..., D] of any float dtype.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      A `QuantizedArray` with `scale` [..., 1] and `axis` -1: what `quantize(x, dtype, axis=-1)` gives.

    Raises:
      ValueError: dtype or shape do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.quantize_rows(jnp.array([[1.0, -2.0], [0.0, 100.0]])).values
      Array([[  64, -127],
             [   0,  127]], dtype=int8)

    Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339
    """
    op = "quantize_rows"
    x = jax.lax.stop_gradient(jnp.asarray(x))
    name = rows_operator.check_row_dtype(op, "dtype", _check_array(op, x, dtype, -1))
    return rows_operator.quantize_rows(x, name, implementation)


@python_numbers
def fake_quantize(
    x: jax.Array,
    dtype: Any = "int8",
    *,
    axis: int = -2,
    group_size: int | tuple[int, int] | None = None,
    per_tensor: bool = False,
    symmetric: bool = True,
    scale: jax.Array | float | None = None,
    zero_point: jax.Array | int | None = None,
) -> jax.Array:
    r"""Quantises and dequantises x, with the straight-through gradient.

    .. math::
        y &= \text{scale} \cdot (q(x) - \text{zero\_point}) \\
        \mathrm{d}x &= \begin{cases} \mathrm{d}y & \text{where } x \text{ is rounded} \\
            0 & \text{where it is clipped to the range of the dtype} \end{cases}

    For training with the rounding of inference. Chosen scales clip nothing, so that the gradient passes
    everywhere; a given `scale` may clip. Scales are constants: no gradient
    flows to or through them.

    Args:
      x: of any float dtype.

    The other arguments and the errors are those of `quantize`.

    Returns:
      y, of x's shape and dtype.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> def f(x):
      ...     return jaxfused.fake_quantize(x, "int4", axis=0, scale=1.0)
      >>> x = jnp.array([1.4, -2.6, 9.0])
      >>> f(x[:2]), jax.grad(lambda x: f(x).sum())(jnp.append(x, 0.0))
      (Array([ 1., -3.], dtype=float32), Array([1., 1., 0., 1.], dtype=float32))

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013,
    https://arxiv.org/abs/1308.3432
    """
    op = "fake_quantize"
    x = jnp.asarray(x)
    name = _check_array(op, x, dtype, axis)
    constant = jax.lax.stop_gradient(x)
    scale, zero_point = jax.lax.stop_gradient(
        _scale_and_zero_point(
            op, constant, name, axis, group_size, per_tensor, symmetric, scale, zero_point
        )
    )
    axis = _from_the_end(axis, x)
    sides = _sides_to_keep(scale, x, axis, group_size)
    rounded = rounding.encode(constant, name, scale, zero_point, axis, "rows", sides)
    inside = rounding.inside_range(constant, name, scale, zero_point, axis, sides)
    values = rounded.dequantize(x.dtype)
    values, inside = (resharding.split_like(a, x) for a in (values, inside))
    return rounding.straight_through(x, values, inside)


def _sides_to_keep(
    scale: jax.Array, x: jax.Array, axis: int, group_size: Any
) -> int | tuple[int, int] | None:
    """Returns the group_size to store with the array if the scale's shape is ambiguous, or None."""
    if group_size is None:
        return None
    is_clear = scale_fits(scale.shape, x.shape, axis) and not blocks_that_fit_too(
        scale.shape, x.shape, axis
    )
    if is_clear:
        return None
    return tuple(group_size) if isinstance(group_size, tuple | list) else group_size


def _check_layout(op: str, layout: str, x: jax.Array, dtype: str, axis: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: layout is {layout!r}; pass one of {', '.join(map(repr, LAYOUTS))}."
        )
    if layout == "rows":
        return
    if x.ndim < 2 or _from_the_end(axis, x) != -2:
        raise ValueError(
            f"{op}: layout 'columns' is for weights [..., D, F] quantised along axis -2, but x has shape"
            f" {x.shape} and axis {axis}; pass layout 'rows'."
        )
    if dtype == "int4" and x.shape[-2] % WORD_BLOCK:
        raise ValueError(
            f"{op}: x has {x.shape[-2]} values along axis {axis}, but layout 'columns' stores int4 in"
            f" blocks of {WORD_BLOCK}; pass layout 'rows', or pad x."
        )


def _from_the_end(axis: int, x: jax.Array) -> int:
    return axis if axis < 0 else axis - x.ndim


def _check_scales_are_chosen(
    op: str, dtype: str, per_tensor: bool, symmetric: bool, scale: Any, zero_point: Any
) -> None:
    if per_tensor or not symmetric or scale is not None or zero_point is not None:
        raise ValueError(
            f"{op}: dtype {dtype!r} chooses its scales by its own rule, a group at a time; leave"
            " per_tensor, symmetric, scale and zero_point out."
        )


def _check_array(op: str, x: jax.Array, dtype: Any, axis: int, others: Collection[str] = ()) -> str:
    """Returns the dtype's name, after checks that x can be quantised to it along the axis."""
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if not isinstance(name, str) or not (name in FORMATS or name in others):
        names = ", ".join(repr(n) for n in (*FORMATS, *others))
        raise ValueError(f"{op}: dtype {name!r} is not known; pass one of {names}.")
    check_floating(op, dict(x=x))
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{op}: axis is {axis}, but x has shape {x.shape};"
            f" pass an axis of x, from {-x.ndim} to {x.ndim - 1}."
        )
    if (name == "int4" or name in others) and x.shape[axis] % 2:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but two {name} are packed into a byte along axis {axis};"
            " pass x with an even size there, such as jnp.pad gives it."
        )
    return name


def _scale_and_zero_point(
    op, x, dtype, axis, group_size, per_tensor, symmetric, scale, zero_point
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the caller's scale and zero point, or else those that fit x."""
    integers = dtype.startswith("int")
    if not integers and (zero_point is not None or not symmetric):
        raise ValueError(
            f"{op}: dtype {dtype!r} is symmetric; pass symmetric=True and no zero_point."
        )
    if scale is None:
        if zero_point is not None:
            raise ValueError(f"{op}: zero_point was passed without a scale; pass both or neither.")
        if per_tensor and group_size is not None:
            raise ValueError(
                f"{op}: group_size={group_size} was passed with per_tensor=True, but one scale is"
                " for a group or for all; pass one of the two."
            )
        groups, blocks = _runs(op, x, axis, group_size)
        return rounding.scales(
            x,
            dtype,
            axis=axis,
            groups=groups,
            blocks=blocks,
            per_tensor=per_tensor,
            symmetric=symmetric,
        )
    if per_tensor or not symmetric:
        raise ValueError(
            f"{op}: scale was passed with per_tensor or symmetric, which say how to choose one; pass the"
            " scale in the shape that it is to have, and a zero_point."
        )
    if getattr(scale, "dtype", None) == jnp.uint8:
        raise ValueError(
            f"{op}: scale has dtype uint8, but x is divided by it; of E8M0 bytes pass"
            " jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)."
        )
    scale = jnp.asarray(scale).astype(jnp.float32)
    scale = scale.reshape((1,) * x.ndim) if scale.ndim == 0 else scale
    from_the_end = _from_the_end(axis, x)
    sides = _given_sides(op, from_the_end, group_size)
    if not scale_fits(scale.shape, x.shape, from_the_end, sides):
        given = "" if group_size is None else f", group_size {group_size}"
        raise ValueError(
            f"{op}: scale has shape {scale.shape}, but x has shape {x.shape} and axis {axis}{given};"
            " pass a scalar, or an array of x's rank with 1 or x's size everywhere, and along the axis"
            " the number of groups (of axis -2 also along the last one)."
        )
    other = blocks_that_fit_too(scale.shape, x.shape, from_the_end)
    if other is not None and sides is None:
        values, entries = x.shape[other[0]], scale.shape[other[0]]
        raise ValueError(
            f"{op}: scale has shape {scale.shape}, so that along axis {other[0]} {values} values of x"
            f" have {entries} scales: those of groups of {values // entries}, or of blocks of {other[1]}"
            " of which the last one is smaller; pass group_size too, of the one or of the other."
        )
    scale = _positive(op, scale)
    if zero_point is None:
        return scale, None
    zero_point = jnp.asarray(zero_point)
    if not jnp.issubdtype(zero_point.dtype, jnp.integer):
        raise ValueError(
            f"{op}: zero_point has dtype {zero_point.dtype}, but it is one of the integers that x is"
            " rounded to; pass integers."
        )
    zero_point = jnp.broadcast_to(zero_point, scale.shape) if zero_point.ndim == 0 else zero_point
    check_shape(op, "zero_point", zero_point, scale.shape, f"scale has shape {scale.shape}")
    return _in_range(op, dtype, scale, zero_point)


def _in_range(
    op: str, dtype: str, scale: jax.Array, zero_point: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scale, and the zero point as int8, after a check that it is in the dtype's range.

    If the zero point is known only at run time, the scale becomes NaN where it is out of range.
    """
    limits = FORMATS[dtype]
    wide = zero_point.astype(jnp.float32)
    fits = (wide >= limits.smallest) & (wide <= limits.largest)
    if not isinstance(fits, jax.core.Tracer):
        wrong = zero_point[~fits]
        if wrong.size:
            raise ValueError(
                f"{op}: zero_point has the value {int(wrong[0])}, but {dtype} is of"
                f" {limits.smallest:.0f} to {limits.largest:.0f}; pass one of these integers."
            )
    return jnp.where(fits, scale, jnp.nan), zero_point.astype(jnp.int8)


def _given_sides(op: str, axis: int, group_size: Any) -> int | tuple[int, int] | None:
    """Checks the group_size that was passed with a scale, and returns it as an int, tuple or None."""
    sides = tuple(group_size) if isinstance(group_size, tuple | list) else group_size
    if not is_group_size(sides, axis):
        raise ValueError(
            f"{op}: group_size is {group_size}, but it is a positive number of values along axis {axis},"
            " or of axis -2 also a pair of them; pass one of these."
        )
    return sides


def _runs(
    op: str, x: jax.Array, axis: int, group_size: int | tuple[int, int] | None
) -> tuple[int, int | None]:
    """Returns the number of groups along the axis and, for blocks, along the last axis (else None)."""
    if group_size is None:
        return 1, None
    sizes = tuple(group_size) if isinstance(group_size, tuple | list) else (group_size,)
    most = 2 if _from_the_end(axis, x) == -2 else 1
    if not 0 < len(sizes) <= most or not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"{op}: group_size is {group_size}, but a pair is for blocks of weights of axis -2, and axis"
            f" is {axis}; pass one number."
        )
    runs = []
    for size, of_axis in zip(sizes, (axis, -1), strict=False):
        values = x.shape[of_axis]
        if size < 1 or values % size:
            raise ValueError(
                f"{op}: group_size is {group_size}, but it must divide the {values} values along axis"
                f" {of_axis} of x; pass a divisor of {values}, or pad x."
            )
        runs.append(max(1, values // size))
    return runs[0], runs[1] if len(runs) > 1 else None


def _positive(op: str, scale: jax.Array) -> jax.Array:
    """Returns the scale, checked to be positive and finite; compiled programs make bad ones NaN."""
    fits = (scale > 0) & (scale < jnp.inf)
    if not isinstance(scale, jax.core.Tracer):
        wrong = scale[~(fits | jnp.isnan(scale))]
        if wrong.size:
            raise ValueError(
                f"{op}: scale has the value {float(wrong[0])!r}, but numbers are divided by it; pass"
                " positive, finite scales."
            )
    return jnp.where(fits, scale, jnp.nan)
