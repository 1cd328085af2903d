"""Finds max_pool, whose gradient is one pass over the image here, but a scatter in XLA."""

from collections.abc import Sequence

import jax

from jaxfused.fusion.graph import Node
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.pool.max_pool import max_pool


def find(book: Book) -> None:
    """Finds all max pools of channels-last images and records their replacements."""
    for node in book.graph.nodes:
        if node.name == "reduce_window_max" and node not in book.owner and _is_pool(node):
            book.add(_site(node))


def _is_pool(node: Node) -> bool:
    """Returns whether windows are only along the axes of pixels, and not dilated."""
    params, (x,) = node.params, node.ins
    dilations = (*params["base_dilation"], *params["window_dilation"])
    return (
        x.is_floating
        and x.ndim >= 3
        and all(dilation == 1 for dilation in dilations)
        and all(
            params["window_dimensions"][axis] == params["window_strides"][axis] == 1
            and tuple(params["padding"][axis]) == (0, 0)
            for axis in (0, -1)
        )
        and all(low >= 0 and high >= 0 for low, high in params["padding"])
    )


def _site(node: Node) -> Site:
    window, strides, padding = (
        tuple(node.params[name])[1:-1]
        for name in ("window_dimensions", "window_strides", "padding")
    )

    def call(x: jax.Array) -> Sequence[jax.Array]:
        return (max_pool(x, window, strides=strides, padding=padding),)

    size = "x".join(map(str, window))
    return Site(
        "max_pool",
        node,
        node.ins,
        node.outs,
        call,
        {node},
        f"max_pool of {size} of {node.ins[0].aval.str_short()}",
    )
