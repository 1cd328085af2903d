"""Finds conv: a convolution with a scale and bias of each channel, the residual sum and the activation.

A bias, or BatchNorm in inference, multiplies each channel by a number and adds another. The factor is
multiplied into the weights, and the summand is the operator's bias. A BatchNorm in training gets its
statistics from the convolution, if a kernel computes them. If the convolution reads the concatenation of
two arrays along their channels, and nothing else does, the operator reads the two arrays instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfused.fusion.activation import activation_of, why_no_activation
from jaxfused.fusion.algebra import between, core, is_reshape, is_transparent, view
from jaxfused.fusion.channels import why_no_channels_first
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers.image_norm import Match, widened
from jaxfused.fusion.recognisers.product import residual_of
from jaxfused.fusion.site import Book, Site, leaking
from jaxfused.ops.conv.conv import run
from jaxfused.ops.conv.conv_input import Concatenated, ConvInput
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.rectified import Rectified
from jaxfused.runtime.shapes import reshaped


def find(book: Book) -> None:
    """Finds all convolutions that nothing replaces yet, and records their replacements."""
    for node in book.graph.nodes:
        if node.name == "conv_general_dilated" and node not in book.owner and _is_dense(node):
            why = _why_not(node)
            if why:
                book.miss("conv", node, why)
            else:
                _find_at(book, node)


def _is_dense(node: Node) -> bool:
    """True if the operation convolves images of one or more spatial axes, in one floating dtype."""
    x, w = node.ins
    return x.is_floating and x.ndim >= 3 and x.dtype == w.dtype == node.out.dtype


def _why_not(node: Node) -> str:
    numbers, axes = node.params["dimension_numbers"], node.out.ndim - 2
    if node.params["batch_group_count"] != 1:
        return "its images are convolved with kernels of their own (batch_group_count)"
    channels_last = numbers.lhs_spec[1] == numbers.out_spec[1] == axes + 1
    return "" if channels_last else why_no_channels_first(node.out, axes)


@dataclass(frozen=True)
class Convolution:
    """Facts of a site, whose call takes `return_input` and `is_rectified`, and masks with a norm."""

    reads_one: bool
    """True if x is one array and not a concatenation."""
    norm: Match | None = None
    """The batch norm that the call includes, whose `mask_gradient` the call takes too."""


@dataclass(frozen=True)
class Step:
    """An elementwise operation whose other operand is one number, or one for each channel."""

    name: str
    operand: Value
    """One number, or one for each channel."""
    dtype: Any
    """Dtype in which the program computes this step."""
    is_reversed: bool
    """True if the operand comes first, as in `operand - x`."""


@dataclass(frozen=True)
class Followed:
    """A convolution's result after the steps, residual sum and activation that `conv` can include."""

    value: Value
    steps: tuple[Step, ...] = ()
    covered: frozenset[Node] = frozenset()
    residual: Value | None = None
    activation: str | None = None

    def words(self) -> str:
        """Returns which of scale, bias, residual and activation the call includes, for reports."""
        is_scaled = any(step.name in ("mul", "div") or step.is_reversed for step in self.steps)
        is_added = any(step.name in ("add", "sub") for step in self.steps)
        words = ["scaled weights"] * is_scaled + ["bias"] * is_added
        words += ["residual"] * (self.residual is not None)
        return ", ".join([*words, *([self.activation] if self.activation else [])])


def _steps(book: Book, result: Value, first: int) -> Followed:
    """Returns the scales and biases after a convolution, up to the last value in the result's dtype.

    The channels are the axis `first` of the result.
    """
    channel: int | None = first
    channels = result.shape[first]
    current = best = Followed(result)
    while current.value.used_once:
        reader = current.value.uses[0]
        if reader in book.owner:
            break
        steps, covered = current.steps, current.covered | {reader}
        if reader.name in ("add", "sub", "mul", "div"):
            is_reversed = reader.ins[1] is current.value and reader.name in ("sub", "div")
            other = reader.ins[0] if reader.ins[1] is current.value else reader.ins[1]
            operand = None if channel is None else _of_channels(other, channel, channels)
            if operand is None or reader.out.shape != current.value.shape:
                break
            if is_reversed and reader.name == "div":
                break
            if reader.name in ("mul", "div") and _rounds_weights(result, other):
                break
            steps += (Step(reader.name, operand, reader.out.dtype, is_reversed),)
            covered |= between(other, {operand})
        elif is_reshape(reader):
            channel = _moved(channel, reader)
        elif not is_transparent(reader):
            break
        current = Followed(reader.out, steps, covered)
        if current.value.dtype == result.dtype and not is_reshape(reader):
            best = current
    return best


