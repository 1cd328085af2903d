"""The step of an optimizer over the leaves of a tree, by kernels, on one device or on shards.

The reference is in jaxfused.optim, where an optimizer's formula is stated in jax.numpy.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch, sharding
from jaxfused.cuda import gradient_norm
from jaxfused.cuda import optimizer_step as kernels
from jaxfused.cuda.optimizer_step import Leaf as Leaf
from jaxfused.cuda.optimizer_step import Scalars as Scalars


@dataclass(frozen=True)
class KernelRule:
    """How the kernels compute an optimizer's formula."""

    name: str
    """The rule "adam", "lion", "sgd" or "lamb"."""
    nesterov: bool
    scalars: Callable[[Any], Scalars]
    """The function from the number of the step to the scalars of the formula."""


def reasons(device: dispatch.Device, dtypes: Sequence[Any]) -> dict[str, str | None]:
    """Returns why each implementation cannot update a tree with arrays of these dtypes."""
    return {
        "cuda": kernels.why_unsupported(
            compute_capability=device.compute_capability, dtypes=tuple(dict.fromkeys(dtypes))
        ),
        "xla": None,
    }


def record(
    name: str,
    leaves: Sequence[Leaf],
    implementation: str,
    why: Mapping[str, str | None],
    by_partitioner: bool = False,
) -> None:
    """Records what was chosen; the operands are, for each dtype, all parameters as one vector."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        dtype = leaf.parameter.dtype
        sizes[dtype] = sizes.get(dtype, 0) + leaf.parameter.size
    operands = [jax.ShapeDtypeStruct((size,), dtype) for dtype, size in sizes.items()]
    dispatch.record(dispatch.Choice(name, operands, implementation, why, by_partitioner))


def step(
    name: str,
    rule: KernelRule,
    scalars: Scalars,
    leaves: Sequence[Leaf],
    decays: Sequence[bool],
    *,
    clips: bool,
    skips_nonfinite: bool,
    why: Mapping[str, str | None],
) -> tuple[list[Leaf], jax.Array]:
    """Returns the leaves after the step, and whether the step was taken.

    Args:
      name: the optimizer's, for `jaxfused.explain`.
      rule: the formula.
      scalars: the numbers of this step.
      leaves: leaves with elements, whose arrays become those of the result.
      decays: for each leaf, whether its weight decays.
      clips: scale gradients down to the norm `scalars.max_norm` of all of them, on all devices.
      skips_nonfinite: change nothing if a gradient is not finite.
      why: for each implementation, why it cannot run.
    """
    if not leaves:
        return [], jnp.array(True)
    call = _Call(
        name,
        rule,
        tuple(decays),
        tuple(tuple(_present(leaf)) for leaf in leaves),
        clips,
        skips_nonfinite,
        why,
    )
    axes = [sharding_axes(i, leaf) for i, leaf in enumerate(leaves)]
    taken, *arrays = sharding.per_array_shard(
        functools.partial(call.on_shards, axes),
        [scalars.stacked(), *_arrays(leaves, call.fields)],
        operand_axes=[("whole",), *(of_leaf[f] for of_leaf, f in _each(axes, call.fields))],
        result_axes=[(), *(of_leaf[f] for of_leaf, f in _each(axes, call.written))],
    )
    return call.leaves(arrays, call.written), taken


def sharding_axes(index: int, leaf: Leaf) -> dict[str, sharding.AxisNames]:
    """Returns the names of the axes of each array of a leaf."""
    axes = tuple(f"leaf{index}_{axis}" for axis in range(leaf.parameter.ndim))
    return dict.fromkeys(Leaf._fields, axes)


def _each(rows: Sequence[Any], fields: Sequence[Sequence[str]]) -> list[tuple[Any, str]]:
    return [(row, field) for row, names in zip(rows, fields, strict=True) for field in names]


def _present(leaf: Leaf) -> list[str]:
    return [field for field, array in leaf._asdict().items() if array is not None]


def _arrays(leaves: Sequence[Leaf], fields: Sequence[Sequence[str]]) -> list[jax.Array]:
    return [
        getattr(leaf, field) for leaf, names in zip(leaves, fields, strict=True) for field in names
    ]


@dataclass(frozen=True)
class _Call:
    """The static part of a step."""

    name: str
    rule: KernelRule
    decays: tuple[bool, ...]
    fields: tuple[tuple[str, ...], ...]
    """The arrays that each leaf has."""
    clips: bool
    skips_nonfinite: bool
    why: Mapping[str, str | None]

    @property
    def written(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in names if f != "gradient") for names in self.fields)

    def leaves(self, arrays: Sequence[jax.Array], fields: Sequence[Sequence[str]]) -> list[Leaf]:
        remaining = iter(arrays)
        rows: list[dict[str, Any]] = [{name: next(remaining) for name in names} for names in fields]
        return [Leaf(**{"gradient": None, **row}) for row in rows]

    def on_shards(
        self,
        axes: Sequence[Mapping[str, sharding.AxisNames]],
        where: sharding.OnShards,
        scalars: jax.Array,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Returns whether the step is taken, and the arrays that have been written."""
        leaves = self.leaves(arrays, self.fields)
        record(self.name, leaves, "cuda", self.why, where.by_partitioner)
        names = [where.names(of_leaf["parameter"]) for of_leaf in axes]
        stats = jnp.zeros_like(scalars, shape=(2,))
        if self.clips or self.skips_nonfinite:
            factor = scalars[Scalars._fields.index("inverse_loss_scale")]
            stats = _sum_of_squares(factor, [leaf.gradient for leaf in leaves], names)
        new: list[Leaf | None] = [None] * len(leaves)
        for group in self._launches(leaves, names):
            results = self._update(
                scalars,
                stats,
                [leaves[i] for i in group],
                [self.decays[i] for i in group],
                names[group[0]],
            )
            for i, leaf in zip(group, results, strict=True):
                new[i] = leaf
        return stats[1] == 0, *_arrays([leaf for leaf in new if leaf is not None], self.written)

    def _launches(
        self, leaves: Sequence[Leaf], names: Sequence[tuple[str, ...]]
    ) -> list[list[int]]:
        """Returns the indices of the leaves that one call updates."""

        def kind(i: int) -> Hashable:
            leaf = leaves[i]
            dtypes = tuple(None if array is None else array.dtype for array in leaf)
            varying = sharding.varying(*(a for a in leaf if a is not None))
            # Sums over a leaf are added up over the devices for the leaves of a call together.
            return dtypes, varying, names[i] if self.rule.name == "lamb" else ()

        return _grouped(kind, len(leaves))

    def _update(
        self,
        scalars: jax.Array,
        stats: jax.Array,
        leaves: Sequence[Leaf],
        decays: Sequence[bool],
        names: tuple[str, ...],
    ) -> list[Leaf]:
        fields = [_present(leaf) for leaf in leaves]
        varying = sharding.varying(scalars, stats, *_arrays(leaves, fields))
        scalars, stats, *arrays = sharding.vary([scalars, stats, *_arrays(leaves, fields)], varying)
        leaves = self.leaves(arrays, fields)
        step = functools.partial(
            kernels.step,
            clips=self.clips,
            skips_nonfinite=self.skips_nonfinite,
            nesterov=self.rule.nesterov,
        )
        if self.rule.name != "lamb":
            new, _ = step(self.rule.name, scalars, stats, leaves, decays)
        else:
            first = [leaf._replace(average=None, copy=None) for leaf in leaves]
            moved, norms = step("lamb_moments", scalars, stats, first, decays)
            assert norms is not None
            norms = lax.psum(norms, names)
            second = [
                new_leaf._replace(gradient=None, average=leaf.average, copy=leaf.copy)
                for new_leaf, leaf in zip(moved, leaves, strict=True)
            ]
            new, _ = step("lamb_write", scalars, stats, second, decays, norms=norms)
        written = [[f for f in names if f != "gradient"] for names in fields]
        return self.leaves(sharding.vary(_arrays(new, written), varying), written)


def _sum_of_squares(
    factor: jax.Array, gradients: Sequence[Any], names: Sequence[tuple[str, ...]]
) -> jax.Array:
    """Returns the sum of the squares of all gradients, and whether one is not finite, as 0 or more."""

    def kind(i: int) -> Hashable:
        return gradients[i].dtype, names[i], sharding.varying(gradients[i])

    totals = []
    for group in _grouped(kind, len(gradients)):
        members = [factor, *(gradients[i] for i in group)]
        varying = sharding.varying(*members)
        factor_here, *members = sharding.vary(members, varying)
        [total] = sharding.vary([gradient_norm.sum_of_squares(factor_here, members)], varying)
        totals.append(lax.psum(total, names[group[0]]))
    total = totals[0]
    for other in totals[1:]:
        total, other = sharding.vary([total, other], sharding.varying(total, other))
        total = total + other
    return total


def _grouped(kind: Callable[[int], Hashable], count: int) -> list[list[int]]:
    """Returns the numbers below `count` in lists of one kind each."""
    groups: dict[Hashable, list[int]] = {}
    for i in range(count):
        groups.setdefault(kind(i), []).append(i)
    return list(groups.values())
