"""Grouped products with quantised weights for Hopper: each group of rows has a matrix of its own.

The kernel is that of `quantized_tiles`, with other positions of the tiles. A group's tiles follow one
another from its first row on; rows of the next group in its last tile are not stored.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.gemm import dequantize, groups, quantized_tiles, quantized_weights
from pallas_kernels.gemm.grouped import MOST_GROUPS
from pallas_kernels.gemm.groups import Group, Groups
from pallas_kernels.gemm.quantized import COPIED_BYTES, STEP, Packed
from pallas_kernels.gemm.quantized_tiles import (
    COLUMNS,
    STORED_ROWS,
    Place,
    QuantizedTiles,
    QuantizedTilesConfig,
)

_DTYPES = (jnp.bfloat16, jnp.float16)


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    out_dtype: Any,
    x_shape: tuple[int, int],
    w: Packed,
) -> str | None:
    """Returns None if groups of rows [M, K] can be multiplied by quantised matrices, else why not."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    for name, dtype in (("lhs", x_dtype), ("the result", out_dtype)):
        if dtype not in _DTYPES:
            return f"it takes bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    (rows, k), matrices = x_shape, w.values.shape[0]
    if k < STEP:
        return f"it takes sums of at least {STEP} numbers (K), and they have {k}"
    if matrices > MOST_GROUPS:
        return f"it takes at most {MOST_GROUPS} groups, and there are {matrices}"
    if rows * matrices >= 2**31:
        return "its indices have 32 bits, and there are too many rows and groups for them"
    if w.n % COPIED_BYTES:
        return f"it takes multiples of {COPIED_BYTES} columns, and there are {w.n}"
    group = of_one_group(w).format(k).group
    return quantized_weights.why_unsupported(dtype=w.dtype, group=group, k=k, step=STEP)


