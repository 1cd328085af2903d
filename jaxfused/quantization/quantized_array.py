"""QuantizedArray: numbers in 8 or 4 bits with their scales, and how they lie in memory.

The layout that kernels read:

- int8, float8: one value a byte, in the shape of the array that was quantised.
- int4: two values a byte, along `axis`, in an array of uint8 whose `axis` is half as long. Byte i holds
  value 2i in its low and value 2i + 1 in its high four bits, each in two's complement:
  `byte[i] = (q[2i] & 15) | ((q[2i + 1] & 15) << 4)`.
- scale and zero_point: of the rank of the values, broadcasting to them but for `axis`, where entry g is
  that of the g-th of as many equal runs of neighbouring values (groups).

A value stands for `scale * (q - zero_point)`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Format(NamedTuple):
    """A dtype of few bits."""

    largest: float
    """The largest number that it holds; the range of a symmetric quantisation is its two signs."""
    smallest: float
    storage: Any
    clipped_from: float
    """Numbers from here on up are not rounded to the largest but clipped to it."""


FORMATS = {
    "int8": Format(127.0, -128.0, jnp.int8, 127.5),
    "int4": Format(7.0, -8.0, jnp.uint8, 7.5),
    "float8_e4m3fn": Format(448.0, -448.0, jnp.float8_e4m3fn, 464.0),
    "float8_e5m2": Format(57344.0, -57344.0, jnp.float8_e5m2, 61440.0),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """An array in 8 or 4 bits: `scale * (values - zero_point)`, made by `jaxfused.quantize`.

    It is a pytree, so that it goes through `jax.jit`, `jax.lax.scan` over stacked layers, `jax.vmap`,
    donation, `jax.device_put` with a sharding, and checkpoints. The module's docstring says how the
    bits lie.

    Attributes:
      values: int8, float8_e4m3fn or float8_e5m2, or uint8 for two int4.
      scale: float32.
      zero_point: int8, or None where 0 stands for 0.
      axis: along which values share scales and int4 are packed, counted from the last, so that it
        holds also where leading axes come and go; it is the axis that a product sums over.

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
    axis: int = field(metadata=dict(static=True))

    @property
    def dtype(self) -> str:
        """Which of FORMATS the values have."""
        return "int4" if self.values.dtype == jnp.uint8 else str(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantised."""
        shape = list(self.values.shape)
        if self.dtype == "int4":
            shape[self.axis] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def groups(self) -> int:
        """How many scales there are along `axis`; 1 where one serves the whole axis."""
        return self.scale.shape[self.axis]

    def unpacked(self) -> jax.Array:
        """The values with one to a byte: int8 for int4, else as they are."""
        return unpack_int4(self.values, self.axis) if self.dtype == "int4" else self.values

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The array that the values stand for; arithmetic is in float32.

        Args:
          dtype: a float dtype for the result.
        """
        values = self.unpacked().astype(jnp.float32)
        if self.zero_point is not None:
            values = values - spread(self.zero_point, self.shape, self.axis).astype(jnp.float32)
        return (values * spread(self.scale, self.shape, self.axis)).astype(dtype)


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
    # Shifting an int8 to the right repeats its sign.
    high = jax.lax.bitcast_convert_type(packed, jnp.int8) >> 4
    low = jax.lax.bitcast_convert_type(packed << 4, jnp.int8) >> 4
    pairs = jnp.stack([low, high], axis=axis + 1)
    return pairs.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def spread(scale: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Scales that broadcast against an array of `shape`: each is repeated over its group."""
    if scale.shape[axis] == 1:
        return scale
    return jnp.repeat(scale, shape[axis] // scale.shape[axis], axis=axis)
