"""rope on Hopper: q and k rotated in one kernel.

A warp works through the heads of one position in steps: first the heads of q, then those of k. The two
halves of the rotating features are two loads with one register layout, so that a thread holds both
values of a pair; cosines and sines are loaded once for all heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import LANES, WARPS
from pallas_kernels.store import store_unoptimized

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class RopeConfig:
    """Config of a warp's steps, each of which rotates some heads of the warp's position."""

    bytes_per_step: int = 128
    """Largest number of bytes that each thread loads in a step."""
    ahead: int = 2
    """Number of steps whose loads are in flight while one step is computed."""

    def __post_init__(self) -> None:
        if self.bytes_per_step < 16 or self.ahead < 0:
            raise ValueError(f"RopeConfig: bytes_per_step >= 16 and ahead >= 0, got {self}")


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    length: int,
    heads: int,
    key_heads: int,
    head_size: int,
    rotary_dim: int,
    interleaved: bool,
    dtype: Any,
    k_dtype: Any,
) -> str | None:
    """Returns None if forward and backward can run, else the rule that they break."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in _DTYPES or dtype != k_dtype:
        return f"q and k must both be float32, bfloat16 or float16, got {dtype} and {k_dtype}"
    if interleaved:
        return "a pair must be two halves of the rotating features, got interleaved pairs"
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        return f"rotary_dim must be even and 2 to {head_size}, got {rotary_dim}"
    if length < WARPS:
        return f"the length must be at least {WARPS}, got {length}"
    common = math.gcd(heads, key_heads)
    for width in _widths(head_size, rotary_dim):
        if _Piece.choose(width, common, jnp.dtype(dtype).itemsize) is None:
            return (
                f"{width} features of {common} heads (the common divisor of q's and k's) must be"
                f" whole steps of a warp, 4 bytes or more a lane; got {dtype}"
            )
    return None


def access_bytes(heads: int, key_heads: int, head_size: int, rotary_dim: int, itemsize: int) -> int:
    """Returns the bytes of a thread's narrowest load or store: 4, 8 or 16 for supported sizes."""
    common = math.gcd(heads, key_heads)
    pieces = [_Piece.choose(w, common, itemsize) for w in _widths(head_size, rotary_dim)]
    return min((piece.vec * itemsize for piece in pieces if piece is not None), default=0)


