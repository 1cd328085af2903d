"""A `jax.shard_map` that is compiled once for equal calls, outside of `jax.jit` too.

Outside of `jax.jit`, JAX compiles each operation within a `jax.shard_map` separately, and most of them
again at every call.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxfused import dispatch
from jaxfused.runtime import table as tables


def over_mesh(
    f: Callable[..., Any],
    static: tuple[Hashable, ...],
    operands: tuple[Any, ...],
    *,
    mesh: Any,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """Returns `f(*static, *operands)`, computed by each device from its shards.

    Args:
      f: a function of a module: equal functions with equal `static` must compute the same.
      static: the first arguments of `f`, compared by value.
      operands: trees of arrays and Nones; arrays of Explicit axes are resharded to `in_specs`.
      mesh: the mesh, all axes of which are mapped.
      in_specs: a PartitionSpec for each array of the operands, None for an absent one.
      out_specs: the PartitionSpecs of the results.
    """
    device = dispatch.current_device()
    call = _Call(f, static, mesh, in_specs, out_specs, device, tables.load(device))
    if _is_staged(operands):
        return call(*operands)
    if dispatch.is_recorded():
        # A new trace, of gradients too, records every implementation chosen; a cached trace records
        # none.
        return jax.jit(lambda *operands: call(*operands))(*operands)
    return _compiled(call, *operands)


def _is_staged(operands: Any) -> bool:
    """Returns whether a function is being traced into a program, such as by `jax.jit`.

    In such a trace, operations on constants return tracers; under `jax.grad` or `jax.vmap` alone,
    arrays.
    """
    leaves = jax.tree.leaves(operands)
    some = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    return some and isinstance(jnp.zeros(()), jax.core.Tracer)


@dataclass(frozen=True)
class _Call:
    """The static arguments of `over_mesh`, with the device and table by which `f`'s operators choose."""

    f: Callable[..., Any]
    static: tuple[Hashable, ...]
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: Any
    device: dispatch.Device
    table: tables.Table

    def __call__(self, *operands: Any) -> Any:
        if self.mesh.explicit_axes:
            shardings = jax.tree.map(functools.partial(NamedSharding, self.mesh), self.in_specs)
            operands = jax.tree.map(jax.sharding.reshard, operands, shardings)
        return jax.shard_map(
            functools.partial(self.f, *self.static),
            mesh=self.mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
        )(*operands)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(call: _Call, *operands: Any) -> Any:
    return call(*operands)


def forget() -> None:
    """Clears the cache of compiled calls."""
    cast(Any, _compiled).clear_cache()
