"""The sum of the squares of all gradients of a tree, by a CUDA kernel on each device's shards."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.ops.optimizer import optimizer_step
from jaxfused.runtime import sharding
from jaxfused.runtime.reference_rules import with_reference_rules


def squared_norm(gradients: Sequence[jax.Array]) -> jax.Array:
    """Returns the float32 sum of the squares of arrays of any shapes, in dtypes of the CUDA kernel.

    The rules for `jax.vmap` and for differentiation are those of the same sum in jax.numpy.
    """
    gradients = [g for g in gradients if g.size]
    if not gradients:
        return jnp.zeros(())

    [total] = with_reference_rules(_by_kernel, _by_reference)(*gradients)
    return total


def clipping_factor(norm: jax.Array, max_norm: jax.Array) -> jax.Array:
    """Returns the factor that scales gradients of this norm down to `max_norm`, at most 1."""
    return jnp.where(norm < max_norm, 1.0, max_norm / norm)


def _by_reference(*gradients: jax.Array) -> tuple[jax.Array]:
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients]
    return (sum(squares, jnp.zeros(())),)


def _by_kernel(*gradients: jax.Array) -> tuple[jax.Array]:
    axes = [tuple(f"leaf{i}_{axis}" for axis in range(g.ndim)) for i, g in enumerate(gradients)]

    def on_shards(axes, where, *arrays):
        names = [where.names(of_leaf) for of_leaf in axes]
        one = jnp.ones_like(arrays[0], jnp.float32, shape=())
        return (optimizer_step.sum_of_squares(one, arrays, names)[0],)

    [total] = sharding.per_array_shard(
        functools.partial(on_shards, axes), gradients, operand_axes=axes, result_axes=[()]
    )
    return (total,)
