"""Kernels that take matrices by their rows, as the operators call them: sharded, batched, any rank.

A product with weights takes its rows [M, D] from an array [..., D]: a shard of the leading axes, or a
batch by `jax.vmap`, is fewer or more rows. The weights' own last axis may be sharded too, where the
kernel does not sum over it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxfused import sharding
from jaxfused.ops.batching import batch_all, is_batched, one_by_one

Results = tuple[Any, ...]

ROWS = "."
"""Stands for the leading axes in the letters of a `RowKernel`'s arrays."""


@dataclass(frozen=True)
class RowKernel:
    """A function of matrices [M, features], some of which share their rows, and how it splits.

    Its letters name the axes of each array as in `sharding.per_shard`, with `ROWS` before the last
    one of those that have the rows; a result without it is a sum over them.
    """

    function: Callable[..., Results]
    keywords: tuple[tuple[str, Any], ...]
    operand_axes: tuple[str, ...]
    result_axes: tuple[str | None, ...]
    """None for a result that is None."""
    whole: str
    """Letters over which the kernel sums before it does what is not linear."""

    def __call__(self, *operands: jax.Array | None) -> Results:
        @custom_vmap
        def call(*operands):
            return self._per_shard(operands)

        @call.def_vmap
        def rule(axis_size, in_batched, *operands):
            over_rows = [ROWS in axes for axes in self.operand_axes]
            shared_is_batched = any(
                is_batched(batched)
                for batched, rows in zip(in_batched, over_rows, strict=True)
                if not rows
            )
            if shared_is_batched or self._sums_rows:
                results = one_by_one(call, in_batched, operands)
            else:
                batched = batch_all(axis_size, in_batched, operands)
                results = self(
                    *(
                        b if rows else operand
                        for b, operand, rows in zip(batched, operands, over_rows, strict=True)
                    )
                )
            return results, jax.tree.map(lambda _: True, results)

        return call(*operands)

    def _per_shard(self, operands: Sequence[jax.Array | None]) -> Results:
        rows = next(
            operand.ndim - 1
            for operand, axes in zip(operands, self.operand_axes, strict=True)
            if ROWS in axes and operand is not None
        )
        leading = sharding.leading_axes(rows)
        return sharding.per_shard(
            _Flat(self),
            operands,
            operand_axes=[axes.replace(ROWS, leading) for axes in self.operand_axes],
            result_axes=[
                None if axes is None else axes.replace(ROWS, leading) for axes in self.result_axes
            ],
            whole=self.whole,
        )

    @property
    def _sums_rows(self) -> bool:
        return any(axes is not None and ROWS not in axes for axes in self.result_axes)


@dataclass(frozen=True)
class _Flat:
    """The kernel over arrays of any rank."""

    kernel: RowKernel

    def __call__(self, *operands: jax.Array | None) -> Results:
        rows: tuple[int, ...] = ()
        flat = []
        for operand, axes in zip(operands, self.kernel.operand_axes, strict=True):
            if operand is not None and ROWS in axes:
                rows = operand.shape[:-1]
                operand = operand.reshape(math.prod(rows), operand.shape[-1])
            flat.append(operand)
        results = self.kernel.function(*flat, **dict(self.kernel.keywords))
        return tuple(
            result.reshape(*rows, result.shape[-1]) if axes is not None and ROWS in axes else result
            for result, axes in zip(results, self.kernel.result_axes, strict=True)
        )
