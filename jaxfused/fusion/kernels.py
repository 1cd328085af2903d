"""Drops replacements that would run no kernel on a GPU: there the program stays as it is."""

from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.fusion.site import Book, Site, first_line, is_refusal


def drop_what_xla_runs(book: Book) -> None:
    """Removes replacements that no kernel runs, forward or backward, or that an operator refuses.

    An operator in plain jax.numpy is no faster than the program. Other devices than GPUs have no
    kernels: there all replacements stay, so that reports show what a GPU may run.
    """
    if dispatch.current_device().platform != "gpu":
        return
    decided: dict[Any, str | None] = {}
    pending = list(book.sites)
    while pending:
        site = pending.pop(0)
        key = (site.detail, *(str(value.aval) for value in site.inputs))
        if key not in decided:
            decided[key] = _why_none(site)
        reason = decided[key]
        if reason is not None:
            pending += book.take_out([site])
            book.miss(site.operator, site.anchor, reason)


def _why_none(site: Site) -> str | None:
    """Returns why no kernel would run; None if one would, or if XLA's compilation decides it."""
    shapes = [v.struct for v in site.inputs]
    floating = [i for i, v in enumerate(site.inputs) if v.is_floating]

    def differentiated(*operands: jax.Array) -> Any:
        def f(*arrays: jax.Array) -> Any:
            merged = list(operands)
            for i, array in zip(floating, arrays, strict=True):
                merged[i] = array
            return tuple(site.run(*merged))

        y, vjp = jax.vjp(f, *(operands[i] for i in floating))
        return vjp(y)

    with dispatch.recorded(alone=True) as choices:
        try:
            jax.eval_shape(differentiated, *shapes)
        except Exception as error:
            if not is_refusal(error):
                raise
            return f"it refused: {first_line(error)}"
    if not choices or any(choice.implementation != "xla" for choice in choices):
        return None
    return "XLA is to run it on this GPU, forward and gradient"
