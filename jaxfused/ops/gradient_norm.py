"""The sum of the squares of all gradients of a tree by a kernel, on one device or on shards."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfused import sharding
from jaxfused.ops import optimizer_step


@jax.custom_jvp
def squared_norm(gradients: Sequence[jax.Array]) -> jax.Array:
    """Returns the float32 sum of the squares of arrays of any shapes, in dtypes that kernels take.

    The rules for `jax.vmap` and for differentiation are those of the same sum in jax.numpy.
    """
    gradients = [g for g in gradients if g.size]
    if not gradients:
        return jnp.zeros(())

    @custom_vmap
    def batchable(*arrays):
        return _by_kernel(arrays)

    @batchable.def_vmap
    def rule(axis_size, in_batched, *arrays):
        del axis_size
        in_axes = [0 if batched else None for batched in in_batched]
        return jax.vmap(lambda *a: _by_reference(a), in_axes)(*arrays), True

    return batchable(*gradients)


@squared_norm.defjvp
def _jvp(primals, tangents):
    return jax.jvp(_by_reference, primals, tangents)


def _by_reference(gradients: Sequence[jax.Array]) -> jax.Array:
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients]
    return sum(squares, jnp.zeros(()))


def _by_kernel(gradients: Sequence[jax.Array]) -> jax.Array:
    axes = [tuple(f"leaf{i}_{axis}" for axis in range(g.ndim)) for i, g in enumerate(gradients)]

    def on_shards(axes, where, *arrays):
        names = [where.names(of_leaf) for of_leaf in axes]
        one = jnp.ones_like(arrays[0], jnp.float32, shape=())
        return (optimizer_step.sum_of_squares(one, arrays, names)[0],)

    [total] = sharding.per_array_shard(
        functools.partial(on_shards, axes), gradients, operand_axes=axes, result_axes=[()]
    )
    return total
