"""Reads a program's attention masks, and turns them into arguments of dot_product_attention.

Masks are conjunctions of parts. A part that does not depend on the program's arguments is evaluated: it
may be the causal mask, a window, or any other. The other parts are arrays of the program. If masked
logits are one finite number, a query without keys gets the mean of all values in the program, since the
softmax of equal logits is uniform; dot_product_attention alone would return 0.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion.algebra import View, view
from jaxfused.fusion.constants import ELEMENTWISE, elementwise, evaluate, rounded, scalar
from jaxfused.fusion.graph import Node, Value

BIG = -998244352.0
"""Largest logit that counts as masked, -1e9 rounded to bfloat16: its exponential is 0."""
BIG_IN_FLOAT16 = -6e4
"""The same limit for float16, whose largest magnitude is 65504."""


@dataclass(frozen=True)
class Layout:
    """Maps the axes of an attention's logits to [B, N, T, S].

    An axis of the logits consists of one or several atoms: batch axes, heads, groups of heads, queries,
    keys.
    """

    sizes: dict[str, int]
    """Length of each atom, a named part of an axis."""
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    """Atoms of the heads: key heads and, last, the query heads that share a key head."""
    query: str
    key: str

    def spread(self, array, axes: tuple[int | None, ...], logits: Sequence[tuple[str, ...]]):
        """Reshapes an array so that it broadcasts to [B, N, T, S]; `axes` are its axes in the logits.

        The array may be NumPy's or JAX's.
        """
        order = [axis for axis in axes if axis is not None]
        kept = array.reshape(
            [s for s, axis in zip(array.shape, axes, strict=True) if axis is not None]
        )
        assert order == sorted(order)
        shape: list[int] = []
        atoms: list[str] = []
        remaining = dict(zip(order, kept.shape, strict=True))
        for axis, names in enumerate(logits):
            atoms += names
            shape += [self.sizes[n] if axis in remaining else 1 for n in names]
        kept = kept.reshape(shape)
        wanted = (*self.batch, *self.heads, self.query, self.key)
        kept = kept.transpose([atoms.index(name) for name in wanted])
        return self._merged(kept)

    def _merged(self, array):
        merged: list[int] = []
        first = 0
        for names in (self.batch, self.heads, (self.query,), (self.key,)):
            sizes = array.shape[first : first + len(names)]
            if any(size != 1 for size in sizes) and any(
                size != self.sizes[name] for size, name in zip(sizes, names, strict=True)
            ):
                full = list(array.shape)
                full[first : first + len(names)] = [self.sizes[name] for name in names]
                broadcast = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
                array = broadcast(array, full)
                sizes = tuple(full[first : first + len(names)])
            merged.append(math.prod(sizes))
            first += len(names)
        return array.reshape(merged)


@dataclass(frozen=True)
class Part:
    """One of the boolean masks whose logical and is the mask of the logits; True is not masked."""

    seen: View
    """The program's array and its axes among those of the logits."""
    logits: tuple[tuple[str, ...], ...]
    """Names of the parts (atoms) that make up each axis of the masked logits, as in `Layout`."""
    constant: np.ndarray | None
    """The array with the logits' rank, True where not masked; None if it depends on arguments."""
    negated: bool


def truth(value: Value) -> Value:
    """Returns the booleans of a mask, before casts to numbers and comparisons of these with 0."""
    while value.node is not None:
        node = value.node
        if node.name == "convert_element_type" and value.dtype != np.bool_:
            value = node.ins[0]
        elif node.name in ("ne", "gt") and scalar(node.ins[1]) == 0.0:
            inner = truth(node.ins[0])
            if inner.dtype != np.bool_:
                break
            value = inner
        elif node.name in ("copy", "name", "sharding_constraint"):
            value = node.ins[0]
        else:
            break
    return value