def candidates(
    x_shape: tuple[int, int], w: Packed, multiprocessors: int
) -> list[QuantizedTilesConfig]:
    """Returns configs for groups of about equal sizes, predicted fastest first."""
    (rows, k), matrices = x_shape, w.values.shape[0]
    layout, used = of_one_group(w).format(k), min(matrices, rows)
    configs = [
        quantized_tiles.filled(height, warpgroups, layout, quantized_tiles.STORE_SLOTS)
        for height in range(STORED_ROWS, 256 + 1, STORED_ROWS)
        for warpgroups in (2, 3)
        if height < rows // used + 2 * STORED_ROWS and (warpgroups == 2 or height <= 128)
    ]

    def time(config: QuantizedTilesConfig) -> float:
        if rows <= used * STORED_ROWS:
            # Reading the matrices takes all of the time; more warpgroups keep up with memory better.
            return config.rows - config.warpgroups
        padded = used * -(-rows // (used * config.rows)) * config.rows
        return quantized_tiles.microseconds(padded, w.n, k, config, multiprocessors)

    return sorted(configs, key=time)


def forward(
    x: jax.Array,
    w: Packed,
    group_sizes: jax.Array,
    offset: jax.Array,
    *,
    out_dtype: Any,
    multiprocessors: int,
    config: QuantizedTilesConfig | None = None,
    name: str = "grouped_quantized",
) -> jax.Array:
    """Returns each group of x's rows times its weights: [M, N], zeros in the rows of no group.

    Args:
      x: [M, K], bfloat16 or float16.
      w: weights of all groups, whose arrays have a leading axis over groups.
      group_sizes: int [G]: rows of each group.
      offset: int [], the index of the group that w's first matrix is for.
    """
    (rows, k), matrices, n = x.shape, w.values.shape[0], w.n
    layout = of_one_group(w).format(k)
    config = config or candidates(x.shape, w, multiprocessors)[0]
    scale = _over_columns(w.scale, n)
    if not layout.group and scale.dtype == jnp.uint8:
        exponents = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
        scale = exponents.astype(jnp.float32)
    arrays = [w.values]
    if layout.group:
        arrays.append(scale)
    if w.zero_point is not None:
        arrays.append(_over_columns(w.zero_point, n))
    if layout.has_table:
        arrays.append(jnp.asarray(dequantize.table(w.codebook, x.dtype)))
    vectors = {} if layout.group else {"w_scale": scale[:, 0]}

    def function(sums: jax.Array, w_scale: Any = None) -> Mapping[str, jax.Array]:
        return {"y": sums if w_scale is None else sums * w_scale}

    tiles = GroupedQuantizedTiles(
        rows,
        n,
        k,
        x.dtype,
        config,
        layout,
        function,
        vectors={name: jax.typeof(v) for name, v in vectors.items()},
        matrices={},
        outputs={"y": out_dtype},
        multiprocessors=multiprocessors,
        group_count=matrices,
    )
    own = groups.operands(group_sizes, offset, groups=matrices, rows=rows, tile_m=config.rows)
    return tiles.launch(x, arrays, tuple(vectors.values()), own=own, name=name)["y"]


def of_one_group(w: Packed) -> Packed:
    """Returns the shapes and dtypes of one group's weights, without the leading axis over groups."""

    def one(array: Any) -> Any:
        return None if array is None else jax.ShapeDtypeStruct(array.shape[1:], array.dtype)

    return Packed(one(w.values), one(w.scale), one(w.zero_point), w.codebook)


def _over_columns(numbers: jax.Array, n: int) -> jax.Array:
    """Returns scales or zero points [E, G, N], repeated where columns share one."""
    return jnp.broadcast_to(numbers, (*numbers.shape[:-1], n))


@dataclass(frozen=True)
class GroupedQuantizedTiles(QuantizedTiles):
    """Static parameters of a grouped launch, and where each group's tiles are."""

    group_count: int = 1
    groups: Groups | None = None
    """Rows and tiles of each group, which only the device knows; None outside of a kernel."""

    @property
    def parts(self) -> list[quantized_tiles.Part]:
        c = self.config
        down = self.m // c.rows + min(self.group_count, self.m)
        return [quantized_tiles.Part(c.rows, 0, (down, pl.cdiv(self.n, c.columns)))]

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, refs: Sequence[Any]) -> tuple[QuantizedTiles, Sequence[Any]]:
        found, refs = groups.on_device(
            refs, groups=self.group_count, rows=self.m, tile_m=self.config.rows
        )
        return replace(self, groups=found), refs

    @property
    def _known(self) -> Groups:
        assert self.groups is not None
        return self.groups

    def grid_of(self, part: quantized_tiles.Part) -> tuple[Any, int]:
        return self._known.tiles(), part.grid[1]

    def place(self, part: quantized_tiles.Part, sequence_idx: Any) -> Place:
        tile, n_start, _ = super().place(part._replace(rows=1), sequence_idx)
        group, within = self._known.of_tile(tile)
        return Place(group.start + within * part.rows, n_start, group)

    def of_place(self, ref: Any, place: Place) -> Any:
        return ref.at[place.group.index]

    def store_rows(self, source: Any, ref: Any, place: Place, columns: Any) -> None:
        """Stores the rows before the group's end, in copies of 2^i rows, since sizes are static."""
        rows = jnp.clip(place.group.end - place.m_start, 0, STORED_ROWS)

        def copy(start: Any, size: int) -> None:
            to = ref.at[pl.ds(place.m_start + start, size), columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], to, commit_group=False)

        @pl.when(rows == STORED_ROWS)
        def _():
            to = ref.at[pl.ds(place.m_start, STORED_ROWS), columns]
            plgpu.copy_smem_to_gmem(source, to, commit_group=False)

        @pl.when(rows < STORED_ROWS)
        def _():
            for bit in reversed(range((STORED_ROWS - 1).bit_length())):
                start = (rows >> (bit + 1)) << (bit + 1)
                pl.when(rows & (1 << bit) != 0)(functools.partial(copy, start, 1 << bit))

    def after_tiles(self, wg_idx: Any, store_zeros: Callable[[Place], None]) -> None:
        """Stores zeros in the rows before the first group and after the last one."""
        across, (before, after) = pl.cdiv(self.n, COLUMNS), self._known.bounds()
        tiles_before = lax.div(before + (STORED_ROWS - 1), jnp.int32(STORED_ROWS))
        tiles_after = lax.div(self.m - after + (STORED_ROWS - 1), jnp.int32(STORED_ROWS))
        first = lax.axis_index("cta") * self.config.warpgroups + wg_idx
        stride = jnp.int32(self.ctas * self.config.warpgroups)

        def store(index: Any, _: None) -> None:
            item = first + index * stride
            m_idx, n_idx = lax.div(item, jnp.int32(across)), lax.rem(item, jnp.int32(across))
            is_before = m_idx < tiles_before
            start = jnp.where(is_before, 0, after - tiles_before * STORED_ROWS)
            end = jnp.where(is_before, before, self.m)
            no_group = Group(jnp.int32(-1), start, end)
            store_zeros(Place(start + m_idx * STORED_ROWS, n_idx * COLUMNS, no_group))

        total = (tiles_before + tiles_after) * across
        count = lax.div(jnp.maximum(total - first, 0) + (stride - 1), stride)
        lax.fori_loop(0, count, store, None)
