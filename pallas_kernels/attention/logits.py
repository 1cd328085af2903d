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
"""Log-sum-exp of a query that attends to nothing: that of the jax.numpy reference."""

_SAVED_ROWS = 64
"""Queries of a warpgroup, whose log-sum-exps it writes together."""


def saved_length(query_count: int) -> int:
    """Returns R, the length of the log-sum-exp [B, N, R] that a forward saves for T queries.

    It is T rounded up to a multiple of 64, in every implementation, so that the forward of one may be
    followed by the backward of another. Entries from T on hold EMPTY_LSE or any other finite number,
    and do not affect the results of any backward.
    """
    return -(-query_count // _SAVED_ROWS) * _SAVED_ROWS


def forward_results(shape: Shape, dtype: Any, logits: "Logits") -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of a forward's results: output [B, T, N, V], log-sum-exp [B, N, R].

    If `logits.saves_rest`, its rest follows, in the same shape.
    """
    batch, query_count, _, heads, _, _, value_size = shape
    saved = jax.ShapeDtypeStruct((batch, heads, saved_length(query_count)), jnp.float32)
    output = jax.ShapeDtypeStruct((batch, query_count, heads, value_size), dtype)
    return (output, *[saved] * logits.row_numbers)


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
    """Seeds [2, B, N], uint32. They are an array because a kernel on one shard of B or N does not know
    the indices of its batch entries and heads in the whole arrays."""
    pattern_heads: Any = None
    """Index in the pattern of each head's mask [N], int32; None if all heads share one."""
    lse_rest: Any = None
    """In a backward, what `Logits.log_sum_exp` returned beside the log-sum-exp [B, N, T, 1], or None."""
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
        """Returns the operands, T padded to whole `query_block`s and S to whole `key_block`s.

        Kernels load them into registers, and such loads, unlike TMA copies, are not clipped.
        """

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
            """Pads T and S by repeating the last values: a function might return NaN for zeros."""
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
            # One number a query, also of a single query.
            lse_rest=None if self.lse_rest is None else pad(self.lse_rest, {2: query_block}),
            query_segments=pad_segments(self.query_segments, query_block),
            key_segments=pad_segments(self.key_segments, key_block),
            reads=tuple(map(pad_read, self.reads)),
        )

    def transposed(self) -> "Operands":
        """Returns the operands for `TransposedTile`: arrays [.., T, S] become [.., S, T]."""

        def swap(array):
            return None if array is None else array.swapaxes(2, 3)

        names = ("bias", "explicit", "lse_rest")
        arrays = {name: swap(getattr(self, name)) for name in names}
        return self._replace(**arrays, reads=tuple(map(swap, self.reads)))


class Bits(NamedTuple):
    """Mask bits of a tile of logits: rows from `first_row` on of matrix `number` of `Tables.bits`."""

    gmem: Any
    number: Index
    first_row: Index

    def words(self, rows: int, layout: Any) -> list[jax.Array]:
        """Loads the words of `rows` rows: array i [rows] of the list has columns 32 i to 32 i + 31."""
        place = pl.ds(self.first_row, rows)
        return [
            plgpu.load(self.gmem.at[self.number, i, place], layout=layout, optimized=False)
            for i in range(self.gmem.shape[1])
        ]


