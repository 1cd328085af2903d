"""Finds upsample: `jax.image.resize`, which multiplies each axis by a matrix of weights.

Nearly all of the weights are zero. The matrices do not depend on the arguments, and are recognised by
their values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion.constants import evaluate
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.pool.upsample import upsample

_FACTOR = 2
"""Factor by which the operator's kernels enlarge each axis."""


def find(book: Book) -> None:
    """Finds products that enlarge all spatial axes of channels-last images by 2, and records them."""
    for node in book.graph.nodes:
        if node.name == "dot_general" and node not in book.owner:
            first = _enlarged(node)
            if first is not None and (first.x.node is None or _enlarged(first.x.node) is None):
                _find_at(book, node, first)


class _Enlarged(NamedTuple):
    """A product that enlarges an axis of an array."""

    x: Value
    axis: int
    is_first: bool
    """True if the enlarged axis is the first axis of the result. Otherwise it is the last."""


def _enlarged(node: Node) -> _Enlarged | None:
    """Returns the array and the axis that an operation enlarges, or None."""
    if node.name != "dot_general":
        return None
    contracted, batch = node.params["dimension_numbers"]
    if any(len(axes) != 1 for axes in contracted) or any(batch):
        return None
    for weights, data in ((0, 1), (1, 0)):
        x, w = node.ins[data], node.ins[weights]
        (axis,), (along,) = contracted[data], contracted[weights]
        if w.ndim != 2 or not w.is_constant or x.is_constant or x.dtype != node.out.dtype:
            continue
        size = x.shape[axis]
        if sorted(w.shape) != [size, _FACTOR * size] or not x.is_floating:
            continue
        matrix = evaluate(w)
        if matrix is None or matrix.shape != w.shape:
            continue
        off = np.abs((matrix if along == 0 else matrix.T) - _weights(size)).max()
        # The exact weights are multiples of 1/4; `jax.image.resize` rounds them in a division.
        if off <= 2 * jnp.finfo(w.dtype).eps:
            return _Enlarged(x, int(axis), weights == 0)
    return None


def _weights(size: int) -> np.ndarray:
    """Returns the matrix [size, 2 size] of bilinear interpolation between the centres of pixels."""
    centres = (np.arange(_FACTOR * size) + 0.5) / _FACTOR - 0.5
    distances = np.abs(np.clip(centres, 0, size - 1) - np.arange(size)[:, None])
    return np.maximum(0.0, 1.0 - distances)


def _find_at(book: Book, node: Node, first: _Enlarged) -> None:
    x = first.x
    order = list(range(x.ndim))
    enlarged: set[int] = set()
    covered: set[Node] = set()
    following: Node | None = node
    while following is not None and following not in book.owner:
        step = _enlarged(following)
        if step is not None:
            axis = order.pop(step.axis)
            order.insert(0 if step.is_first else len(order), axis)
            enlarged.add(axis)
        elif following.name == "transpose":
            order = [order[axis] for axis in following.params["permutation"]]
        else:
            break
        covered.add(following)
        y = following.out
        if order == list(range(x.ndim)) and enlarged == set(range(1, x.ndim - 1)):
            book.add(_site(node, x, y, covered))
            return
        following = y.uses[0] if y.used_once else None


def _site(node: Node, x: Value, y: Value, covered: set[Node]) -> Site:
    def call(x: jax.Array) -> Sequence[jax.Array]:
        return (upsample(x, _FACTOR),)

    return Site(
        "upsample", node, [x], [y], call, covered, f"upsample by {_FACTOR} of {x.aval.str_short()}"
    )
