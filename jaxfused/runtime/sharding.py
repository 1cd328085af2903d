"""Operators on sharded inputs, for each of JAX's three kinds of mesh axes.

XLA cannot see into a kernel, and by default gathers the kernel's operands on every device. `per_shard`
runs the kernel on the shards instead. When the sharding is known depends on the mesh axes:

- Auto (`jax.jit` over sharded arrays): when XLA compiles. The kernel becomes a `custom_partitioning`
  with a rule for the Shardy partitioner.
- Explicit (`jax.jit` too): in the types of the operands. The kernel runs in a `jax.shard_map`.
- Manual (inside `jax.shard_map` and `jax.pmap`): the operands are the shards.

JAX does not support one case: Auto axes together with Manual or Explicit ones. There XLA passes no mesh
to the partitioning function. Sums over shards cannot be expressed without a mesh, and with our own mesh
a check in XLA's compiler fails. A kernel's operands are therefore gathered along those Auto axes.
"""

import functools
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Places = Mapping[str, tuple[str, ...]]
"""For each named axis of an operation's arrays, the mesh axes that split it; none for unsplit axes."""


def per_shard(
    f: Callable[..., tuple[jax.Array | None, ...]],
    operands: Sequence[jax.Array | None],
    *,
    operand_axes: Sequence[str],
    result_axes: Sequence[str | None],
    whole: str = "",
    parts: str = "",
    in_own_module: Callable[..., tuple[jax.Array | None, ...]] | None = None,
) -> tuple[jax.Array | None, ...]:
    """Returns `f(*operands)`, computed by each device from its shards.

    A string names the axes of an array by letters, as in `jax.numpy.einsum`. If mesh axes split a
    letter, `f` sees a part of that axis, in all operands and results alike. A result without the letter
    is a sum over the axis, and is added up over the devices.

    Args:
      f: a function that holds for any size of the axes that are not `whole`. Equal functions must
        compute the same, since outside of `jax.jit` they are compiled once. A frozen dataclass with a
        `__call__` does that.
      operands: arrays of any rank, or None.
      operand_axes: the letters of each operand, also of one that is None.
      result_axes: the letters of each result of `f`, None for a result that is None.
      whole: letters that must not be split.
      parts: letters of contracted axes, over which `f` sums before its last step. They are split as the
        first operand with such a letter is, and then `f.on_parts(names, *operands)` is called instead,
        which adds up its sums over the mesh axes `names` itself.
      in_own_module: the function to call in place of `f` where XLA partitions the call, which lowers it
        anew, into a separate module, at each place of the program.

    Returns:
      The results of `f`. They have no gradient of their own: an operator's custom_vjp goes around this,
      and `align` before the custom_vjp.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxfused.runtime.sharding import per_shard
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
        parts,
        f if in_own_module is None else in_own_module,
    )
    aligned = align(operands, operand_axes=operand_axes, whole=whole, parts=parts)
    present = [operand for operand in aligned if operand is not None]
    mesh = _mesh(present)
    unsettled = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.explicit_axes or (mesh.manual_axes and unsettled):
        places = _explicit_places(present, call.present_operands, whole, parts)
        results = jax.shard_map(
            functools.partial(call.on_shards, places),
            mesh=mesh,
            # An empty set means all mesh axes except those that an enclosing `jax.vmap` maps its
            # batch over.
            axis_names=unsettled if mesh.manual_axes else set(),
            in_specs=tuple(_spec(letters, places) for letters in call.present_operands),
            out_specs=tuple(_spec(letters, places) for letters in call.present_results),
        )(*present)
    elif is_in_one_piece(*present):
        if not mesh.manual_axes:
            return f(*aligned)
        results = call.on_shards({}, *present)
    else:
        results = _partitioned(call, *present)
    remaining = iter(results)
    return tuple(None if letters is None else next(remaining) for letters in result_axes)


class Blocks(NamedTuple):
    """An axis that consists of blocks of `size` entries; devices split it between blocks only."""

    name: str
    """Name of the axis that counts the blocks."""
    size: int


AxisNames = tuple[str | Blocks, ...]
"""Names of an array's axes; axes of the same name are split alike in all arrays."""


class OnShards(NamedTuple):
    """How the arrays are split in a call of the function given to `per_array_shard`."""

    places: Places
    by_partitioner: bool
    """True if XLA is partitioning the program."""

    def names(self, axes: AxisNames) -> tuple[str, ...]:
        """Returns the mesh axes that split an array with these axes."""
        return tuple(name for axis in axes for name in self.places.get(_name(axis), ()))


