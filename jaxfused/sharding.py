"""How an operator runs on sharded inputs, in whichever of JAX's ways the caller shards them.

A kernel is opaque to XLA, which by default gathers the kernel's operands on every device. `per_shard`
runs the kernel on the shards instead. When the sharding is known depends on the mesh axes:

- Auto (`jax.jit` over sharded arrays): when XLA compiles. The kernel becomes a `custom_partitioning`
  with a rule for the Shardy partitioner.
- Explicit (`jax.jit` too): in the types of the operands. The kernel runs in a `jax.shard_map`.
- Manual (inside `jax.shard_map` and `jax.pmap`): the operands are the shards.

One case is beyond JAX: Auto axes beside Manual or Explicit ones. There XLA passes no mesh to the
partitioning function. Sums over shards cannot be expressed without a mesh, and with a mesh of our own a
check in XLA's compiler fails. The operands of a kernel are therefore gathered along those Auto axes, and
along no others.
"""

import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Places = Mapping[str, tuple[str, ...]]
"""The mesh axes that split each axis of an operation; an axis that is not split is not listed."""


def per_shard(
    f: Callable[..., tuple[jax.Array | None, ...]],
    operands: Sequence[jax.Array | None],
    *,
    operand_axes: Sequence[str],
    result_axes: Sequence[str | None],
    whole: str = "",
    in_own_module: Callable[..., tuple[jax.Array | None, ...]] | None = None,
) -> tuple[jax.Array | None, ...]:
    """`f(*operands)`, computed by each device from the shards that it holds.

    A string names the axes of an array by letters, as in `jax.numpy.einsum`. Where mesh axes split a
    letter, `f` sees a part of it, in all operands and results alike; a result without the letter is
    a sum over it, and gets added up over the devices.

    Args:
      f: a function that holds for any size of the axes that are not `whole`. What it computes must be
        settled by its equality: outside of `jax.jit` it is compiled once for all functions that are
        equal. A frozen dataclass with a `__call__` does that.
      operands: arrays of any rank, or None.
      operand_axes: the letters of each operand, also of one that is None.
      result_axes: the letters of each result of `f`, None for a result that is None.
      whole: letters that must not be split.
      in_own_module: what is called in the place of `f` where XLA partitions the call. It is lowered
        there into a module of its own, anew at each place of the program.

    Returns:
      The results of `f`. They have no gradient of their own: an operator's custom_vjp goes around this,
      and `align` before the custom_vjp.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxfused.sharding import per_shard
      >>> def scale_and_add(x, scale):
      ...     return x * scale, x.sum(0)
      >>> _, total = per_shard(
      ...     scale_and_add,
      ...     (jnp.ones((4, 2)), jnp.array([1.0, 3.0])),
      ...     operand_axes=("md", "d"),
      ...     result_axes=("md", "d"),
      ... )
      >>> total
      Array([4., 4.], dtype=float32)

    Source: Shardy's sharding rules, https://openxla.org/shardy/sharding_representation
    """
    call = _Call(
        f,
        tuple(
            None if operand is None else letters
            for operand, letters in zip(operands, operand_axes, strict=True)
        ),
        tuple(result_axes),
        whole,
        f if in_own_module is None else in_own_module,
    )
    aligned = align(operands, operand_axes=operand_axes, whole=whole)
    present = [operand for operand in aligned if operand is not None]
    mesh = _mesh(present)
    unsettled = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.explicit_axes or (mesh.manual_axes and unsettled):
        places = _explicit_places(present, call.present_operands, whole)
        results = jax.shard_map(
            functools.partial(call.on_shards, places),
            mesh=mesh,
            # Without names: all but those that an enclosing `jax.vmap` has taken for its batch.
            axis_names=unsettled if mesh.manual_axes else set(),
            in_specs=tuple(_spec(letters, places) for letters in call.present_operands),
            out_specs=tuple(_spec(letters, places) for letters in call.present_results),
        )(*present)
    elif mesh.manual_axes or max(jax.device_count(), mesh.size) == 1:
        results = call.on_shards({}, *present)
    else:
        results = _partitioned(call, *present)
    remaining = iter(results)
    return tuple(None if letters is None else next(remaining) for letters in result_axes)


class GroupPlaces(NamedTuple):
    """Where `per_group_shard` calls its function."""

    names: tuple[tuple[str, ...], ...]
    """The mesh axes that split the arrays of each group, over which sums are to be added up."""
    by_partitioner: bool
    """Whether XLA is partitioning the program."""


