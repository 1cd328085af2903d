"""ragged_dot, forward and with gradients, at groups of equal and of uneven sizes, and for decode."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.run.case import BARE, BEST_PEER, BULK_READ, Arrays, Bar, Case, functions

ON_REQUEST = True
"""True: XLA multiplies all rows by each group's matrix, and its products take long to tune."""

EVEN, UNEVEN = "even", "uneven"


class Sizes(NamedTuple):
    """Sizes of a grouped product."""

    groups: int
    rows: int
    features: int
    out_features: int
    kind: str | int
    """EVEN, UNEVEN, or for decode the number of different groups that each token's rows go to."""


_LAYERS = (
    (64, 8192, 2048, 1408),
    (8, 4096, 768, 2048),
    (128, 16384, 2048, 768),
    (8, 16384, 4096, 14336),
)
_DECODE = ((128, 2048, 768, 8), (8, 4096, 14336, 2), (64, 2048, 1408, 6))
"""Groups, features, out features, and groups a token."""
SHAPES: tuple[Sizes, ...] = (
    *(Sizes(*layer, kind) for kind in (EVEN, UNEVEN) for layer in _LAYERS),
    *(Sizes(e, n * most, k, out, most) for e, k, out, most in _DECODE for n in (16, 64)),
)
QUICK_SHAPES = SHAPES[:2]
_FEW, _MANY = 128, 512
"""Rows a group up to which the matrices' bytes bound the time, and from which operations do."""


def cases(quick: bool = False, shapes: Sequence[Sequence[Any]] | None = None) -> list[Case]:
    chosen = [Sizes(*s) for s in shapes or (QUICK_SHAPES if quick else SHAPES)]
    pairs = [(s, g) for g in (False, True) for s in chosen if not (g and _is_decode(s))]
    return [_case(*pair) for pair in pairs]


def group_sizes(s: Sizes) -> np.ndarray:
    """Returns the number of rows of each group."""
    rng = np.random.default_rng(0)
    if s.kind == EVEN:
        return np.full(s.groups, s.rows // s.groups)
    if s.kind == UNEVEN:
        ends = np.round(np.cumsum(rng.dirichlet(np.full(s.groups, 2.0))) * s.rows)
        return np.diff(ends.astype(np.int64), prepend=0)
    tokens = s.rows // int(s.kind)
    drawn = [rng.choice(s.groups, int(s.kind), replace=False) for _ in range(tokens)]
    return np.bincount(np.concatenate(drawn), minlength=s.groups)


def _is_decode(s: Sizes) -> bool:
    return isinstance(s.kind, int)


def _bars(s: Sizes, with_gradients: bool) -> tuple[Bar, ...]:
    bars = [Bar(BEST_PEER, must=1.0, aim=1.15)]
    if s.kind == EVEN and s.rows // s.groups >= _MANY:
        bars.append(Bar(BARE, must=0.85))
    elif not with_gradients and s.rows // s.groups <= _FEW:
        bars.append(Bar(BULK_READ, must=0.80 if _is_decode(s) else 0.85))
    return tuple(bars)


def _case(s: Sizes, with_gradients: bool) -> Case:
    sizes = group_sizes(s)
    peers: dict[str, Any] = {
        "xla": jax.lax.ragged_dot,
        "jla": _jla,
        "tokamax": _tokamax,
        "tokamax_tiles": _tokamax_tiles,
    }
    if s.kind == EVEN:
        peers[BARE] = _dense
    kind = f"decode, {np.count_nonzero(sizes)} groups" if _is_decode(s) else s.kind
    read = s.features * s.out_features * int(np.count_nonzero(sizes))
    passes = 3 if with_gradients else 1
    return Case(
        name=f"ragged_dot {kind}" + " forward+backward" * with_gradients,
        shape=s[:4],
        make_inputs=partial(_make_inputs, s, with_gradients),
        bytes=2 * passes * (s.rows * (s.features + s.out_features) + read),
        flops=2 * passes * s.rows * s.features * s.out_features if s.rows // s.groups > _FEW else 0,
        bars=_bars(s, with_gradients),
        skipped={
            "cuda": "there is no CUDA kernel",
            "pallas": "it is the default",
            "reference": "it is jax.lax.ragged_dot, which is a peer",
        },
        **functions(
            jaxfused.ragged_dot,
            peers,
            {"torch_grouped": lambda: _torch},
            differentiable=2,
            cotangents=int(with_gradients),
            truth=partial(_truth, sizes),
        ),
    )


def _make_inputs(s: Sizes, with_gradients: bool, key: jax.Array) -> Arrays:
    """Returns x [M, K], the matrices [E, K, N] and the group sizes, and dy [M, N] with gradients."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (s.rows, s.features), jnp.bfloat16)
    w = jax.random.normal(keys[1], (s.groups, s.features, s.out_features), jnp.bfloat16)
    operands = x, w * jnp.asarray(s.features**-0.5, w.dtype), jnp.asarray(group_sizes(s), jnp.int32)
    if not with_gradients:
        return operands
    return *operands, jax.random.normal(keys[2], (s.rows, s.out_features), jnp.bfloat16)


def _truth(sizes: np.ndarray, x: jax.Array, w: jax.Array, given: jax.Array) -> jax.Array:
    """Computes each group's rows alone, in [groups, most rows of a group, K]."""
    del given
    begin, places = np.cumsum(sizes) - sizes, np.arange(sizes.max())
    of_rows = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.minimum(begin[:, None] + places, len(of_rows) - 1)
    return jnp.einsum("erk,ekn->ern", x[rows], w)[of_rows, np.arange(len(of_rows)) - begin[of_rows]]


# --- the peers ------------------------------------------------------------------------------------


def _dense(x, w, sizes):
    y = jnp.einsum("erk,ekn->ern", x.reshape(w.shape[0], -1, x.shape[-1]), w)
    return y.reshape(-1, w.shape[-1])


def _jla(x, w, sizes):
    from jla.ops.mosaic_gpu.ragged_dot import ragged_dot

    return ragged_dot(x, w, sizes, full_groups=True)


def _tokamax(x, w, sizes):
    import tokamax

    return tokamax.ragged_dot(x, w, sizes, implementation="mosaic")


def _tokamax_tiles(x, w, sizes):
    """Tiles of 128 x 64 in a persistent kernel, for tokamax has no measured ones of Hopper GPUs."""
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu, pallas_mosaic_gpu_common

    minor = pallas_mosaic_gpu_common.MatmulDimension.N
    tiles = dict(block_m=128, block_n=64, block_k=128, num_stages=4, split_k=1)
    config = pallas_mosaic_gpu.Config(
        **tiles, persistent=True, grid_minor_dim=minor, grid_tile_width=8
    )
    of = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot
    vjp = partial(base.vjp, dlhs_ragged_dot=of(config=config), drhs_ragged_dot=of())
    return of(config=config, vjp=vjp)(x, w, group_sizes=sizes)


def _torch(x, w, sizes):
    import torch

    return torch._grouped_mm(x, w, offs=sizes.cumsum(0, dtype=torch.int32))