def per_array_shard(
    f: Callable[..., tuple[jax.Array, ...]],
    operands: Sequence[jax.Array],
    *,
    operand_axes: Sequence[AxisNames],
    result_axes: Sequence[AxisNames],
) -> tuple[jax.Array, ...]:
    """Returns `f(on_shards, *operands)`, computed by each device from its shards of many arrays.

    Unlike in `per_shard`, axes are named by words, so that the number of arrays is not limited.

    Args:
      f: a function that computes results elementwise. It adds up sums over the devices itself, along the
        mesh axes in its `OnShards`, which has none inside the caller's own `jax.shard_map`.
      operands: the arrays. The last one with a named axis decides how that axis is split.
      operand_axes: the names of the axes of each operand. An axis that must not be split has a name
        that starts with "whole".
      result_axes: the names of the axes of each result, all of which operands have too.

    Returns:
      The results of `f`. They have no gradient.
    """
    mesh = _mesh(operands)
    unsettled = set(mesh.axis_names) - set(mesh.manual_axes)
    shapes = [operand.shape for operand in operands]
    if mesh.explicit_axes or (mesh.manual_axes and unsettled):
        specs = [jax.typeof(operand).sharding.spec for operand in operands]
        places = _places_by_names(specs, shapes, operand_axes, mesh.shape)
        in_specs = tuple(_spec_by_names(axes, places) for axes in operand_axes)
        if mesh.explicit_axes:
            operands = [
                jax.sharding.reshard(operand, NamedSharding(mesh, spec))
                for operand, spec in zip(operands, in_specs, strict=True)
            ]
        return jax.shard_map(
            functools.partial(f, OnShards(places, False)),
            mesh=mesh,
            axis_names=unsettled if mesh.manual_axes else set(),
            in_specs=in_specs,
            out_specs=tuple(_spec_by_names(axes, places) for axes in result_axes),
            # The check of varying axes is off, because results that are written in place do not
            # state in their types along which mesh axes they vary.
            check_vma=False,
        )(*operands)
    not_split = functools.partial(f, OnShards({}, False))
    if mesh.manual_axes or max(jax.device_count(), mesh.size) == 1:
        return not_split(*operands)

    def partition(mesh: Mesh, operands: Any, results: Any):
        specs = [operand.sharding.spec for operand in operands]
        places = _places_by_names(specs, shapes, operand_axes, mesh.shape)

        def shardings(of_arrays: Sequence[AxisNames]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, _spec_by_names(axes, places)) for axes in of_arrays)

        return (
            mesh,
            functools.partial(f, OnShards(places, True)),
            shardings(result_axes),
            shardings(operand_axes),
        )

    def rule(of_arrays: Sequence[AxisNames]) -> str:
        return ", ".join(" ".join(map(_factors, axes)) for axes in of_arrays)

    every = [axis for axes in operand_axes for axis in axes]
    sizes = {f"{axis.name}_within": axis.size for axis in every if isinstance(axis, Blocks)}
    partitioned = custom_partitioning(not_split)
    partitioned.def_partition(
        partition,
        sharding_rule=f"{rule(operand_axes)} -> {rule(result_axes)}",
        # JAX requires the factors in the order of the sharding rule.
        need_replication_factors=tuple(
            dict.fromkeys(
                f"{_name(axis)}_within" if isinstance(axis, Blocks) else axis
                for axis in every
                if isinstance(axis, Blocks) or axis.startswith("whole")
            )
        ),
        **sizes,
    )
    return partitioned(*operands)


def _name(axis: str | Blocks) -> str:
    return axis.name if isinstance(axis, Blocks) else axis


def _factors(axis: str | Blocks) -> str:
    return f"({axis.name} {axis.name}_within)" if isinstance(axis, Blocks) else axis


def _places_by_names(
    specs: Sequence[P],
    shapes: Sequence[tuple[int, ...]],
    operand_axes: Sequence[AxisNames],
    mesh_shape: Mapping[str, int],
) -> Places:
    """Returns the mesh axes that split each named axis evenly in the last operand with that axis."""
    places: dict[str, tuple[str, ...]] = {}
    for spec, shape, axes in reversed([*zip(specs, shapes, operand_axes, strict=True)]):
        for entry, size, axis in zip(spec, shape, axes, strict=False):
            names = names_of(entry)
            unit = axis.size if isinstance(axis, Blocks) else 1
            even = size % (unit * math.prod(mesh_shape[name] for name in names)) == 0
            name = _name(axis)
            if name not in places and not name.startswith("whole"):
                places[name] = names if even else ()
    return places


