"""A layer of a checkpoint: its tensors, and the weights that they represent."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.modules.linear import QuantizedKernel
from jaxfused.ops.grouped.ragged_dot import check_groups, checked_sizes, ragged_dot
from jaxfused.ops.quantized.quantized_matmul import quantized_matmul
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_arrays
from jaxfused.runtime.packing import WORD_BLOCK, pack_codes, pack_int4, pack_words
from jaxfused.runtime.quantized_array import Layout, QuantizedArray
from jaxfused.runtime.scale_groups import of_each_column
from jaxfused.runtime.serialization import serializable


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A linear layer of a quantised checkpoint, `x[..., permutation] @ array + bias`.

    Attributes:
      array: the weights [..., D, F], with leading axes where the checkpoint stacks experts.
      permutation: int32 [D], the input that each row of the weights takes, if the checkpoint was
        quantised in the order of activations (GPTQ's `desc_act`); None for input i at row i.
      bias: [..., F], or None.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> array = jaxfused.quantize(jnp.eye(4))
      >>> layer = jaxfused.quantization.QuantizedLayer(array, jnp.array([3, 2, 1, 0]), None)
      >>> layer(jnp.arange(4.0)).round(4)
      Array([3., 2., 1., 0.], dtype=float32)
    """

    array: QuantizedArray
    permutation: jax.Array | None = None
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's result [..., F], in x's dtype, for x [..., D]."""
        if self.permutation is not None:
            self._check_inputs(x)
            x = jnp.take(x, self.permutation, axis=-1)
        return quantized_matmul(x, self.array, self.bias)

    def of_groups(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Returns a stack's results [M, F] for rows x [M, D], a group of them for each layer.

        The product is `jaxfused.ragged_dot`; the results of rows after the last group are zeros.

        Args:
          group_sizes: int [E], the number of rows of each layer of the stack; below 0 counts as 0.
        """
        op = "QuantizedLayer.of_groups"
        if self.array.ndim != 3:
            raise ValueError(
                f"{op}: the weights have shape {self.array.shape}, which is no stack"
                " of layers; pass the layers to jaxfused.quantization.stack first."
            )
        x, group_sizes = as_arrays(x, group_sizes)
        if x.ndim != 2:
            raise ValueError(f"{op}: x has shape {x.shape}; pass one matrix [rows, features].")
        check_groups(op, "the stack", self.array, group_sizes, False)
        group_sizes, _ = checked_sizes(op, group_sizes, None, self.array.shape[0])
        if self.permutation is None and self.bias is None:
            return ragged_dot(x, self.array, group_sizes)
        ends = jnp.cumsum(jnp.clip(group_sizes, 0, x.shape[0]), dtype=jnp.int32)
        group = sharding.searchsorted(
            ends, jnp.arange(x.shape[0]), side="right", method="compare_all"
        )
        if self.permutation is not None:
            self._check_inputs(x)
            order = jnp.take(self.permutation, group, axis=0, mode="clip")
            x = jnp.take_along_axis(x, order, axis=-1)
        y = ragged_dot(x, self.array, group_sizes)
        if self.bias is None:
            return y
        bias = jnp.take(self.bias, group, axis=0, mode="fill", fill_value=0)
        return (y + bias).astype(y.dtype)

    def _check_inputs(self, x: jax.Array) -> None:
        """Checks the size of x, since `jnp.take` would permute x of a wrong size without an error."""
        features = self.array.shape[-2]
        if jnp.shape(x)[-1:] != (features,):
            raise ValueError(
                f"QuantizedLayer: x has shape {jnp.shape(x)}, but the weights have shape"
                f" {self.array.shape}; pass x with {features} features in its last axis."
            )

    @property
    def kernel(self) -> QuantizedKernel:
        """The layer's weights as a kernel for the linear layers of jaxfused.nnx and jaxfused.linen."""
        return QuantizedKernel(self.array, permutation=self.permutation)

    def with_outputs(self, order: jax.Array) -> "QuantizedLayer":
        """Returns the layer with its outputs in another order, for a next layer's `permutation`.

        If only an elementwise function is between two layers, the next one then needs no permutation
        at run time: the results of `up.with_outputs(down.permutation)` have the order of
        `down.array`'s rows.

        Args:
          order: int [F], the index of each output, the same for all layers of a stack.
        """
        array, columns = self.array.as_read(), self.array.shape[-1]
        [order] = as_arrays(order)
        if order.shape != (columns,) or not jnp.issubdtype(order.dtype, jnp.integer):
            raise ValueError(
                f"QuantizedLayer.with_outputs: order has shape {order.shape} and dtype {order.dtype},"
                f" but there are {columns} outputs; pass the index of each, int ({columns},)."
                " Layers with orders of their own are reordered before jaxfused.quantization.stack."
            )

        def taken(part: jax.Array | None, axis: int = -1) -> Any:
            return None if part is None else jnp.take(part, order, axis=axis)

        def numbers(part: jax.Array | None) -> Any:
            return None if part is None else taken(of_each_column(part, columns))

        values = taken(array.values, -2 if array.layout == "columns" else -1)
        scale, zero_point, offset = map(numbers, (array.scale, array.zero_point, array.offset))
        array = replace(array, values=values, scale=scale, zero_point=zero_point, offset=offset)
        return replace(self, array=array, bias=taken(self.bias))

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the weights [..., D, F] as floats, with rows in the order of the inputs."""
        weights = self.array.dequantize(dtype)
        if self.permutation is None:
            return weights
        return jnp.take(weights, jnp.argsort(self.permutation), axis=-2)


Build = Callable[[], QuantizedLayer]
"""Function that reads and converts a checked layer; only it allocates memory for the arrays."""
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """Memory-mapped tensors of a layer, by the rest of their names after the layer's name.

    Attributes:
      op: the function that the user called.
      layer: the layer's name.
      arrays: the tensors.
    """

    op: str
    layer: str
    arrays: Mapping[str, np.ndarray]

    def fail(self, sentence: str) -> NoReturn:
        """Raises a ValueError that names the user's function and the layer."""
        raise ValueError(f"{self.op}: layer {self.layer!r}: {sentence}")

    def get(self, part: str) -> np.ndarray | None:
        """Returns a tensor that may be missing."""
        return self.arrays.get(part)

    def take(self, part: str, dtypes: Iterable[str], shape: Any = None) -> np.ndarray:
        """Returns a tensor after a check of its dtype and shape.

        Args:
          dtypes: names of the allowed dtypes.
          shape: the size of each axis, or None for any size; a first `...` stands for any leading axes.
            None allows any shape.
        """
        if part not in self.arrays:
            names = ", ".join(sorted(self.arrays))
            self.fail(f"it has {names}, but no {part}; pass all tensors of the layer.")
        array, dtypes = self.arrays[part], tuple(dtypes)
        if str(array.dtype) not in dtypes:
            self.fail(
                f"{part} has dtype {array.dtype}, but this format has {' or '.join(dtypes)} there; pass"
                " the config that the checkpoint came with."
            )
        if shape is not None and not _fits(array.shape, shape):
            wanted = ", ".join({None: "any", ...: "..."}.get(n, str(n)) for n in shape)
            self.fail(
                f"{part} has shape {array.shape}, but by the config and the other tensors it has to be"
                f" ({wanted}); pass the config that the checkpoint came with."
            )
        return array

    def scales(self, part: str, dtypes: Iterable[str], shape: Any = None) -> np.ndarray:
        """Returns a tensor of floats without NaN, in float32 unless its dtype is E8M0."""
        scale = self.take(part, dtypes, shape)
        wide = scale.astype(np.float32)
        if np.isnan(wide).any():
            where = tuple(int(i) for i in np.argwhere(np.isnan(wide))[0])
            self.fail(
                f"{part} is NaN at {where}, so that weights would be NaN; quantise the layer again."
            )
        return scale if scale.dtype.itemsize == 1 and scale.dtype.name.endswith("e8m0fnu") else wide

    def bias(self, part: str = "bias") -> Callable[[], jax.Array | None]:
        """Returns a function that reads the bias, if the layer has one."""
        bias = self.get(part)
        return lambda: None if bias is None else on_device(bias)


