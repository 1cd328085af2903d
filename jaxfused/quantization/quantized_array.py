"""QuantizedArray: numbers in 8 or 4 bits with their scales, and how they lie in memory.

How the bits lie, unless the layout is "columns":

- int8, float8: one value a byte, in the shape of the array that was quantised.
- int4: two values a byte, along `axis`, in an array of uint8 whose `axis` is half as long. Byte i holds
  value 2i in its low and value 2i + 1 in its high four bits, each in two's complement:
  `byte[i] = (q[2i] & 15) | ((q[2i + 1] & 15) << 4)`.
- layout "columns", for weights [..., D, F] of axis -2: what a column of a product sums over is
  contiguous, as the kernels read it. int8 and float8 are stored as [..., F, D]. int4 are stored in words
  of 32 bits, int32 [..., F, D / 8], for which D is a multiple of 128: `pack_words` says in which order.
- scale and zero_point: of the rank of the values, broadcasting to them but for `axis`, where entry g is
  that of the g-th of as many equal runs of neighbouring values (groups). Of weights [..., D, F] of axis
  -2 the columns may come in such runs too, so that a block of the matrix shares a scale.

A value stands for `scale * (q - zero_point)`.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Format(NamedTuple):
    """A dtype of few bits."""

    largest: float
    """The largest number that it holds; the range of a symmetric quantisation is its two signs."""
    smallest: float
    storage: Any
    clipped_from: float
    """Numbers from here on up are not rounded to the largest but clipped to it."""

    @property
    def unit(self) -> float:
        """What the scale is to the largest magnitude: 1 / `largest`, rounded to float32.

        A scale is a product with it, as XLA may make one of a division by a constant, whose last bit
        differs from the quotient's.
        """
        return float(np.float32(1) / np.float32(self.largest))

    @property
    def asymmetric_unit(self) -> float:
        """What the scale is to the range from the smallest to the largest value."""
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
      values: int8, float8_e4m3fn or float8_e5m2; or uint8 for two int4, int32 for eight.
      scale: float32.
      zero_point: int8, or None where 0 stands for 0.
      axis: along which values share scales and int4 are packed, counted from the last, so that it
        holds also where leading axes come and go; it is the axis that a product sums over.
      layout: "rows", or "columns" for weights as the kernels read them.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> q = jaxfused.quantize(jnp.array([[1.0, -2.0], [-7.0, 14.0]]), "int4", axis=0)
      >>> q.dtype, q.shape, q.values.shape
      ('int4', (2, 2), (1, 2))
      >>> q.dequantize()
      Array([[ 1., -2.],
             [-7., 14.]], dtype=float32)
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    axis: int
    layout: Layout = "rows"

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[int, Layout]]:
        """The arrays with their names, and what is static."""
        name = "values" if self.layout == "rows" else "columns"
        keys = (jax.tree_util.GetAttrKey(key) for key in (name, "scale", "zero_point"))
        arrays = (self.values, self.scale, self.zero_point)
        return tuple(zip(keys, arrays, strict=True)), (self.axis, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[int, Layout], arrays: Any) -> "QuantizedArray":
        """The array again."""
        (values, scale, zero_point), (axis, layout) = arrays, static
        return cls(values, scale, zero_point, axis, layout)

    @property
    def dtype(self) -> str:
        """Which of FORMATS the values have."""
        return "int4" if self.values.dtype in (jnp.uint8, jnp.int32) else str(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantised."""
        shape = list(self.values.shape)
        if self.layout == "columns":
            shape[-2:] = shape[:-3:-1]
        if self.dtype == "int4":
            shape[self.axis] *= 2 if self.layout == "rows" else _NIBBLES
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def groups(self) -> int:
        """How many scales there are along `axis`; 1 where one serves the whole axis."""
        return self.scale.shape[self.axis]

    @property
    def columns_alike(self) -> int:
        """How many neighbouring entries along the last axis share a scale; 1 where there are none."""
        return self.shape[-1] // self.scale.shape[-1] if self.scale.size else 1

    def unpacked(self) -> jax.Array:
        """The values with one to a byte, in the shape of the array: int8 for int4."""
        if self.layout == "columns":
            columns = unpack_words(self.values) if self.dtype == "int4" else self.values
            return columns.mT
        return unpack_int4(self.values, self.axis) if self.dtype == "int4" else self.values

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The array that the values stand for; arithmetic is in float32.

        Args:
          dtype: a float dtype for the result.
        """
        values = self.unpacked().astype(jnp.float32)
        if self.zero_point is not None:
            values = values - spread(self.zero_point, self.shape).astype(jnp.float32)
        return (values * spread(self.scale, self.shape)).astype(dtype)


def check_parts(op: str, name: str, array: QuantizedArray) -> None:
    """Checks that the parts of an array, which anyone may put together, belong to each other."""
    storage = {jnp.dtype(format.storage): key for key, format in FORMATS.items()}
    storage[jnp.dtype(jnp.int32)] = "int4"
    values, scale, zero_point = array.values, array.scale, array.zero_point
    remedy = "pass what jaxfused.quantize returns"
    if values.dtype not in storage:
        names = ", ".join(str(dtype) for dtype in storage)
        raise ValueError(
            f"{op}: {name}.values has dtype {values.dtype}, not one of {names}; {remedy}."
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
            f"{op}: {name}.axis is {array.axis}, but {name}.values has shape {values.shape}; axes are"
            f" counted from the last, -1; {remedy}."
        )
    shape = array.shape
    if values.dtype == jnp.int32 and shape[-2] % WORD_BLOCK:
        raise ValueError(
            f"{op}: {name}.values has {values.shape[-1]} words of int4 in a row, but they come in blocks"
            f" of {WORD_BLOCK // _NIBBLES}; {remedy}."
        )
    if not scale_fits(scale.shape, shape, array.axis):
        raise ValueError(
            f"{op}: {name}.scale has shape {scale.shape}, but {name} has shape {shape}: along axis"
            f" {array.axis}, and across it in weights of axis -2, a scale is of equal groups, and"
            f" elsewhere of one value or all; {remedy}."
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"{op}: {name}.zero_point has shape {zero_point.shape}, but {name}.scale has shape"
            f" {scale.shape}; {remedy}."
        )


def scale_fits(scale: tuple[int, ...], shape: tuple[int, ...], axis: int) -> bool:
    """Whether scales of one shape are those of equal runs of an array of another.

    Args:
      axis: counted from the last.
    """
    split = (axis, -1) if axis == -2 else (axis,)
    return len(scale) == len(shape) and all(
        entries in (1, size) or (i - len(shape) in split and entries > 0 and size % entries == 0)
        for i, (entries, size) in enumerate(zip(scale, shape, strict=True))
    )


def pack_int4(values: jax.Array, axis: int) -> jax.Array:
    """Packs integers -8 to 7 as the module's docstring says; the axis is of even size."""
    low, high = (
        jax.lax.slice_in_dim(values, start, None, stride=2, axis=axis % values.ndim)
        for start in (0, 1)
    )
    low, high = (half.astype(jnp.uint8) & 15 for half in (low, high))
    return low | (high << 4)


