"""Finds conv in a sum of shifted products: y_t = sum over k of w_k * x_(t - k), for each channel.

State-space models write their short causal convolution in this form, because XLA's depthwise
convolutions are slow. The shifts are slices of a padded array, or padded slices of an array.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.fusion.algebra import (
    at_dtype,
    between,
    core,
    passed_on,
    product,
    stages,
    total,
    vector,
    view,
)
from jaxfused.fusion.constants import evaluate, scalar
from jaxfused.fusion.graph import Node, Value, cuts
from jaxfused.fusion.recognisers.conv import Step, folded, followed_by
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.conv.conv import conv
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.shapes import reshaped


class Window(NamedTuple):
    """A shifted array: its entry t along `axis` is entry t + shift of `source`, or 0."""

    source: Value
    axis: int | None
    """Axis of the shift; None if the window is the source itself, not shifted."""
    shift: int
    first: int
    """First entry of the source that is not replaced by zero."""
    last: int
    """End (exclusive) of the source's entries that are not replaced by zero."""

    def has_all(self, length: int) -> bool:
        """Returns whether no entry of the source within a window of this length is replaced by zero."""
        if self.axis is None:
            return True
        size = self.source.shape[self.axis]
        first, last = max(0, self.shift), min(size, self.shift + length)
        return first >= last or (self.first <= first and self.last >= last)


@dataclass(frozen=True)
class _Taps:
    """A sum of windows of one array, each times a vector of one weight for each channel."""

    value: Value
    x: Value
    axis: int
    weights: dict[int, Value]
    """Weight of each window, by the window's shift."""
    bias: Value | None


def find(book: Book) -> None:
    """Finds all sums of shifted products in the graph and records their replacements."""
    tried: set[Node] = set()
    for node in book.graph.nodes:
        if node.name != "mul" or node in tried or node in book.owner:
            continue
        if not any(len(list(_windows(operand))) > 1 for operand in node.ins):
            continue
        found = _longest(node.out)
        if found is None:
            continue
        site = _site(book, node, found)
        if site is not None:
            tried |= site.covered
            book.add(site)


_LONGEST = 24
_FEWEST, _MOST = 2, 8
"""Fewest and most windows of a sum. A longer sum is another algorithm, such as a filter."""


def _longest(value: Value) -> _Taps | None:
    """Returns the longest sum of windows that contains a product, or None."""
    best: _Taps | None = None
    for _ in range(_LONGEST):
        found = _taps(value)
        if found is None and best is not None:
            break
        best = found or best
        if not value.used_once:
            break
        node = value.uses[0]
        if node.name != "add" and passed_on(node) is None:
            break
        value = node.out
    return best


def _taps(value: Value) -> _Taps | None:
    """Returns the value as a sum of windows, or None."""
    rank = value.ndim
    windows: list[tuple[Value, Value]] = []
    bias: Value | None = None
    parts = total(value)
    if parts.constant != 0.0 or not _FEWEST <= len(parts.terms) <= _MOST + 1:
        return None
    for term in parts.terms:
        summand = vector(term.view, rank)
        if summand is not None and bias is None and term.factor == 1.0:
            bias = summand
            continue
        powers = product(*term.view)
        if len(powers.powers) != 2 or powers.constant * term.factor != 1.0:
            return None
        if any(power != 1.0 for power in powers.powers.values()):
            return None
        weights = [(seen, vector(seen, rank)) for seen in powers.powers]
        array = [seen.base for seen, weight in weights if weight is None]
        weight = [weight for _, weight in weights if weight is not None]
        if len(array) != 1 or len(weight) != 1 or array[0].shape != value.shape:
            return None
        windows.append((array[0], weight[0]))
    return _of_one_array(value, windows, bias)


def _of_one_array(
    value: Value, windows: Sequence[tuple[Value, Value]], bias: Value | None
) -> _Taps | None:
    """Returns the windows as different shifts of one array, or None."""
    chains = [list(_windows(array)) for array, _ in windows]
    for source in reversed([window.source for window in chains[0]] if chains else []):
        of_source = [next((w for w in chain if w.source is source), None) for chain in chains]
        found = [window for window in of_source if window is not None]
        axes = {window.axis for window in found if window.axis is not None}
        if len(found) < len(chains) or len(axes) != 1:
            continue
        (axis,) = axes
        weights = {w.shift: weight for w, (_, weight) in zip(found, windows, strict=True)}
        has_all = all(window.has_all(value.shape[axis]) for window in found)
        if len(weights) == len(found) >= _FEWEST and has_all and axis == value.ndim - 2:
            return _Taps(value, source, axis, weights, bias)
    return None


def _windows(value: Value) -> Iterator[Window]:
    """Yields the value as a window of itself, then of each array from which it was sliced or padded."""
    axis: int | None = None
    value = core(value)
    window = Window(value, None, 0, 0, 0)
    while True:
        yield window
        moved = None if value.node is None else _moved(value.node, window, axis)
        if moved is None:
            return
        window = moved
        axis, value = window.axis, window.source


