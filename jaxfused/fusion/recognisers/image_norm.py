"""Matches norms of images and the operations after them, for group_norm and batch_norm."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.fusion.activation import activation_of, why_no_activation
from jaxfused.fusion.algebra import between, is_root, view
from jaxfused.fusion.channels import Arrangement, arrangements, is_of_rows, why_no_channels_first
from jaxfused.fusion.frame import Layout, Stage
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.moments import Affine, Moments, made_of, normalised, scaled, statistics
from jaxfused.fusion.recognisers.product import residual_of
from jaxfused.fusion.site import Book, Site, leaking
from jaxfused.ops.norm.moments import is_few
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.shapes import reshaped


@dataclass(frozen=True)
class Match:
    """A value that is a norm's result."""

    moments: Moments
    arrangement: Arrangement
    epsilon: float
    value: Value
    operands: dict[str, Value] = field(default_factory=dict)
    """Operands by name: scale, bias, image_scale (here 1 + scale), image_shift, residual."""
    activation: str | None = None

    @property
    def x(self) -> Stage:
        """The normalised array in the result's dtype, and if it exists with the result's axis order."""
        stages = [s for s in self.moments.frame.stages if s.value.dtype == self.value.dtype]
        alike = [stage for stage in stages if stage.layout == self.arrangement.layout]
        return (alike or stages)[-1]

    @property
    def is_of_rows(self) -> bool:
        """True if an image is one pixel in one group, whose mean is over its array's last axis."""
        read, roles = self.moments.frame.stages[0].layout, self.arrangement
        last = next((parts for parts in reversed(read) if parts), ())
        return not roles.pixels and not roles.groups and self.moments.reduced == set(last)

    def covered(self) -> set[Node]:
        """Returns the operations that compute the result from x and the operands."""
        stages = self.moments.frame.stages
        earlier = stages[stages.index(self.x) :]
        leaves = {stage.value for stage in earlier} | set(self.operands.values())
        return between(self.value, leaves)

    def operand(self, name: str, array: jax.Array) -> jax.Array:
        """Returns an array of the program in the axes that the operator takes: channels last."""
        frame, arrangement = self.moments.frame, self.arrangement
        if name == "x":
            return frame.arranged(array, self.x.layout, arrangement.operand)
        if name == "residual":
            return frame.arranged(array, arrangement.layout, arrangement.operand)
        if name in ("scale", "bias"):
            return array.reshape(-1)
        return reshaped(array, frame.length(arrangement.images), -1)

    def operands_of(self, arrays: Sequence[jax.Array]) -> dict[str, Any]:
        """Returns all operands in the axes that the operator takes, given the program's arrays."""
        names = ["x", *self.operands]
        return {name: self.operand(name, a) for name, a in zip(names, arrays, strict=True)}

    def result(self, y: jax.Array) -> jax.Array:
        """Returns the operator's result with the program's axes and dtype."""
        arrangement = self.arrangement
        y = self.moments.frame.arranged(y, arrangement.operand, arrangement.layout)
        return reshaped(y, *self.value.shape).astype(self.value.dtype)

    def words(self) -> str:
        """Returns a description of the call without the operator's name."""
        names = [*self.operands, *([self.activation] if self.activation else [])]
        return f"({', '.join(names)}) of {self.x.value.aval.str_short()}"


