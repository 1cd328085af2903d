"""Runs a function on each device's part of a batch, where the batch's type says how it is split."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def over_batch[R](
    f: Callable[[Any, Any, Any], R], images: jax.Array, split: Any, whole: Any = None
) -> R:
    """Returns `f(split, whole, axis_names)`, run by each device on its part of a split batch.

    Where the type of `images` has Explicit axes, each device runs `f` on its part of the batch, in a
    `jax.shard_map` over the axes that split it; else `f` runs as it is, with None for their names.

    Args:
      f: the function; its results have the batch as their first axis too.
      images: the array whose type says how the batch is split.
      split: a tree of arrays [B, ...].
      whole: a tree of arrays that all devices have.
    """
    sharding = jax.typeof(images).sharding
    mesh = sharding.mesh
    if not mesh.explicit_axes:
        return f(split, whole, None)
    names = sharding.spec[0]
    specs = P(names), P()
    split, whole = (
        jax.tree.map(
            lambda array, s=spec: jax.sharding.reshard(array, NamedSharding(mesh, s)), tree
        )
        for tree, spec in zip((split, whole), specs, strict=True)
    )
    on_shards = jax.shard_map(
        lambda split, whole: f(split, whole, names),
        mesh=mesh,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes) if mesh.manual_axes else set(),
        in_specs=specs,
        out_specs=P(names),
        # The check is off, since types of kernel results do not state the mesh axes along which
        # they vary.
        check_vma=False,
    )
    return on_shards(split, whole)
