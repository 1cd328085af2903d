"""Finds group_norm, with the scale and shift of each image, the residual sum and the activation.

Instance norm and the norm of a whole image are group norms too. Channels may come first, where XLA's
own convolutions have them last in memory.
"""

from typing import Any

import jax

from jaxfused.fuse.channels import arrangements, is_of_rows
from jaxfused.fuse.graph import Node
from jaxfused.fuse.moments import is_root, statistics
from jaxfused.fuse.recognisers.image_norm import Match, add, match
from jaxfused.fuse.site import Book, Site
from jaxfused.ops.group_norm import group_norm
from jaxfused.reference.promotion import accumulator_dtype


def find(book: Book) -> None:
    """Adds all group norms of the graph."""
    for root in book.graph.nodes:
        if not is_root(root) or not root.out.uses or root in book.owner:
            continue
        moments = statistics(root)
        if moments is None or is_of_rows(moments):
            continue
        readings = list(arrangements(moments, moments.frame.source.layout))
        if not readings or any(a.is_of_batch for a in readings):
            continue
        found = match(moments, root, of_batch=False)
        if isinstance(found, Match):
            add(book, root, found, _site)
        elif found:
            book.miss("group_norm", root, found)


def _site(root: Node, found: Match) -> Site:
    arrangement = found.arrangement
    groups = found.moments.frame.length(arrangement.groups)
    names = list(found.operands)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        operands: dict[str, Any] = {
            name: found.operand(name, array)
            for name, array in zip(["x", *names], arrays, strict=True)
        }
        x = operands.pop("x")
        if "image_scale" in operands:
            # The program has added 1 already, in its own dtype.
            factor = operands["image_scale"].astype(accumulator_dtype(x.dtype))
            operands["image_scale"] = factor - 1.0
        y = group_norm(
            x,
            num_groups=groups,
            epsilon=found.epsilon,
            activation=found.activation,
            **operands,
        )
        return [found.result(y)]

    return Site(
        "group_norm",
        root,
        [found.x.value, *found.operands.values()],
        [found.value],
        call,
        found.covered(),
        f"group_norm{found.words()}, num_groups={groups}",
        facts=found,
    )
