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
  With a `group_size`, groups have this size, and the last one has the remaining values. An offset has
  the shape of the scale.
- codes of a `codebook` of 16 or 4 numbers: two or four in a uint8, along `axis`, which layout "columns"
  has last; the first code is in the lowest bits. Codes of dtype uint4 are one an element.

A value stands for `scale * (q - zero_point) + offset`, where q is the stored number, or the entry of
the codebook that the stored code names.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import resharding
from jaxfused.runtime.packing import NIBBLES, WORD_BLOCK, unpack_codes, unpack_int4, unpack_words
from jaxfused.runtime.scale_groups import (
    blocks_that_fit_too,
    is_group_size,
    repeated,
    scale_fits,
    sides_of,
    spread,
)
from jaxfused.runtime.serialization import serializable_quantized


class Format(NamedTuple):
    """A format of a few bits, in which numbers are stored."""

    largest: float
    """The largest number of the format; symmetric quantisation uses -largest to largest."""
    smallest: float
    storage: Any
    clipped_from: float
    """Magnitude from which a number counts as clipped; smaller ones are rounded to `largest` at most."""

    @property
    def unit(self) -> float:
        """Ratio of the scale to the largest magnitude: 1 / `largest`, rounded to float32.

        The scale is the largest magnitude times this ratio. A division by `largest` could differ in the
        last bit, since XLA may turn it into such a product.
        """
        return float(np.float32(1) / np.float32(self.largest))

    @property
    def asymmetric_unit(self) -> float:
        """Ratio of an asymmetric scale to the range from the smallest to the largest value."""
        return float(np.float32(1) / np.float32(self.largest - self.smallest))


FORMATS = {
    "int8": Format(127.0, -128.0, jnp.int8, 127.5),
    "int4": Format(7.0, -8.0, jnp.uint8, 7.5),
    "float8_e4m3fn": Format(448.0, -448.0, jnp.float8_e4m3fn, 464.0),
    "float8_e5m2": Format(57344.0, -57344.0, jnp.float8_e5m2, 61440.0),
}


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
CODEBOOKS: dict[str, tuple[float, ...]] = {
    name: tuple(float(np.float32(number)) for number in numbers)
    for name, numbers in {
        "nf4": (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ),
        "fp4": (*_FP4, *(-number for number in _FP4)),
        "e2m1": (*_E2M1, *(-number for number in _E2M1)),
        "ternary": (-1.0, 0.0, 1.0, 2.0),
    }.items()
}
"""Codebooks of checkpoints: QLoRA's NF4, bitsandbytes' FP4, E2M1 of MXFP4 and NVFP4, ternary numbers,
whose fourth code is 2, as BitNet's files have it."""


Layout = Literal["rows", "columns"]
LAYOUTS: tuple[Layout, ...] = ("rows", "columns")


def layout_of(dtype: str, shape: Sequence[int], axis: int) -> Layout:
    """Returns the layout of an array that is quantised without a word on its layout.

    Weights [..., D, F] of axis -2 lie as the kernels of products read them, if their int4 fill whole
    blocks; everything else lies as it came. `axis` counts from the last.
    """
    if axis != -2 or len(shape) < 2:
        return "rows"
    return "columns" if dtype != "int4" or shape[-2] % WORD_BLOCK == 0 else "rows"


