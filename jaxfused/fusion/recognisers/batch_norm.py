"""Finds batch_norm in training, with the residual sum and the activation after it.

The mean and variance of the batch are results too: the program updates its running averages with them.
BatchNorm in inference is elementwise and is left to XLA; after a convolution, `conv` includes it.
"""

import jax

from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers import image_norm
from jaxfused.fusion.recognisers.image_norm import Match, widened
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.conv.conv import Statistics
from jaxfused.ops.norm.batch_norm import run


def find(book: Book) -> None:
    """Finds all batch norms that compute statistics of the batch, and records their replacements."""
    image_norm.find(book, _site, of_batch=True)


def _site(root: Node, found: Match) -> Site:
    covered = found.covered()
    means, variances = _statistics(found, covered)

    def call(
        *arrays: jax.Array, statistics: Statistics | None = None, mask_gradient: bool = True
    ) -> list[jax.Array]:
        operands = found.operands_of([*widened(found, arrays[:1]), *arrays[1:]])
        y, mean, variance = run(
            operands.pop("x"),
            epsilon=found.epsilon,
            activation=found.activation,
            statistics=statistics,
            mask_gradient=mask_gradient,
            **operands,
        )
        beside = [(value, mean) for value in means] + [(value, variance) for value in variances]
        return [
            found.result(y),
            *(array.reshape(value.shape).astype(value.dtype) for value, array in beside),
        ]

    return Site(
        "batch_norm",
        root,
        [found.x.value, *found.operands.values()],
        [found.value, *means, *variances],
        call,
        covered,
        f"batch_norm{found.words()}",
        facts=found,
    )


def _statistics(found: Match, covered: set[Node]) -> tuple[list[Value], list[Value]]:
    """Returns the means and variances that operations outside of `covered` read."""
    moments, channels = found.moments, found.arrangement.channels
    means, variances = [], []
    for node in sorted(covered, key=lambda node: node.order):
        value = node.out
        is_read = value.is_output or any(reader not in covered for reader in value.uses)
        layout = moments.frame.of_parts(channels, value.shape)
        if value is found.value or not is_read or layout is None:
            continue
        seen = moments.frame.look(value, layout)
        if moments.is_mean(seen):
            means.append(value)
        elif moments.epsilon(seen) == 0.0:
            variances.append(value)
    return means, variances