def _spec_by_names(axes: AxisNames, places: Places) -> P:
    return P(*(places.get(_name(axis)) or None for axis in axes))


def leading_axes(count: int, taken: str = "") -> str:
    """Returns `count` letters for leading axes, in upper case and not among those `taken`.

    Operators name their own axes in lower case.
    """
    return "".join(sorted(set(string.ascii_uppercase) - set(taken))[:count])


def align(
    operands: Sequence[jax.Array | None],
    *,
    operand_axes: Sequence[str],
    whole: str = "",
    parts: str = "",
) -> tuple[jax.Array | None, ...]:
    """Returns the operands of a custom_vjp, resharded alike where their types state a sharding.

    A custom_vjp must return gradients of its operands' exact types. JAX differentiates this
    resharding by its own rules: gradients return to the sharding of the caller's arrays and, in a
    `jax.shard_map`, the gradients of an array that the devices share are added up.

    Args:
      operands: arrays, or None.
      operand_axes: the letters of each operand, as in `per_shard`.
      whole: letters that must not be split.
      parts: letters of contracted axes, split as in the first operand that has them.

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
        places = _explicit_places(present, axes, whole, parts)
        present = [
            jax.sharding.reshard(operand, NamedSharding(mesh, _spec(letters, places)))
            for operand, letters in zip(present, axes, strict=True)
        ]
    aligned = iter(_vary(present, _varying(present)))
    return tuple(None if operand is None else next(aligned) for operand in operands)


def by_shards_of_rows(
    f: Callable[..., jax.Array],
    rows: Sequence[jax.Array | None],
    others: Any,
    *,
    axes: Sequence[str],
    result_axes: str,
) -> jax.Array:
    """Returns `f(others, *rows)`; where types state a sharding, each device computes it from its shards.

    JAX differentiates the result, unlike that of `per_shard`; XLA partitions `f` under Auto mesh axes.

    Args:
      f: a function whose every row of results depends on the same row of `rows`, and on all `others`.
      rows: arrays, or None.
      others: a tree of arrays, which every device needs unsharded.
      axes: the letters of each of `rows`, as in `per_shard`; only those in upper case stay split.
      result_axes: the letters of the result.
    """
    present = [array for array in rows if array is not None]
    mesh = _mesh([*present, *jax.tree.leaves(others)])
    if not mesh.explicit_axes:
        return f(others, *rows)
    whole = "".join({*"".join(axes)} & {*string.ascii_lowercase})
    aligned = [array for array in align(rows, operand_axes=axes, whole=whole) if array is not None]
    letters = [own for own, array in zip(axes, rows, strict=True) if array is not None]
    places = _explicit_places(aligned, letters, whole, "")
    if mesh.manual_axes and not any(places.values()):
        # JAX cannot lower the gradient of a `shard_map` within another one (0.11.2).
        return f(others, *rows)
    others = jax.tree.map(lambda a: jax.sharding.reshard(a, NamedSharding(mesh, P())), others)

    def on_shards(others: Any, *shards: jax.Array) -> jax.Array:
        along, remaining = _varying(shards), iter(shards)
        others = jax.tree.map(lambda a: _vary([a], along)[0], others)
        return f(others, *(None if array is None else next(remaining) for array in rows))

    return jax.shard_map(
        on_shards,
        mesh=mesh,
        axis_names={*mesh.axis_names} - {*mesh.manual_axes} if mesh.manual_axes else set(),
        in_specs=(P(), *(_spec(own, places) for own in letters)),
        out_specs=_spec(result_axes, places),
    )(others, *aligned)


def shards(
    operands: Sequence[Any], *, operand_axes: Sequence[str], whole: str = "", parts: str = ""
) -> list[jax.ShapeDtypeStruct | None]:
    """Returns the shapes of one device's shards in `per_shard`, where the operands' types state them.

    Where XLA's partitioner splits the operands later, the shapes are those of the operands.
    """
    given = [
        (operand, letters)
        for operand, letters in zip(operands, operand_axes, strict=True)
        if operand is not None
    ]
    present, axes = [operand for operand, _ in given], [letters for _, letters in given]
    mesh = _mesh(present)
    places = _explicit_places(present, axes, whole, parts) if mesh.explicit_axes else {}
    return [
        None
        if operand is None
        else jax.ShapeDtypeStruct(
            [
                size // math.prod(mesh.shape[name] for name in places.get(letter, ()))
                for size, letter in zip(operand.shape, letters, strict=True)
            ],
            operand.dtype,
        )
        for operand, letters in zip(operands, operand_axes, strict=True)
    ]


def varying(*operands: jax.Array) -> frozenset[str]:
    """Returns the Manual axes along which any operand varies, where `jax.shard_map` tracks them."""
    return _varying(operands)


def searchsorted(
    ordered: jax.Array, values: jax.Array, *, side: str = "left", method: str = "scan"
) -> jax.Array:
    """`jnp.searchsorted` in int32; by a sort in a `shard_map` of some mesh axes beside Auto ones.

    With the other methods JAX raises an AssertionError there (0.11.2).
    """
    mesh = jax.sharding.get_abstract_mesh()
    method = "sort" if mesh.manual_axes and mesh.auto_axes else method
    return jax.numpy.searchsorted(ordered, values, side=side, method=method).astype(jax.numpy.int32)


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape`, with results that are operands of another one in any `shard_map`.

    Where some mesh axes are Manual and others Auto, the results say along which axes they vary but have
    no mesh, and JAX refuses them with an AssertionError (0.11.2).
    """
    return jax.tree.map(
        lambda s: s if s.sharding is not None else jax.ShapeDtypeStruct(s.shape, s.dtype),
        jax.eval_shape(f, *args),
    )


