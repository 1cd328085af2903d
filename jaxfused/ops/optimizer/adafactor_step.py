"""Adafactor's second moments and update scales of matrices, by CUDA kernels on each device's shards.

The reference is Optax's `scale_by_factored_rms`. An update is a gradient times a factor for its row, one
for its column and one for its matrix. So these kernels write no updates: the
pass that writes the parameters multiplies.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfused.ops.optimizer import adafactor_cuda as kernels
from jaxfused.ops.optimizer import optimizer_step
from jaxfused.ops.optimizer.gradient_norm import clipping_factor
from jaxfused.runtime import sharding
from jaxfused.runtime.reference_rules import with_reference_rules

LEAST_PARAMETER_SCALE = 1e-3
"""The least root mean square of a parameter, as in Optax's `scale_by_param_block_rms`."""


class Leaf(NamedTuple):
    """Arrays of one parameter, a matrix or a stack of matrices.

    Moments come first, because of the arrays that share an axis the last one decides its sharding.
    """

    row_moment: jax.Array
    """Decayed mean of each row's squares, [..., rows]."""
    column_moment: jax.Array
    """Decayed mean of each column's squares, [..., columns]."""
    gradient: jax.Array
    """Gradient [..., rows, columns]; the parameter has the same shape."""
    parameter: jax.Array


class Scaled(NamedTuple):
    """A leaf after the step: its update is gradient / sqrt(row_moment column_moment) * scale."""

    row_moment: jax.Array
    column_moment: jax.Array
    scale: jax.Array
    """Factor of each matrix, float32 [...]."""


class Scalars(NamedTuple):
    """Scalars of one step."""

    decay: Any
    one_minus_decay: Any
    eps: Any
    clipping_threshold: Any
    max_norm: Any
    other_squares: Any
    """Sum of squares of the gradients that are not among this step's leaves, for the global norm."""


def step(
    scalars: Scalars,
    leaves: Sequence[Leaf],
    normalizes_columns: Sequence[bool],
    *,
    clips: bool,
    clips_updates: bool,
    multiplies_by_parameter: bool,
    why: Mapping[str, str | None],
) -> tuple[list[Scaled], jax.Array]:
    """Returns the leaves after the step, and the clipping factor of all gradients of the tree.

    Args:
      scalars: the numbers of this step.
      leaves: non-empty leaves.
      normalizes_columns: for each leaf, True to divide the moments of the columns by their mean, False
        those of the rows.
      clips: scale gradients down such that the norm over all leaves and devices is at most `max_norm`.
      clips_updates: scale a leaf's updates down to the root mean square `clipping_threshold`.
      multiplies_by_parameter: multiply a leaf's updates by the root mean square of the parameter.
      why: for each implementation, why it cannot run.
    """
    call = _Call(tuple(normalizes_columns), clips, clips_updates, multiplies_by_parameter, why)
    vector = jnp.stack([jnp.asarray(s, jnp.float32).reshape(()) for s in scalars])
    run = with_reference_rules(call.by_kernels, call.by_reference)
    factor, *arrays = run(vector, *(array for leaf in leaves for array in leaf))
    return [Scaled(*arrays[i : i + 3]) for i in range(0, len(arrays), 3)], factor


def _axes(names: Sequence[str]) -> tuple[sharding.AxisNames, ...]:
    """Returns the axis names of a leaf's row moment, column moment, gradient and parameter."""
    *leading, rows, columns = names
    return (*leading, rows), (*leading, columns), tuple(names), tuple(names)