def parts_of(
    value: Value, axes: tuple[int | None, ...], logits: tuple[tuple[str, ...], ...], negated: bool
) -> list[Part]:
    """Splits a mask, negated if `negated`, into parts whose logical and is the mask."""
    rank = len(logits)
    value = truth(value)
    seen = view(value, axes)
    inner = truth(seen.base)
    if inner is not seen.base and inner.dtype == np.bool_:
        return parts_of(inner, seen.axes, logits, negated)
    node = seen.base.node
    if node is not None and node.name == "not":
        return parts_of(node.ins[0], seen.axes, logits, not negated)
    if node is not None and node.name == ("or" if negated else "and"):
        return [
            part
            for operand in node.ins
            for part in parts_of(operand, _operand_axes(operand, seen.axes), logits, negated)
        ]
    constant = evaluate(seen.base)
    if constant is not None:
        # The array gets the rank of the logits, with length 1 for axes that it does not have.
        shape = [1] * rank
        for axis, size in zip(seen.axes, constant.shape, strict=True):
            if axis is not None:
                shape[axis] = size
        constant = constant.astype(bool).reshape(shape) != negated
    return [Part(seen, logits, constant, negated)]


def _operand_axes(operand: Value, axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if s == 1 else a for s, a in zip(operand.shape, axes, strict=True))


class OfBooleans(NamedTuple):
    """An array with one number where a boolean array is False, and another where it is True."""

    booleans: View
    of_false: float
    of_true: float


def of_booleans(seen: View) -> OfBooleans | None:
    """Reads an array such as `(1 - mask) * -1e9` as two numbers chosen by booleans, or returns None."""
    seen = view(*seen)
    node = seen.base.node
    if seen.base.dtype == np.bool_:
        return None if seen.base.is_constant else OfBooleans(seen, 0.0, 1.0)
    if node is None or len(node.outs) != 1:
        return None
    if node.name == "select_n" and node.ins[0].dtype == np.bool_:
        numbers = [scalar(value) for value in node.ins[1:]]
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            return None
        return OfBooleans(_operand(node, 0, seen), numbers[0], numbers[1])
    function = elementwise(node)
    moving = [i for i, value in enumerate(node.ins) if scalar(value) is None]
    if (
        function is None
        or len(moving) != 1
        or not set(node.out.shape) >= {*node.ins[moving[0]].shape}
    ):
        return None
    inner = of_booleans(_operand(node, moving[0], seen))
    if inner is None:
        return None

    def made_of(number: float) -> float:
        ins = [number if i == moving[0] else scalar(v) for i, v in enumerate(node.ins)]
        with np.errstate(all="ignore"):
            made = float(function(*map(np.asarray, ins)))
        return rounded(made, node.out.dtype) if node.out.is_floating else made

    return OfBooleans(inner.booleans, made_of(inner.of_false), made_of(inner.of_true))


def _operand(node: Node, index: int, seen: View) -> View:
    operand = node.ins[index]
    return View(operand, _operand_axes(operand, seen.axes) if operand.ndim else ())


_ORDINARY = 1e4
"""Largest magnitude that weights, positions and arguments of unknown range are assumed to have."""
_DEEPEST = 24


def bounds(value: Value, depth: int = 0) -> tuple[float, float]:
    """Returns bounds of an array's values, assuming that unknown inputs are within +-`_ORDINARY`."""
    ordinary = (-_ORDINARY, _ORDINARY)
    if value.dtype == np.bool_:
        return 0.0, 1.0
    array = evaluate(value)
    if array is not None and array.size:
        return float(array.min()), float(array.max())
    node = value.node
    if node is None or depth > _DEEPEST or node.name not in _BOUNDED:
        return ordinary
    ins = [bounds(operand, depth + 1) for operand in node.ins]
    if node.name == "select_n":
        ins = ins[1:]
    if node.name in ("select_n", "concatenate"):
        return min(low for low, _ in ins), max(high for _, high in ins)
    function = _BOUNDED[node.name]
    with np.errstate(all="ignore"):
        corners = np.asarray([function(*corner) for corner in itertools.product(*ins)], float)
    if np.isnan(corners).any():
        return -np.inf, np.inf
    return float(corners.min()), float(corners.max())


