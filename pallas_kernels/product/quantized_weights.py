"""Weights of 8 or 4 bits in a product of few rows: from global memory to operands in registers.

The weights lie as [N, K], so that a thread finds the numbers of a row next to one another, as many at a
time as a register holds. They become numbers of x's dtype, which holds each of them exactly, in
registers. A scale that a whole column of the product shares is left to the epilogue; one of a group
along the sums multiplies the sum of that group in float32, so that no weight is ever rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.product.operands import SWIZZLE_BYTES, bits_of, tiled

DTYPES = (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2)
_X_COLUMNS = 64
"""Numbers of x in 128 bytes, which are swizzled as one."""


@dataclass(frozen=True)
class Format:
    """How the weights of a product are stored, beside their shape."""

    dtype: Any
    group: int = 0
    """Weights along the sums that share a scale; 0 where the epilogue scales whole columns."""
    has_zero_point: bool = False

    @property
    def bits(self) -> int:
        return bits_of(self.dtype)

    @property
    def arrays(self) -> int:
        """How many arrays a product's weights are made of."""
        return 1 + int(self.group > 0) + int(self.has_zero_point)


def why_unsupported(
    *, dtype: Any, group: int, has_zero_point: bool, k: int, n: int, step: int
) -> str | None:
    """None where a product [M, k] @ [n, k]^T with such weights can run in steps of `step`, else why not.

    Args:
      group: weights along the sums that share a scale; 0 for one scale a column.
    """
    if dtype not in DTYPES:
        return f"it takes weights of int8, int4 and float8, and they are {jnp.dtype(dtype)}"
    bits = Format(dtype).bits
    row_bytes = 16
    if k * bits % (8 * row_bytes):
        return (
            f"it copies rows of weights that are whole multiples of {row_bytes} bytes, and a row has"
            f" {k} numbers of {bits} bits"
        )
    if group and group not in (32, 64) and group % step:
        return f"it takes groups of 32, 64 and multiples of {step}, and they have {group}"
    if has_zero_point and n % row_bytes:
        return (
            f"it copies zero points of a multiple of {row_bytes} columns, and there are {n} columns"
        )
    return None


@dataclass(frozen=True)
class QuantizedTile:
    """`span` columns of the weights in a step along the sums."""

    format: Format
    span: int
    x_dtype: Any
    step_k: int
    """Numbers along the sums in a step."""

    in_registers = True

    @property
    def copies(self) -> int:
        return self.format.arrays

    @property
    def group(self) -> int:
        """Numbers along the sums that are multiplied before their sum is scaled."""
        return min(self.format.group or self.step_k, self.step_k)

    @property
    def groups(self) -> int:
        """Of a step."""
        return self.step_k // self.group

    @property
    def x_columns(self) -> int:
        """Numbers of x that an instruction finds swizzled as one."""
        return min(_X_COLUMNS, self.group)

    def memory(self, stages: int) -> Mapping[str, Any]:
        f = self.format
        row_bytes = self.step_k * f.bits // 8
        columns = min(row_bytes, SWIZZLE_BYTES) * 8 // f.bits
        memory = {"values": tiled((stages, self.span, self.step_k), f.dtype, columns)}
        if f.group:
            memory["scale"] = plgpu.SMEM((stages, self.groups, self.span), jnp.float32)
        if f.has_zero_point:
            memory["zero_point"] = plgpu.SMEM((stages, self.groups, self.span), jnp.int8)
        return memory

    def copy(
        self,
        arrays: Sequence[Any],
        memory: Mapping[str, Any],
        slot: Any,
        start: Any,
        k_start: Any,
        landed: Any,
    ) -> None:
        """Starts the copies of the columns from `start` on, of a step, with their scales."""
        values, *of_groups = arrays
        columns = pl.ds(start, self.span)
        plgpu.copy_gmem_to_smem(
            values.at[columns, pl.ds(k_start, self.step_k)], memory["values"].at[slot], landed
        )
        names = [name for name in ("scale", "zero_point") if name in memory]
        for name, array in zip(names, of_groups, strict=True):
            first = lax.div(k_start, jnp.int32(self.format.group)) if self.format.group else 0
            plgpu.copy_gmem_to_smem(
                array.at[pl.ds(first, self.groups), columns], memory[name].at[slot], landed
            )

    def operands(self, memory: Mapping[str, Any], slot: Any) -> Iterator[jax.Array]:
        """Yields the weights [span, group] of each group in registers, as instructions take them."""
        wide = _to_floats(
            plgpu.load(memory["values"].at[slot], layout=self._load_layout), self.x_dtype
        )
        for group in range(self.groups):
            first = group * self.group
            w = wide if self.groups == 1 else wide[:, first : first + self.group]
            if self.format.has_zero_point:
                zero_point = plgpu.load(
                    memory["zero_point"].at[slot, group], layout=plgpu.Layout.WGMMA.reduce(1)
                )
                zero_point = zero_point.astype(self.x_dtype)
                w = w - lax.broadcast_in_dim(zero_point, w.shape, (0,))
            yield w

    def scales(self, memory: Mapping[str, Any], slot: Any, rows: int) -> Iterator[jax.Array]:
        """Yields for each group what multiplies its sums [span, rows]."""
        for group in range(self.groups):
            scale = plgpu.load(
                memory["scale"].at[slot, group], layout=plgpu.Layout.WGMMA.reduce(1)
            )
            yield lax.broadcast_in_dim(scale, (self.span, rows), (0,))

    @property
    def _load_layout(self) -> Any:
        """Of which a thread's registers need few exchanges to become an operand."""
        layouts = plgpu.Layout
        return layouts.WGMMA_UPCAST_4X if self.format.bits == 4 else layouts.WGMMA_UPCAST_2X


def _to_floats(w: jax.Array, dtype: Any) -> jax.Array:
    """Weights, as they were loaded, in a dtype of 16 bits and in the layout of instructions."""
    # Narrow registers are exchanged, since fewer of them are.
    w = plgpu.layout_cast(w, plgpu.Layout.WGMMA)
    if jnp.issubdtype(w.dtype, jnp.integer):
        return w.astype(jnp.bfloat16) if dtype == jnp.bfloat16 else w.astype(dtype)
    # The hardware converts float8 to float16 alone.
    w = w.astype(jnp.float16)
    return w if dtype == jnp.float16 else w.astype(jnp.float32).astype(dtype)