def _rounds_weights(result: Value, factor: Value) -> bool:
    """Returns whether 16-bit weights times the scale `factor` would be rounded again.

    Results near 0 would then differ from those of the program, which multiplies the result.
    """
    number = scalar(factor)
    if number is None or result.dtype.itemsize > 2:
        return False
    return math.frexp(number)[0] not in (0.5, -0.5)


def _moved(axis: int | None, node: Node) -> int | None:
    """Returns the axis after a reshape that only adds or drops axes of length 1, or None."""
    before, after = node.ins[0].shape, node.out.shape
    if axis is None or [size for size in before if size != 1] != [n for n in after if n != 1]:
        return None
    if before[axis] == 1:
        return None
    position = sum(size != 1 for size in before[:axis])
    return [i for i, size in enumerate(after) if size != 1][position]


def _of_channels(value: Value, channel: int, channels: int) -> Value | None:
    """Returns an operand before its broadcast, if it is one number or one for each channel, or None."""
    seen = view(value)
    axes = [axis for axis in seen.axes if axis is not None]
    is_vector = axes == ([channel] if channels != 1 else [])
    is_number = not axes and scalar(value) is not None
    return seen.base if seen.base.is_floating and (is_vector or is_number) else None


def followed_by(book: Book, node: Node, result: Value, channel: int) -> Followed:
    """Returns the result of a convolution after the operations that the operator `conv` can include."""
    found = _steps(book, result, channel)
    added = residual_of(book, found.value)
    if added is not None and added.value.dtype == result.dtype:
        covered = found.covered | {added.node}
        found = replace(found, value=added.value, covered=covered, residual=added.residual)
    activated = activation_of(found.value)
    if activated is None:
        why = why_no_activation(found.value)
        if why:
            book.miss("conv", node, why)
    elif book.is_free(activated.covered) and activated.result.dtype == result.dtype:
        covered = found.covered | activated.covered
        found = replace(found, value=activated.result, covered=covered, activation=activated.name)
    return found


def _find_at(book: Book, node: Node) -> None:
    channel = node.params["dimension_numbers"].out_spec[1]
    followed = followed_by(book, node, node.out, channel)
    site = _site(book, node, followed)
    if book.add(site) and followed.residual is None and followed.activation is None:
        _join_batch_norm(book, site)


def _join_batch_norm(book: Book, site: Site) -> None:
    """Merges a following batch norm in training into the convolution, which returns its statistics."""
    node, (y,) = site.anchor, site.outputs
    norm = next((s for s in book.sites if s.operator == "batch_norm" and s.inputs[0] is y), None)
    if norm is None:
        return
    found: Match = norm.facts
    channel = node.params["dimension_numbers"].out_spec[1]
    if y.shape != node.out.shape or found.x.layout[channel] != found.arrangement.channels:
        return
    count = len(site.inputs)

    def call(
        *arrays: jax.Array, mask_gradient: bool = True, **options: bool
    ) -> Sequence[jax.Array]:
        read = widened(found, arrays[:count])
        y, statistics, *again = site.call(*read, statistics=True, **options)
        masks = dict(statistics=statistics, mask_gradient=mask_gradient)
        return [
            *norm.call(y, *arrays[count:], **masks),
            *(x.astype(arrays[0].dtype) for x in again),
        ]

    joined = Site(
        "conv",
        node,
        [*site.inputs, *norm.inputs[1:]],
        norm.outputs,
        call,
        site.covered | norm.covered | found.covered(),
        f"{site.detail}, {norm.detail}",
        parts=(site, norm),
        facts=replace(site.facts, norm=found),
    )
    if leaking(joined) is None:
        book.add(joined)


