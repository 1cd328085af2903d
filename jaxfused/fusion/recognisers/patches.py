"""Finds linear in a convolution whose windows do not overlap: the embedding of an image's patches.

Such a convolution is a product of patches and a matrix. Convolution kernels are slow with the few input
channels of an image, most of all in wgrad.
"""

import math
from collections.abc import Sequence

import jax

from jaxfused.fusion.algebra import core, trailing
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.linear.linear import linear
from jaxfused.runtime.shapes import reshaped


def find(book: Book) -> None:
    """Finds all convolutions that cut their input into patches, and records their replacements."""
    for node in book.graph.nodes:
        if node.name == "conv_general_dilated" and node not in book.owner and _cuts(node):
            book.add(_site(book, node))


def _cuts(node: Node) -> bool:
    """Returns whether the windows have several pixels each, do not overlap, and leave no pixel out."""
    params = node.params
    numbers = params["dimension_numbers"]
    x, w = node.ins
    window = [w.shape[axis] for axis in numbers.rhs_spec[2:]]
    image = [x.shape[axis] for axis in numbers.lhs_spec[2:]]
    return (
        x.is_floating
        and x.dtype == w.dtype == node.out.dtype
        and params["feature_group_count"] == params["batch_group_count"] == 1
        and tuple(params["window_strides"]) == tuple(window)
        and all(tuple(pads) == (0, 0) for pads in params["padding"])
        and all(d == 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
        and math.prod(window) > 1
        and all(size % cut == 0 for size, cut in zip(image, window, strict=True))
    )


def _site(book: Book, node: Node) -> Site:
    numbers = node.params["dimension_numbers"]
    x, w = node.ins
    spatial = len(numbers.lhs_spec) - 2
    window = [w.shape[axis] for axis in numbers.rhs_spec[2:]]
    result = node.out
    covered = {node}
    weights, bias = core(w), None
    channels_last = numbers.out_spec[1] == result.ndim - 1
    if channels_last and result.used_once and result.uses[0].name == "add":
        added = result.uses[0]
        other = added.ins[1] if added.ins[0] is result else added.ins[0]
        bias = trailing(other, (result.shape[-1],))
        if bias is not None and added not in book.owner and added.out.shape == result.shape:
            result = added.out
            covered.add(added)
    shape, precision = result.shape, node.params["precision"]

    def call(x: jax.Array, w: jax.Array, *bias: jax.Array) -> Sequence[jax.Array]:
        x = x.transpose(numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
        cut = [x.shape[0]]
        for size, length in zip(x.shape[1:-1], window, strict=True):
            cut += [size // length, length]
        patches = reshaped(x, *cut, x.shape[-1])
        axes = range(1, 2 * spatial + 1)
        patches = patches.transpose(0, *axes[::2], *axes[1::2], 2 * spatial + 1)
        patches = reshaped(patches, *patches.shape[: spatial + 1], -1)
        matrix = w.transpose(*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
        y = linear(
            patches,
            reshaped(matrix, -1, matrix.shape[-1]),
            bias[0].reshape(-1) if bias else None,
            precision=precision,
        )
        placed = [0] * y.ndim
        for position, axis in enumerate((numbers.out_spec[0], *numbers.out_spec[2:])):
            placed[axis] = position
        placed[numbers.out_spec[1]] = y.ndim - 1
        return (reshaped(y.transpose(placed), *shape),)

    inputs: list[Value] = [x, weights]
    if result is not node.out and bias is not None:
        inputs.append(bias)
    return Site(
        "linear",
        node,
        inputs,
        [result],
        call,
        covered,
        f"linear of patches {'x'.join(map(str, window))} of {x.aval.str_short()}",
    )