def per_group_shard(
    f: Callable[..., tuple[jax.Array, ...]],
    operands: Sequence[jax.Array],
    *,
    operand_groups: Sequence[int | None],
    result_groups: Sequence[int | None],
) -> tuple[jax.Array, ...]:
    """`f(places, *operands)`, computed by each device from the shards that it holds of many arrays.

    The arrays of a group have one shape and are split alike, as the first of them is; one group knows
    nothing of the others. Which groups there are and how many is not limited by an alphabet, as in
    `per_shard`.

    Args:
      f: a function that computes each result of a group elementwise from arrays of this group and from
        values that all devices share. Sums over a group are its own to add up over the devices, along
        the mesh axes that it is told, which are none in a `jax.shard_map` of the caller's own.
      operands: the arrays.
      operand_groups: the group of each operand, counted from 0; None for one that each device needs
        whole.
      result_groups: the group of each result; None for a scalar that is the same on all devices.

    Returns:
      The results of `f`. They have no gradient.
    """
    count = 1 + max((g for g in operand_groups if g is not None), default=-1)
    first = [operand_groups.index(group) for group in range(count)]
    mesh = _mesh(operands)
    unsettled = set(mesh.axis_names) - set(mesh.manual_axes)

    def specs_of(groups: Sequence[int | None], specs: Sequence[P]) -> tuple[P, ...]:
        return tuple(P() if group is None else specs[group] for group in groups)

    if mesh.explicit_axes or (mesh.manual_axes and unsettled):
        specs = [
            _even(jax.typeof(operands[i]).sharding.spec, operands[i].shape, mesh.shape)
            for i in first
        ]
        in_specs = specs_of(operand_groups, specs)
        if mesh.explicit_axes:
            operands = [
                jax.sharding.reshard(operand, NamedSharding(mesh, spec))
                for operand, spec in zip(operands, in_specs, strict=True)
            ]
        return jax.shard_map(
            functools.partial(f, GroupPlaces(tuple(map(_split_by, specs)), False)),
            mesh=mesh,
            axis_names=unsettled if mesh.manual_axes else set(),
            in_specs=in_specs,
            out_specs=specs_of(result_groups, specs),
            # Results that a kernel has written in place do not state along which axes they vary.
            check_vma=False,
        )(*operands)
    not_split = functools.partial(f, GroupPlaces(((),) * count, False))
    if mesh.manual_axes or max(jax.device_count(), mesh.size) == 1:
        return not_split(*operands)

    def partition(mesh: Mesh, operands: Any, results: Any):
        specs = [_even(operands[i].sharding.spec, operands[i].shape, mesh.shape) for i in first]

        def shardings(groups: Sequence[int | None]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec) for spec in specs_of(groups, specs))

        return (
            mesh,
            functools.partial(f, GroupPlaces(tuple(map(_split_by, specs)), True)),
            shardings(result_groups),
            shardings(operand_groups),
        )

    ranks = [operands[i].ndim for i in first]
    shared = {
        i: [f"s{i}_{axis}" for axis in range(operand.ndim)]
        for i, (operand, group) in enumerate(zip(operands, operand_groups, strict=True))
        if group is None
    }

    def factors(groups: Sequence[int | None], shared: Mapping[int, Sequence[str]]) -> str:
        return ", ".join(
            " ".join(
                shared.get(i, ())
                if group is None
                else [f"g{group}_{axis}" for axis in range(ranks[group])]
            )
            for i, group in enumerate(groups)
        )

    partitioned = custom_partitioning(not_split)
    partitioned.def_partition(
        partition,
        sharding_rule=f"{factors(operand_groups, shared)} -> {factors(result_groups, {})}",
        need_replication_factors=tuple(f for axes in shared.values() for f in axes),
    )
    return partitioned(*operands)


def _even(spec: P, shape: tuple[int, ...], mesh_shape: Mapping[str, int]) -> P:
    """Returns the part of a spec that splits axes into shards of one size."""
    names = [_names(entry) for entry in spec]
    return P(
        *(
            entry if size % math.prod(mesh_shape[name] for name in entry) == 0 else ()
            for entry, size in zip(names, shape, strict=False)
        )
    )


def _split_by(spec: P) -> tuple[str, ...]:
    return tuple(name for entry in spec for name in _names(entry))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def leading_axes(count: int) -> str:
    """Returns letters for `count` leading axes, in upper case; lower case is left to the operator."""
    return string.ascii_uppercase[:count]


def align(
    operands: Sequence[jax.Array | None], *, operand_axes: Sequence[str], whole: str = ""
) -> tuple[jax.Array | None, ...]:
    """Returns the operands with one sharding where their types state it, ahead of a custom_vjp.

    A custom_vjp must give gradients of the very types of its operands. This step has a gradient by
    JAX's own rules: it brings them back to the sharding of the caller's arrays and, in a
    `jax.shard_map`, adds up those of an array that the devices share.

    Args:
      operands: arrays, or None.
      operand_axes: the letters of each operand, as in `per_shard`.
      whole: letters that must not be split.

    Returns:
      The operands in their order.
    """
    present = [operand for operand in operands if operand is not None]
    mesh = _mesh(present)
    if mesh.explicit_axes:
        axes = [
            letters
            for operand, letters in zip(operands, operand_axes, strict=True)
            if operand is not None
        ]
        places = _explicit_places(present, axes, whole)
        present = [
            jax.sharding.reshard(operand, NamedSharding(mesh, _spec(letters, places)))
            for operand, letters in zip(present, axes, strict=True)
        ]
    aligned = iter(_vary(present, _varying(present)))
    return tuple(None if operand is None else next(aligned) for operand in operands)