def vary(arrays: Sequence[jax.Array], names: frozenset[str]) -> list[jax.Array]:
    """Returns the arrays with types that vary along the Manual axes `names`, as kernels require."""
    return _vary(arrays, names)


_untracked = Primitive("untracked")
_untracked.def_abstract_eval(
    lambda operand: jax.core.ShapedArray(operand.shape, operand.dtype, sharding=operand.sharding)
)
mlir.register_lowering(_untracked, lambda context, operand: [operand])


def untracked(operands: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
    """Returns the operands with types that do not say along which Manual axes they vary.

    Pallas refuses varying types for operands that single warps read. Nothing is computed. JAX has no
    such cast, because it may hide that a result varies; `vary` states the axes of a kernel's results.
    """
    return tuple(
        operand if operand is None or not _varying([operand]) else _untracked.bind(operand)
        for operand in operands
    )


AxisName = str | tuple[str, ...]
"""Name of a mesh axis, or names of several that count as one axis."""


def is_mapped(axis_name: AxisName) -> bool:
    """Returns whether `jax.shard_map`, `jax.pmap` or `jax.vmap` maps over all of these axes here."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def mesh_to_map(
    op: str,
    axis_name: AxisName,
    *operands: Any,
    mesh: Any = None,
    remedy: str = "within jax.shard_map over it",
) -> Any:
    """Returns the mesh for a `jax.shard_map` over these axes, or None if they are mapped already.

    Args:
      op: the operator's name.
      axis_name: the axes.
      *operands: arrays.
      mesh: the mesh that the caller passed in place of the operands'.
      remedy: what to do if there is no such axis.

    Raises:
      ValueError: there is no such axis, or only some of several are mapped.
    """
    names = names_of(axis_name)
    if not names or len({*names}) < len(names):
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}; pass the name of a mesh axis, or a tuple of several."
        )
    if is_mapped(axis_name):
        return None
    mesh = _mesh(operands) if mesh is None else mesh
    if not {*names} <= {*mesh.axis_names}:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}, but the mesh here has the axes {mesh.axis_names}; call"
            f" it within jax.set_mesh of a mesh with that axis, or {remedy}."
        )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if mapped := [name for name in names if name in manual]:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}, of which only {mapped} are mapped here; map all of them,"
            " or none."
        )
    return mesh


def devices_along(mesh: Mesh | AbstractMesh, axis_name: AxisName | None) -> int:
    """Returns the number of devices along mesh axes, given as in an entry of a `PartitionSpec`."""
    return math.prod(mesh.shape[name] for name in names_of(axis_name))


def check_split(op: str, name: str, shape: Sequence[int], spec: Iterable[Any], mesh: Any) -> None:
    """Checks that `spec` names axes of the mesh, and that they split an array's first axes evenly."""
    spec = tuple(spec)
    if not {of for entry in spec for of in names_of(entry)} <= {*mesh.axis_names}:
        raise ValueError(
            f"{op}: spec is {P(*spec)} for {name}, but the mesh here has the axes {mesh.axis_names};"
            " name those."
        )
    for count, entry in zip(shape, spec, strict=False):
        if count % devices_along(mesh, entry):
            raise ValueError(
                f"{op}: {name} has shape {tuple(shape)}, but {devices_along(mesh, entry)} devices of"
                f" {entry!r} share an axis of {count}; pass a multiple."
            )


def mesh_of(*operands: jax.Array) -> AbstractMesh:
    """Returns the mesh of the operands' types, or of the context."""
    return _mesh(operands)


def is_explicit(*operands: jax.Array) -> bool:
    """Returns whether the operands' types state their sharding (Explicit mesh axes).

    If they do, jax.numpy requires a stated sharding for a sum over a split axis; `per_shard` states it.
    """
    return bool(_mesh(operands).explicit_axes)


def is_partitioned_by_xla(*operands: jax.Array) -> bool:
    """Whether only XLA's partitioner decides how the operands are split: all mesh axes are Auto."""
    mesh = _mesh(operands)
    return not (mesh.explicit_axes or mesh.manual_axes) and not is_in_one_piece(*operands)


def is_in_one_piece(*operands: jax.Array) -> bool:
    """Returns whether each operand is certainly on one device: an unsharded array, or a shard."""
    mesh = _mesh(operands)
    unsettled = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.explicit_axes or (mesh.manual_axes and unsettled):
        return False
    return bool(mesh.manual_axes) or max(jax.device_count(), mesh.size) == 1


@dataclass(frozen=True)
class _Call:
    """A call of `per_shard` without its operands; the axes of an absent operand are None."""

    f: Callable[..., tuple[jax.Array | None, ...]]
    operand_axes: tuple[str | None, ...]
    result_axes: tuple[str | None, ...]
    whole: str
    parts: str
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
        names = tuple(n for letter in self.parts for n in places.get(letter, ()))
        # `on_parts` adds some operands, such as a bias, once after its sum over devices. These must
        # not vary along the mesh axes of that sum.
        remaining = iter(shards if names else _vary(shards, varying))
        operands = [None if letters is None else next(remaining) for letters in self.operand_axes]
        if names:
            f: Any = self.f
            present = [result for result in f.on_parts(names, *operands) if result is not None]
        else:
            # A kernel's results vary along its operands' mesh axes, which their types do not say.
            present = _vary([r for r in self.f(*operands) if r is not None], varying)
        return tuple(
            lax.psum(
                result,
                tuple(
                    n
                    for letter in places
                    if letter not in letters + self.parts
                    for n in places[letter]
                ),
            )
            for result, letters in zip(present, self.present_results, strict=True)
        )


@functools.partial(jax.jit, static_argnums=0)
def _partitioned(call: _Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the call as a `custom_partitioning`, which XLA splits over devices when it compiles."""

    def partition(mesh: Mesh, operands: Any, results: Any):
        del results
        places = _places(
            [operand.sharding.spec for operand in operands],
            [operand.shape for operand in operands],
            call.present_operands,
            mesh.shape,
            call.whole,
            call.parts,
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
        # JAX requires the factors in the order of the sharding rule.
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
    parts: str,
) -> Places:
    """Returns the mesh axes that split each letter's axis evenly in the first operand that has it."""
    places: dict[str, tuple[str, ...]] = {}
    decided: set[str] = set()
    for spec, shape, letters in zip(specs, shapes, axes, strict=True):
        for entry, size, letter in zip(spec, shape, letters, strict=False):
            names = names_of(entry)
            taken = set().union(*places.values())
            # XLA pads shards of uneven sizes, and sums over them would include the padding.
            even = size % math.prod(mesh_shape[name] for name in names) == 0
            unsettled = letter not in {*whole, *places, *decided}
            if names and even and unsettled and taken.isdisjoint(names):
                places[letter] = names
        decided |= {letter for letter in letters if letter in parts}
    return places


def names_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a `PartitionSpec` names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _explicit_places(
    operands: Sequence[jax.Array], axes: Sequence[str], whole: str, parts: str
) -> Places:
    """Returns the mesh axes that split each letter's axis, as the operands' types state (Explicit)."""
    return _places(
        [jax.typeof(operand).sharding.spec for operand in operands],
        [operand.shape for operand in operands],
        axes,
        _mesh(operands).shape,
        whole,
        parts,
    )


def _spec(letters: str, places: Places) -> P:
    return P(*(places.get(letter) for letter in letters))


def _mesh(operands: Sequence[jax.Array]) -> AbstractMesh:
    """Returns the mesh of the first operand whose type has a mesh; constants have none."""
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    return next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())


def _varying(operands: Sequence[jax.Array]) -> frozenset[str]:
    """Returns the Manual axes along which any operand varies, where `jax.shard_map` tracks them."""
    return frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in operands))


def _vary(arrays: Sequence[jax.Array], names: frozenset[str]) -> list[jax.Array]:
    return [lax.pcast(a, tuple(sorted(names - _varying([a]))), to="varying") for a in arrays]
