"""Finds linear_softmax_cross_entropy: the loss of a product whose logits would fill the memory.

It follows the logits of each product forward (`logit_rows`). If all that is computed from them are
numbers of rows that follow from the operator's statistics, such as a label's log-probability, the
operator gives these. Fewer than FEWEST_LOGITS logits are left to XLA: saving them is faster than making
them again.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion.algebra import between
from jaxfused.fusion.constants import times_number
from jaxfused.fusion.graph import Node, cuts
from jaxfused.fusion.recognisers.logit_rows import (
    ALWAYS,
    LOG_SUM,
    MAXIMUM,
    MEAN,
    OF_LABELS,
    PICKED,
    Reading,
    Row,
    Total,
    operations_after,
    read,
)
from jaxfused.fusion.recognisers.product import (
    Biased,
    Projection,
    biased,
    last_of,
    projections,
)
from jaxfused.fusion.site import Book, Site
from jaxfused.fusion.source import line_of
from jaxfused.ops.loss.linear_cross_entropy import (
    linear_softmax_cross_entropy,
    linear_softmax_statistics,
)
from jaxfused.runtime.shapes import reshaped

FEWEST_LOGITS = 2**24
"""Fewest logits of a loss that is replaced. Its backward computes the logits again, in chunks of as
many."""

_LOWEST = tuple((precision, precision) for precision in (None, jax.lax.Precision.DEFAULT))


def find(book: Book) -> None:
    """Finds losses whose logits are the result of a product, and records their replacements."""
    for p in projections(book):
        if len(p.contracted) != p.w.ndim - 1:
            continue
        affine = biased(book, p)
        if not book.is_free(p.covered | affine.covered):
            continue
        reading, factor = read(affine.value), 1.0
        logits = last_of(affine.value)
        # Logits may be multiplied by a number, such as 1 / temperature.
        scaled = times_number(logits.uses[0]) if logits.used_once else None
        if not reading.has_logarithm and scaled is not None:
            reading, factor = read(logits.uses[0].out), scaled[1]
        if not reading.has_logarithm:
            _miss(book, p, reading)
            continue
        reason = _why_not(p, affine, reading)
        if reason is None:
            _add(book, p, affine, reading, factor)
        elif reason:
            book.miss("linear_softmax_cross_entropy", p.node, reason)


def _miss(book: Book, p: Projection, reading: Reading) -> None:
    """Records the first operation after many logits that is unknown here and leads to a logarithm."""
    if math.prod(reading.start.shape) < FEWEST_LOGITS:
        return
    read = reading.consumed
    readers = {node for value in reading.states for node in value.uses if node not in read}
    for node in sorted(readers, key=lambda node: node.order):
        after = operations_after(node)
        if any(n.name == "log" for n in after) and any(n.name == "exp" for n in after | read):
            line = line_of(node)
            reason = f"{node.name} at line {line} is no step from logits to a loss of labels"
            book.miss("linear_softmax_cross_entropy", p.node, reason)
            return


def _why_not(p: Projection, affine: Biased, reading: Reading) -> str | None:
    """Returns why a loss of logits is not replaced, or None; "" if few logits are no loss."""
    is_loss = _is_loss(reading)
    if math.prod(affine.value.shape) < FEWEST_LOGITS:
        return "its logits are few enough to be kept" if is_loss else ""
    if not is_loss:
        return "what is computed from its logits is more than losses of one label for each row"
    if p.precision not in (None, *_LOWEST):
        return f"its product has precision={p.precision}, and the operator's the default"
    if p.node.out.dtype.itemsize > p.x.dtype.itemsize:
        return f"its logits are {p.node.out.dtype}, and the operator rounds them to {p.x.dtype}"
    return None


def _is_loss(reading: Reading) -> bool:
    """Returns whether what follows from the logits is what the operator's statistics give."""
    rows = _rows(reading)
    together = reading.outside != "zero"
    return (
        reading.labels is not None
        and any(row.factors[:, PICKED].any() for row in rows)
        and len({row.steps for row in rows}) == 1
        and all(not row.is_live or row.is_free_of_maximum(together) for row in rows)
    )


def _rows(reading: Reading) -> list[Row]:
    return [s.row if isinstance(s, Total) else s for s in reading.results.values()]


def _stepped(x: jax.Array, steps: Sequence[Node]) -> jax.Array:
    """Returns x [..., D] after slices and reshapes of logits' rows."""
    for node in steps:
        if node.name == "slice":
            x = x[tuple(cuts(node.out)[:-1])]
        else:
            x = reshaped(x, *node.out.shape[:-1], x.shape[-1])
    return x