def varying(*operands: jax.Array) -> frozenset[str]:
    """Returns the Manual axes along which any operand varies, where `jax.shard_map` tracks them."""
    return _varying(operands)


def vary(arrays: Sequence[jax.Array], names: frozenset[str]) -> list[jax.Array]:
    """Returns the arrays as ones that vary along these Manual axes, which a kernel's operands share."""
    return _vary(arrays, names)


def is_explicit(*operands: jax.Array) -> bool:
    """Whether the operands' types say how they are sharded.

    If they do, jax.numpy has to be told the sharding of a sum over a split axis, which `per_shard` does.
    """
    return bool(_mesh(operands).explicit_axes)


@dataclass(frozen=True)
class _Call:
    """The static part of a call of `per_shard`; the axes of absent operands are None."""

    f: Callable[..., tuple[jax.Array | None, ...]]
    operand_axes: tuple[str | None, ...]
    result_axes: tuple[str | None, ...]
    whole: str
    in_own_module: Callable[..., tuple[jax.Array | None, ...]]

    @property
    def present_operands(self) -> tuple[str, ...]:
        return tuple(letters for letters in self.operand_axes if letters is not None)

    @property
    def present_results(self) -> tuple[str, ...]:
        return tuple(letters for letters in self.result_axes if letters is not None)

    def on_shards(self, places: Places, *shards: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the results that are not None, from the shards of the operands that are not None."""
        varying = _varying(shards)
        remaining = iter(_vary(shards, varying))
        results = self.f(
            *(None if letters is None else next(remaining) for letters in self.operand_axes)
        )
        present = [result for result in results if result is not None]
        # A kernel's results do not state that they vary over the mesh axes of its operands, so this adds
        # it.
        return tuple(
            lax.psum(
                result,
                tuple(n for letter in places if letter not in letters for n in places[letter]),
            )
            for result, letters in zip(_vary(present, varying), self.present_results, strict=True)
        )


@functools.partial(jax.jit, static_argnums=0)
def _partitioned(call: _Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the call in the form that XLA partitions."""

    def partition(mesh: Mesh, operands: Any, results: Any):
        del results
        places = _places(
            [operand.sharding.spec for operand in operands],
            [operand.shape for operand in operands],
            call.present_operands,
            mesh.shape,
            call.whole,
        )

        def shardings(axes: Sequence[str]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, _spec(letters, places)) for letters in axes)

        return (
            mesh,
            functools.partial(replace(call, f=call.in_own_module).on_shards, places),
            shardings(call.present_results),
            shardings(call.present_operands),
        )

    def rule(axes: Sequence[str]) -> str:
        return ", ".join(" ".join(letters) for letters in axes)

    partitioned = custom_partitioning(functools.partial(call.on_shards, {}))
    partitioned.def_partition(
        partition,
        sharding_rule=f"{rule(call.present_operands)} -> {rule(call.present_results)}",
        # The factors are in the order of the rule, which JAX checks.
        need_replication_factors=tuple(
            letter
            for letter in dict.fromkeys("".join(call.present_operands + call.present_results))
            if letter in call.whole
        ),
    )
    return partitioned(*operands)


def _places(
    specs: Sequence[P],
    shapes: Sequence[tuple[int, ...]],
    axes: Sequence[str],
    mesh_shape: Mapping[str, int],
    whole: str,
) -> Places:
    """Returns the mesh axes of each letter: those of the first operand that can be split so."""
    places: dict[str, tuple[str, ...]] = {}
    for spec, shape, letters in zip(specs, shapes, axes, strict=True):
        for entry, size, letter in zip(spec, shape, letters, strict=False):
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            taken = set().union(*places.values())
            # XLA pads shards of uneven sizes, and sums would include the padding.
            even = size % math.prod(mesh_shape[name] for name in names) == 0
            if names and even and letter not in {*whole, *places} and taken.isdisjoint(names):
                places[letter] = names
    return places


def _explicit_places(operands: Sequence[jax.Array], axes: Sequence[str], whole: str) -> Places:
    """Computes `_places` from the types of the operands, which name Explicit axes only."""
    return _places(
        [jax.typeof(operand).sharding.spec for operand in operands],
        [operand.shape for operand in operands],
        axes,
        _mesh(operands).shape,
        whole,
    )


def _spec(letters: str, places: Places) -> P:
    return P(*(places.get(letter) for letter in letters))


def _mesh(operands: Sequence[jax.Array]) -> AbstractMesh:
    """Returns the mesh of the first operand whose type has one, since constants have none."""
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    return next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())


def _varying(operands: Sequence[jax.Array]) -> frozenset[str]:
    """Returns the Manual axes along which any operand varies, where `jax.shard_map` tracks them."""
    return frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in operands))


def _vary(arrays: Sequence[jax.Array], names: frozenset[str]) -> list[jax.Array]:
    return [lax.pcast(a, tuple(sorted(names - _varying([a]))), to="varying") for a in arrays]