@dataclass(frozen=True)
class _Call:
    """Static arguments of `step`."""

    normalizes_columns: tuple[bool, ...]
    clips: bool
    clips_updates: bool
    multiplies_by_parameter: bool
    why: Mapping[str, str | None] = field(compare=False)

    def by_reference(self, vector: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the clipping factor, then each leaf's arrays of `Scaled`, computed in jax.numpy."""
        scalars, leaves = Scalars(*vector), _leaves(arrays)
        squares = [jnp.square(leaf.gradient.astype(jnp.float32)) for leaf in leaves]
        factor = jnp.ones_like(scalars.max_norm)
        if self.clips:
            norm = jnp.sqrt(scalars.other_squares + sum(map(jnp.sum, squares)))
            factor = clipping_factor(norm, scalars.max_norm)
        scaled = [
            self._scaled(scalars, factor, leaf, square, normalizes_columns)
            for leaf, square, normalizes_columns in zip(
                leaves, squares, self.normalizes_columns, strict=True
            )
        ]
        return factor, *(array for leaf in scaled for array in leaf)

    def _scaled(
        self,
        scalars: Scalars,
        factor: jax.Array,
        leaf: Leaf,
        squares: jax.Array,
        normalizes_columns: bool,
    ) -> Scaled:
        moments = []
        for axis, old in ((-1, leaf.row_moment), (-2, leaf.column_moment)):
            new = factor**2 * jnp.mean(squares, axis) + scalars.eps
            moments.append((scalars.decay * old + scalars.one_minus_decay * new).astype(old.dtype))
        row, column = (moment.astype(jnp.float32) for moment in moments)
        scale = factor * jnp.sqrt(jnp.mean(column if normalizes_columns else row, -1))
        if self.clips_updates:
            updates = squares / row[..., None] / column[..., None, :] * scale[..., None, None] ** 2
            root = jnp.sqrt(jnp.mean(updates))
            scale = scale / jnp.maximum(1.0, root / scalars.clipping_threshold)
        if self.multiplies_by_parameter:
            root = jnp.sqrt(jnp.mean(jnp.square(leaf.parameter.astype(jnp.float32))))
            scale = scale * jnp.maximum(root, LEAST_PARAMETER_SCALE)
        return Scaled(moments[0], moments[1], scale)

    def by_kernels(self, vector: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the results of `by_reference`, computed by CUDA kernels on each device's shards."""
        names = [
            [f"leaf{i}_{axis}" for axis in range(leaf.parameter.ndim)]
            for i, leaf in enumerate(_leaves(arrays))
        ]
        axes = [_axes(of_leaf) for of_leaf in names]
        result_axes: list[sharding.AxisNames] = [()]
        for of_arrays, of_leaf in zip(axes, names, strict=True):
            result_axes += [*of_arrays[:2], tuple(of_leaf[:-2])]
        return sharding.per_array_shard(
            functools.partial(self.on_shards, axes),
            [vector, *arrays],
            operand_axes=[("whole_scalars",), *(of_array for leaf in axes for of_array in leaf)],
            result_axes=result_axes,
        )

    def on_shards(
        self,
        axes: Sequence[Sequence[sharding.AxisNames]],
        where: sharding.OnShards,
        vector: jax.Array,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        leaves = _leaves(arrays)
        recorded = [optimizer_step.Leaf(None, leaf.parameter) for leaf in leaves]
        optimizer_step.record("adafactor step", recorded, "cuda", self.why, where.by_partitioner)
        split = [
            _Split.of(where, of_leaf[-1], leaf) for of_leaf, leaf in zip(axes, leaves, strict=True)
        ]
        groups = _groups(leaves)
        scalars = Scalars(*vector)
        of_groups = [
            _Group(
                self,
                [leaves[i] for i in g],
                [split[i] for i in g],
                [self.normalizes_columns[i] for i in g],
            )
            for g in groups
        ]
        sums = [group.sums_of_squares() for group in of_groups]
        factor = jnp.ones_like(scalars.max_norm)
        if self.clips:
            norm = jnp.sqrt(
                scalars.other_squares + sum(jnp.sum(totals[:, 0]) for _, totals in sums)
            )
            factor = clipping_factor(norm, scalars.max_norm)
        results: list[Scaled | None] = [None] * len(leaves)
        for indices, group, (lines, totals) in zip(groups, of_groups, sums, strict=True):
            for i, scaled in zip(
                indices, group.scaled(scalars, factor, lines, totals), strict=True
            ):
                results[i] = scaled
        return factor, *(array for scaled in results if scaled is not None for array in scaled)


def _leaves(arrays: Sequence[jax.Array]) -> list[Leaf]:
    return [Leaf(*arrays[i : i + 4]) for i in range(0, len(arrays), 4)]


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Returns lists of indices of leaves with equal dtypes; one kernel call updates each list."""
    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        kind = tuple(array.dtype for array in leaf), sharding.varying(*leaf)
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


@dataclass(frozen=True)
class _Split:
    """Mesh axes that split a leaf's matrices, rows and columns, and the unsharded sizes."""

    matrices: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_count: int
    column_count: int
    size: int

    @classmethod
    def of(cls, where: sharding.OnShards, axes: sharding.AxisNames, leaf: Leaf) -> "_Split":
        matrices, rows, columns = (
            where.names(part) for part in (axes[:-2], axes[-2:-1], axes[-1:])
        )
        parts = [
            math.prod(lax.axis_size(name) for name in names) for names in (matrices, rows, columns)
        ]
        shape = leaf.parameter.shape
        size = math.prod(shape) * math.prod(parts)
        return cls(matrices, rows, columns, shape[-2] * parts[1], shape[-1] * parts[2], size)


@dataclass(frozen=True)
class _Group:
    """Leaves of equal dtypes, which one kernel call updates."""

    call: _Call
    leaves: Sequence[Leaf]
    split: Sequence[_Split]
    normalizes_columns: Sequence[bool]

    def sums_of_squares(self) -> tuple[jax.Array, jax.Array]:
        """Returns sums of squares over all devices: of each row and column, and of each leaf."""
        gradients = [leaf.gradient for leaf in self.leaves]
        parameters = [leaf.parameter for leaf in self.leaves if self.call.multiplies_by_parameter]
        lines, totals = self._varying(kernels.sums_of_squares)(gradients, parameters)
        kinds = [
            (moment.size, names)
            for leaf, s in zip(self.leaves, self.split, strict=True)
            for moment, names in ((leaf.row_moment, s.columns), (leaf.column_moment, s.rows))
        ]
        every = [(1, (*s.matrices, *s.rows, *s.columns)) for s in self.split]
        return _added_up(lines, kinds), _added_up(totals, every)

    def scaled(
        self, scalars: Scalars, factor: jax.Array, lines: jax.Array, totals: jax.Array
    ) -> list[Scaled]:
        """Returns each leaf's new moments and update scale, given its sums of squares.

        `lines` has the sums of rows and columns, `totals` those of whole leaves; the clipping
        `factor` multiplies the gradients.
        """
        numbers = (scalars.decay, scalars.one_minus_decay, factor * factor, scalars.eps)
        rows, columns, sums = self._varying(kernels.new_moments)(
            jnp.stack(numbers),
            lines,
            [leaf.row_moment for leaf in self.leaves],
            [leaf.column_moment for leaf in self.leaves],
            [(s.column_count, s.row_count) for s in self.split],
            self.normalizes_columns,
        )
        # The vectors below have one number per matrix, or one per leaf.
        matrices = [math.prod(leaf.parameter.shape[:-2]) for leaf in self.leaves]
        lengths, along, across = [], [], []
        for of_columns, s, count in zip(self.normalizes_columns, self.split, matrices, strict=True):
            lengths.append(s.column_count if of_columns else s.row_count)
            along.append((count, s.columns if of_columns else s.rows))
            across.append((count, (*s.rows, *s.columns)))
        sizes = _vector([s.size for s in self.split])
        means = _added_up(sums, along) / _repeated(_vector(lengths), matrices)
        scale = factor * jnp.sqrt(means)
        if self.call.clips_updates:
            gradients = [leaf.gradient for leaf in self.leaves]
            squares = self._varying(kernels.updates_squared)(gradients, rows, columns)
            squares = _added_up(squares, across) * scale**2
            if len(matrices) < len(squares):
                squares = jnp.stack([jnp.sum(part) for part in _parts(squares, matrices)])
            squares = _added_up(squares, [(1, s.matrices) for s in self.split])
            root = jnp.sqrt(squares / sizes)
            divisor = jnp.maximum(1.0, root / scalars.clipping_threshold)
            scale = scale / _repeated(divisor, matrices)
        if self.call.multiplies_by_parameter:
            root = jnp.sqrt(totals[:, 1] / sizes)
            scale = scale * _repeated(jnp.maximum(root, LEAST_PARAMETER_SCALE), matrices)
        # Without the barrier XLA recomputes the scale for each element that it writes.
        scales = _parts(lax.optimization_barrier(scale), matrices)
        return [
            Scaled(row, column, part.reshape(leaf.parameter.shape[:-2]))
            for row, column, part, leaf in zip(rows, columns, scales, self.leaves, strict=True)
        ]

    def _varying(self, call: Any) -> Any:
        """Wraps a kernel's call so that operands and results vary over the same Manual axes."""

        def wrapped(*operands: Any) -> Any:
            leaves = jax.tree.leaves(operands)
            is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
            arrays = [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]
            names = sharding.varying(*arrays)
            varied = iter(sharding.vary(arrays, names))
            treedef: Any = jax.tree.structure(operands)
            results = call(
                *treedef.unflatten(
                    [
                        next(varied) if own else leaf
                        for leaf, own in zip(leaves, is_array, strict=True)
                    ]
                )
            )
            of_results: Any = jax.tree.structure(results)
            return of_results.unflatten(sharding.vary(jax.tree.leaves(results), names))

        return wrapped


def _added_up(array: jax.Array, parts: Sequence[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """Sums parts of an array's first axis over devices; `parts` has (size, mesh axes) of each part."""
    if not any(names for _, names in parts):
        return array
    split = _parts(array, [size for size, _ in parts])
    return jnp.concatenate(
        [lax.psum(part, names) for part, (_, names) in zip(split, parts, strict=True)]
    )


def _vector(values: Sequence[float]) -> jax.Array:
    # XLA's partitioner accepts no functions that close over constant arrays, only over scalars.
    return jnp.stack([lax.full((), value, jnp.float32) for value in values])


def _repeated(vector: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Returns a vector with each element repeated as often as `counts` says."""
    if all(count == 1 for count in counts):
        return vector
    return jnp.concatenate(
        [jnp.broadcast_to(vector[i], (count,)) for i, count in enumerate(counts)]
    )


def _parts(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Splits an array along its first axis into parts of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]