def _fits(shape: tuple[int, ...], wanted: tuple[Any, ...]) -> bool:
    if wanted and wanted[0] is ...:
        wanted = wanted[1:]
        shape = shape[max(len(shape) - len(wanted), 0) :]
    return len(shape) == len(wanted) and all(
        n is None or n == m for n, m in zip(wanted, shape, strict=True)
    )


FLOATS = ("float16", "bfloat16", "float32")


def on_device(array: np.ndarray) -> jax.Array:
    """Returns a copy of a memory-mapped array on the device; without x64, 64-bit numbers get 32 bits."""
    return jnp.array(array)


def groups_of(parts: Parts, features: int, group_size: int) -> int:
    """Returns the number of groups along the features; group_size -1 means one group."""
    if features < 1:
        parts.fail("its weights have no inputs; pass all tensors of the layer.")
    if group_size == -1:
        return 1
    if group_size < 1:
        parts.fail(f"group_size is {group_size}; it has to be positive, or -1 for a whole column.")
    return -(-features // group_size)


def mapping(parts: Parts, config: Config, name: str) -> Config:
    """Returns the mapping that the config has under `name`, or an empty one."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        parts.fail(f"the config has {name} {found!r}, but it has to be a mapping.")
    return found or {}


def names(parts: Parts, config: Config, name: str) -> list[str]:
    """Returns the list of names that the config has under `name`, or an empty one."""
    found = config.get(name)
    if found is not None and not (
        isinstance(found, list | tuple) and all(isinstance(n, str) for n in found)
    ):
        parts.fail(f"the config has {name} {found!r}, but it has to be a list of names.")
    return list(found or ())


def is_matched(parts: Parts, pattern: str, *, anywhere: bool = False) -> bool:
    """Returns whether a config's pattern fits the start of the layer's name, or any part of it."""
    try:
        return (re.search if anywhere else re.match)(pattern, parts.layer) is not None
    except re.error as error:
        parts.fail(f"the config has the pattern {pattern!r}, which cannot be read: {error}.")


def order_of_groups(parts: Parts, name: str, of_input: np.ndarray, size: int) -> np.ndarray | None:
    """Returns the permutation [D] that sorts the inputs into groups of `size`; None if they are sorted.

    `of_input` [D] has the index of each input's group.
    """
    expected = np.arange(of_input.size) // size
    if (of_input == expected).all():
        return None
    order = np.argsort(of_input, kind="stable").astype(np.int32)
    if (of_input[order] != expected).any():
        parts.fail(
            f"{name} has group numbers {of_input.min()} to {of_input.max()} that are no groups of {size}"
            " inputs each; pass the config that the checkpoint came with."
        )
    return order


def number(parts: Parts, config: Config, names: tuple[str, ...], allowed: Any = None) -> int:
    """Returns the integer that the config has under the first of `names` that is present."""
    found = next((config[name] for name in names if config.get(name) is not None), None)
    if type(found) is not int or (allowed is not None and found not in allowed):
        wanted = "an integer" if allowed is None else f"one of {', '.join(map(str, allowed))}"
        parts.fail(f"the config has {names[0]} {found!r}, but it has to be {wanted}.")
    return found


def flat_groups(
    scale: np.ndarray, block: int, shape: tuple[int, int]
) -> tuple[np.ndarray, int | None]:
    """Returns scales [F, groups] and their group size, given one scale a block of flattened [F, D].

    A block that spans several rows becomes several smaller groups with the same scale.
    """
    columns, features = shape
    size = math.gcd(block, features)
    runs = np.arange(columns * features // size) * size // block
    grouped = scale.reshape(-1)[runs].reshape(columns, features // size)
    return grouped, size if size < features else None


# --- weights from stored values -------------------------------------------------------------------


def weights(
    values: jax.Array,
    scale: np.ndarray,
    *,
    layout: Layout = "columns",
    zero_point: np.ndarray | None = None,
    offset: np.ndarray | None = None,
    group_size: int | tuple[int, int] | None = None,
    codebook: tuple[float, ...] | None = None,
) -> QuantizedArray:
    """Returns weights of stored values [..., F, D], given scales and offsets [..., F, groups]."""
    parts = (scale, zero_point, offset)
    of_groups = [None if a is None else jnp.array(np.swapaxes(a, -1, -2)) for a in parts]
    scale_of_groups, zeros, offsets = of_groups
    assert scale_of_groups is not None
    return QuantizedArray(
        values,
        scale_of_groups,
        zeros,
        -2,
        layout,
        group_size,
        offset=offsets,
        codebook=codebook,
    )


def integer_weights(
    codes: jax.Array,
    bits: int,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    *,
    group_size: int | None = None,
    offset: np.ndarray | None = None,
) -> QuantizedArray:
    """Returns weights from unsigned codes [..., F, D] and uint8 zero points in the codes' range.

    Codes and zero points minus 2^(bits - 1) are stored as int8, or as int4 for codes of up to four bits.
    Without `zero_point`, the zero point is 2^(bits - 1).
    """
    center = 2 ** (bits - 1)
    values, layout = stored_integers(codes, bits)
    zeros = None if zero_point is None else (zero_point.astype(np.int16) - center).astype(np.int8)
    return weights(
        values, scale, layout=layout, zero_point=zeros, offset=offset, group_size=group_size
    )


def stored_integers(codes: jax.Array, bits: int) -> tuple[jax.Array, Layout]:
    """Returns unsigned codes [..., F, D] as signed integers, in the kernels' layout if D allows it."""
    narrow, features = bits <= 4, codes.shape[-1]
    layout: Layout = "rows" if narrow and features % WORD_BLOCK and features % 2 == 0 else "columns"
    return _stored_integers(codes, bits, layout), layout


@functools.partial(jax.jit, static_argnums=(1, 2))
def _stored_integers(codes: jax.Array, bits: int, layout: str) -> jax.Array:
    values = (codes.astype(jnp.int16) - 2 ** (bits - 1)).astype(jnp.int8)
    if bits > 4:
        return values
    if layout == "rows":
        return pack_int4(values.mT, -2)
    return pack_words(values) if codes.shape[-1] % WORD_BLOCK == 0 else values.astype(jnp.int4)


@functools.partial(jax.jit, static_argnums=1)
def stored_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Returns codes [..., F, D] of a codebook, packed as layout "columns" stores them."""
    if codes.shape[-1] % (8 // bits):
        assert bits == 4
        return codes.astype(jnp.uint4)
    return pack_codes(codes, -1, bits)


def unpacked_bits(words: Any, bits: int) -> Any:
    """Returns codes of `bits` bits from uint32 [..., W] (or bytes), the first in the lowest bits.

    If `bits` does not divide 32, a code may start in one word and end in the next. Takes arrays of NumPy
    and of JAX.
    """
    width = 8 * words.dtype.itemsize
    if width % bits == 0:
        shifts = np.arange(0, width, bits).astype(words.dtype)
        codes = (words[..., None] >> shifts) & (2**bits - 1)
    else:
        starts = np.arange(width) * bits
        word, shift = starts // width, (starts % width).astype(words.dtype)
        runs = words.reshape(*words.shape[:-1], -1, bits)
        # A shift by the full width is undefined: the next word is shifted in two steps.
        last = words.dtype.type(width - 1)
        following = (runs[..., np.minimum(word + 1, bits - 1)] << words.dtype.type(1)) << (
            last - shift
        )
        codes = ((runs[..., word] >> shift) | following) & (2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.uint8)