def _site(book: Book, node: Node, followed: Followed) -> Site:
    steps, residual, value = followed.steps, followed.residual, followed.value
    w = core(node.ins[1])
    numbers = node.params["dimension_numbers"]
    parts, joined = _parts(book, node)
    last = [numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1]]
    shape = value.shape

    first = [numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]]

    def call(
        *arrays: jax.Array,
        statistics: bool = False,
        return_input: bool = False,
        is_rectified: bool = False,
    ) -> Sequence[Any]:
        read, (w, *others) = arrays[: len(parts)], arrays[len(parts) :]
        images = [a.transpose(first) for a in read]
        x: ConvInput = Concatenated(*images) if len(images) > 1 else images[0]
        x = Rectified(images[0]) if is_rectified else x
        w = w.transpose(*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
        w, bias = folded(w, steps, others, accumulator_dtype(x.dtype))
        y, again, taken = run(
            x,
            w,
            bias,
            activation=followed.activation,
            residual=None
            if residual is None
            else reshaped(others[-1], *node.out.shape).transpose(last),
            window=dict(
                strides=node.params["window_strides"],
                padding=node.params["padding"],
                input_dilation=node.params["lhs_dilation"],
                kernel_dilation=node.params["rhs_dilation"],
                feature_group_count=node.params["feature_group_count"],
            ),
            precision=node.params["precision"],
            return_input=return_input,
            statistics=statistics,
        )
        y = reshaped(y.transpose([last.index(axis) for axis in range(y.ndim)]), *shape)
        results = [y, taken] if statistics else [y]
        if return_input:
            results.append(again.transpose([first.index(axis) for axis in range(again.ndim)]))
        return results

    return Site(
        "conv",
        node,
        [*parts, w, *(step.operand for step in steps), *([] if residual is None else [residual])],
        [value],
        call,
        {node} | followed.covered | joined | between(node.ins[1], {w}),
        f"conv({followed.words()}) of"
        f" {' and '.join(part.aval.str_short() for part in parts)} and {list(w.shape)}",
        facts=Convolution(reads_one=len(parts) == 1),
    )


def _parts(book: Book, node: Node) -> tuple[Sequence[Value], set[Node]]:
    """Returns the arrays that a convolution reads, and the concatenation that it replaces.

    They are two arrays if the convolution alone reads their concatenation, and else one.
    """
    x = node.ins[0]
    joined = x.node
    if joined is None or joined.name != "concatenate" or not x.used_once or joined in book.owner:
        return [x], set()
    channel = node.params["dimension_numbers"].lhs_spec[1]
    if joined.params["dimension"] != channel or len(joined.ins) != 2:
        return [x], set()
    return joined.ins, {joined}


def folded(
    w: jax.Array, steps: Sequence[Step], arrays: Sequence[jax.Array], dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns weights [..., C] and a bias [C] with which the convolution includes the steps."""
    channels = w.shape[-1:]
    vectors = [array.reshape(-1) for array in arrays[: len(steps)]]
    if [step.name for step in steps] == ["add"]:
        return w, jax.numpy.broadcast_to(vectors[0].astype(steps[0].dtype), channels)
    factor: jax.Array | None = None
    bias: jax.Array | None = None
    for step, vector in zip(steps, vectors, strict=True):
        operand = vector.astype(dtype)
        if step.name in ("mul", "div"):
            operand = operand if step.name == "mul" else 1.0 / operand
            factor = operand if factor is None else factor * operand
            bias = None if bias is None else bias * operand
            continue
        if step.name == "sub" and step.is_reversed:
            factor = -jax.numpy.ones((), dtype) if factor is None else -factor
            bias = None if bias is None else -bias
        elif step.name == "sub":
            operand = -operand
        bias = operand if bias is None else bias + operand
    if factor is not None:
        w = w.astype(dtype) * factor
    return w, None if bias is None else jax.numpy.broadcast_to(bias, channels)
