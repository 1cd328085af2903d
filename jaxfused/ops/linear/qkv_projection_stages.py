"""Operations of qkv_projection: the forward, and the gradient of its input."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear import linear_xla, qkv_projection_xla
from jaxfused.ops.rope.rope import batch_tables, ungrouped
from jaxfused.runtime import product_regimes, sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_xla import product, side_by_side
from jaxfused.runtime.roofline import Passes
from jaxfused.runtime.runner import Axes, Results
from jaxfused.runtime.shapes import shapes_of
from jaxfused.runtime.vmap import batch_all, is_batched
from pallas_kernels.gemm import matmul as pallas_matmul
from pallas_kernels.gemm import qkv_projection as pallas_qkv_projection
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.qkv_heads import Heads
from pallas_kernels.gemm.small_m import MAX_ROWS

# --- options --------------------------------------------------------------------------------------

HEADS = ("ngh", "nkh", "nkh")
"""Axis letters of q, k and v: key heads (n), the query heads that share one (g), an axis of length 1 in
keys and values (k), features of a head (h)."""


@dataclass(frozen=True)
class Options:
    """Static arguments of a call of qkv_projection."""

    head_size: int
    epsilon: float
    scale_offset: float
    interleaved: bool
    precision: Any
    one_array: tuple[int, int] | None = None
    """(key heads, query heads that share each) if one array holds all weights, and one all biases. These
    are passed as the queries' arrays, with None for keys and values."""

    @property
    def whole(self) -> str:
        """Letters of axes that devices must not split."""
        # The kernel takes multiples of 16 columns. A shard of whole heads has such a multiple only if
        # head_size is one, so the axis of key heads (n) is not split otherwise.
        return "dgkhsrc" if self.head_size % 16 == 0 else "dngkhsrc"

    def grouped(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays [..., columns] of q, k and v as [..., key heads, heads of each, H].

        Queries have several heads for each key head, keys and values one.
        """
        groups, _ = cast(tuple[int, int], self.one_array)
        width = groups * self.head_size
        return [
            part.reshape(*part.shape[:-1], groups, part.shape[-1] // width, self.head_size)
            for part in parts
        ]

    @property
    def ends(self) -> tuple[int, int]:
        """Column indices at which those of queries and of keys end in w [D, all columns]."""
        groups, heads = cast(tuple[int, int], self.one_array)
        return groups * heads * self.head_size, groups * (heads + 1) * self.head_size

    def apart(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the three weights, or biases, as arrays [..., key heads, heads of each, H]."""
        if self.one_array is None or arrays[0] is None:
            return arrays
        return self.grouped(jnp.split(arrays[0], self.ends, axis=-1))

    def shapes(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the shapes of the three arrays of q, k and v (weights or biases), without a split."""
        if self.one_array is None or arrays[0] is None:
            return shapes_of(arrays)
        groups, heads = self.one_array
        before, dtype = arrays[0].shape[:-1], arrays[0].dtype
        return [
            jax.ShapeDtypeStruct((*before, groups, n, self.head_size), dtype) for n in (heads, 1, 1)
        ]

    def heads(self, w_q: Any, w_k: Any, w_v: Any, *others: Any) -> Heads:
        """Returns the heads' widths, norms and rotation for weights, biases, scales and rope tables.

        With weights alone, the `Heads` have neither norm nor rotation.
        """
        *_, q_scale, k_scale, cos, _ = others or (None, None, None, None)
        return Heads(
            widths=tuple(math.prod(w.shape[1:]) for w in self.shapes((w_q, w_k, w_v))),
            size=self.head_size,
            has_norms=(q_scale is not None, k_scale is not None),
            rotary_dim=0 if cos is None else 2 * cos.shape[-1],
            interleaved=self.interleaved,
        )

    def finish(self, y, scale, cos, sin):
        """Returns y [..., T, key heads, heads of each, H] after norm and rotation, computed by XLA."""
        heads = ungrouped(y)
        if cos is None or cos.ndim == 2:
            # With more than one axis before [T, heads, H], XLA (jax 0.11.2) tiles some norms wrongly.
            heads = heads.reshape(math.prod(heads.shape[:-3]), *heads.shape[-3:])
        finished = qkv_projection_xla.finish(
            heads,
            scale,
            cos,
            sin,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            interleaved=self.interleaved,
        )
        return finished.reshape(y.shape)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """Computes queries, keys and values, and, if they are saved, queries and keys before their norms.

    Operands are x [..., T, D], weights [D, key heads, heads of each, H], biases of the same axes but D,
    the norms' scales, and rope tables.
    """

    options: Options
    save_projections: bool

    @property
    def name(self) -> str:
        return "qkv_projection forward"

    def axes(self, *operands) -> Axes:
        rows = sharding.leading_axes(operands[0].ndim - 1)
        results = [rows + group for group in HEADS]
        saved = results[:2] if self.save_projections else (None, None)
        return Axes(operand_axes(operands), (*results, *saved), self.options.whole)

    def configs(self, implementation, device, x, *parameters) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_qkv_projection.fitting(
            math.prod(x.shape[:-1]),
            x.shape[-1],
            self.options.heads(*parameters),
            device.multiprocessors,
        )

    def why_not(self, device, x, *parameters) -> Mapping[str, str | None]:
        return _why_not(device, x, self.options.heads(*parameters))

    def estimate(self, device, able, x, *parameters) -> Estimate:
        heads = self.options.heads(*parameters)
        itemsize = x.dtype.itemsize
        work = Work(math.prod(x.shape[:-1]), sum(heads.widths), x.shape[-1], itemsize=itemsize)
        # XLA splits its product into queries, keys and values, and then normalises and rotates queries
        # and keys in passes over memory.
        moved = 2 * itemsize * (_OF_PAIRS if heads.rotary_dim and heads.interleaved else 1)
        steps = 1 + int(heads.norm and heads.rotary_dim > 0)
        passes = Passes(bytes_of_element=steps * moved, launches=len(heads.widths) * steps)
        few, spared = work.m <= MAX_ROWS, passes.time(work.m * work.n)
        is_long, is_even = work.k > product_regimes.SPLIT_SUM, work.k % product_regimes.LINE == 0
        is_longer = work.k >= 2 * product_regimes.SPLIT_SUM
        # XLA pads a D that is no multiple of LINE, takes two kernels for one row, splits only long sums.
        as_it_reads = work.m > 1 and is_long and is_even
        # Without a small-M kernel for these heads, weights are converted before a tile of 128 rows.
        narrow = heads.finishes and heads.size < MAX_ROWS
        if few and parameters[0].dtype != x.dtype and (as_it_reads or narrow):
            return Rule(("xla",), "its product converts the weights as it reads them")
        if few and heads.finishes and heads.unit > _WIDE_HEAD:
            return Rule(("xla",), f"a CTA of few rows has a whole head, of {heads.unit} columns")
        elements = work.m * work.n
        wide_or_few = heads.size >= _WIDE_HEAD or elements < product_regimes.LARGE
        if not few and heads.finishes and is_longer and wide_or_few:
            return Rule(("xla",), "its long sums are faster beside wide heads or few tiles")
        # XLA copies three results, and is faster where it splits long sums of few tiles. Its norms of
        # narrow heads take so long that a kernel of few tiles gains; a rotation alone does not.
        norms = heads.norm and heads.size < _WIDE_HEAD
        most = product_regimes.FEW_TILES * (2 if heads.finishes and not heads.norm else 1)
        splits = is_long and elements <= most and not norms
        tiny = heads.finishes and elements < product_regimes.SMALLEST // (2 if norms else 1)
        several = few or (work.k >= 2 * MAX_ROWS and not splits and not tiny)
        return product_regimes.estimate(device, work, spared, several=several)

    def run(self, implementation, device, x, *parameters, config=None) -> Results:
        *weights_and_biases, q_scale, k_scale, cos, sin = parameters
        weights: Sequence[Any] = weights_and_biases[:3]
        biases: Sequence[Any] = weights_and_biases[3:]
        if implementation == "xla":
            return self._run_in_xla(x, weights, biases, (q_scale, k_scale), cos, sin)
        weights, biases = self.options.apart(weights), self.options.apart(biases)
        results = pallas_qkv_projection.forward(
            x.reshape(-1, x.shape[-1]),
            [w.astype(x.dtype).reshape(len(w), -1) for w in weights],
            None if biases[0] is None else [b.reshape(-1) for b in biases],
            (q_scale, k_scale),
            *(
                None if table is None else table.reshape(-1, table.shape[-1])
                for table in (cos, sin)
            ),
            interleaved=self.options.interleaved,
            head_size=self.options.head_size,
            epsilon=self.options.epsilon,
            scale_offset=self.options.scale_offset,
            save_projections=self.save_projections,
            multiprocessors=device.multiprocessors,
            config=config,
        )
        groups, _, head_size = weights[0].shape[1:]
        return tuple(
            None if y is None else y.reshape(*x.shape[:-1], groups, -1, head_size) for y in results
        )

    def _run_in_xla(self, x, weights, biases, scales, cos, sin) -> Results:
        # XLA runs one product; separate weights are concatenated for it.
        w, bias = weights[0], biases[0]
        if self.options.one_array is None:
            flat = [w.reshape(len(w), math.prod(w.shape[1:])) for w in weights]
            w = jnp.concatenate(flat, axis=-1)
            bias = None if bias is None else jnp.concatenate([b.reshape(-1) for b in biases])
        shapes = self.options.shapes(weights)
        y, _ = linear_xla.layer(
            x.reshape(-1, x.shape[-1]),
            w,
            bias,
            None,
            activation=None,
            out_dtype=x.dtype,
            save_preactivation=False,
            precision=self.options.precision,
        )
        # The columns become [heads, H] before the split into q, k and v, because XLA would copy slices
        # of columns.
        counts = [math.prod(w.shape[1:-1]) for w in shapes]
        y = y.reshape(*x.shape[:-1], sum(counts), self.options.head_size)
        parts = jnp.split(y, (counts[0], counts[0] + counts[1]), axis=-2)
        q, k, v = (
            part.reshape(*x.shape[:-1], *w.shape[1:]) for part, w in zip(parts, shapes, strict=True)
        )
        heads = [self.options.finish(y, s, cos, sin) for y, s in zip((q, k), scales, strict=True)]
        return (*heads, v, *((q, k) if self.save_projections else (None, None)))

    def batched(self, call, axis_size, in_batched, x, *others) -> Results | None:
        *parameters, cos, sin = others
        if is_batched(in_batched[1:-2]):
            return None
        tables: Sequence[Any] = (cos, sin)
        if cos is not None:
            rows = x.shape[1 if is_batched(in_batched[0]) else 0 : -1]
            tables = batch_tables(axis_size, in_batched[-2:], tables, rows)
        return call(self, *batch_all(axis_size, in_batched[:1], (x,)), *parameters, *tables)


@dataclass(frozen=True)
class InputGradient:
    """Computes (dx,) [..., T, D]: the sum of dq @ w_q^T, dk @ w_k^T and dv @ w_v^T.

    dq, dk and dv are [..., T, key heads, heads of each, H].
    """

    options: Options

    @property
    def name(self) -> str:
        return "qkv_projection input gradient"

    def axes(self, *operands) -> Axes:
        rows = sharding.leading_axes(operands[0].ndim - 3)
        return Axes(
            [*(rows + g for g in HEADS), *_weight_axes(operands[3:])],
            (rows + "d",),
            self.options.whole,
        )

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        rows, features = math.prod(operands[0].shape[:-3]), operands[3].shape[0]
        if implementation != "pallas":
            return ()
        work = _gradient_work(rows, features, self.options.shapes(operands[3:]))
        return pallas_matmul.fitting(work, device.multiprocessors)

    def why_not(self, device, *operands) -> Mapping[str, str | None]:
        x, _ = self._x_and_weights(*operands)
        return _why_not(device, x, self.options.heads(*operands[3:]))

    def estimate(self, device, able, *operands) -> Estimate:
        x, weights = self._x_and_weights(*operands)
        work = _gradient_work(math.prod(x.shape[:-1]), x.shape[-1], weights)
        if work.m <= MAX_ROWS:
            return Rule(("xla",), "its product splits the sums of few rows")
        # XLA copies the cotangents to concatenate them. The kernel's call copies each of the weights.
        both_ways = 2 * x.dtype.itemsize
        passes = Passes(bytes_of_element=both_ways)
        copies = replace(passes, launches=len(weights))
        spared = passes.time(work.m * work.k) - copies.time(work.n * work.k)
        return product_regimes.estimate(device, work, spared, several=True)

    def _x_and_weights(self, dq, dk, dv, *weights) -> tuple[Any, Sequence[Any]]:
        """Returns the shapes and dtypes of x [..., D] and of the weights of q, k and v.

        The weights are [D, key heads, heads of each, H].
        """
        del dk, dv
        *rows, _, _, _ = dq.shape
        x = jax.ShapeDtypeStruct((*rows, len(weights[0])), dq.dtype)
        return x, self.options.shapes(weights)

    def run(self, implementation, device, *operands, config=None) -> Results:
        before = operands[0].shape[:-3]
        dys = [dy.reshape(*before, math.prod(dy.shape[-3:])) for dy in operands[:3]]

        def flat(weights):
            return [w.astype(dys[0].dtype).reshape(len(w), math.prod(w.shape[1:])) for w in weights]

        if implementation == "xla":
            if self.options.one_array is None:
                w = jnp.concatenate(flat(operands[3:]), axis=-1)
            else:
                w = operands[3].astype(dys[0].dtype)
            dy = side_by_side(dys, self.options.head_size)
            rows = sharding.leading_axes(dy.ndim - 1)
            dx = product(
                f"{rows}f,df->{rows}d",
                dy,
                w,
                out_dtype=dy.dtype,
                precision=self.options.precision,
            )
            return (dx.reshape(*before, len(w)),)
        (dx,) = pallas_qkv_projection.input_gradient(
            [dy.reshape(-1, dy.shape[-1]) for dy in dys],
            flat(self.options.apart(operands[3:])),
            multiprocessors=device.multiprocessors,
            config=config,
        )
        return (dx.reshape(*before, dx.shape[-1]),)

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        if is_batched(in_batched[3:]):
            return None
        return call(self, *batch_all(axis_size, in_batched[:3], operands[:3]), *operands[3:])


def _why_not(device: dispatch.Device, x: Any, heads: Heads) -> dict[str, str | None]:
    """Returns why each implementation cannot take x [..., D] and the weights of these heads."""
    return {
        "pallas": pallas_qkv_projection.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=x.dtype,
            features=x.shape[-1],
            heads=heads,
        ),
        "cuda": "there is no CUDA kernel of qkv_projection yet",
        "xla": None,
    }


_WIDE_HEAD = 128
"""Features of a head above which XLA is faster at small M with a norm or rotation, because one CTA
computes a whole head, and from which it is faster at larger M if D is at least 2 * SPLIT_SUM."""
_OF_PAIRS = 2
"""XLA's time to rotate interleaved pairs of features, which it loads one by one, divided by its time to
rotate the halves of a head."""


def _gradient_work(rows: int, features: int, weights: Sequence[Any]) -> Work:
    columns = sum(math.prod(w.shape[1:]) for w in weights)
    return Work(rows, features, columns, k_last=True)


def operand_axes(operands: Sequence[Any]) -> Sequence[str]:
    """Returns the axis letters of x, weights, biases, scales and rope tables, for `sharding.align`."""
    rows = sharding.leading_axes(operands[0].ndim - 1)
    cos = operands[-1]
    table = "" if cos is None else rows[len(rows) - (cos.ndim - 1) :] + "r"
    weights, biases = _weight_axes(operands[1:4]), HEADS
    if operands[2] is None:
        biases = ("c", "", "")
    return rows + "d", *weights, *biases, "s", "s", table, table


def _weight_axes(weights: Sequence[Any]) -> Sequence[str]:
    """Returns the axis letters of three weights, or of one with all columns and two absent ones."""
    return ("dc", "", "") if weights[1] is None else tuple("d" + group for group in HEADS)
