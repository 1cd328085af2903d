"""Configs of a product with an epilogue, predicted fastest first, and the limits of its kernels."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.gemm import cost
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, swizzled_columns
from pallas_kernels.gemm.small_m import MAX_PARTS, MAX_ROWS, FewRowsConfig
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

_DTYPES = (jnp.bfloat16, jnp.float16)
GRAIN = 8
"""Divisor of K and N: rows of 16-bit numbers then begin at multiples of 16 bytes, as TMA requires."""


def candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs with large tiles, predicted fastest first; not all fit into shared memory."""
    tiles = functools.partial(MatmulConfig, epilogue_columns=32)
    if work.itemsize == 4:
        # Float32 products were not measured. Their results are not rounded to 16 bits, so that only
        # tiles of up to 128 columns leave registers for the epilogue.
        stages = (4, 3, 2)
        small = tiles(tile_m=64, tile_n=128, stages=2)
        return [*(tiles(tile_n=128, stages=stage) for stage in stages), small]
    whole = swizzled_columns(jnp.bfloat16)
    shapes = [tiles(tile_m=tile_m, tile_n=tile_n) for tile_m, tile_n in _PING_PONG_TILES]
    shapes.append(tiles(tile_m=64, tile_n=256, ping_pong=False))
    if work.read_bytes > work.itemsize:
        # Tiles of 64 x 192, for N that 256 does not divide: with 64 rows, not 128, they leave registers
        # for several epilogue matrices.
        shapes.append(tiles(tile_m=64))
    if work.products > 1:
        # CTAs of a cluster share b, so that each reads half as much of it.
        shapes = [
            replace(shape, cluster=2)
            for shape in shapes
            if shape.ping_pong and shape.tile_n % (work.products * whole) == 0
        ]
    if work.n % whole and not work.k_last:
        shapes += [replace(shape, pads_columns=True) for shape in shapes]
    slots = [(4, 2, 2), (3, 2, 2)] if work.read_bytes else []
    slots += [(4, 1, 2), (3, 1, 2)] if not work.read_bytes and work.written_bytes <= 4 else []
    slots += [(4, 1, 1), (3, 1, 1), (2, 1, 1)]
    configs = [
        replace(shape, stages=stages, read_slots=read, write_slots=write)
        for stages, read, write in slots
        for shape in shapes
    ]
    return sorted(configs, key=lambda config: cost.kernel(work, config, multiprocessors))


_PING_PONG_TILES = ((128, 192), (128, 128), (64, 256), (64, 128), (128, 64))


def few_rows_candidates(work: Work, multiprocessors: int) -> list[FewRowsConfig]:
    """Returns configs of the small-M kernel, predicted fastest first; none above `MAX_ROWS` rows."""
    if work.m > MAX_ROWS or work.itemsize != 2:
        return []
    parts = [parts for parts in (1, 2, 4, MAX_PARTS) if parts <= work.steps]
    configs = [
        FewRowsConfig(tile_n, part, stages)
        for tile_n in (64, 128)
        if tile_n == 64 or tile_n < 2 * work.n
        for part in parts
        for stages in (3, 4, 6, 8)
        if stages == 3 or stages < 2 * work.steps // part
    ]
    return sorted(configs, key=lambda config: cost.few_rows(work, config, multiprocessors))


def fitting(
    work: Work, multiprocessors: int, *, spare_bytes: int = 0
) -> list[MatmulConfig | FewRowsConfig]:
    """Returns the configs of both kernels that fit into shared memory, predicted fastest first.

    Args:
      spare_bytes: further bytes of shared memory that an epilogue takes, such as for more vectors.
    """
    return sorted(
        (
            config
            for config in (
                *candidates(work, multiprocessors),
                *few_rows_candidates(work, multiprocessors),
            )
            if fits(work, config, spare_bytes)
        ),
        key=lambda config: cost.time(work, config, multiprocessors),
    )


def fits(work: Work, config: MatmulConfig | FewRowsConfig, spare_bytes: int = 0) -> bool:
    """Returns whether a config fits into shared memory next to an epilogue's `spare_bytes`."""
    return _shared_bytes(work, config) <= SHARED_MEMORY_BYTES - spare_bytes


def _shared_bytes(work: Work, config: MatmulConfig | FewRowsConfig) -> int:
    """Returns the approximate bytes of shared memory per CTA; `Epilogue.shared_bytes` is exact."""
    if isinstance(config, FewRowsConfig):
        return cost.few_rows_shared_bytes(work, config)
    ring = config.stages * (config.cta_tile_m + config.tile_n) * SWIZZLE_BYTES
    streams = config.read_slots * work.read_bytes + config.write_slots * work.written_bytes
    vectors_and_barriers = 3 * 1024
    return (
        ring + CONSUMERS * config.tile_m * config.epilogue_columns * streams + vectors_and_barriers
    )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
    allows_tf32: bool = False,
) -> str | None:
    """Returns None if products with epilogues can run, else why not.

    Args:
      dtypes: dtypes of the left operand, "x", and of the epilogue's operands and results, None for
        absent ones.
      features: sizes of the operands' and the result's axes other than the rows, keyed by name.
      allows_tf32: whether float32 may be multiplied with the 10 bits of tf32.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtypes["x"] == jnp.float32 and not allows_tf32:
        return (
            "it multiplies float32 as tf32, and the precision asked for x has more bits than tf32"
        )
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in (*_DTYPES, jnp.float32):
            return (
                f"it takes float32, bfloat16 and float16, and {name} has dtype {jnp.dtype(dtype)}"
            )
    for name, size in features.items():
        if size % GRAIN:
            return f"it takes multiples of {GRAIN} features, and {name} has {size}"
    return None