def _moved(node: Node, window: Window, axis: int | None) -> Window | None:
    """Returns the window as one of the array that an operation slices or pads, or None."""
    if node.name == "slice":
        taken = cuts(node.out)
        whole = [slice(0, size, 1) for size in node.ins[0].shape]
        changed = [i for i, (cut, full) in enumerate(zip(taken, whole, strict=True)) if cut != full]
        offset, source = [cut.start for cut in taken], node.ins[0]
        if any(cut.step != 1 for cut in taken):
            return None
    else:
        padded = _padded(node)
        if padded is None:
            return None
        source, before = padded
        offset = [-low for low in before]
        changed = [
            i for i, (a, b) in enumerate(zip(source.shape, node.out.shape, strict=True)) if a != b
        ]
        changed = changed or [i for i, low in enumerate(before) if low]
    if not changed:
        return window._replace(source=core(source))
    if len(changed) != 1 or axis not in (None, changed[0]):
        return None
    (along,) = changed
    first, last = (0, node.out.shape[along]) if axis is None else (window.first, window.last)
    move = offset[along]
    source = core(source)
    first, last = max(first + move, 0), min(last + move, source.shape[along])
    return Window(source, along, window.shift + move, first, last)


def _padded(node: Node) -> tuple[Value, list[int]] | None:
    """Returns the array that an operation pads with zeros, and the zeros before each axis; or None."""
    if node.name == "pad":
        config = node.params["padding_config"]
        if scalar(node.ins[1]) != 0.0 or any(inner for _, _, inner in config):
            return None
        return node.ins[0], [int(low) for low, _, _ in config]
    if node.name != "concatenate":
        return None
    rest = [i for i, part in enumerate(node.ins) if not _is_zero(part)]
    if len(rest) != 1:
        return None
    axis, before = node.params["dimension"], [0] * node.out.ndim
    before[axis] = sum(part.shape[axis] for part in node.ins[: rest[0]])
    return node.ins[rest[0]], before


def _is_zero(value: Value) -> bool:
    array = evaluate(view(value).base)
    return array is not None and not array.any()


def _without_shared(covered: set[Node]) -> set[Node]:
    """Leaves out slices and pads that the program also uses elsewhere, as for its next state."""
    kept = set(covered)
    for node in sorted(covered, key=lambda node: -node.order):
        is_window = node.name in ("slice", "pad", "concatenate")
        if is_window and any(v.is_output or not kept.issuperset(v.uses) for v in node.outs):
            kept.discard(node)
    return kept


def _site(book: Book, node: Node, found: _Taps) -> Site | None:
    value = found.value
    x = at_dtype(found.x, value.dtype)
    shifts = sorted(found.weights)
    steps = {b - a for a, b in itertools.pairwise(shifts)}
    weights = [found.weights[shift] for shift in shifts]
    length, size = value.shape[found.axis], found.x.shape[found.axis]
    padding = (-shifts[0], shifts[-1] + length - size)
    leaves = {*weights, *([] if found.bias is None else [found.bias])}
    covered = _without_shared(between(value, {*stages(found.x), *leaves}))
    # The operator multiplies in the dtype of x: the program must have done so too.
    computed = [n.out.dtype for n in covered if n.name in ("mul", "add")]
    is_plain = len({w.dtype for w in weights}) == 1 and all(d == value.dtype for d in computed)
    if x is None or len(steps) != 1 or min(padding) < 0 or not is_plain:
        return None
    followed = followed_by(book, node, value, value.ndim - 1)
    if found.bias is not None:
        first = Step("add", found.bias, value.dtype, is_reversed=False)
        followed = replace(followed, steps=(first, *followed.steps))
    shape, channels = followed.value.shape, value.shape[-1]
    others = [step.operand for step in followed.steps]
    if followed.residual is not None:
        others.append(followed.residual)

    def call(x: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        w = jnp.stack([array.reshape(-1) for array in arrays[: len(weights)]])[:, None]
        rest = arrays[len(weights) :]
        w, bias = folded(w, followed.steps, rest, accumulator_dtype(x.dtype))
        residual = None if followed.residual is None else reshaped(rest[-1], -1, length, channels)
        y = conv(
            reshaped(x, -1, size, channels),
            w,
            bias,
            activation=followed.activation,
            residual=residual,
            padding=[padding],
            kernel_dilation=(min(steps),),
            feature_group_count=channels,
            precision=jax.lax.Precision.HIGHEST if x.dtype.itemsize > 2 else None,
        )
        assert isinstance(y, jax.Array)
        return (reshaped(y, *shape),)

    return Site(
        "conv",
        node,
        [x, *weights, *others],
        [followed.value],
        call,
        covered | followed.covered,
        f"conv({followed.words()}) of {x.aval.str_short()} and {len(weights)} shifts of it",
    )
