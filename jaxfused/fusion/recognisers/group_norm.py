"""Finds group_norm, with the scale and shift of each image, the residual sum and the activation.

Instance norm and the norm of a whole image are group norms too. Images [B, C, H, W] are included where
XLA's convolutions store the channels as the contiguous axis.
"""

import jax

from jaxfused.fusion.graph import Node
from jaxfused.fusion.recognisers import image_norm
from jaxfused.fusion.recognisers.image_norm import Match, widened
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.norm.group_norm import group_norm
from jaxfused.runtime.promotion import accumulator_dtype


def find(book: Book) -> None:
    """Finds all group norms of the graph and records their replacements."""
    image_norm.find(book, _site, of_batch=False)


def _site(root: Node, found: Match) -> Site:
    arrangement = found.arrangement
    groups = found.moments.frame.length(arrangement.groups)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        operands = found.operands_of([*widened(found, arrays[:1]), *arrays[1:]])
        x = operands.pop("x")
        if "image_scale" in operands:
            # The operator adds 1 to `image_scale`, but the program's factor contains the 1 already.
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
