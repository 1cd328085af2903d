"""Changes how devices share an array whose type states it (Explicit axes), outside of kernels."""

import string
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfused.runtime.sharding import align, leading_axes, names_of


def whole(*arrays: jax.Array) -> tuple[Any, ...]:
    """Reshards arrays whose types state a sharding, such that no axis is split."""
    axes = [leading_axes(array.ndim) for array in arrays]
    return align(arrays, operand_axes=axes, whole=string.ascii_uppercase)


def unsplit(x: jax.Array, axes: Iterable[int]) -> jax.Array:
    """Reshards an array whose type states a sharding, such that these axes are not split."""
    axes = {axis % x.ndim for axis in axes}
    return _resharded(x, [None if axis in axes else n for axis, n in enumerate(_entries(x))])


def split_with(array: jax.Array, other: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Reshards an array where its split conflicts with that of `other`, beside which it is broadcast.

    JAX refuses operands with Explicit axes of which one mesh axis splits different axes, as the rows of
    activations and the bias of a layer whose parameters are fully sharded.

    Args:
      array: an array.
      other: the array whose split stays.
      axes: the axis of `other` for each axis of the array; None if they have the same axes.
    """
    of_other = _entries(other)
    used = {name for entry in of_other for name in names_of(entry)}
    wanted = []
    for own, axis in zip(_entries(array), range(array.ndim) if axes is None else axes, strict=True):
        beside = of_other[axis]
        fits = own == beside or (beside is None and used.isdisjoint(names_of(own)))
        wanted.append(own if own is None or fits else beside)
    return _resharded(array, wanted)


def split_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """Reshards an array, where types state it, such that it is split as one of the same shape."""
    return _resharded(array, _entries(other))


def _entries(x: jax.Array) -> list[Any]:
    """Returns the mesh axes that split each axis of x, as its type states."""
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (x.ndim - len(spec))]


def _resharded(x: jax.Array, entries: Sequence[Any]) -> jax.Array:
    mesh = jax.typeof(x).sharding.mesh
    if [*entries] == _entries(x) or not mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*entries)))


def whole_images(x: jax.Array) -> jax.Array:
    """Reshards images [B, *spatial, C] whose type states a sharding: no spatial axis stays split."""
    spatial = leading_axes(x.ndim - 2)
    (aligned,) = align((x,), operand_axes=("b" + spatial + "c",), whole=spatial)
    assert aligned is not None
    return aligned


def whole_images_on_several_axes(x: jax.Array) -> jax.Array:
    """Returns images [B, *spatial, C], gathered along spatial axes on a mesh of several Auto axes.

    If some of the axes split the height of images, XLA's partitioner multiplies the gradient of a
    convolution's weights by the number of devices along the others (jax 0.11.2 and 0.12.0.1). Without
    `jax.set_mesh` the axes are not known here, and nothing is gathered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    several = sum(mesh.shape[name] > 1 for name in mesh.auto_axes) > 1
    if not several or mesh.manual_axes or mesh.explicit_axes:
        return x
    spec = P(P.UNCONSTRAINED, *[None] * (x.ndim - 2), P.UNCONSTRAINED)
    return lax.with_sharding_constraint(x, spec)


def split_by_batch(
    batched: Sequence[jax.Array | None], others: Sequence[jax.Array | None] = ()
) -> tuple[Any, ...]:
    """Reshards arrays whose types state it: only the first axis of the `batched` ones stays split."""
    arrays = (*batched, *others)
    axes = ["" if array is None else leading_axes(array.ndim) for array in arrays]
    for i in range(len(batched)):
        axes[i] = "b" + axes[i][1:]
    return align(arrays, operand_axes=axes, whole=string.ascii_uppercase)