def _widths(head_size: int, rotary_dim: int) -> list[int]:
    """Returns the features of each rotating half of a head, and those that do not rotate, if any."""
    return [rotary_dim // 2, *([head_size - rotary_dim] if rotary_dim < head_size else [])]


@dataclass(frozen=True)
class _Piece:
    """How a warp's lanes hold one part of each of several heads.

    The part is a rotating half of the head's features, or the features that do not rotate.
    """

    vec: int
    """Contiguous features that a lane loads at a time."""
    lanes: int
    """Lanes that hold the features of one head."""

    @classmethod
    def choose(cls, width: int, heads: int, itemsize: int) -> "_Piece | None":
        """Returns the layout with the widest loads for `width` features of `heads` heads, or None."""
        for access_bytes in (16, 8, 4):
            vec = access_bytes // itemsize
            for lanes in (32, 16, 8, 4, 2):
                if width % (vec * lanes) == 0 and heads % (LANES // lanes) == 0:
                    return cls(vec, lanes)
        return None

    @property
    def heads(self) -> int:
        """Number of heads that a warp holds at a time."""
        return LANES // self.lanes

    @property
    def layout(self) -> plgpu.Layout:
        """Register layout of [positions, heads, features]."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((WARPS, self.heads, self.lanes * self.vec), (self.vec,))),
            warp_dims=(-4,),
            lane_dims=(-2,) if self.lanes == LANES else (-3, -2),
            vector_dim=-1,
        )


def rotate(
    q: jax.Array,
    k: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    inverse: bool,
    config: RopeConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns q [B, T, N, H] and k [B, T, K, H], rotated by float32 cos and sin [B or 1, T, R/2].

    With `inverse` they are rotated back, as in the backward.
    """
    if q.size == 0 or (k is not None and k.size == 0):
        if q.size > 0:
            q, _ = rotate(q, None, cos, sin, inverse=inverse, config=config)
        elif k is not None and k.size > 0:
            k, _ = rotate(k, None, cos, sin, inverse=inverse, config=config)
        return q, k
    config = config or RopeConfig()
    inputs = [q] if k is None else [q, k]
    batch, length, _, head_size = q.shape
    pairs = cos.shape[-1]
    common = math.gcd(*(x.shape[2] for x in inputs))
    tiles = -(-length // WARPS)
    widths = _widths(head_size, 2 * pairs)
    pieces = [_Piece.choose(width, common, q.dtype.itemsize) for width in widths]
    columns = [pl.ds(0, pairs), pl.ds(pairs, pairs), pl.ds(2 * pairs, head_size - 2 * pairs)]
    layouts = [pieces[0].layout, pieces[0].layout, pieces[-1].layout][: len(widths) + 1]
    # Heads of a step: a multiple of each layout's heads, and a divisor of q's and k's heads.
    step_heads = math.lcm(*(piece.heads for piece in pieces))
    thread_bytes = step_heads * head_size * q.dtype.itemsize // LANES
    for factor in range(max(1, config.bytes_per_step // thread_bytes), 0, -1):
        if common % (factor * step_heads) == 0:
            step_heads *= factor
            break

    def rope_kernel(*refs):
        sources, (cos_gmem, sin_gmem) = refs[: len(inputs)], refs[len(inputs) : len(inputs) + 2]
        targets = refs[len(inputs) + 2 :]
        index = lax.axis_index("tile")
        b = lax.div(index, jnp.int32(tiles))
        # A tile has 4 positions. If the length is no multiple of 4, the last tile starts earlier, to end
        # with the sequence: positions that two tiles share are computed twice, to the same bits.
        t = jnp.minimum(lax.rem(index, jnp.int32(tiles)) * WARPS, length - WARPS)
        position = pl.ds(t, WARPS)
        shape = (WARPS, step_heads, pairs)

        def angles(ref):
            table_idx = 0 if ref.shape[0] == 1 else b
            rows = plgpu.load(
                ref.at[table_idx, position], layout=layouts[0].reduce(1), optimized=False
            )
            return lax.broadcast_in_dim(rows, shape, (0, 2))

        steps = [
            (source.at[b, position, heads], target.at[b, position, heads])
            for source, target in zip(sources, targets, strict=True)
            for heads in (
                pl.ds(first, step_heads) for first in range(0, source.shape[2], step_heads)
            )
        ]

        def load(source):
            return [
                plgpu.load(source.at[:, :, c], layout=layout, optimized=False)
                for c, layout in zip(columns, layouts, strict=False)
            ]

        loaded = [load(source) for source, _ in steps[: config.ahead]]
        cos_tile, sin_tile = angles(cos_gmem), angles(sin_gmem)
        if inverse:
            sin_tile = -sin_tile
        for step_idx, (_, target) in enumerate(steps):
            if step_idx + config.ahead < len(steps):
                loaded.append(load(steps[step_idx + config.ahead][0]))
            first, second, *rest = loaded.pop(0)
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            rotated = (
                first * cos_tile - second * sin_tile,
                second * cos_tile + first * sin_tile,
            )
            values = [*(half.astype(q.dtype) for half in rotated), *rest]
            for c, value in zip(columns, values, strict=False):
                store_unoptimized(target.at[:, :, c], value)

    rotated = plgpu.kernel(
        rope_kernel,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs),
        grid=(batch * tiles,),
        grid_names=("tile",),
    )(*inputs, cos, sin)
    return rotated[0], None if k is None else rotated[1]
