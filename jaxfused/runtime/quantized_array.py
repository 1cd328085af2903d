"""QuantizedArray: numbers in 8 or 4 bits with their scales, and their layout in memory.

The layout of the bits, unless `layout` is "columns":

- int8, float8: one value a byte, in the shape of the array that was quantised.
- int4: two values a byte, along `axis`, in an array of uint8 whose `axis` is half as long. Byte i holds
  value 2i in its low and value 2i + 1 in its high four bits, each in two's complement:
  `byte[i] = (q[2i] & 15) | ((q[2i + 1] & 15) << 4)`.
- layout "columns", for weights [..., D, F] of axis -2: each column is contiguous along the summed axis,
  as the kernels read it. int8 and float8 are stored as [..., F, D]. int4 are stored in words of 32 bits,
  int32 [..., F, D / 8], where D is a multiple of 128: `pack_words` says in which order.
- values of dtype int4, whose storage JAX decides, and float4_e2m1fn: in the shape of the array, in
  either layout. XLA multiplies them, and no kernel does.
- scale and zero_point have the rank of the values and broadcast to them, except along `axis`: there
  entry g belongs to the g-th group, and groups are equal runs of neighbouring values. In weights
  [..., D, F] of axis -2 the columns may form groups too, so that a block of the matrix shares a scale.
  With a `group_size`, groups have this size, and the last one has the remaining values.

A value stands for `scale * (q - zero_point)`.
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Format(NamedTuple):
    """A dtype of few bits."""

    largest: float
    """The largest number of the format; symmetric quantisation uses the range from -largest to it."""
    smallest: float
    storage: Any
    clipped_from: float
    """Magnitude from which a number counts as clipped; smaller ones are rounded, `largest` at most."""

    @property
    def unit(self) -> float:
        """Ratio of the scale to the largest magnitude: 1 / `largest`, rounded to float32.

        The scale is computed as a product with it, because XLA may turn a division by a constant into
        such a product, and the last bit would differ.
        """
        return float(np.float32(1) / np.float32(self.largest))

    @property
    def asymmetric_unit(self) -> float:
        """Ratio of the scale to the range from the smallest to the largest value."""
        return float(np.float32(1) / np.float32(self.largest - self.smallest))


FORMATS = {
    "int8": Format(127.0, -128.0, jnp.int8, 127.5),
    "int4": Format(7.0, -8.0, jnp.uint8, 7.5),
    "float8_e4m3fn": Format(448.0, -448.0, jnp.float8_e4m3fn, 464.0),
    "float8_e5m2": Format(57344.0, -57344.0, jnp.float8_e5m2, 61440.0),
}


Layout = Literal["rows", "columns"]
LAYOUTS: tuple[Layout, ...] = ("rows", "columns")


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class QuantizedArray:
    """An array in 8 or 4 bits: `scale * (values - zero_point)`, made by `jaxfused.quantize`.

    It is a pytree, so that it goes through `jax.jit`, `jax.lax.scan` over stacked layers, `jax.vmap`,
    donation, `jax.device_put` with a sharding, and checkpoints. The module's docstring says how the
    bits lie. A checkpoint of one layout cannot be read as the other: the values' names differ in it.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2; or uint8 for two int4, int32 for eight. int4 itself and
        float4_e2m1fn are read by XLA alone.
      scale: float32; other floats, float8_e8m0fnu too, are read as float32, and float64 as it is.
      zero_point: int8, or None where 0 stands for 0. Other integers and floats are read as float32,
        with which values are dequantised before they are multiplied.
      axis: along which values share scales and int4 are packed, counted from the last, so that it
        holds also where leading axes come and go; it is the axis that a product sums over.
      layout: "rows", or "columns" for weights as the kernels read them.
      group_size: how many neighbouring values along `axis` share a scale, the last of them perhaps
        fewer; of axis -2 also a pair, of the sides of a block. None where all groups are equal.

    Raises:
      ValueError: parts that are arrays do not belong to each other, or have dtypes that are not read.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> q = jaxfused.quantize(jnp.array([[1.0, -2.0], [-7.0, 14.0]]), "int4", axis=0)
      >>> q.dtype, q.shape, q.values.shape
      ('int4', (2, 2), (1, 2))
      >>> q.dequantize()
      Array([[ 1., -2.],
             [-7., 14.]], dtype=float32)

      A checkpoint in blocks of 128 x 128, of which the last ones are not whole:

      >>> values, scale = jnp.ones((192, 256), jnp.float8_e4m3fn), jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> q = jaxfused.QuantizedArray(values, scale, None, axis=-2, group_size=(128, 128))
      >>> q.dequantize()[jnp.array([127, 128]), 0]
      Array([1., 3.], dtype=float32)
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    axis: int
    layout: Layout = "rows"
    group_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        # Pytrees of partition specs, of axes or of None are QuantizedArrays too.
        if not _is_array(self.values):
            return
        for name in ("values", "scale", "zero_point"):
            part = getattr(self, name)
            if hasattr(part, "__jax_array__"):
                object.__setattr__(self, name, jnp.asarray(part))
        op = "QuantizedArray"
        object.__setattr__(self, "axis", _integer(op, "axis", self.axis))
        sides: Any = self.group_size
        if isinstance(sides, tuple | list):
            sides = tuple(_integer(op, "group_size", side) for side in sides)
        elif sides is not None:
            sides = _integer(op, "group_size", sides)
        object.__setattr__(self, "group_size", sides)
        check_parts(op, "", self)
        _check_groups_are_clear(op, self)

    def tree_flatten_with_keys(self) -> tuple[Any, "_Static"]:
        """Returns the arrays with their names, and the static fields."""
        name = "values" if self.layout == "rows" else "columns"
        keys = (jax.tree_util.GetAttrKey(key) for key in (name, "scale", "zero_point"))
        arrays = (self.values, self.scale, self.zero_point)
        return tuple(zip(keys, arrays, strict=True)), (self.axis, self.layout, self.group_size)

    @classmethod
    def tree_unflatten(cls, static: "_Static", arrays: Any) -> "QuantizedArray":
        """Rebuilds the array unchecked, from whatever parts a transformation returned."""
        array = object.__new__(cls)
        (values, scale, zero_point), (axis, layout, group_size) = arrays, static
        parts = dict(
            values=values,
            scale=scale,
            zero_point=zero_point,
            axis=axis,
            layout=layout,
            group_size=group_size,
        )
        for name, part in parts.items():
            object.__setattr__(array, name, part)
        return array

    @property
    def dtype(self) -> str:
        """The format of the values: one of FORMATS, or "float4_e2m1fn"."""
        return "int4" if self.values.dtype in _INT4 else str(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantised."""
        shape = list(self.values.shape)
        if self.layout == "columns":
            shape[-2:] = shape[:-3:-1]
        shape[self.axis] *= _packed(self.values.dtype)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def groups(self) -> int:
        """Number of scales along `axis`; 1 if the whole axis shares one."""
        return self.scale.shape[self.axis]

    @property
    def columns_alike(self) -> int:
        """Number of neighbouring entries along the last axis that share a scale; 1 if none do."""
        if isinstance(self.group_size, tuple):
            return self.group_size[1]
        return self.shape[-1] // self.scale.shape[-1] if self.scale.size else 1

    def unpacked(self) -> jax.Array:
        """Returns the values, one a byte, in the shape of the array; int4 become int8."""
        values = jnp.asarray(self.values)
        if values.dtype == jnp.int32:
            values = unpack_words(values)
        elif values.dtype == jnp.uint8:
            values = unpack_int4(values, self.axis)
        elif self.dtype == "int4":
            values = values.astype(jnp.int8)
        return values.mT if self.layout == "columns" else values

    def as_read(self) -> "QuantizedArray":
        """Returns the same numbers in the form that products read.

        Scales are float32 (or float64). Zero points are int8 if it holds every number of their dtype,
        else float32. Groups are equal: blocks of 128 with a last one of 64 become groups of 64.
        """
        scale: Any = jnp.asarray(self.scale)
        zero_point: Any = self.zero_point
        if scale.dtype.itemsize < 4:
            scale = scale.astype(jnp.float32)
        if zero_point is not None:
            zero_point = jnp.asarray(zero_point)
            zero_point = zero_point.astype(
                jnp.int8 if zero_point.dtype in _WITHIN_INT8 else jnp.float32
            )
        shape, grid = self.shape, list(scale.shape)
        for axis, side in _sides(self.axis, self.group_size).items():
            if grid[axis] > 1:
                equal = math.gcd(side, shape[axis])
                grid[axis] = shape[axis] // equal
                scale, zero_point = (
                    None if a is None else _repeated(a, axis, side // equal, grid[axis])
                    for a in (scale, zero_point)
                )
        return assembled(jnp.asarray(self.values), scale, zero_point, self.axis, self.layout)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the array that the values stand for; arithmetic is in float32.

        Args:
          dtype: a float dtype for the result.
        """
        read = self.as_read()
        values = read.unpacked().astype(jnp.float32)
        if read.zero_point is not None:
            values = values - spread(read.zero_point, self.shape).astype(jnp.float32)
        return (values * spread(read.scale, self.shape)).astype(dtype)


_Static = tuple[int, Layout, int | tuple[int, int] | None]
_INT4 = (jnp.uint8, jnp.int32, jnp.int4)
_READABLE = (
    *(format.storage for format in FORMATS.values()),
    jnp.int32,
    jnp.int4,
    jnp.float4_e2m1fn,
)
_WITHIN_INT8 = (jnp.int8, jnp.int4, jnp.int2, jnp.uint4, jnp.uint2)
"""Dtypes of zero points that int8 holds exactly."""


def assembled(
    values: Any,
    scale: Any,
    zero_point: Any,
    axis: int,
    layout: Layout,
    group_size: int | tuple[int, int] | None = None,
) -> QuantizedArray:
    """Returns an array of parts that are known to fit together, without checking them again."""
    return QuantizedArray.tree_unflatten((axis, layout, group_size), (values, scale, zero_point))


def as_operand(op: str, name: str, array: QuantizedArray) -> QuantizedArray:
    """Returns the operand in the form that products read, after checking its parts.

    They are checked again because transformations build arrays without the constructor.
    """
    check_parts(op, name, array)
    return array.as_read()


def _is_array(part: Any) -> bool:
    return hasattr(part, "dtype") and hasattr(part, "shape")


def _integer(op: str, name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{op}: {name} has {number!r}; pass integers there.") from None


def _packed(values: Any) -> int:
    """Returns how many numbers an element of this dtype packs along the axis."""
    return {jnp.dtype(jnp.uint8): 2, jnp.dtype(jnp.int32): _NIBBLES}.get(jnp.dtype(values), 1)


def _sides(axis: int, group_size: int | tuple[int, int] | None) -> dict[int, int]:
    """Returns the number of values that share a scale, for each axis that `group_size` covers."""
    if group_size is None:
        return {}
    sizes = group_size if isinstance(group_size, tuple) else (group_size,)
    return dict(zip((axis, -1), sizes, strict=False))


def _why_unreadable(values: Any) -> str | None:
    """Returns the remedy for values of a dtype that cannot be read, or None."""
    if values in _READABLE:
        return None
    if values in (jnp.uint4, jnp.uint2):
        return (
            "pass them as jnp.int4, with 8 (of uint2: 2) taken from them and from their zero points"
        )
    if values == jnp.int2:
        return "pass them as jnp.int4, which holds the same numbers"
    if jnp.issubdtype(values, jnp.floating):
        return "pass jaxfused.quantize(values.astype(jnp.float32) * scale, dtype)"
    return "pass what jaxfused.quantize returns"


def check_parts(op: str, name: str, array: QuantizedArray) -> None:
    """Checks that the parts of an array fit together.

    Args:
      name: the operand's name for messages; empty in the array's own constructor.
    """
    values, scale, zero_point = array.values, array.scale, array.zero_point
    part, name = (f"{name}.", name) if name else ("", "the array")
    remedy = "pass what jaxfused.quantize returns"
    for key, found in (("values", values), ("scale", scale), ("zero_point", zero_point)):
        if not _is_array(found) and not (key == "zero_point" and found is None):
            raise ValueError(
                f"{op}: {part}{key} is a {type(found).__name__}, but it has to be an array of JAX or"
                f" NumPy; {remedy}."
            )
    instead = _why_unreadable(values.dtype)
    if instead is not None:
        names = ", ".join(str(jnp.dtype(dtype)) for dtype in _READABLE)
        raise ValueError(
            f"{op}: {part}values has dtype {values.dtype}, not one of {names}; {instead}."
        )
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        instead = (
            "of E8M0 bytes pass jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)"
            if scale.dtype == jnp.uint8
            else "pass floats, such as scale.astype(jnp.float32)"
        )
        raise ValueError(
            f"{op}: {part}scale has dtype {scale.dtype}, but values are multiplied by it; {instead}."
        )
    if zero_point is not None and not (
        jnp.issubdtype(zero_point.dtype, jnp.integer)
        or jnp.issubdtype(zero_point.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{op}: {part}zero_point has dtype {zero_point.dtype}, but it is subtracted from values;"
            " pass integers, such as int8, or floats."
        )
    if array.layout not in LAYOUTS or (array.layout == "columns") < (values.dtype == jnp.int32):
        raise ValueError(
            f"{op}: {name} has layout {array.layout!r} and values of {values.dtype}, but int32 are int4"
            f" in words of layout 'columns'; {remedy}."
        )
    if array.layout == "columns" and (
        array.axis != -2 or values.ndim < 2 or values.dtype == jnp.uint8
    ):
        raise ValueError(
            f"{op}: {name} has layout 'columns', axis {array.axis} and values of shape {values.shape}"
            f" and {values.dtype}, but this layout is for weights of axis -2, whose int4 are int32;"
            f" {remedy}."
        )
    if not -values.ndim <= array.axis < 0:
        raise ValueError(
            f"{op}: {part}axis is {array.axis}, but {part}values has shape {values.shape}; axes are"
            f" counted from the last, -1; {remedy}."
        )
    shape = array.shape
    if values.dtype == jnp.int32 and shape[-2] % WORD_BLOCK:
        raise ValueError(
            f"{op}: {part}values has {values.shape[-1]} words of int4 in a row, but they come in blocks"
            f" of {WORD_BLOCK // _NIBBLES}; {remedy}."
        )
    _check_group_size(op, part, array)
    if not scale_fits(scale.shape, shape, array.axis, array.group_size):
        raise ValueError(
            f"{op}: {part}scale has shape {scale.shape}, but {name} has shape {shape} and group_size"
            f" {array.group_size}: along axis {array.axis}, and across it in weights of axis -2, there"
            " is a scale for each group, where groups are equal unless group_size says otherwise, and"
            " elsewhere for one value or all; pass a scale that fits, or the group_size of blocks whose"
            " last one is smaller, such as (128, 128)."
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"{op}: {part}zero_point has shape {zero_point.shape}, but {part}scale has shape"
            f" {scale.shape}; {remedy}."
        )


def _check_group_size(op: str, part: str, array: QuantizedArray) -> None:
    if not is_group_size(array.group_size, array.axis):
        raise ValueError(
            f"{op}: {part}group_size is {array.group_size}, but it is a positive number of values along"
            f" axis {array.axis}, or of axis -2 also a pair of them; pass one of these."
        )


def is_group_size(group_size: int | tuple[int, int] | None, axis: int) -> bool:
    """Returns whether `group_size` is valid for an array of this axis, counted from the last."""
    if isinstance(group_size, tuple):
        return axis == -2 and len(group_size) == 2 and min(group_size) > 0
    return group_size is None or group_size > 0


def _check_groups_are_clear(op: str, array: QuantizedArray) -> None:
    """Checks that scales of equal groups are not ambiguous with blocks whose last one is smaller.

    Two scales along 192 values may be of 96 each, or of 128 and 64, as in checkpoints with blocks.
    """
    if array.group_size is not None:
        return
    other = blocks_that_fit_too(array.scale.shape, array.shape, array.axis)
    if other is not None:
        axis, side = other
        values, entries = array.shape[axis], array.scale.shape[axis]
        raise ValueError(
            f"{op}: scale has shape {array.scale.shape}, so that along axis {axis} {values} values have"
            f" {entries} scales: those of {entries} groups of {values // entries}, or of blocks of"
            f" {side} of which the last one is smaller; pass group_size={values // entries} or"
            f" group_size={side}, or in weights of axis -2 a pair for both axes."
        )


def blocks_that_fit_too(
    scale: tuple[int, ...], shape: tuple[int, ...], axis: int
) -> tuple[int, int] | None:
    """Returns an axis where a usual size of blocks gives as many scales as equal groups, or None."""
    for split in (axis, -1) if axis == -2 else (axis,):
        entries, values = scale[split], shape[split]
        for side in _USUAL_SIDES:
            if 1 < entries < values and side * entries != values and -(-values // side) == entries:
                return split, side
    return None


_USUAL_SIDES = (128, 64, 32, 16, 256, 512)
"""The usual sides of blocks that share a scale in checkpoints, tried in this order."""


def scale_fits(
    scale: tuple[int, ...],
    shape: tuple[int, ...],
    axis: int,
    group_size: int | tuple[int, int] | None = None,
) -> bool:
    """Returns whether an array of shape `shape` can have scales of shape `scale`.

    Args:
      axis: the array's axis, counted from the last.
      group_size: as in a `QuantizedArray`.
    """
    sides, split = _sides(axis, group_size), (axis, -1) if axis == -2 else (axis,)

    def fits(i: int) -> bool:
        entries, size = scale[i], shape[i]
        if i in sides:
            return entries == -(-size // sides[i])
        return entries in (1, size) or (i in split and entries > 0 and size % entries == 0)

    return len(scale) == len(shape) and all(fits(i) for i in range(-len(shape), 0))


def pack_int4(values: jax.Array, axis: int) -> jax.Array:
    """Packs integers -8 to 7 as the module's docstring says, along an axis of even size."""
    low, high = (
        jax.lax.slice_in_dim(values, start, None, stride=2, axis=axis % values.ndim)
        for start in (0, 1)
    )
    low, high = (half.astype(jnp.uint8) & 15 for half in (low, high))
    return low | (high << 4)


def unpack_int4(packed: jax.Array, axis: int) -> jax.Array:
    """Returns the integers that `pack_int4` packed, as int8."""
    axis = axis % packed.ndim
    # Computed separately, the two halves would cost XLA an extra write to interleave. Shifting an int8
    # to the right repeats its sign.
    pairs = jnp.expand_dims(packed, axis + 1)
    shape = [2 if i == axis + 1 else 1 for i in range(pairs.ndim)]
    shifts = jnp.array([4, 0], jnp.uint8).reshape(shape)
    numbers = jax.lax.bitcast_convert_type(pairs << shifts, jnp.int8) >> 4
    return numbers.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


_NIBBLES = 8
"""Number of int4 in a word."""
WORD_BLOCK = 128
"""Number of int4 whose words are stored together."""


def pack_words(values: jax.Array) -> jax.Array:
    """Packs integers -8 to 7 [..., N, K] into words [..., N, K / 8] for kernels; 128 divides K.

    Four threads share a run of 16 numbers of a WGMMA: thread t holds 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A
    word has a thread's numbers of two runs, each plus 8: the even ones in its low half, the odd ones in
    its high half. The words of a block of 128 numbers are ordered by t, then by the runs.
    """
    *leading, k = values.shape
    # The axes: block, word of the thread, run of the word, half of the run, thread, odd.
    runs = (values.astype(jnp.int32) + 8).reshape(*leading, k // WORD_BLOCK, 4, 2, 2, 4, 2)
    nibbles = jnp.moveaxis(runs, (-2, -5, -1), (-5, -4, -3)).reshape(*leading, k // 8, _NIBBLES)
    shifted = jax.lax.bitcast_convert_type(nibbles, jnp.uint32) << _nibble_shifts()
    words = jnp.sum(shifted, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack_words(words: jax.Array) -> jax.Array:
    """Returns the integers [..., N, K] that `pack_words` packed, as int8."""
    *leading, count = words.shape
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    nibbles = ((unsigned[..., None] >> _nibble_shifts()) & 15).astype(jnp.int8) - jnp.int8(8)
    blocks = count * _NIBBLES // WORD_BLOCK
    # The axes: block, thread, word of the thread, odd, run of the word, half of the run. One axis is
    # split at a time, which JAX can do to arrays whose sharding is in their types.
    runs = nibbles.reshape(*leading, blocks, 4, 4, _NIBBLES)
    runs = runs.reshape(*leading, blocks, 4, 4, 2, 2, 2)
    return jnp.moveaxis(runs, (-5, -4, -3), (-2, -5, -1)).reshape(*leading, count * _NIBBLES)


def _nibble_shifts() -> jax.Array:
    return 4 * jnp.arange(_NIBBLES, dtype=jnp.uint32)


def spread(
    scale: jax.Array,
    shape: tuple[int, ...],
    axis: int = -1,
    group_size: int | tuple[int, int] | None = None,
) -> jax.Array:
    """Repeats each scale over its group, so that scales broadcast against an array of `shape`.

    Args:
      axis: the axis of groups that `group_size` is about.
      group_size: as in a `QuantizedArray`; None if groups are equal.
    """
    sides = _sides(axis, group_size)
    for i in range(-len(shape), 0):
        entries, size = scale.shape[i], shape[i]
        if entries not in (1, size):
            scale = _repeated(scale, i, sides.get(i) or size // entries, size)
    return scale


def _repeated(scale: jax.Array, axis: int, times: int, size: int) -> jax.Array:
    """Repeats each entry `times` times along the axis, the last one as often as `size` leaves room."""
    longer = jnp.repeat(scale, times, axis=axis)
    if longer.shape[axis] == size:
        return longer
    return jax.lax.slice_in_dim(longer, 0, size, axis=axis % scale.ndim)


def of_each_column(scale: jax.Array, columns: int) -> jax.Array:
    """Returns scales or zero points [..., G, F], one for each column, of weights that may share them."""
    groups = scale.shape[:-1]
    return jnp.broadcast_to(spread(scale, (*groups, columns)), (*groups, columns))
