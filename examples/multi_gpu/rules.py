"""Maps the names of arrays' axes, which models state, to the mesh axes that split them.

A Flax model names the axes of its parameters: `nnx.with_partitioning(init, ("embed", "mlp"))`, or
`kernel_metadata=dict(out_sharding=("embed", "mlp"))`; in Linen `nn.with_partitioning` or
`nn.with_logical_partitioning`. `RULES` says what the names mean; axes of the mesh may be named too.
"""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from examples.errors import ExampleError

AXES = ("data", "fsdp", "context", "tensor")
"""Axes of the mesh, outermost first: devices along the last, tensor, are on one host if they fit.

data: splits each batch; every device has all parameters.
fsdp: splits each batch and each parameter, which is all-gathered where a layer reads it.
context: splits each sequence.
tensor: splits heads, hidden features and the vocabulary.
"""

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "batch": ("data", "fsdp"),
    "length": "context",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "joined_kv": "tensor",
    "kv": None,
    "layers": None,
}

FSDP_ELEMENTS = 2**12
"""Fewest elements of a parameter without axis names, of two axes or more, to be split over fsdp."""


def spec(
    names: Sequence[str | tuple[str, ...] | None] | None,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    rules: Rules = RULES,
) -> P:
    """Returns an array's partition spec; an axis that the number of devices does not divide is unsplit.

    Args:
      names: names of the array's last axes; None to split a large array over fsdp, along its largest
        axis that the number of devices divides.
      shape: shape of the array.
      sizes: sizes of the mesh's axes.
      rules: mesh axes by name.

    Raises:
      ExampleError: a name is in no rule.
    """
    axes: list[tuple[str, ...]] = [()] * len(shape)
    if names is None:
        by = sizes.get("fsdp", 1)
        able = [i for i, size in enumerate(shape) if size % by == 0]
        if by > 1 and able and len(shape) > 1 and math.prod(shape) >= FSDP_ELEMENTS:
            axes[max(able, key=lambda i: shape[i])] = ("fsdp",)
        return P(*(axis or None for axis in axes))
    used: set[str] = set()
    for i, name in zip(range(len(shape) - len(names), len(shape)), names, strict=True):
        split = tuple(
            a for a in _mesh_axes(name, sizes, rules) if sizes.get(a, 1) > 1 and a not in used
        )
        if i >= 0 and split and shape[i] % math.prod([sizes[a] for a in split]) == 0:
            axes[i] = split
            used |= {*split}
    return P(*(axis or None for axis in axes))


def _mesh_axes(name, sizes: Mapping[str, int], rules: Rules) -> tuple[str, ...]:
    if name is None:
        return ()
    if isinstance(name, tuple):
        return tuple(a for each in name for a in _mesh_axes(each, sizes, rules))
    if name in rules:
        axes = rules[name]
        return axes if isinstance(axes, tuple) else (() if axes is None else (axes,))
    if name in sizes:
        return (name,)
    raise ExampleError(
        f"the names of parameters' axes need a rule, but {name!r} has none and is no axis of the mesh"
        f" ({', '.join(sizes)}); use one of {', '.join(rules)}, or add {name!r} to the rules."
    )
