"""qkv_projection on the small-M product: a block of columns is whole heads of one output.

The norm and the rotation of a head are computed in the registers of a chunk of rows. A warp has whole
rows: the mean square is a sum within a warp, and both features of a pair are in the same thread, be they
of two halves or interleaved. Only data distinguish queries, keys and values, as in `qkv_projection`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm import cost, interleaved_rope, matmul
from pallas_kernels.gemm.small_m import FewRows, FewRowsConfig, chunk_layout
from pallas_kernels.gemm.tiled_product import Block

_NAMES = ("y", "projection")
_VALUES = 2
"""Index of the output without norm and rotation."""
_HEAD_GRAIN = 64
"""Divisor of the size of a head with a norm or a rotation: a half then fills the lanes of a warp."""


def candidates(
    work: cost.Work,
    *,
    widths: Sequence[int],
    head_size: int,
    norm: bool,
    rotary_dim: int,
    multiprocessors: int,
) -> list[FewRowsConfig]:
    """Returns configs whose blocks of columns are whole heads of one output, predicted fastest first."""
    finishes = norm or rotary_dim > 0
    if finishes and (head_size % _HEAD_GRAIN or rotary_dim not in (0, head_size)):
        return []
    return [
        config
        for config in matmul.few_rows_candidates(work, multiprocessors)
        if all(width % config.tile_n == 0 for width in widths)
        and not (finishes and config.tile_n % head_size)
    ]


def forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scales: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    interleaved: bool,
    widths: Sequence[int],
    has_norms: Sequence[bool],
    head_size: int,
    epsilon: float,
    save_projections: bool,
    config: FewRowsConfig,
) -> tuple[jax.Array, ...]:
    """Returns queries, keys and values [M, heads * H], and the first two before their norms if saved.

    Args:
      x: [M, D].
      w: [D, columns], those of queries, keys and values.
      bias: [columns].
      scales: [3, H], factors of the norms, float32; 1 where there is none.
      cos: [P, H/2] of float32: row m of the result is rotated by row m % P.
      sin: like `cos`.
      interleaved: whether features 2 i and 2 i + 1 are a pair, else features i of both halves.
      widths: columns of each output.
      has_norms: whether queries and keys have norms.
    """
    m, k = x.shape
    finishes = scales is not None or cos is not None
    if cos is not None and sin is not None and cos.shape[0] < m and cos.shape[0] % 8:
        # Chunks of 8 rows are copied at once, and no copy can wrap around a table's end.
        cos, sin = (jnp.resize(table, (m, table.shape[1])) for table in (cos, sin))
    vectors = {"bias": bias, "scale": scales}
    matrices = {"cos": cos, "sin": sin}
    width = head_size // 2
    if interleaved and cos is not None and sin is not None:
        matrices, width = {"turns": interleaved_rope.table(cos, sin)}, head_size
    present_vectors = {name: v for name, v in vectors.items() if v is not None}
    present = {name: table for name, table in matrices.items() if table is not None}

    def epilogue(z, *, bias=None, scale=None, cos=None, sin=None, turns=None):
        z = (z if bias is None else z + bias).astype(x.dtype)
        if not finishes:
            return {"y": [z], "projection": [z]}
        pieces = [z[:, start : start + width] for start in range(0, config.tile_n, width)]
        kind = _kind(widths, config.tile_n)
        angles = [a for a in (cos, sin, turns) if a is not None]
        results = []
        for start in range(0, len(pieces), head_size // width):
            head = [p.astype(jnp.float32) for p in pieces[start : start + head_size // width]]
            if scale is not None:
                head = _normed(head, scale, kind, has_norms, epsilon)
            if angles:
                head = _rotated(head, angles, kind)
            results += head
        return {"y": results, "projection": pieces}

    launch = FewRows(
        m=m,
        n=sum(widths),
        ks=(k,),
        dtype=x.dtype,
        blocks=(Block(0),),
        config=config,
        products=1,
        w_dtype=w.dtype,
        w_transposed=False,
        function=epilogue,
        vectors={name: jax.typeof(v) for name, v in present_vectors.items()},
        matrices={name: jax.typeof(table) for name, table in present.items()},
        outputs=dict.fromkeys(_NAMES if save_projections else _NAMES[:1], x.dtype),
        segments=tuple(widths),
        segments_of={"projection": _VALUES},
        piece=width if finishes else config.tile_n,
    )
    others = (*present_vectors.values(), *present.values())
    return tuple(launch.launch((x,), (w,), others, name="qkv_projection_few_rows"))


def _kind(widths: Sequence[int], tile_n: int) -> jax.Array:
    """Returns 0, 1 or 2 where the columns of this CTA are queries, keys or values."""
    start = lax.axis_index("column") * tile_n
    past_queries = (start >= widths[0]).astype(jnp.int32)
    return past_queries + (start >= widths[0] + widths[1]).astype(jnp.int32)


def _normed(
    head: Sequence[jax.Array],
    scale: jax.Array,
    kind: jax.Array,
    has_norms: Sequence[bool],
    epsilon: float,
) -> list[jax.Array]:
    """Returns the pieces of a head after its norm, if its kind has one."""
    squares = [jnp.sum(piece * piece, axis=1) for piece in head]
    factor = lax.rsqrt(sum(squares[1:], squares[0]) * (1.0 / scale.shape[1]) + epsilon)
    for plain in (_VALUES, *(i for i, has in enumerate(has_norms) if not has)):
        factor = jnp.where(jnp.broadcast_to(kind == plain, factor.shape), 1.0, factor)
    width = head[0].shape[1]
    scales = [scale[:, start : start + width] for start in range(0, scale.shape[1], width)]
    return [
        piece * lax.broadcast_in_dim(factor, piece.shape, (0,)) * scale
        for piece, scale in zip(head, scales, strict=True)
    ]


def _rotated(
    head: Sequence[jax.Array], angles: Sequence[jax.Array], kind: jax.Array
) -> list[jax.Array]:
    """Returns a head after its rotation, which leaves values as they are.

    Halves take cosines and sines; interleaved pairs take one array in which these alternate.
    """
    value = (kind == _VALUES).astype(jnp.float32)
    if len(angles) == 1:
        [whole], [turns] = head, angles
        return [interleaved_rope.turned(whole, turns, value, layout=chunk_layout(whole.shape[1]))]
    (first, second), (cos, sin) = head, angles
    cos, sin = cos * (1.0 - value) + value, sin * (1.0 - value)
    return [first * cos - second * sin, second * cos + first * sin]
