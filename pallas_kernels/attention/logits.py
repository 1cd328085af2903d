"""The step from the products Q K^T of a tile to its logits, and back, for forward and backward.

Logits are in base 2 here, which is log2(e) times the logits of the formula, because the hardware
computes exp2.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mask import BlockMask, Extent, Index
from pallas_kernels.attention.memory import WGMMA_ROWS, ceil_to
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.tile_function import Part, TileFunction, total

LOG2E = math.log2(math.e)
EMPTY_LSE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Log-sum-exp of a row that attends to nothing, equal to the reference's."""

_SAVED_ROWS = 64
"""Queries whose log-sum-exp a warpgroup writes at a time."""


def saved_length(query_count: int) -> int:
    """Returns R, the length of the log-sum-exp [B, N, R] that a forward saves for T queries.

    It is T rounded up to a multiple of 64, in every implementation, so that the forward of one may be
    followed by the backward of another. Entries from T on hold EMPTY_LSE or any other finite number,
    and do not affect the results of any backward.
    """
    return -(-query_count // _SAVED_ROWS) * _SAVED_ROWS


def forward_results(
    shape: Shape, dtype: Any, logits: "Logits"
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of a forward's results: output [B, T, N, V], and what it saves of each row."""
    batch, query_count, _, heads, _, _, value_size = shape
    saved = logits.row_numbers * saved_length(query_count)
    return (
        jax.ShapeDtypeStruct((batch, query_count, heads, value_size), dtype),
        jax.ShapeDtypeStruct((batch, heads, saved), jnp.float32),
    )


def apart(lse: jax.Array) -> jax.Array:
    """Returns a log-sum-exp [.., R] in the form [.., 2 R] that `Logits.saves_apart` describes."""
    maximum = jnp.where(lse <= EMPTY_LSE, EMPTY_LSE, lse * LOG2E)
    return jnp.concatenate([maximum, jnp.zeros_like(lse)], axis=-1)


def joined(saved: jax.Array) -> jax.Array:
    """Returns the log-sum-exp [.., R], a natural logarithm, of what is saved apart, [.., 2 R]."""
    maximum, log_sum = jnp.split(saved, 2, axis=-1)
    return jnp.where(maximum <= EMPTY_LSE, EMPTY_LSE, (maximum + log_sum) * (1 / LOG2E))


class Operands(NamedTuple):
    """The optional arrays of attention; in a kernel, their references in global memory."""

    bias: Any = None
    """Bias [B or 1, N or 1, T or 1, S or 1], any float dtype."""
    sinks: Any = None
    """Sink logits [N], float32."""
    query_lengths: Any = None
    """Number of queries of each batch entry [B], int32; the next two fields are int32 [B], too."""
    key_lengths: Any = None
    query_offset: Any = None
    query_segments: Any = None
    """Segment of each query [B, T], int32; `key_segments` are [B, S]."""
    key_segments: Any = None
    explicit: Any = None
    """Mask [B or 1, N or 1, T or 1, S or 1], int8, 1 where a query may attend to a key."""
    dropout_seeds: Any = None
    """Seeds [2, B, N], uint32: an operand, as a kernel cannot tell which shard of B or N it computes."""
    pattern_heads: Any = None
    """Index in the pattern of each head's mask [N], int32; None if all heads share one."""
    reads: tuple[Any, ...] = ()
    """Arrays that `score` and `allows` of `Logits` read, each [B or 1, N or 1, T or 1, S or 1]."""

    def extent(self, mask: BlockMask, batch_idx: Index) -> Extent:
        """Returns the lengths and the query offset of a batch entry, in a kernel."""
        return Extent(
            mask.query_count if self.query_lengths is None else self.query_lengths[batch_idx],
            mask.key_count if self.key_lengths is None else self.key_lengths[batch_idx],
            0 if self.query_offset is None else self.query_offset[batch_idx],
        )

    def padded(self, query_block: int, key_block: int) -> "Operands":
        """Returns the operands padded to whole blocks, since register loads are not clipped."""

        def pad(array, axes: dict[int, int]):
            widths = [(0, 0)] * array.ndim
            for axis, block in axes.items():
                widths[axis] = (0, -array.shape[axis] % block)
            return array if not any(w for _, w in widths) else jnp.pad(array, widths)

        def pad_logits(array):
            """Pads the last two axes, except an axis of length 1, which all queries or keys share."""
            if array is None:
                return None
            blocks = {2: query_block, 3: key_block}
            return pad(array, {i: n for i, n in blocks.items() if array.shape[i] != 1})

        def pad_read(array):
            """Pads by repeating the last values: a function may be NaN for others, such as 0."""
            blocks = ((2, query_block), (3, key_block))
            missing = {axis: -array.shape[axis] % block for axis, block in blocks}
            widths = [(0, 0)] * 2 + [
                (0, n if array.shape[axis] != 1 else 0) for axis, n in missing.items()
            ]
            return array if not any(w for _, w in widths) else jnp.pad(array, widths, mode="edge")

        def pad_segments(array, block):
            return None if array is None else pad(array, {1: block})

        return self._replace(
            bias=pad_logits(self.bias),
            explicit=pad_logits(self.explicit),
            query_segments=pad_segments(self.query_segments, query_block),
            key_segments=pad_segments(self.key_segments, key_block),
            reads=tuple(map(pad_read, self.reads)),
        )

    def transposed(self) -> "Operands":
        """Returns the operands for `TransposedTile`: with the logits' last two axes swapped."""

        def swap(array):
            return None if array is None else array.swapaxes(2, 3)

        return self._replace(
            bias=swap(self.bias), explicit=swap(self.explicit), reads=tuple(map(swap, self.reads))
        )


class Bits(NamedTuple):
    """Mask bits of a tile of logits: rows from `first_row` on of matrix `number` of `Tables.bits`."""

    gmem: Any
    number: Index
    first_row: Index

    def words(self, rows: int, layout: Any) -> list[jax.Array]:
        """Loads the words of `rows` rows; each array of the list has one word of every row."""
        place = pl.ds(self.first_row, rows)
        return [
            plgpu.load(self.gmem.at[self.number, i, place], layout=layout, optimized=False)
            for i in range(self.gmem.shape[1])
        ]


class OwnBits(NamedTuple):
    """Mask bits of one consumer's rows: matrix `number` of the bits of `own_lists.OwnLists`."""

    gmem: Any
    number: Index

    def words(self, layout: Any) -> jax.Array:
        """Loads the mask's bits as words [rows, 8]; a thread holds two words of each of its rows."""
        return plgpu.load(self.gmem.at[self.number], layout=layout, optimized=False)


@dataclass(frozen=True)
class Tile:
    """Position of a tile of logits, whose rows are queries, or keys if `transposed`."""

    batch: Index
    head: Index
    query_start: Index
    key_start: Index
    shape: tuple[int, int]
    """Rows and columns of the tile."""
    transposed: bool = False
    layout: Any = plgpu.Layout.WGMMA
    bits: "Bits | OwnBits | list[jax.Array] | jax.Array | None" = None
    """Mask bits of the pattern, or the words of bits that are already loaded; None without one."""
    early: tuple[tuple[Any, jax.Array], ...] = ()
    """Pairs of an array's reference and the part of it that is already loaded."""

    @property
    def query_axis(self) -> int:
        return 1 if self.transposed else 0

    def numbers(self, axis: int, from_start: bool = False) -> jax.Array:
        """Returns the query indices (axis 0) or key indices (axis 1) of the rows or of the columns.

        With `from_start` they are counted from the tile's first one.
        """
        start = self.query_start if axis == 0 else self.key_start
        dimension = axis ^ self.query_axis
        numbers = plgpu.broadcasted_iota(
            jnp.int32,
            self.shape[dimension : dimension + 1],
            0,
            layout=self.layout.reduce(1 - dimension),
        )
        return numbers if from_start else start + numbers

    def index(self, axis: int) -> jax.Array:
        """Returns the query index (axis 0) or key index (axis 1) of each element, as an int32 tile."""
        # Broadcasting a vector saves the registers that whole tiles of indices would occupy.
        return lax.broadcast_in_dim(self.numbers(axis), self.shape, [axis ^ self.query_axis])

    def seed(self, ref, word: int) -> jax.Array:
        """Returns one of the two seeds of dropout, from the array of `dropout_seeds`."""
        return ref[word, self.batch, self.head]

    def vector(self, ref, axis: int) -> jax.Array:
        """Loads the tile's queries (axis 0) or keys (axis 1) of `ref`, [B, T or S], as a full tile."""
        dimension = axis ^ self.query_axis
        start = self.query_start if axis == 0 else self.key_start
        values = plgpu.load(
            ref.at[self.batch, pl.ds(start, self.shape[dimension])],
            layout=self.layout.reduce(1 - dimension),
            optimized=False,
        )
        return lax.broadcast_in_dim(values, self.shape, [dimension])

    def matrix(self, ref) -> jax.Array:
        """Loads the tile's part of `ref`, [B or 1, N or 1, T or 1, S or 1]; rows must be queries."""
        values, axes = self.read(ref), self.axes(ref)
        if len(axes) == 2:
            return values
        if not axes:
            return jnp.broadcast_to(values, self.shape)
        return lax.broadcast_in_dim(values, self.shape, axes)

    def axes(self, ref) -> tuple[int, ...]:
        """Returns the axes along which `ref` is not broadcast: 0 for queries, 1 for keys."""
        return tuple(axis for axis in (0, 1) if ref.shape[2 + axis] > 1)

    def read(self, ref) -> jax.Array:
        """Loads the tile's part of `ref` along its `axes`, not broadcast; rows must be queries."""
        for known, part in self.early:
            if known is ref:
                return part
        assert not self.transposed
        b = self.batch if ref.shape[0] > 1 else 0
        n = self.head if ref.shape[1] > 1 else 0
        index: list[Any] = [b, n]
        axes = self.axes(ref)
        for axis, start in ((0, self.query_start), (1, self.key_start)):
            index.append(pl.ds(start, self.shape[axis]) if axis in axes else 0)
        if not axes:
            return ref[tuple(index)]
        layout = self.layout if len(axes) == 2 else self.layout.reduce(1 - axes[0])
        return plgpu.load(ref.at[tuple(index)], layout=layout, optimized=False)

    def loaded(self, reads: Sequence[Any]) -> Any:
        """Loads the mask bits, and the `reads` that all columns share; returns the tile with both.

        Loads take longer than their use, so they start before the tile's products.
        """
        few = [ref for ref in reads if 1 not in self.axes(ref)]
        early = tuple((ref, self.read(ref)) for ref in few)
        return replace(self, bits=None if self.bits is None else self._words(), early=early)

    def _words(self) -> Any:
        if isinstance(self.bits, OwnBits):
            return self.bits.words(self.layout)
        if not isinstance(self.bits, Bits):
            return self.bits
        return self.bits.words(self.shape[0], self.layout.reduce(1))

    def allowed_by_bits(self) -> jax.Array:
        """Returns whether the pattern allows each element.

        A row's bits are in words of 32 columns. A thread's columns differ from each other by known
        multiples of 8, so the compiler knows which word holds a column, and all but 3 bits of its place
        in the word.
        """
        words = self._words()
        _, columns = self.shape
        if not isinstance(words, list):
            steps = [words & jnp.uint32(1 << step) for step in range(columns // 8)]
            return jnp.concatenate(steps, axis=1) != 0
        numbers = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=self.layout.reduce(0))
        column = lax.broadcast_in_dim(numbers, self.shape, [1])
        word = None
        for i, loaded in reversed(list(enumerate(words))):
            own = lax.broadcast_in_dim(loaded, self.shape, [0])
            word = own if word is None else jnp.where(column < 32 * (i + 1), own, word)
        low, high = (column & 7).astype(jnp.uint32), (column & 24).astype(jnp.uint32)
        return ((word >> low) & (jnp.uint32(1) << high)) != 0


class TransposedTile(Tile):
    """A tile with keys as rows; bias and explicit mask have their last two axes swapped."""

    def matrix(self, ref) -> jax.Array:
        return self._of_keys().matrix(ref)

    def read(self, ref) -> jax.Array:
        return replace(self._of_keys(), early=self.early).read(ref)

    def _of_keys(self) -> Tile:
        """Returns the tile for arrays whose last two axes are swapped."""
        return Tile(self.batch, self.head, self.key_start, self.query_start, self.shape)

    def along_queries(self, smem) -> jax.Array:
        values = plgpu.load(smem, layout=self.layout.reduce(0))
        return lax.broadcast_in_dim(values, self.shape, [1])


@dataclass(frozen=True)
class Logits:
    """Static parameters of the step from Q K^T to weights: scale, cap, bias, mask and dropout."""

    scale: float
    mask: BlockMask
    soft_cap: float | None = None
    has_bias: bool = False
    has_sinks: bool = False
    dropout_rate: float = 0.0
    score: TileFunction | None = None
    """Function that changes each logit after cap and bias; it reads the first of `Operands.reads`."""
    allows: TileFunction | None = None
    """Function that forbids further elements; it reads the other `Operands.reads`."""

    @property
    def needs_registers(self) -> bool:
        """True if computing a logit takes so many registers that tiles should be smaller."""
        by_score = self.score is not None and self.score.derivative_by_element
        return self.soft_cap is not None or self.dropout_rate > 0 or by_score

    @property
    def has_matrices(self) -> bool:
        """True if there are operands with a number for each logit: a bias or an explicit mask."""
        return self.has_bias or self.mask.has_explicit

    @property
    def has_functions(self) -> bool:
        return self.score is not None or self.allows is not None

    @property
    def saves_apart(self) -> bool:
        """True if a forward saves [B, N, 2 R]: the rows' maxima, in base 2, then log2 of their sums.

        Where a bias or a function has lowered all logits of a row by 1e9, float32 has no digits left for
        the logarithm of the sum: their sum, the log-sum-exp, would be the maximum alone.
        """
        return self.has_bias or self.score is not None

    @property
    def row_numbers(self) -> int:
        """Numbers that a forward saves of each row: the log-sum-exp, or its two parts."""
        return 2 if self.saves_apart else 1

    def saved_rows(
        self, empty: jax.Array, maximum: jax.Array, total: jax.Array, factor: float = 1 / LOG2E
    ) -> list[jax.Array]:
        """Returns what is saved of rows; a log-sum-exp is in base 2 times `factor`."""
        if self.saves_apart:
            return [jnp.where(empty, EMPTY_LSE, maximum), jnp.where(empty, 0.0, jnp.log2(total))]
        return [jnp.where(empty, EMPTY_LSE, _times(maximum + jnp.log2(total), factor))]

    def probabilities(self, x: jax.Array, lse2: jax.Array, log_sum: jax.Array | None) -> jax.Array:
        """Returns P of `logits` x, given the log-sum-exp, or the maximum and log2 of the sum."""
        exponent = x * self.multiplier - lse2
        return jnp.exp2(exponent if log_sum is None else exponent - log_sum)

    def pads_keys(self, key_block: int) -> bool:
        """True if XLA must pad bias or mask [.., S]: `key_block` does not divide S, but 64 does."""
        count = self.mask.key_count
        return self.has_matrices and count % key_block > 0 and count % WGMMA_ROWS == 0

    def operand_start(self, start: jax.Array, count: int, tile_rows: int) -> jax.Array:
        """Returns the first row of bias, mask or segments to load for a warpgroup's rows at `start`.

        Operands have `count` rows, padded to a multiple of 64. They are not padded to whole tiles of
        `tile_rows`, since padding takes a copy. A warpgroup with all its rows beyond the operands' end
        loads the last 64 rows instead, and does not store its results.
        """
        length = ceil_to(count, WGMMA_ROWS)
        has_rows = self.has_matrices or self.mask.has_segments or self.has_functions
        if length % tile_rows == 0 or not has_rows:
            return start
        return lax.min(start, jnp.int32(length - WGMMA_ROWS))

    @property
    def multiplier(self) -> float:
        """Factor that `logits` leaves out; it is applied when the maximum is subtracted."""
        if self.score is not None:
            return LOG2E
        if self.soft_cap is None and not self.has_bias and self.scale > 0:
            return self.scale * LOG2E
        return 1.0

    def logits(
        self, products: jax.Array, tile: Tile, operands: Operands, extent: Extent, masked: bool
    ) -> jax.Array:
        """Returns the logits in base 2 divided by `multiplier`; if `masked`, -inf at masked elements."""
        x = products
        if self.score is not None:
            x = self.scored(self.scores(x, tile, operands), tile, operands)
        elif self.multiplier == 1.0:
            x = self.capped(x) * LOG2E
            if self.has_bias:
                bias = tile.matrix(operands.bias).astype(jnp.float32)
                # The other term is greater only below -4e37, and there keeps a finite bias, such as the
                # lowest number, from becoming -inf, which masks.
                x = x + jnp.maximum(bias * LOG2E, bias * 0.25 - 5e37)
        if masked:
            x = self.masked(x, tile, operands, extent)
        return x

    def logits_if_masked(
        self,
        products: jax.Array,
        tile: Tile,
        operands: Operands,
        extent: Extent,
        is_partial: bool | jax.Array,
    ) -> jax.Array:
        """Returns `logits`, masked only if the block is partial, which may be known only at run time.

        The loop over blocks contains this branch. With a separate loop for each kind of block, ptxas
        runs out of registers and makes the products wait for each other.
        """

        def of(masked):
            def f(x):
                x = self.logits(x, tile, operands, extent, masked)
                return plgpu.layout_cast(x, tile.layout)

            return f

        if self.mask.forbids_anywhere:
            is_partial = True
        if isinstance(is_partial, bool):
            return of(is_partial)(products)
        return lax.cond(is_partial, of(True), of(False), products)

    def capped(self, products: jax.Array) -> jax.Array:
        """Returns the logits before bias and mask, in base e."""
        if self.soft_cap is None:
            return products * self.scale
        return self.soft_cap * _tanh(products * (self.scale / self.soft_cap))

    # --- functions that change or mask logits -------------------------------------------------

    @property
    def limits(self) -> tuple[int, int]:
        return self.mask.query_count, self.mask.key_count

    def score_reads(self, operands: Operands) -> tuple[Any, ...]:
        return operands.reads[: 0 if self.score is None else self.score.reads]

    def scores(self, products: jax.Array, tile: Tile, operands: Operands) -> jax.Array:
        """Returns the logits after cap and bias, the argument of the function of the score."""
        x = self.capped(products)
        if self.has_bias:
            x = x + tile.matrix(operands.bias).astype(jnp.float32)
        return x

    def scored(self, scores: jax.Array, tile: Tile, operands: Operands) -> jax.Array:
        """Applies the function `score` to the scores, without the terms that `shift` returns."""
        assert self.score is not None
        reads = self.score_reads(operands)
        separated = self.score.separated(tile, reads, self.limits)
        if separated is None:
            # The result of a caller's function may have 16 bits.
            return self.score(tile, reads, self.limits, scores).astype(jnp.float32)
        if not separated.by_key:
            return scores
        axis = 1 - tile.query_axis
        by_key = total(separated.by_key, axis, tile.shape)
        return scores + lax.broadcast_in_dim(by_key, tile.shape, [axis])

    def shift(self, tile: Tile, operands: Operands) -> jax.Array | None:
        """Returns the part of each query's logits, in base 2, that `logits` leaves out, or None."""
        if self.score is None:
            return None
        separated = self.score.separated(tile, self.score_reads(operands), self.limits)
        if separated is None or not separated.by_query:
            return None
        return total(separated.by_query, tile.query_axis, tile.shape) * LOG2E

    def derivatives_of_score(
        self, which: Sequence[int], products: jax.Array, tile: Tile, operands: Operands
    ) -> list[Part]:
        """Returns the logits' derivatives by inputs: 0 is the score, i the i-th read with a gradient."""
        assert self.score is not None
        score = functools.partial(self.scores, products, tile, operands)
        reads = self.score_reads(operands)
        return self.score.derivatives(which, tile, reads, self.limits, score)

    def derivative(self, products: jax.Array, tile: Tile, operands: Operands) -> jax.Array | None:
        """Returns the derivative of the logits with respect to the products; None if it is `scale`."""
        derivative = None if self.soft_cap is None else self.derivative_of_capped(products)
        if self.score is None or self.score.is_additive:
            return derivative
        (part,) = self.derivatives_of_score([0], products, tile, operands)
        by_score = part.over((0, 1), tile.shape).astype(jnp.float32)
        return by_score if derivative is None else by_score * derivative

    def chained(self, gradient: jax.Array, derivative: jax.Array | None) -> jax.Array:
        """Multiplies a gradient by a derivative (None: by 1); the result is 0 where the gradient is 0.

        Where an element is masked or beyond the last key, the derivative of a function may be NaN.
        """
        if derivative is None:
            return gradient
        if self.score is None or self.score.is_additive:
            return gradient * derivative
        return jnp.where(gradient == 0.0, 0.0, gradient * derivative)

    def within_rows(self, probabilities: jax.Array, lse2: jax.Array) -> jax.Array:
        """Returns the probabilities, with 0 for queries beyond the last one.

        There the log-sum-exp is inf, and functions may be NaN.
        """
        if not self.has_functions:
            return probabilities
        return jnp.where(lse2 == jnp.inf, 0.0, probabilities)

    def derivative_of_capped(self, products: jax.Array) -> jax.Array | float:
        """Returns the derivative of the logits with respect to the products."""
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
        """Returns the gradient of the products, divided by `scale` if there is no cap.

        dp is the gradient of the probabilities after dropout, `kept` are these probabilities, and
        `derivative` is the cap's derivative, or None without a cap. Without a cap, the result is the
        gradient of the logits, and of the bias.
        """
        if kept is not None:
            dp = jnp.where(kept == 0, 0.0, dp * (1 / self.keep_probability))
        ds = probabilities.astype(jnp.float32) * (dp - delta)
        return self.chained(ds, derivative)

    def masked(self, x: jax.Array, tile: Tile, operands: Operands, extent: Extent) -> jax.Array:
        """Returns x, with -inf where the mask forbids an element."""
        allowed = self.mask.allowed(tile.index, extent)
        if allowed is not None:
            x = jnp.where(allowed, x, -jnp.inf)
        if tile.bits is not None:
            x = jnp.where(tile.allowed_by_bits(), x, -jnp.inf)
        if self.mask.has_segments:
            same = tile.vector(operands.query_segments, 0) == tile.vector(operands.key_segments, 1)
            x = jnp.where(same, x, -jnp.inf)
        if self.mask.has_explicit:
            x = jnp.where(tile.matrix(operands.explicit) != 0, x, -jnp.inf)
        if self.allows is not None:
            reads = operands.reads[len(self.score_reads(operands)) :]
            x = jnp.where(self.allows(tile, reads, self.limits), x, -jnp.inf)
        return x

    # --- dropout: the bits of jaxfused.runtime.dropout.keep -----------------------------------

    @property
    def dropout_threshold(self) -> int:
        return min(round(self.dropout_rate * 65536), 65535)

    @property
    def keep_probability(self) -> float:
        return 1.0 - self.dropout_threshold / 65536

    def dropped(self, probabilities: jax.Array, tile: Tile, operands: Operands) -> jax.Array:
        """Returns the probabilities with dropped ones set to 0, not yet divided by keep_probability."""
        query = tile.index(0).astype(jnp.uint32)
        key = tile.index(1).astype(jnp.uint32)
        u, v = (_murmur(tile.seed(operands.dropout_seeds, i) ^ query) for i in range(2))
        x = _murmur(u ^ (key >> 1), v)
        half = jnp.where((key & 1) == 0, x & jnp.uint32(0xFFFF), x >> 16)
        return jnp.where(half >= jnp.uint32(self.dropout_threshold), probabilities, 0.0)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * factor


def _tanh(x: jax.Array) -> jax.Array:
    """Computes tanh by an exponential: the tanh instruction errs by more than bfloat16's rounding."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def _murmur(x: jax.Array, tweak: jax.Array | None = None) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    if tweak is not None:
        x = x ^ tweak
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
