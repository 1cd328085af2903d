"""From the products Q K^T of a tile to its logits and back: what forward and backward share.

Logits are in base 2 here, log2(e) times those of the formula, since exp2 is what the hardware has.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mask import BlockMask, Index

LOG2E = math.log2(math.e)
EMPTY_LSE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The log-sum-exp of a row that attends to nothing, as in the reference."""

_SAVED_ROWS = 64
"""A warpgroup writes the log-sum-exp of so many queries at a time."""


def saved_length(query_count: int) -> int:
    """R, the length of the log-sum-exp [B, N, R] that a forward saves for T = `query_count` queries.

    It is T rounded up to a multiple of 64, in every implementation, so that the forward of one may be
    followed by the backward of another. Entries from T on hold EMPTY_LSE or any other finite number,
    and no backward lets them into its results.
    """
    return -(-query_count // _SAVED_ROWS) * _SAVED_ROWS


class Operands(NamedTuple):
    """The optional arrays of attention; in a kernel, their references in global memory."""

    bias: Any = None
    """[B or 1, N or 1, T or 1, S or 1], any float dtype."""
    sinks: Any = None
    """[N] float32."""
    query_lengths: Any = None
    """[B] int32, as key_lengths."""
    key_lengths: Any = None
    query_segments: Any = None
    """[B, T] int32, with key_segments [B, S]."""
    key_segments: Any = None
    explicit: Any = None
    """[B or 1, N or 1, T or 1, S or 1] int8, 1 where a query may attend to a key."""
    dropout_seeds: Any = None
    """[2, B, N] uint32, from the function of this name."""

    def lengths(self, mask: BlockMask, batch_idx: Index) -> tuple[Index, Index]:
        """(queries, keys) of a batch entry."""
        return (
            mask.query_count if self.query_lengths is None else self.query_lengths[batch_idx],
            mask.key_count if self.key_lengths is None else self.key_lengths[batch_idx],
        )

    def padded(self, query_block: int, key_block: int) -> "Operands":
        """With T and S filled up to whole blocks, as loads into registers are not cut at the end."""

        def pad(array, axes: dict[int, int]):
            widths = [(0, 0)] * array.ndim
            for axis, block in axes.items():
                widths[axis] = (0, -array.shape[axis] % block)
            return array if not any(w for _, w in widths) else jnp.pad(array, widths)

        def pad_logits(array):
            """An axis of 1 is shared by all queries or keys of [.., T, S], and stays as it is."""
            if array is None:
                return None
            blocks = {2: query_block, 3: key_block}
            return pad(array, {i: n for i, n in blocks.items() if array.shape[i] != 1})

        def pad_segments(array, block):
            return None if array is None else pad(array, {1: block})

        return self._replace(
            bias=pad_logits(self.bias),
            explicit=pad_logits(self.explicit),
            query_segments=pad_segments(self.query_segments, query_block),
            key_segments=pad_segments(self.key_segments, key_block),
        )

    def transposed(self) -> "Operands":
        """With the last two axes of bias and explicit mask swapped, as a `TransposedTile` loads them."""

        def swap(array):
            return None if array is None else array.swapaxes(2, 3)

        return self._replace(bias=swap(self.bias), explicit=swap(self.explicit))


@dataclass(frozen=True)
class Tile:
    """Where a tile of logits lies. Rows are queries, or with `transposed` keys."""

    batch: Index
    head: Index
    query_start: Index
    key_start: Index
    shape: tuple[int, int]
    """(rows, columns)"""
    transposed: bool = False
    layout: Any = plgpu.Layout.WGMMA

    @property
    def query_axis(self) -> int:
        return 1 if self.transposed else 0

    def index(self, axis: int) -> jax.Array:
        """The queries (axis 0) or keys (axis 1) of the elements, as an int32 tile."""
        start = self.query_start if axis == 0 else self.key_start
        dimension = axis ^ self.query_axis
        # A vector that is broadcast, since whole tiles of numbers occupy registers in a window's mask.
        numbers = plgpu.broadcasted_iota(
            jnp.int32,
            self.shape[dimension : dimension + 1],
            0,
            layout=self.layout.reduce(1 - dimension),
        )
        return lax.broadcast_in_dim(start + numbers, self.shape, [dimension])

    def vector(self, ref, axis: int) -> jax.Array:
        """[B or 1, T or S] along the queries (axis 0) or keys (axis 1), broadcast to the tile."""
        dimension = axis ^ self.query_axis
        start = self.query_start if axis == 0 else self.key_start
        values = plgpu.load(
            ref.at[self.batch, pl.ds(start, self.shape[dimension])],
            layout=self.layout.reduce(1 - dimension),
            optimized=False,
        )
        return lax.broadcast_in_dim(values, self.shape, [dimension])

    def matrix(self, ref) -> jax.Array:
        """[B or 1, N or 1, T or 1, S or 1], broadcast to the tile; only with rows as queries."""
        assert not self.transposed
        b = self.batch if ref.shape[0] > 1 else 0
        n = self.head if ref.shape[1] > 1 else 0
        index: list[Any] = [b, n]
        dimensions = []
        for axis, start in ((0, self.query_start), (1, self.key_start)):
            if ref.shape[2 + axis] > 1:
                index.append(pl.ds(start, self.shape[axis]))
                dimensions.append(axis)
            else:
                index.append(0)
        if len(dimensions) == 2:
            return plgpu.load(ref.at[tuple(index)], layout=self.layout, optimized=False)
        if not dimensions:
            return jnp.broadcast_to(ref[tuple(index)], self.shape)
        values = plgpu.load(
            ref.at[tuple(index)], layout=self.layout.reduce(1 - dimensions[0]), optimized=False
        )
        return lax.broadcast_in_dim(values, self.shape, dimensions)


class TransposedTile(Tile):
    """Keys by queries. Bias and explicit mask come with their last two axes swapped."""

    def matrix(self, ref) -> jax.Array:
        return Tile(self.batch, self.head, self.key_start, self.query_start, self.shape).matrix(ref)

    def along_queries(self, smem) -> jax.Array:
        values = plgpu.load(smem, layout=self.layout.reduce(0))
        return lax.broadcast_in_dim(values, self.shape, [1])


@dataclass(frozen=True)
class Logits:
    """All that is static between the products and the values: scale, cap, bias, mask, dropout."""

    scale: float
    mask: BlockMask
    soft_cap: float | None = None
    has_bias: bool = False
    has_sinks: bool = False
    dropout_rate: float = 0.0

    @property
    def needs_registers(self) -> bool:
        """Whether an element of a tile takes so many that tiles should be smaller."""
        return self.soft_cap is not None or self.dropout_rate > 0

    @property
    def multiplier(self) -> float:
        """What `products` are still to be multiplied by, in the same step as the subtraction."""
        if self.soft_cap is None and not self.has_bias and self.scale > 0:
            return self.scale * LOG2E
        return 1.0

    def logits(
        self, products: jax.Array, tile: Tile, operands: Operands, key_length: Index, masked: bool
    ) -> jax.Array:
        """The logits in base 2 divided by `multiplier`; -inf where the mask, if `masked`, forbids."""
        x = products
        if self.multiplier == 1.0:
            x = self.capped(x) * LOG2E
            if self.has_bias:
                x = x + tile.matrix(operands.bias).astype(jnp.float32) * LOG2E
        if masked:
            x = self.masked(x, tile, operands, key_length)
        return x

    def logits_if_masked(
        self,
        products: jax.Array,
        tile: Tile,
        operands: Operands,
        key_length: Index,
        is_partial: bool | jax.Array,
    ) -> jax.Array:
        """`logits`, masked only where the block is partial, which may be known in the kernel alone.

        One loop with a branch: with a loop for each kind ptxas runs out of registers and has products
        wait for each other.
        """

        def of(masked):
            def f(x):
                x = self.logits(x, tile, operands, key_length, masked)
                return plgpu.layout_cast(x, tile.layout)

            return f

        if self.mask.has_explicit:
            is_partial = True
        if isinstance(is_partial, bool):
            return of(is_partial)(products)
        return lax.cond(is_partial, of(True), of(False), products)

    def capped(self, products: jax.Array) -> jax.Array:
        """The logits before bias and mask, in base e."""
        if self.soft_cap is None:
            return products * self.scale
        return self.soft_cap * _tanh(products * (self.scale / self.soft_cap))

    def derivative_of_capped(self, products: jax.Array) -> jax.Array | float:
        """The factor from the gradient of the logits to that of the products."""
        if self.soft_cap is None:
            return self.scale
        tanh = _tanh(products * (self.scale / self.soft_cap))
        return self.scale * (1.0 - tanh * tanh)

    def gradient(
        self,
        probabilities: jax.Array,
        dp: jax.Array,
        delta: jax.Array,
        kept: jax.Array | None,
        derivative: jax.Array | None,
    ) -> jax.Array:
        """The gradient of the products, without a cap divided by `scale`.

        dp is the gradient of the dropped probabilities; kept are those after dropout, and derivative
        is that of the cap, None without it.
        """
        if kept is not None:
            dp = jnp.where(kept == 0, 0.0, dp * (1 / self.keep_probability))
        ds = probabilities.astype(jnp.float32) * (dp - delta)
        return ds if derivative is None else ds * derivative

    def masked(self, x: jax.Array, tile: Tile, operands: Operands, key_length: Index) -> jax.Array:
        """x, and -inf where the mask forbids."""
        allowed = self.mask.allowed(tile.index, key_length)
        if allowed is not None:
            x = jnp.where(allowed, x, -jnp.inf)
        if self.mask.has_segments:
            same = tile.vector(operands.query_segments, 0) == tile.vector(operands.key_segments, 1)
            x = jnp.where(same, x, -jnp.inf)
        if self.mask.has_explicit:
            x = jnp.where(tile.matrix(operands.explicit) != 0, x, -jnp.inf)
        return x

    # --- dropout: the bits of jaxfused.semantics.dropout.keep -----------------------------------

    @property
    def dropout_threshold(self) -> int:
        return min(round(self.dropout_rate * 65536), 65535)

    @property
    def keep_probability(self) -> float:
        return 1.0 - self.dropout_threshold / 65536

    def dropped(self, probabilities: jax.Array, tile: Tile, operands: Operands) -> jax.Array:
        """0 where dropout drops, not yet divided by keep_probability."""
        query = tile.index(0).astype(jnp.uint32)
        key = tile.index(1).astype(jnp.uint32)
        u, v = (_murmur(operands.dropout_seeds[i, tile.batch, tile.head] ^ query) for i in range(2))
        x = _murmur(u ^ (key >> 1), v)
        half = jnp.where((key & 1) == 0, x & jnp.uint32(0xFFFF), x >> 16)
        return jnp.where(half >= jnp.uint32(self.dropout_threshold), probabilities, 0.0)


def dropout_seeds(words: jax.Array, batch: int, heads: int) -> jax.Array:
    """[2, B, N] from the two words of a call: what of dropout does not depend on query and key.

    They are an operand, not computed in the kernel, because a shard of the batch or the heads does
    not know its own place.
    """
    row = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(1, batch, heads)
    return _murmur(words[:, None, None] ^ row) + jnp.uint32(0x9E3779B9)


def _tanh(x: jax.Array) -> jax.Array:
    """By an exponential, since the instruction for it is off by 2^-11: more than bfloat16's logits."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def _murmur(x: jax.Array, tweak: jax.Array | None = None) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    if tweak is not None:
        x = x ^ tweak
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
