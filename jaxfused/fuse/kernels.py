"""Which sites have a kernel: on a GPU, what XLA would run in every stage stays the program's own."""

from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.fuse.site import Book, Site


def drop_what_xla_runs(book: Book) -> None:
    """Takes out the sites of which no stage, forward or gradient, has a kernel that is to run.

    An operator in plain jax.numpy is no faster than the program. Elsewhere than on a GPU there are no
    kernels at all, and the operators' references show what would be found.
    """
    if dispatch.current_device().platform != "gpu":
        return
    decided: dict[Any, bool] = {}
    pending = list(book.sites)
    while pending:
        site = pending.pop(0)
        key = (site.detail, *(str(value.aval) for value in site.inputs))
        if key not in decided:
            decided[key] = _has_kernel(site)
        if not decided[key]:
            pending += book.take_out([site])
            book.miss(
                site.operator, site.anchor, "XLA is to run it on this GPU, forward and gradient"
            )


def _has_kernel(site: Site) -> bool:
    """Whether a stage is chosen to run in a kernel, or nothing is known before XLA compiles."""
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
        jax.eval_shape(differentiated, *shapes)
    return not choices or any(choice.implementation != "xla" for choice in choices)
