"""qkv_projection on the small-M product: a block of columns is whole heads of one output.

The norm and the rotation of a head are computed in the registers of a chunk of rows. A warp has whole
rows: the mean square is a sum within a warp, and both features of a pair are in the same thread, be they
of two halves or interleaved. Queries, keys and values run the same code with different data, as in
`qkv_projection`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm import cost, interleaved_rope, matmul
from pallas_kernels.gemm.fused_product import present
from pallas_kernels.gemm.qkv_heads import VALUES, Heads
from pallas_kernels.gemm.small_m import FewRows, FewRowsConfig, chunk_layout
from pallas_kernels.gemm.tiled_product import Block

_NAMES = ("y", "projection")
_HEAD_GRAIN = 64
"""Divisor of the size of a head with a norm or a rotation: a half then fills the lanes of a warp."""


def candidates(work: cost.Work, heads: Heads, multiprocessors: int) -> list[FewRowsConfig]:
    """Returns configs whose blocks of columns are whole heads of one output, predicted fastest first."""
    if heads.finishes and (heads.size % _HEAD_GRAIN or heads.rotary_dim not in (0, heads.size)):
        return []
    return [
        config
        for config in matmul.few_rows_candidates(work, multiprocessors)
        if all(width % config.tile_n == 0 for width in heads.widths)
        and not (heads.finishes and config.tile_n % heads.size)
    ]


def forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scales: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    heads: Heads,
    *,
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
      heads: the outputs, and what is computed of them.
    """
    m, k = x.shape
    if cos is not None and sin is not None and cos.shape[0] < m and cos.shape[0] % 8:
        # A copy has 8 rows of a table and cannot wrap around its end: the table is repeated to m rows.
        cos, sin = (jnp.resize(table, (m, table.shape[1])) for table in (cos, sin))
    vectors = {"bias": bias, "scale": scales}
    matrices = {"cos": cos, "sin": sin}
    width = heads.size // 2
    if heads.interleaved and cos is not None and sin is not None:
        matrices, width = {"turns": interleaved_rope.table(cos, sin)}, heads.size
    vectors, matrices = present(vectors), present(matrices)

    def epilogue(z, *, bias=None, scale=None, cos=None, sin=None, turns=None):
        z = (z if bias is None else z + bias).astype(x.dtype)
        if not heads.finishes:
            return {"y": [z], "projection": [z]}
        pieces = [z[:, start : start + width] for start in range(0, config.tile_n, width)]
        kind = _kind(heads.widths, config.tile_n)
        angles = [a for a in (cos, sin, turns) if a is not None]
        results = []
        for start in range(0, len(pieces), heads.size // width):
            head = [p.astype(jnp.float32) for p in pieces[start : start + heads.size // width]]
            if scale is not None:
                head = _normed(head, scale, kind, heads, epsilon)
            if angles:
                head = _rotated(head, angles, kind)
            results += head
        return {"y": results, "projection": pieces}

    launch = FewRows(
        m=m,
        n=sum(heads.widths),
        ks=(k,),
        dtype=x.dtype,
        blocks=(Block(0),),
        config=config,
        products=1,
        w_dtype=w.dtype,
        w_transposed=False,
        function=epilogue,
        vectors={name: jax.typeof(v) for name, v in vectors.items()},
        matrices={name: jax.typeof(table) for name, table in matrices.items()},
        outputs=dict.fromkeys(_NAMES if save_projections else _NAMES[:1], x.dtype),
        segments=heads.widths,
        segments_of={"projection": VALUES},
        piece=width if heads.finishes else config.tile_n,
    )
    others = (*vectors.values(), *matrices.values())
    return tuple(launch.launch((x,), (w,), others, name="qkv_projection_few_rows"))


def _kind(widths: Sequence[int], tile_n: int) -> jax.Array:
    """Returns 0, 1 or 2 if this CTA computes queries, keys or values, of `widths` columns each."""
    start = lax.axis_index("column") * tile_n
    past_queries = (start >= widths[0]).astype(jnp.int32)
    return past_queries + (start >= widths[0] + widths[1]).astype(jnp.int32)


def _normed(
    head: Sequence[jax.Array],
    scale: jax.Array,
    kind: jax.Array,
    heads: Heads,
    epsilon: float,
) -> list[jax.Array]:
    """Returns pieces [8, H or H/2] of a head after its norm, if heads of its kind have one.

    `scale` is [8, H], with equal rows; `kind` is 0 for queries, 1 for keys and 2 for values.
    """
    squares = [jnp.sum(piece * piece, axis=1) for piece in head]
    factor = lax.rsqrt(sum(squares[1:], squares[0]) * (1.0 / scale.shape[1]) + epsilon)
    for plain in heads.plain:
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
    value = (kind == VALUES).astype(jnp.float32)
    if len(angles) == 1:
        [whole], [turns] = head, angles
        return [interleaved_rope.turned(whole, turns, value, layout=chunk_layout(whole.shape[1]))]
    (first, second), (cos, sin) = head, angles
    cos, sin = cos * (1.0 - value) + value, sin * (1.0 - value)
    return [first * cos - second * sin, second * cos + first * sin]
