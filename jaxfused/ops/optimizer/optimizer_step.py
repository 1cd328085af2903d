"""An optimizer's step over the leaves of a tree, by CUDA kernels on each device's shards.

The reference is in jaxfused.optim, where an optimizer's formula is stated in jax.numpy.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.optimizer import gradient_norm_cuda
from jaxfused.ops.optimizer import optimizer_step_cuda as kernels
from jaxfused.ops.optimizer.optimizer_step_cuda import Leaf as Leaf
from jaxfused.ops.optimizer.optimizer_step_cuda import Scalars as Scalars
from jaxfused.runtime import sharding, stochastic_rounding


@dataclass(frozen=True)
class KernelRule:
    """The formula by which the CUDA kernels update parameters."""

    name: str
    """Name of the formula: "adam", "lion", "sgd" or "lamb"."""
    nesterov: bool
    scalars: Callable[[Any], Scalars]
    """Function from the step's number to the scalars of the formula."""

    @property
    def stage(self) -> str:
        """Name of the kernel call in `jaxfused.explain`."""
        return f"{self.name} step"


def reasons(device: dispatch.Device, dtypes: Sequence[Any]) -> dict[str, str | None]:
    """Returns why each implementation cannot update a tree with arrays of these dtypes."""
    reason = kernels.why_unsupported(
        compute_capability=device.compute_capability, dtypes=tuple(dict.fromkeys(dtypes))
    )
    return {"cuda": reason, "xla": None}


def record(
    name: str,
    leaves: Sequence[Leaf],
    implementation: str,
    why: Mapping[str, str | None],
    by_partitioner: bool = False,
) -> None:
    """Records the implementation for `jaxfused.explain`; all parameters of a dtype are one vector."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        dtype = leaf.parameter.dtype
        sizes[dtype] = sizes.get(dtype, 0) + leaf.parameter.size
    operands = [jax.ShapeDtypeStruct((size,), dtype) for dtype, size in sizes.items()]
    dispatch.record(dispatch.Choice(name, operands, implementation, why, by_partitioner))


def step(
    rule: KernelRule,
    scalars: Scalars,
    leaves: Sequence[Leaf],
    decays: Sequence[bool],
    *,
    clips: bool,
    skips_nonfinite: bool,
    why: Mapping[str, str | None],
    numbers: Sequence[int],
    rounding: jax.Array | None = None,
    coding: jax.Array | None = None,
) -> tuple[list[Leaf], jax.Array]:
    """Returns the leaves after the step, and whether the step was taken.

    Args:
      rule: the formula.
      scalars: the numbers of this step.
      leaves: leaves with elements, whose arrays become those of the result.
      decays: for each leaf, whether its weight decays.
      clips: scale gradients down such that their norm over all devices is at most `scalars.max_norm`.
      skips_nonfinite: change nothing if a gradient is not finite.
      why: for each implementation, why it cannot run.
      numbers: each leaf's number in its tree, for random bits.
      rounding: uint32 [2], the seed of the bits that round bfloat16 arrays; None to round to nearest.
      coding: uint32 [2], the seed of the bits that round moments in 8 bits, if there are any.
    """
    if not leaves:
        return [], jnp.array(True)
    call = _Call(
        rule,
        tuple(decays),
        tuple(tuple(_present(leaf)) for leaf in leaves),
        clips,
        skips_nonfinite,
        why,
        tuple(numbers),
        rounding is not None,
    )
    none = jnp.zeros(2, jnp.uint32)
    words = jnp.stack([none if w is None else w for w in (rounding, coding)])
    axes = [sharding_axes(i, leaf) for i, leaf in enumerate(leaves)]
    taken, *arrays = sharding.per_array_shard(
        functools.partial(call.on_shards, axes),
        [scalars.stacked(), words, *_arrays(leaves, call.fields)],
        operand_axes=[
            ("whole_scalars",),
            ("whole_words", "whole_pair"),
            *(of_leaf[f] for of_leaf, f in _each(axes, call.fields)),
        ],
        result_axes=[(), *(of_leaf[f] for of_leaf, f in _each(axes, call.written))],
    )
    return call.leaves(arrays, call.written), taken


def sharding_axes(index: int, leaf: Leaf) -> dict[str, sharding.AxisNames]:
    """Returns, by field, the axis names of a leaf's arrays; axes of one name are split alike."""
    names = [f"leaf{index}_{axis}" for axis in range(leaf.parameter.ndim)]
    if leaf.first_scale is None:
        return dict.fromkeys(Leaf._fields, tuple(names))
    # Devices may split a last axis at the ends of an 8-bit moment's blocks, but not axes merged in
    # blocks.
    leading = leaf.first_scale.ndim - 1
    axes: sharding.AxisNames
    if leading == leaf.parameter.ndim - 1:
        scales: sharding.AxisNames = tuple(names)
        axes = (*names[:-1], sharding.Blocks(names[-1], kernels.BLOCK))
    else:
        whole = [f"whole_{name}" for name in names[leading:]]
        scales = (*names[:leading], f"whole_blocks{index}")
        axes = (*names[:leading], *whole)
    of_scales = dict(first_scale=scales, second_scale=scales)
    return dict.fromkeys(Leaf._fields, axes) | of_scales