def _times(array: jax.Array, factor: float) -> jax.Array:
    return array if factor == 1.0 else array * factor


def _smoothing_of(row: Row, outside: str) -> tuple[float, float] | None:
    """Returns the factor and the label smoothing with which a row's number is a loss, or None."""
    factor = row.factors[:, LOG_SUM].sum()
    expected = np.zeros(4)
    expected[LOG_SUM], expected[PICKED] = factor, row.factors[:, PICKED].sum()
    expected[MEAN] = -factor - expected[PICKED]
    if factor == 0 or not np.allclose(
        row.factors.sum(0), expected, rtol=0, atol=1e-7 * abs(factor)
    ):
        return None
    smoothing = float(expected[MEAN] / -factor)
    smoothing = 0.0 if abs(smoothing) < 1e-7 else smoothing
    if outside == "zero" and (row.factors[ALWAYS].any() or smoothing):
        return None
    return (float(factor), smoothing) if 0.0 <= smoothing < 1.0 else None


def _add(book: Book, p: Projection, affine: Biased, reading: Reading, factor: float) -> None:
    """Adds the replacement of a loss; `reading` starts at a product times `factor`."""
    classes = math.prod(p.features)
    labels = reading.labels
    assert labels is not None
    results, rows = reading.results, _rows(reading)
    steps = rows[0].steps
    inputs = [p.x, p.w, labels]
    if affine.bias is not None:
        inputs.append(affine.bias)
    plain = _smoothing_of(rows[0], reading.outside) if len(rows) == 1 else None
    is_zero = reading.outside == "zero"

    def call(
        x: jax.Array, w: jax.Array, labels: jax.Array, *bias: jax.Array
    ) -> Sequence[jax.Array]:
        x = _times(_stepped(p.inputs(x), steps), factor)
        labels = reshaped(labels, *x.shape[:-1])
        inside = (labels >= 0) & (labels < classes)
        known = {
            "zero": jnp.where(inside, labels, 0),
            "clip": labels.clip(0, classes - 1),
            "nan": labels,
        }
        operands = [x, p.matrix(w), known[reading.outside]]
        operands += [_times(p.bias(bias[0]), factor)] if bias else []
        if plain is not None:
            losses = linear_softmax_cross_entropy(
                *operands,
                label_smoothing=plain[1],
                logits_soft_cap=reading.soft_cap,
                reduction="none",
            )
            numbers = [plain[0] * (jnp.where(inside, losses, 0.0) if is_zero else losses)]
        else:
            statistics = linear_softmax_statistics(
                *operands,
                of_mean=any(row.factors[:, MEAN].any() for row in rows),
                logits_soft_cap=reading.soft_cap,
            )
            columns = (statistics.maximum, statistics.log_sum, statistics.picked, statistics.mean)
            numbers = [_number(row, columns, inside if is_zero else None) for row in rows]
        for i, state in enumerate(results.values()):
            if isinstance(state, Total):
                numbers[i] = reshaped(numbers[i], *state.shape).sum(state.axes)
        return [
            reshaped(number.astype(value.dtype), *value.shape)
            for value, number in zip(results, numbers, strict=True)
        ]

    leaves = {p.result, labels} | (set() if affine.bias is None else {affine.bias})
    covered = set(p.covered) | affine.covered
    for value in results:
        covered |= between(value, leaves)
    words = [] if plain is None or not plain[1] else [f"label_smoothing {plain[1]:.4g}"]
    words += [] if plain is not None else [f"{len(rows)} x a number of each row"]
    words += [] if factor == 1.0 else [f"logits times {factor:.4g}"]
    words += [] if reading.soft_cap is None else [f"cap {reading.soft_cap:g}"]
    of = f"({', '.join(words)}) of" if words else " of"
    book.add(
        Site(
            "linear_softmax_cross_entropy",
            p.node,
            inputs,
            [*results],
            call,
            covered,
            f"linear_softmax_cross_entropy{of} {p.x.aval.str_short()} and {classes} classes",
        )
    )


def _number(row: Row, statistics: Sequence[jax.Array], inside: jax.Array | None) -> jax.Array:
    """Returns a row's number; without terms of labels where a label is not `inside` the classes."""

    def total(factors: np.ndarray) -> jax.Array:
        terms = [float(f) * s for f, s in zip(factors, statistics, strict=True) if f]
        return sum(terms, jnp.zeros_like(statistics[MAXIMUM]))

    if inside is None:
        return total(row.factors.sum(0))
    return total(row.factors[ALWAYS]) + jnp.where(inside, total(row.factors[OF_LABELS]), 0.0)