def unpack_int4(packed: jax.Array, axis: int) -> jax.Array:
    """The integers, as int8, that `pack_int4` packed."""
    axis = axis % packed.ndim
    # XLA would write the pairs of two halves that are computed apart. Shifting an int8 to the right
    # repeats its sign.
    pairs = jnp.expand_dims(packed, axis + 1)
    shape = [2 if i == axis + 1 else 1 for i in range(pairs.ndim)]
    shifts = jnp.array([4, 0], jnp.uint8).reshape(shape)
    numbers = jax.lax.bitcast_convert_type(pairs << shifts, jnp.int8) >> 4
    return numbers.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


_NIBBLES = 8
"""int4 in a word."""
WORD_BLOCK = 128
"""int4 whose words are stored together."""


def pack_words(values: jax.Array) -> jax.Array:
    """Packs integers -8 to 7 [..., N, K] into words [..., N, K / 8] for kernels; 128 divides K.

    Of 16 numbers a thread of four, t, gives a wgmma instruction four: 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A
    word has those of two such runs, 8 added to each: the even ones in its low half, the odd ones in its
    high half. The words of a block of 128 numbers are ordered by t, and those of a thread by the runs.
    """
    *leading, k = values.shape
    # The axes: block, word of the thread, run of the word, half of the run, thread, odd.
    runs = (values.astype(jnp.int32) + 8).reshape(*leading, k // WORD_BLOCK, 4, 2, 2, 4, 2)
    nibbles = jnp.moveaxis(runs, (-2, -5, -1), (-5, -4, -3)).reshape(*leading, k // 8, _NIBBLES)
    shifted = jax.lax.bitcast_convert_type(nibbles, jnp.uint32) << _nibble_shifts()
    words = jnp.sum(shifted, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack_words(words: jax.Array) -> jax.Array:
    """The integers [..., N, K], as int8, that `pack_words` packed."""
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


def spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Scales that broadcast against an array of `shape`: each is repeated over its run."""
    for axis, (entries, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if entries not in (1, size):
            scale = jnp.repeat(scale, size // entries, axis=axis)
    return scale


def of_each_column(scale: jax.Array, columns: int) -> jax.Array:
    """The scales, or zero points, [..., G, F] of weights whose columns may share them."""
    groups = scale.shape[:-1]
    return jnp.broadcast_to(spread(scale, (*groups, columns)), (*groups, columns))