_BOUNDED: dict[str, Callable[..., float]] = {
    **{name: ELEMENTWISE[name] for name in ("add", "sub", "mul", "neg", "max", "min")},
    **dict.fromkeys(("concatenate", "gather", "select_n", "slice"), lambda x, *_: x),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose"), lambda x, *_: x),
    **dict.fromkeys(("convert_element_type", "copy", "name"), lambda x: x),
}
"""Operations monotonic in each operand: bounds of the operands give bounds of the result."""


@dataclass(frozen=True)
class Known:
    """The part of a mask that does not depend on the program's arguments."""

    is_causal: bool
    window: tuple[int, int] | None
    explicit: np.ndarray | None
    """bool [B or 1, N or 1, T, S]; None if `is_causal` and `window` are the whole mask."""
    always_has_key: bool

    def words(self) -> list[str]:
        found = ["is_causal"] if self.is_causal else []
        found += [f"window {self.window}"] if self.window is not None else []
        return found + (["constant mask"] if self.explicit is not None else [])


def known(layout: Layout, parts: Sequence[Part]) -> Known:
    """Returns the logical and of a mask's constant parts, cached because layers share their masks."""
    constants = [part for part in parts if part.constant is not None]
    if not constants:
        return Known(False, None, None, True)
    bases = [part.seen.base.twin or part.seen.base for part in constants]
    made_of = [(p.seen.axes, p.logits, p.negated) for p in constants]
    sizes = tuple(layout.sizes.items())
    places = (layout.batch, layout.heads, layout.query, layout.key, sizes)
    key = ("mask", *bases, *made_of, *places)
    if key not in bases[0].facts:
        bases[0].facts[key] = _known(layout, constants)
    return bases[0].facts[key]


def _known(layout: Layout, parts: Sequence[Part]) -> Known:
    queries, keys = layout.sizes[layout.query], layout.sizes[layout.key]
    together = np.ones((1, 1, 1, 1), bool)
    for part in parts:
        assert part.constant is not None
        axes = tuple(i if size != 1 else None for i, size in enumerate(part.constant.shape))
        together = together & layout.spread(part.constant, axes, part.logits)
    if together.all():
        return Known(False, None, None, True)
    for axis in (0, 1):
        first = together.take([0], axis)
        together = first if (together == first).all() else together
    full = np.broadcast_to(together, (*together.shape[:2], queries, keys))
    has_key = bool(full.any(axis=-1).all())
    if full.shape[:2] == (1, 1):
        allowed = full[0, 0]
        if np.array_equal(allowed, np.tri(queries, keys, dtype=bool)):
            return Known(True, None, None, has_key)
        window = _window(allowed)
        if window is not None:
            return Known(window[1] == 0, window, None, has_key)
    return Known(False, None, full, has_key)


def _window(allowed: np.ndarray) -> tuple[int, int] | None:
    """Returns how many keys before and after its position each query attends to; None if no window."""
    queries, keys = allowed.shape
    rows = np.flatnonzero(allowed.any(axis=1))
    if not rows.size:
        return None
    first = allowed.argmax(axis=1)[rows]
    last = keys - 1 - allowed[:, ::-1].argmax(axis=1)[rows]
    left, right = int((rows - first).max()), int((last - rows).max())
    if left < 0 or right < 0:
        return None
    band = np.tri(queries, keys, right, bool) & ~np.tri(queries, keys, -left - 1, bool)
    return (left, right) if np.array_equal(allowed, band) else None


def has_key(explicit: jax.Array, known: Known, queries: int, keys: int) -> jax.Array:
    """Returns for each query whether it may attend to some key, as [B or 1, N or 1, T or 1]."""
    allowed = explicit
    if known.explicit is not None:
        allowed = allowed & jnp.asarray(known.explicit)
    if known.is_causal or known.window is not None:
        distance = jnp.arange(queries)[:, None] - jnp.arange(keys)[None]
        left, right = known.window or (keys + queries, keys + queries)
        inside = (distance <= left) & (distance >= (0 if known.is_causal else -right))
        allowed = allowed & inside[None, None]
    return jnp.any(allowed, axis=-1)