def _each(rows: Sequence[Any], fields: Sequence[Sequence[str]]) -> list[tuple[Any, str]]:
    return [(row, field) for row, names in zip(rows, fields, strict=True) for field in names]


def _present(leaf: Leaf) -> list[str]:
    """Returns the names of a leaf's arrays; scales are first, as the last array decides the split."""
    present = [field for field, array in leaf._asdict().items() if array is not None]
    return sorted(present, key=lambda field: not field.endswith("scale"))


def _arrays(leaves: Sequence[Leaf], fields: Sequence[Sequence[str]]) -> list[jax.Array]:
    return [
        getattr(leaf, field) for leaf, names in zip(leaves, fields, strict=True) for field in names
    ]


@dataclass(frozen=True)
class _Call:
    """Static arguments of `step`."""

    rule: KernelRule
    decays: tuple[bool, ...]
    fields: tuple[tuple[str, ...], ...]
    """Names of each leaf's arrays."""
    clips: bool
    skips_nonfinite: bool
    why: Mapping[str, str | None]
    numbers: tuple[int, ...]
    rounds: bool
    """True if bfloat16 arrays are rounded stochastically."""

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
        words: jax.Array,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Returns whether the step is taken, and the new arrays named in `written`, leaf by leaf.

        The first result is False if the norm, computed to clip or to skip, is of non-finite
        gradients.
        """
        leaves = self.leaves(arrays, self.fields)
        record(self.rule.stage, leaves, "cuda", self.why, where.by_partitioner)
        names = [where.names(of_leaf["parameter"]) for of_leaf in axes]
        stats = jnp.zeros_like(scalars, shape=(2,))
        if self.clips or self.skips_nonfinite:
            factor = scalars[Scalars._fields.index("inverse_loss_scale")]
            stats = sum_of_squares(factor, [leaf.gradient for leaf in leaves], names)
        new: list[Leaf | None] = [None] * len(leaves)
        for group in self._launches(leaves, names):
            members = [leaves[i] for i in group]
            random = None
            if self.rounds or members[0].first_scale is not None:
                places = [_place(where, axes[i]["parameter"], leaves[i].parameter) for i in group]
                random = _random(words, [self.numbers[i] for i in group], places, members[0])
            decays = [self.decays[i] for i in group]
            results = self._update(scalars, stats, random, members, decays, names[group[0]])
            for i, leaf in zip(group, results, strict=True):
                new[i] = leaf
        return stats[1] == 0, *_arrays([leaf for leaf in new if leaf is not None], self.written)

    def _launches(
        self, leaves: Sequence[Leaf], names: Sequence[tuple[str, ...]]
    ) -> list[list[int]]:
        """Returns lists of indices of leaves of equal dtypes, which one kernel call can update."""

        def kind(i: int) -> Hashable:
            leaf = leaves[i]
            dtypes = tuple(None if array is None else array.dtype for array in leaf)
            varying = sharding.varying(*(a for a in leaf if a is not None))
            # One psum adds the norms of all LAMB leaves of a call, so the same mesh axes must split
            # them all.
            return dtypes, varying, names[i] if self.rule.name == "lamb" else ()

        return _grouped(kind, len(leaves))

    def _update(
        self,
        scalars: jax.Array,
        stats: jax.Array,
        random: jax.Array | None,
        leaves: Sequence[Leaf],
        decays: Sequence[bool],
        names: tuple[str, ...],
    ) -> list[Leaf]:
        fields = [_present(leaf) for leaf in leaves]
        shared = [scalars, stats, *([] if random is None else [random])]
        operands = [*shared, *_arrays(leaves, fields)]
        varying = sharding.varying(*operands)
        operands = sharding.vary(operands, varying)
        scalars, stats, *arrays = operands
        if random is not None:
            random, *arrays = arrays
        leaves = self.leaves(arrays, fields)
        step = functools.partial(
            kernels.step,
            clips=self.clips,
            skips_nonfinite=self.skips_nonfinite,
            nesterov=self.rule.nesterov,
            random=random,
            rounded=stochastic_rounding.ARRAYS if self.rounds else (),
        )
        if self.rule.name != "lamb":
            coded = "_8bit" if leaves[0].first_scale is not None else ""
            new, _ = step(self.rule.name + coded, scalars, stats, leaves, decays)
        else:
            first = [leaf._replace(average=None, copy=None) for leaf in leaves]
            keeps_direction = _has_float32_moments(leaves[0])
            moved, norms = step(
                "lamb_moments" if keeps_direction else "lamb_norms", scalars, stats, first, decays
            )
            assert norms is not None
            norms = lax.psum(norms, names)
            second = [
                new_leaf._replace(
                    gradient=None if keeps_direction else leaf.gradient,
                    average=leaf.average,
                    copy=leaf.copy,
                )
                for new_leaf, leaf in zip(moved, leaves, strict=True)
            ]
            rule = "lamb_write" if keeps_direction else "lamb_whole"
            new, _ = step(rule, scalars, stats, second, decays, norms=norms)
        written = [[f for f in names if f != "gradient"] for names in fields]
        return self.leaves(sharding.vary(_arrays(new, written), varying), written)


def _has_float32_moments(leaf: Leaf) -> bool:
    return all(
        moment is None or moment.dtype == jnp.float32
        for moment in (leaf.first_moment, leaf.second_moment)
    )


def _place(
    where: sharding.OnShards, axes: sharding.AxisNames, shard: jax.Array
) -> list[jax.Array | int]:
    """Returns how a shard's indices map to the whole array's: a base, three chunks, three skips.

    The element with index l on this device has index base + l + sum of (l // chunk) * skip, modulo 2^32,
    in the array. Each split axis has a term, except the array's first axis.
    """
    base: jax.Array | int = 0
    terms = []
    local_stride = stride = 1
    for axis in reversed(range(shard.ndim)):
        size, names = shard.shape[axis], where.names((axes[axis],))
        parts = math.prod(lax.axis_size(name) for name in names)
        if parts > 1:
            offset = lax.axis_index(names).astype(jnp.uint32)
            base = base + offset * jnp.uint32(size * stride % 2**32)
            if axis > 0:
                terms.append((size * local_stride, size * stride * (parts - 1) % 2**32))
        local_stride *= size
        stride *= size * parts
    if len(terms) > 3 or any(chunk >= 2**32 for chunk, _ in terms):
        raise ValueError(
            "step: random rounding takes arrays of which at most 3 axes beside the first are split,"
            f" into parts of less than 2^32 elements, but a shard has shape {shard.shape}; split fewer"
            " axes."
        )
    chunks, skips = zip(*terms, *[(0, 0)] * (3 - len(terms)), strict=True)
    return [base, *chunks, *skips]


def _random(
    words: jax.Array,
    numbers: Sequence[int],
    places: Sequence[Sequence[jax.Array | int]],
    like: Leaf,
) -> jax.Array:
    """Returns uint32 [leaves, RANDOM_WORDS]: seeds of random bits, and the index map of `_place`."""
    rounding, coding = words
    codes = like.first_scale is not None

    def vector(values: Sequence[jax.Array | int]) -> jax.Array:
        # XLA's partitioner accepts no functions that close over constant arrays, only over scalars.
        return jnp.stack(
            [v if isinstance(v, jax.Array) else lax.full((), v, jnp.uint32) for v in values]
        )

    leaves = vector(numbers)
    seeds = [
        stochastic_rounding.leaf_seeds(coding if codes and moment else rounding, leaves, array)
        for moment, array in enumerate(stochastic_rounding.ARRAYS)
    ]
    rows = jnp.stack([vector(row) for row in places])
    table = jnp.concatenate([*(seed.T for seed in seeds), rows], axis=1)
    return jnp.pad(table, ((0, 0), (0, kernels.RANDOM_WORDS - table.shape[1])))


def sum_of_squares(
    factor: jax.Array, gradients: Sequence[Any], names: Sequence[tuple[str, ...]]
) -> jax.Array:
    """Returns the sum of squares of all gradients, and a count that is 0 if all are finite."""

    def kind(i: int) -> Hashable:
        return gradients[i].dtype, names[i], sharding.varying(gradients[i])

    totals = []
    for group in _grouped(kind, len(gradients)):
        members = [factor, *(gradients[i] for i in group)]
        varying = sharding.varying(*members)
        factor_here, *members = sharding.vary(members, varying)
        [total] = sharding.vary([gradient_norm_cuda.sum_of_squares(factor_here, members)], varying)
        totals.append(lax.psum(total, names[group[0]]))
    total = totals[0]
    for other in totals[1:]:
        total, other = sharding.vary([total, other], sharding.varying(total, other))
        total = total + other
    return total


def _grouped(kind: Callable[[int], Hashable], count: int) -> list[list[int]]:
    """Returns lists of the numbers below `count`; those in a list have the same `kind`."""
    groups: dict[Hashable, list[int]] = {}
    for i in range(count):
        groups.setdefault(kind(i), []).append(i)
    return list(groups.values())