class OwnBits(NamedTuple):
    """Mask bits of the 64 rows of one consumer: matrix `number` of `own_lists.OwnLists.tables.bits`."""

    gmem: Any
    number: Index

    def words(self, layout: Any) -> jax.Array:
        """Loads the bits as uint32 words [64, 8]; a thread holds two words of each of its rows."""
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
    """Mask bits of the pattern, or their words in registers; None without a pattern."""
    early: tuple[tuple[Any, jax.Array], ...] = ()
    """Arrays of score and mask functions that are in registers already: pairs of the reference in global
    memory and the tile's values, as `read` returns them."""

    @property
    def query_axis(self) -> int:
        return 1 if self.transposed else 0

    def numbers(self, axis: int, from_start: bool = False) -> jax.Array:
        """Returns the tile's query indices (axis 0) or key indices (axis 1), an int32 vector.

        With `from_start` the tile's first query or key has index 0.
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
        """Returns seed `word` (0 or 1) of the tile's batch entry and head; `ref` is [2, B, N]."""
        return ref[word, self.batch, self.head]

    def vector(self, ref, axis: int) -> jax.Array:
        """Loads the tile's queries (axis 0) or keys (axis 1) of `ref` [B, T or S], as a full tile."""
        dimension = axis ^ self.query_axis
        start = self.query_start if axis == 0 else self.key_start
        values = plgpu.load(
            ref.at[self.batch, pl.ds(start, self.shape[dimension])],
            layout=self.layout.reduce(1 - dimension),
            optimized=False,
        )
        return lax.broadcast_in_dim(values, self.shape, [dimension])

    def matrix(self, ref) -> jax.Array:
        """Loads the tile of `ref` [B or 1, N or 1, T or 1, S or 1], broadcast to `shape`.

        A tile whose rows are keys needs `TransposedTile`, for which `ref` is [.., S or 1, T or 1].
        """
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
        """Loads the tile of `ref` without broadcasts: with the axes that `axes` returns, or a scalar."""
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

    def loaded(self, operands: Operands) -> Any:
        """Returns the tile with what takes few registers loaded: its mask bits, and some operands.

        They are `lse_rest` and those `reads` that are the same for all keys. Kernels call this before
        they start the tile's products, which hide the latency of the loads.
        """
        few = [ref for ref in operands.reads if 1 not in self.axes(ref)]
        few += [] if operands.lse_rest is None else [operands.lse_rest]
        early = tuple((ref, self.read(ref)) for ref in few)
        return replace(self, bits=None if self.bits is None else self._words(), early=early)

    def with_rest(self, operands: Operands, rest: Sequence[Any]) -> Any:
        """Returns the tile with `lse_rest`, a kernel's copy [queries] in shared memory, if there is one.

        One for each column of a transposed tile is too many to load early, and loads late from global
        memory would be waited for.
        """
        layout = self.layout.reduce(1 - self.query_axis)
        values = [(operands.lse_rest, plgpu.load(smem, layout=layout)) for smem in rest]
        return replace(self, early=(*self.early, *values))

    def _words(self) -> Any:
        if isinstance(self.bits, OwnBits):
            return self.bits.words(self.layout)
        if not isinstance(self.bits, Bits):
            return self.bits
        return self.bits.words(self.shape[0], self.layout.reduce(1))

    def allowed_by_bits(self) -> jax.Array:
        """Returns whether the pattern allows each element.

        A row's bits are in words of 32 columns. In the WGMMA layout, a thread's columns differ from each
        other by multiples of 8 that are known at compile time. So are the word of each column, and all
        but the lowest 3 bits of its bit index in the word.
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
        return self._of_keys().read(ref)

    def _of_keys(self) -> Tile:
        """Returns the tile as one with keys in place of queries, to load arrays [.., S, T]."""
        starts = (self.key_start, self.query_start)
        return Tile(self.batch, self.head, *starts, self.shape, early=self.early)

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
    """Function that changes each logit after cap and bias; reads the first `score.reads` arrays of
    `Operands.reads`."""
    allows: TileFunction | None = None
    """Function that forbids further elements; reads the arrays of `Operands.reads` after `score`'s."""

    @property
    def needs_registers(self) -> bool:
        """True if cap, dropout or score function take so many registers that tiles should be small."""
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
    def saves_rest(self) -> bool:
        """True if a bias or a function may lower all logits of a query, by 1e9 for example.

        Float32 then has no digits for the logarithm of the sum next to the maximum, so a forward saves
        what the log-sum-exp lacks, too. Logits, maxima and log-sum-exps are in base e in the kernels:
        differences of such logits are exact, and the lowest float32 times log2(e) would be -inf.
        """
        return self.has_bias or self.score is not None

    @property
    def row_numbers(self) -> int:
        """Numbers that a forward saves of each query: the log-sum-exp, and its rest if `saves_rest`."""
        return 2 if self.saves_rest else 1

    @property
    def unit(self) -> float:
        """Factor from natural logarithms to the logits, maxima and log-sum-exps of the kernels."""
        return 1.0 if self.saves_rest else LOG2E

    def exp(self, x: jax.Array, rest: Any = None) -> jax.Array:
        """Returns the exponential of a difference of logits, and of `rest`, which is in base 2."""
        if not self.saves_rest:
            return jnp.exp2(x)
        return jnp.exp2(x * LOG2E if rest is None else x * LOG2E + rest)

    def log_sum_exp(
        self,
        maximum: Any,
        total: Any,
        empty: Any = None,
        factor: float = 1.0,
        is_part: bool = False,
    ) -> list[jax.Array]:
        """Returns [log-sum-exp] of queries with a maximum and a sum, and its rest if `saves_rest`.

        A log-sum-exp in base 2 is multiplied by `factor`. The rest, in base 2, is what rounding took
        from the other: P = exp(logit - lse) * 2^-rest. For queries that are `empty`, these are EMPTY_LSE
        and 0, or if `is_part`, for parts to be merged, the rest is -inf.
        """
        if not self.saves_rest:
            lse = maximum + jnp.log2(total)
            lse = lse if factor == 1.0 else lse * factor
            return [lse if empty is None else jnp.where(empty, EMPTY_LSE, lse)]
        log = jnp.log2(total)
        lse = maximum + jnp.maximum(log, 0.0) * (1 / LOG2E)
        rest = log - (lse - maximum) * LOG2E
        if empty is None or is_part:
            return [lse, rest]
        return [jnp.where(empty, EMPTY_LSE, lse), jnp.where(empty, 0.0, rest)]

    def is_empty(self, lse: jax.Array) -> jax.Array:
        """Returns whether a saved log-sum-exp is that of a query that attends to nothing."""
        return lse == EMPTY_LSE if self.saves_rest else lse <= EMPTY_LSE

    def probabilities(
        self, x: jax.Array, lse: jax.Array, tile: Tile, operands: Operands
    ) -> jax.Array:
        """Returns P of a tile of `logits` and its queries' log-sum-exp, as a vector or as a tile."""
        x = x * self.multiplier
        x = x - (lax.broadcast_in_dim(lse, x.shape, [tile.query_axis]) if lse.ndim == 1 else lse)
        return self.exp(x, None if operands.lse_rest is None else -tile.matrix(operands.lse_rest))

    def pads_keys(self, key_block: int) -> bool:
        """True if `key_block` makes XLA pad bias or mask [.., S], and blocks of 64 keys would not."""
        count = self.mask.key_count
        return self.has_matrices and count % key_block > 0 and count % WGMMA_ROWS == 0

    def operand_start(self, start: jax.Array, count: int, tile_rows: int) -> jax.Array:
        """Returns the first row of bias, mask or other operands to load for 64 rows from `start` on.

        Operands have `count` rows, padded to a multiple of 64, but not to whole tiles of `tile_rows`,
        since padding takes a copy. A warpgroup whose rows all lie beyond the operands' end loads the
        last 64 rows instead, and does not store its results.
        """
        length = ceil_to(count, WGMMA_ROWS)
        has_rows = self.has_matrices or self.mask.has_segments or self.has_functions
        if length % tile_rows == 0 or not has_rows:
            return start
        return lax.min(start, jnp.int32(length - WGMMA_ROWS))

    @property
    def multiplier(self) -> float:
        """Constant by which `logits` has divided its result.

        Callers multiply by it in the expression that subtracts the maximum: one fused multiply-add.
        """
        if self.soft_cap is None and not self.saves_rest and self.scale > 0:
            return self.scale * LOG2E
        return 1.0

    def logits(
        self, products: jax.Array, tile: Tile, operands: Operands, extent: Extent, masked: bool
    ) -> jax.Array:
        """Returns the logits divided by `multiplier`; if `masked`, -inf at masked elements.

        They are in base 2, or in base e if `saves_rest`.
        """
        x = products
        if self.saves_rest:
            x = self.scores(x, tile, operands)
            x = x if self.score is None else self.scored(x, tile, operands)
        elif self.multiplier == 1.0:
            x = self.capped(x) * LOG2E
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

        The loop over blocks contains this branch. With separate loops for full and partial blocks, ptxas
        runs out of registers and serialises the WGMMAs.
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
        """Returns the logits before bias and mask, in base e, from products Q K^T."""
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
        """Returns the logits after cap and bias, base e: the first argument of the function `score`."""
        x = self.capped(products)
        if self.has_bias:
            x = x + tile.matrix(operands.bias).astype(jnp.float32)
        return x

    def scored(self, scores: jax.Array, tile: Tile, operands: Operands) -> jax.Array:
        """Returns the tile of `score`'s results, without the term of each query that `shift` returns."""
        assert self.score is not None
        reads = self.score_reads(operands)
        separated = self.score.separated(tile, reads, self.limits)
        if separated is None:
            # A caller's function may return bfloat16 or float16.
            return self.score(tile, reads, self.limits, scores).astype(jnp.float32)
        if not separated.by_key:
            return scores
        axis = 1 - tile.query_axis
        by_key = total(separated.by_key, axis, tile.shape)
        return scores + lax.broadcast_in_dim(by_key, tile.shape, [axis])

    def shift(self, tile: Tile, operands: Operands) -> jax.Array | None:
        """Returns the terms [queries], base e, that `logits` leaves out of `score`'s result, or None."""
        if self.score is None:
            return None
        separated = self.score.separated(tile, self.score_reads(operands), self.limits)
        if separated is None or not separated.by_query:
            return None
        return total(separated.by_query, tile.query_axis, tile.shape)

    def derivatives_of_score(
        self, which: Sequence[int], products: jax.Array, tile: Tile, operands: Operands
    ) -> list[Part]:
        """Returns the derivatives of `score`'s result by the inputs whose numbers are in `which`.

        Input 0 is the score; input i is the i-th, from 1, of the arrays it reads that have a gradient.
        """
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
        """Returns the probabilities, with 0 for queries beyond the last one, whose `lse2` is inf.

        exp2(x - inf) is 0, except where a caller's score function returned NaN for such a query.
        """
        if not self.has_functions:
            return probabilities
        return jnp.where(lse2 == jnp.inf, 0.0, probabilities)

    def derivative_of_capped(self, products: jax.Array) -> jax.Array | float:
        """Returns the derivative of the logits before bias with respect to the products Q K^T."""
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

        All arrays are tiles. dp is the gradient of the probabilities after dropout, and `kept` are these
        probabilities (None without dropout). `derivative` is that of cap and score function. If it is
        None, the result is the gradient of the logits, and so of the bias.
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


def _tanh(x: jax.Array) -> jax.Array:
    """Computes tanh by an exponential: the GPU's tanh instruction errs by more than bfloat16 rounds."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E)) + 1.0)


def _murmur(x: jax.Array, tweak: jax.Array | None = None) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13)
    if tweak is not None:
        x = x ^ tweak
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