def widened(found: Match, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the arrays with the norm's input in float32 or float64, where rounding it may matter.

    If a norm is over few values, rounding its input may change the gradient by a tenth. On a GPU the
    input of norms over many values stays rounded. On other devices no input does, because XLA drops such
    roundings from the program.
    """
    frame, arrangement = found.moments.frame, found.arrangement
    norms = frame.length(arrangement.images) * frame.length(arrangement.groups)
    is_kept = is_few(math.prod(found.x.value.shape) // max(norms, 1))
    if not is_kept and dispatch.current_device().platform == "gpu":
        return arrays
    return [array.astype(accumulator_dtype(array.dtype)) for array in arrays]


def find(book: Book, make: Callable[[Node, Match], Site], *, of_batch: bool) -> None:
    """Finds norms over groups of channels, or over the batch, and adds what `make` returns for each."""
    operator = "batch_norm" if of_batch else "group_norm"
    for root in book.graph.nodes:
        if not is_root(root) or not root.out.uses or root in book.owner:
            continue
        moments = statistics(root)
        if moments is None or is_of_rows(moments):
            continue
        readings = list(arrangements(moments, moments.frame.source.layout))
        if not readings or any(a.is_of_batch for a in readings) != of_batch:
            continue
        found = match(moments, root, of_batch=of_batch)
        if isinstance(found, Match):
            # Where it is a norm of rows after a transposition, `norm` finds it.
            if not found.is_of_rows:
                add(book, root, found, make)
        elif found:
            book.miss(operator, root, found)


def match(moments: Moments, root: Node, *, of_batch: bool) -> Match | str:
    """Returns the last value after the root that is a norm's result, or why there is none.

    The reason is "" if the root is not that of a variance plus epsilon.
    """
    found: Match | None = None
    modulated: Match | None = None
    # A root of a variance without epsilon is a standard deviation, not part of a norm.
    is_norms = view(root.ins[0]).base.made_by == "add"
    reason = "nothing is multiplied by it and by the normalised array" if is_norms else ""
    for value in made_of(root.out):
        for layout in moments.frame.layouts(value.shape):
            affine = normalised(moments, value, layout)
            if affine is None:
                if found is not None and not of_batch:
                    modulated = _modulated(found, value, layout) or modulated
                continue
            read = [
                _read(affine, a, moments, value)
                for a in arrangements(moments, layout)
                if a.is_of_batch == of_batch
            ]
            whole = next((m for m in read if isinstance(m, Match)), None)
            found = whole or found
            if whole is None and read:
                reason = str(read[0])
    found = modulated or found
    return found or reason


def _read(affine: Affine, arrangement: Arrangement, moments: Moments, value: Value) -> Match | str:
    """Returns the norm whose result the value is, with the axes' roles `arrangement`; or why not."""
    operands = _operands(affine, arrangement)
    if isinstance(operands, str):
        return operands
    assert affine.epsilon is not None
    if {"image_scale", "bias"} <= operands.keys() or {"bias", "image_shift"} <= operands.keys():
        return "it is scaled by more than one array"
    return Match(moments, arrangement, affine.epsilon, value, operands)


def _operands(affine: Affine, arrangement: Arrangement) -> dict[str, Value] | str:
    """Returns the operands scale, bias, image_scale and image_shift by name; or why they are none."""
    operands: dict[str, Value] = {}
    names = {"scale": "image_scale", "bias": "image_shift"}
    for name, views in (("scale", affine.factors), ("bias", affine.summands)):
        for seen in views:
            shared, of_images = arrangement.of_channels(seen), arrangement.of_images(seen)
            key = name if shared is not None else names[name]
            operand = shared if shared is not None else of_images
            if operand is None:
                return "it is scaled by, or added to, an array that differs from pixel to pixel"
            if key in operands:
                return "it is scaled by more than one array"
            operands[key] = operand
    return operands


def _modulated(found: Match, value: Value, layout: Layout) -> Match | None:
    """Returns a match extended by a scale and shift of each image, or None."""
    if {"image_scale", "image_shift"} & found.operands.keys():
        return None
    before = found.arrangement
    affine = scaled(found.moments, found.value, before.layout, value, layout)
    if affine is None:
        return None
    arrangement = replace(before, layout=layout)
    operands = _operands(affine, arrangement)
    if isinstance(operands, str) or not operands.keys() <= {"image_scale", "image_shift"}:
        return None
    return replace(found, arrangement=arrangement, value=value, operands=found.operands | operands)


def why_not(found: Match) -> str:
    """Returns why the norm stays in the program, which is due to its dtypes or order of axes, or ""."""
    frame, value = found.moments.frame, found.value
    x = frame.source.value
    narrow = any(stage.value.dtype == value.dtype for stage in frame.stages)
    if not narrow or value.dtype.itemsize > x.dtype.itemsize:
        return f"its result stays in {value.dtype}, and what is normalised is {x.dtype}"
    if not found.arrangement.is_last:
        return why_no_channels_first(value, len(found.arrangement.pixels))
    return ""


def add(book: Book, root: Node, found: Match, make: Callable[[Node, Match], Site]) -> None:
    """Adds the call of a matched norm, which includes as many of the operations after it as it can."""
    operator = "batch_norm" if found.arrangement.is_of_batch else "group_norm"
    longer = [found, *_followed_by(book, found, operator)]
    whys = [why_not(each) for each in longer]
    sites = [make(root, each) for each, why in zip(longer, whys, strict=True) if not why]
    if not sites:
        book.miss(operator, root, whys[0])
        return
    book.add(next((site for site in reversed(sites) if leaking(site) is None), sites[0]))


def _followed_by(book: Book, found: Match, operator: str) -> Iterator[Match]:
    """Yields the match with the residual sum after it, then with the activation too."""
    added = residual_of(book, found.value)
    if added is not None and added.value.dtype == found.value.dtype:
        operands = found.operands | {"residual": added.residual}
        found = replace(found, value=added.value, operands=operands)
        yield found
    activated = activation_of(found.value)
    if activated is not None and book.is_free(activated.covered):
        yield replace(found, value=activated.result, activation=activated.name)
    elif activated is None:
        why = why_no_activation(found.value)
        if why and found.value.node is not None:
            book.miss(operator, found.value.node, why)