@serializable_quantized
@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """An array in 8, 4 or 2 bits: `scale * (values - zero_point) + offset`, made by `jaxfused.quantize`.

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
      offset: floats of the scale's shape, which are added last; None for none. XLA reads it.
      codebook: the 16 or 4 numbers that the values are codes of, such as
        `jaxfused.quantization.CODEBOOKS["nf4"]`; values are then uint8 with two or four codes each, or
        uint4. None where the values are the numbers. Kernels read 16 numbers in layout "columns", XLA
        all.

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

      Numbers of a codebook, two codes a byte, plus an offset:

      >>> codes, one = jnp.array([[0x7F]], jnp.uint8), jnp.ones((1, 1))
      >>> nf4 = jaxfused.quantization.CODEBOOKS["nf4"]
      >>> jaxfused.QuantizedArray(codes, one, None, axis=-2, offset=one, codebook=nf4).dequantize()
      Array([[2.],
             [1.]], dtype=float32)
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    axis: int
    layout: Layout = "rows"
    group_size: int | tuple[int, int] | None = None
    offset: jax.Array | None = None
    codebook: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        # The fields may also be partition specs, axes or None, which are not checked.
        if not _is_array(self.values):
            return
        for name in ("values", "scale", "zero_point", "offset"):
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
        if self.codebook is not None:
            object.__setattr__(self, "codebook", _codebook(op, self.codebook))
        check_parts(op, "", self)
        _check_groups_are_clear(op, self)

    def tree_flatten(self) -> tuple[Any, "_Static"]:
        """Returns the arrays, and the static fields; JAX asks at every call of a compiled function."""
        # A transformation may have put None in place of an offset; the tree still has the offset's
        # entry.
        has_offset = self.offset is not None or "_has_offset" in vars(self)
        arrays: tuple[Any, ...] = (self.values, self.scale, self.zero_point)
        if has_offset:  # Checkpoints of arrays without an offset have no entry for it.
            arrays += (self.offset,)
        return arrays, (self.axis, self.layout, self.group_size, self.codebook, has_offset)

    def tree_flatten_with_keys(self) -> tuple[Any, "_Static"]:
        """Returns the arrays with their names, and the static fields."""
        arrays, static = self.tree_flatten()
        name = "values" if self.layout == "rows" else "columns"
        names = (name if self.codebook is None else f"codes_in_{name}", *_ARRAYS[1:])
        return tuple(zip(map(jax.tree_util.GetAttrKey, names), arrays, strict=False)), static

    @classmethod
    def tree_unflatten(cls, static: "_Static", arrays: Any) -> "QuantizedArray":
        """Rebuilds the array without checks, from what a JAX transformation puts in its fields."""
        array = object.__new__(cls)
        *fields, has_offset = static
        arrays = (*arrays, None)[: len(_ARRAYS)]
        if has_offset and arrays[-1] is None:
            object.__setattr__(array, "_has_offset", True)
        for name, part in zip(_ARRAYS + _STATIC, (*arrays, *fields), strict=True):
            object.__setattr__(array, name, part)
        return array

    @property
    def dtype(self) -> str:
        """The format of the values: one of FORMATS, "float4_e2m1fn", or of codes "uint4" or "uint2"."""
        if self.codebook is not None:
            return f"uint{_code_bits(self.codebook)}"
        return "int4" if self.values.dtype in _INT4 else str(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantised."""
        shape = list(self.values.shape)
        if self.layout == "columns":
            shape[-2:] = shape[:-3:-1]
        shape[self.axis] *= self.packed
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def packed(self) -> int:
        """Number of values along `axis` in one element."""
        if self.values.dtype == jnp.uint8:
            return 2 if self.codebook is None else 8 // _code_bits(self.codebook)
        return NIBBLES if self.values.dtype == jnp.int32 else 1

    @property
    def is_scaled(self) -> bool:
        """Whether a value is `scale * q` of the stored number q: no zero point, offset or codebook."""
        return self.zero_point is None and self.offset is None and self.codebook is None

    @property
    def groups(self) -> int:
        """Number of scales along `axis`; 1 if the whole axis shares one."""
        return self.scale.shape[self.axis]

    @property
    def columns_alike(self) -> int:
        """Number of adjacent entries along the last axis that share one scale; 1 for a scale each."""
        if isinstance(self.group_size, tuple):
            return self.group_size[1]
        return self.shape[-1] // self.scale.shape[-1] if self.scale.size else 1

    def unpacked(self) -> jax.Array:
        """Returns the values, one a byte, in the shape of the array: int4 as int8, codes as uint8."""
        values = jnp.asarray(self.values)
        if self.codebook is not None:
            axis = -1 if self.layout == "columns" else self.axis
            if values.dtype == jnp.uint8:
                values = unpack_codes(values, axis, _code_bits(self.codebook))
            values = values.astype(jnp.uint8)
        elif values.dtype == jnp.int32:
            values = unpack_words(values)
        elif values.dtype == jnp.uint8:
            values = unpack_int4(values, self.axis)
        elif self.dtype == "int4":
            values = values.astype(jnp.int8)
        return values.mT if self.layout == "columns" else values

    def numbers(self) -> jax.Array:
        """Returns the numbers before zero point and scale: the values, or their codebook entries."""
        values = self.unpacked()
        return values if self.codebook is None else _entries(self.codebook, values)

    def as_read(self) -> "QuantizedArray":
        """Returns an array of the same numbers, in the form that products read.

        Scales are float32 (or float64). Zero points are int8 if it holds every number of their dtype,
        else float32. Groups are equal: blocks of 128 with a last one of 64 become groups of 64.
        """
        scale: Any = jnp.asarray(self.scale)
        zero_point: Any = self.zero_point
        offset: Any = self.offset
        if scale.dtype.itemsize < 4:
            scale = scale.astype(jnp.float32)
        if zero_point is not None:
            zero_point = jnp.asarray(zero_point)
            zero_point = zero_point.astype(
                jnp.int8 if zero_point.dtype in _WITHIN_INT8 else jnp.float32
            )
        if offset is not None:
            offset = jnp.asarray(offset).astype(scale.dtype)
        shape, grid = self.shape, list(scale.shape)
        for axis, side in sides_of(self.axis, self.group_size).items():
            if grid[axis] > 1:
                equal = math.gcd(side, shape[axis])
                grid[axis] = shape[axis] // equal
                scale, zero_point, offset = (
                    None if a is None else repeated(a, axis, side // equal, grid[axis])
                    for a in (scale, zero_point, offset)
                )
        values = jnp.asarray(self.values)
        return assembled(
            values,
            scale,
            zero_point,
            self.axis,
            self.layout,
            offset=offset,
            codebook=self.codebook,
        )

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the array that the values stand for; arithmetic is in float32.

        Args:
          dtype: a float dtype for the result.
        """
        read = self.as_read()
        values = read.numbers().astype(jnp.float32)

        def beside_values(of_groups: jax.Array) -> jax.Array:
            return resharding.split_with(spread(of_groups, self.shape), values)

        if read.zero_point is not None:
            values = values - beside_values(read.zero_point).astype(jnp.float32)
        values = values * beside_values(read.scale)
        if read.offset is not None:
            values = values + beside_values(read.offset)
        return values.astype(dtype)


_ARRAYS = ("values", "scale", "zero_point", "offset")
_STATIC = ("axis", "layout", "group_size", "codebook")
_Static = tuple[Any, ...]
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
    *,
    offset: Any = None,
    codebook: tuple[float, ...] | None = None,
) -> QuantizedArray:
    """Builds a `QuantizedArray` without checks, of arrays that are known to fit together."""
    arrays = (values, scale, zero_point, *(() if offset is None else (offset,)))
    static = (axis, layout, group_size, codebook, offset is not None)
    return QuantizedArray.tree_unflatten(static, arrays)


def as_operand(op: str, name: str, array: QuantizedArray) -> QuantizedArray:
    """Returns the operand in the form that products read, after checking its arrays.

    The constructor's checks are repeated, because JAX's transformations build arrays without it.
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


def _codebook(op: str, codebook: Any) -> tuple[float, ...]:
    """Returns a codebook's numbers rounded to float32."""
    try:
        numbers = np.asarray(codebook, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(0)
    if numbers.shape not in ((16,), (4,)) or not np.isfinite(numbers).all():
        raise ValueError(
            f"{op}: codebook is {codebook!r}, but it has to be 16 or 4 finite numbers; pass such, or one"
            f" of jaxfused.quantization.CODEBOOKS: {', '.join(CODEBOOKS)}."
        )
    return tuple(numbers.astype(np.float32).tolist())


def _code_bits(codebook: tuple[float, ...]) -> int:
    return len(codebook).bit_length() - 1


@functools.partial(jax.jit, static_argnums=0)
def _entries(codebook: tuple[float, ...], codes: jax.Array) -> jax.Array:
    """Looks up the codes in the codebook by selects on their bits; the result is float32.

    Unlike a gather, selects fuse with the operation that reads the entries, and need no sharding rule.
    """
    entries: list[Any] = [jnp.float32(number) for number in codebook]
    for bit in range(_code_bits(codebook)):
        is_odd = (codes >> bit) & 1 == 1
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [jnp.where(is_odd, odd, even) for even, odd in pairs]
    return entries[0]


def _readable(codebook: tuple[float, ...] | None) -> tuple[Any, ...]:
    """Returns the dtypes that the stored values may have, with or without a codebook."""
    if codebook is None:
        return _READABLE
    return (jnp.uint8, jnp.uint4) if _code_bits(codebook) == 4 else (jnp.uint8,)


def _why_unreadable(values: Any, codebook: tuple[float, ...] | None) -> str | None:
    """Returns the remedy for values of a dtype that cannot be read, or None."""
    if values in _readable(codebook):
        return None
    if codebook is not None:
        return f"pack {8 // _code_bits(codebook)} codes into a byte, the first in the lowest bits"
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
    """Checks that values, scale, zero point and offset of an array fit together.

    Args:
      name: the operand's name for messages; empty in the array's own constructor.
    """
    values, scale = array.values, array.scale
    zero_point, offset = array.zero_point, array.offset
    part, name = (f"{name}.", name) if name else ("", "the array")
    remedy = "pass what jaxfused.quantize returns"
    for key in _ARRAYS:
        found = getattr(array, key)
        if not _is_array(found) and not (key in ("zero_point", "offset") and found is None):
            raise ValueError(
                f"{op}: {part}{key} is a {type(found).__name__}, but it has to be an array of JAX or"
                f" NumPy; {remedy}."
            )
    instead = _why_unreadable(values.dtype, array.codebook)
    if instead is not None:
        readable = _readable(array.codebook)
        names = ", ".join(str(jnp.dtype(dtype)) for dtype in readable)
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
    if offset is not None and not jnp.issubdtype(offset.dtype, jnp.floating):
        raise ValueError(
            f"{op}: {part}offset has dtype {offset.dtype}, but it is added to floats; pass floats, or"
            " integers that are subtracted from the values as zero_point."
        )
    _check_layout(op, name, array, remedy)
    if not -values.ndim <= array.axis < 0:
        raise ValueError(
            f"{op}: {part}axis is {array.axis}, but {part}values has shape {values.shape}; axes are"
            f" counted from the last, -1; {remedy}."
        )
    shape = array.shape
    if values.dtype == jnp.int32 and shape[-2] % WORD_BLOCK:
        raise ValueError(
            f"{op}: {part}values has {values.shape[-1]} words of int4 in a row, but they come in blocks"
            f" of {WORD_BLOCK // NIBBLES}; {remedy}."
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
    for key, found in (("zero_point", zero_point), ("offset", offset)):
        if found is not None and found.shape != scale.shape:
            raise ValueError(
                f"{op}: {part}{key} has shape {found.shape}, but {part}scale has shape"
                f" {scale.shape}; {remedy}."
            )


def _check_layout(op: str, name: str, array: QuantizedArray, remedy: str) -> None:
    values = array.values
    if array.layout not in LAYOUTS or (array.layout == "columns") < (values.dtype == jnp.int32):
        raise ValueError(
            f"{op}: {name} has layout {array.layout!r} and values of {values.dtype}, but int32 are int4"
            f" in words of layout 'columns'; {remedy}."
        )
    if array.layout == "columns" and (
        array.axis != -2
        or values.ndim < 2
        or (values.dtype == jnp.uint8 and array.codebook is None)
    ):
        raise ValueError(
            f"{op}: {name} has layout 'columns', axis {array.axis} and values of shape {values.shape}"
            f" and {values.dtype}, but this layout is for weights of axis -2, whose int4 are int32;"
            f" {remedy}."
        )


def _check_group_size(op: str, part: str, array: QuantizedArray) -> None:
    if not is_group_size(array.group_size, array.axis):
        raise ValueError(
            f"{op}: {part}group_size is {array.group_size}, but it is a positive number of values along"
            f" axis {array.axis}, or of axis -2 also a pair of them; pass one of these."
        )


def _check_groups_are_clear(op: str, array: QuantizedArray) -> None:
    """Checks that scales of equal groups could not be those of blocks whose last one is smaller.

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
