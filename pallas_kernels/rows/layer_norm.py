"""layer_norm and rms_norm on Hopper: limits and the forward kernel.

Each operand is read once and each result written once; statistics stay in float32 registers. The
forward saves mean and 1/std of each row, so that the backward, in `layer_norm_backward`, needs one
exchange between warps for a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.activation import activation as activate
from pallas_kernels.rows.layer_norm_configs import backward_guesses, check_config, forward_guesses
from pallas_kernels.rows.rounding import RowRounding
from pallas_kernels.rows.tiles import Place, RowConfig, RowTiles

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

_LARGEST_FEATURES = 16384
"""Features up to which the backward's column sums fit into the registers of one CTA."""


# --- limits ---------------------------------------------------------------------------------------


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    segments: int = 1,
    vectors_of_segments: bool = False,
    gated: bool = False,
) -> str | None:
    """Returns None if forward and backward can run, else the rule that they break.

    The shapes are those that the kernels see: of one shard, with all entries of a `vmap` folded into the
    rows. Each entry is one of the backward's `segments`.

    Args:
      vectors_of_segments: whether each segment has its own scale, bias, pre_bias and gate.
      gated: whether a gate multiplies the branch that is added to the residual.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"x must be float32, bfloat16 or float16, got {dtype}"
    if residual_dtype is not None and residual_dtype != dtype:
        return f"residual must have x's dtype {dtype}, got {residual_dtype}"
    if features > _LARGEST_FEATURES:
        return f"the number of features must be at most {_LARGEST_FEATURES}, got {features}"
    if rows == 0:
        return None
    if segments < 1 or rows % segments:
        return f"segments must divide the {rows} rows evenly, got {segments}"
    itemsize = jnp.dtype(dtype).itemsize
    residual = 0 if residual_dtype is None else 1
    tiled = rows // segments if vectors_of_segments else rows
    for guesses, matrices, sums in (
        (forward_guesses, 1 + residual, False),
        (backward_guesses, 2 + residual + gated, True),
    ):
        guess = guesses(tiled, features, itemsize, matrices, 1)[0]
        reason = guess.why_unfit(tiled, features, matrices * itemsize, sums)
        if reason is not None:
            return reason if tiled == rows else f"{reason} with parameters of their own"
    return None


# --- forward --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """Static options of a norm."""

    subtract_mean: bool
    epsilon: float
    scale_offset: float
    pre_activation: str | None
    activation: str | None
    round_before_scale: bool

    def scaled(self, normalised: jax.Array, dtype: Any) -> jax.Array:
        """Returns the float32 number that the scale multiplies: `normalised`, rounded if asked for.

        With `round_before_scale` it is rounded to x's dtype, `dtype`.
        """
        if not self.round_before_scale:
            return normalised
        return normalised.astype(dtype).astype(jnp.float32)


class ForwardResults(NamedTuple):
    """Results of the forward; results that the call does not ask for are None."""

    y: jax.Array
    next_residual: jax.Array | None
    mean: jax.Array | None
    """Row means [M] in float32; the fields after it are float32 too."""
    rstd: jax.Array | None
    row_scale: jax.Array | None
    """Scale of each row by which an 8-bit y is dequantised, [M]."""


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    save_statistics: bool,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    multiprocessors: int,
    round_before_scale: bool = False,
    gate: jax.Array | None = None,
    segments: int = 1,
    rounding: RowRounding | None = None,
    config: RowConfig | None = None,
) -> ForwardResults:
    """Returns the norm of rows [M, D]; results that were not asked for are None.

    The vectors are [D], or [segments, D] for as many equal runs of rows. A gate multiplies the branch
    that is added to the residual. With a rounding, y has 8 bits and a scale for each row.
    """
    rows, features = x.shape
    if rows == 0:
        statistic = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
        return ForwardResults(
            x if rounding is None else x.astype(rounding.dtype),
            residual,
            statistic if save_statistics and subtract_mean else None,
            statistic if save_statistics else None,
            None if rounding is None else statistic,
        )
    matrices = present(x=x, residual=residual)
    vectors = present(scale=scale, bias=bias, pre_bias=pre_bias, gate=gate)
    itemsize = x.dtype.itemsize
    tiled = rows // segments
    if config is None:
        config = forward_guesses(tiled, features, itemsize, len(matrices), len(vectors), rows)[0]
    check_config(config, tiled, features, len(matrices) * itemsize, sums=False)
    tiles = RowTiles.plan(config, rows, features, segments, multiprocessors)

    matrix = jax.ShapeDtypeStruct(tiles.matrix_shape, x.dtype)
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = present(
        y=matrix if rounding is None else jax.ShapeDtypeStruct(matrix.shape, rounding.dtype),
        next_residual=None if residual is None else matrix,
        mean=statistic if save_statistics and subtract_mean else None,
        rstd=statistic if save_statistics else None,
        row_scale=None if rounding is None else statistic,
    )
    norm = Norm(
        subtract_mean, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    names = tuple(matrices), tuple(vectors), tuple(outputs)
    kernel = _ForwardKernel(norm, tiles, x.dtype, *names, rounding)
    results = plgpu.kernel(
        kernel.layer_norm_forward if rounding is None else kernel.layer_norm_quantized_forward,
        out_type=tuple(outputs.values()),
        scratch_types=dict(
            **tiles.ring_scratch({name: m.dtype for name, m in matrices.items()}),
            **tiles.exchange_scratch(1),
        ),
        **tiles.launch,
    )(
        *(tiles.matrix_view(m) for m in matrices.values()),
        *(tiles.vector_view(v) for v in vectors.values()),
    )
    named = dict(zip(outputs, results, strict=True))
    next_residual = named.get("next_residual")
    return ForwardResults(
        named["y"].reshape(x.shape),
        None if next_residual is None else next_residual.reshape(x.shape),
        named.get("mean"),
        named.get("rstd"),
        named.get("row_scale"),
    )


@dataclass(frozen=True)
class _ForwardKernel:
    """Forward kernel over `tiles`, with the names of its operands and results in global memory."""

    norm: Norm
    tiles: RowTiles
    dtype: Any
    matrices: tuple[str, ...]
    vectors: tuple[str, ...]
    outputs: tuple[str, ...]
    rounding: RowRounding | None

    def layer_norm_quantized_forward(self, *refs, **scratch) -> None:
        """Runs `layer_norm_forward` under another name in profiles."""
        self.layer_norm_forward(*refs, **scratch)

    def layer_norm_forward(
        self, *refs, exchange_smem, exchange_barrier, ring_barriers=None, **ring
    ) -> None:
        tiles = self.tiles
        gmem = dict(zip((*self.matrices, *self.vectors, *self.outputs), refs, strict=True))
        place = tiles.place()
        layout = tiles.layout(self.dtype.itemsize)
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in self.vectors}
        warpgroup = _ForwardWarpgroup(
            self, gmem, place, layout, parameters, exchange_smem, exchange_barrier
        )
        tiles.for_each_tile(
            place,
            [(gmem[name], ring.get(f"{name}_smem")) for name in self.matrices],
            ring_barriers,
            warpgroup.norm_tile,
            None,
        )


@dataclass(frozen=True)
class _ForwardWarpgroup:
    """A forward warpgroup's arrays, vectors and buffers, the same for all of its tiles."""

    kernel: _ForwardKernel
    gmem: Mapping[str, Any]
    place: Place
    layout: plgpu.Layout
    parameters: Mapping[str, Callable[[int], jax.Array]]
    exchange_smem: Any
    exchange_barrier: Any

    def norm_tile(self, step_idx, row, tile_refs, _) -> None:
        kernel, tiles, norm = self.kernel, self.kernel.tiles, self.kernel.norm
        parities = self._parities(step_idx)
        chunks = range(tiles.config.chunks)
        summed = tiles.per_chunk(lambda chunk: self._summed(tile_refs, chunk))
        u = tiles.per_chunk(
            lambda chunk: activate(norm.pre_activation, summed(chunk).astype(jnp.float32))
        )
        if "next_residual" in kernel.outputs:
            for chunk in chunks:
                tiles.store(self.gmem["next_residual"], self.place, row, chunk, summed(chunk))

        centred = u
        if norm.subtract_mean:
            mean = self._total(tiles.line_sum(u), parities["mean"]) * (1.0 / tiles.features)
            centred = tiles.per_chunk(lambda chunk: u(chunk) - tiles.across_columns(mean))
        squares = self._total(
            tiles.line_sum(lambda chunk: centred(chunk) * centred(chunk)), parities["squares"]
        )
        rstd = lax.rsqrt(squares * (1.0 / tiles.features) + norm.epsilon)

        def y(chunk: int) -> jax.Array:
            return self._scaled(centred(chunk) * tiles.across_columns(rstd), chunk)

        if kernel.rounding is not None:
            # y is rounded to x's dtype first: the bits are those of a norm and a quantisation kernel.
            kernel.rounding.store(
                tiles,
                self.place,
                row,
                parities["largest"],
                tiles.per_chunk(lambda chunk: y(chunk).astype(jnp.float32)),
                self.gmem["y"],
                self.gmem["row_scale"],
                self.exchange_smem,
                self.exchange_barrier,
            )
        else:
            for chunk in chunks:
                tiles.store(self.gmem["y"], self.place, row, chunk, y(chunk))
        if "mean" in kernel.outputs:
            tiles.store_statistic(self.gmem["mean"], self.place, row, mean)
        if "rstd" in kernel.outputs:
            tiles.store_statistic(self.gmem["rstd"], self.place, row, rstd)

    def _parities(self, step_idx) -> Mapping[str, Any]:
        """Returns which half (0 or 1) of `exchange_smem` each total of a row uses.

        Halves alternate from one total to the next, also across tiles (see `RowTiles.total`).
        """
        exchanges = ["mean"] if self.kernel.norm.subtract_mean else []
        exchanges += ["squares"] if self.kernel.rounding is None else ["squares", "largest"]
        first = lax.rem(step_idx, jnp.int32(2)) if len(exchanges) % 2 else 0
        return {name: 1 - first if i % 2 else first for i, name in enumerate(exchanges)}

    def _summed(self, tile_refs, chunk: int) -> jax.Array:
        """Returns a column block of (x + pre_bias) * gate + residual; rounded if there is a residual."""
        tiles = self.kernel.tiles
        h = tiles.load(tile_refs[0], chunk, self.layout)
        if "pre_bias" in self.parameters:
            h += self.parameters["pre_bias"](chunk)
        if "gate" in self.parameters:
            h *= self.parameters["gate"](chunk)
        if "residual" in self.kernel.matrices:
            h = (h + tiles.load(tile_refs[1], chunk, self.layout)).astype(self.kernel.dtype)
        return h

    def _total(self, line: jax.Array, parity) -> jax.Array:
        """Returns sums over whole rows, given sums over a tile's lines (rows or parts of rows)."""
        return self.kernel.tiles.total(
            [line], self.exchange_smem, self.exchange_barrier, parity, self.place
        )[0]

    def _scaled(self, y: jax.Array, chunk: int) -> jax.Array:
        """Returns activation(y * scale + bias) in x's dtype for a column block of normalised values."""
        norm = self.kernel.norm
        y = norm.scaled(y, self.kernel.dtype)
        if "scale" in self.parameters:
            y *= self.parameters["scale"](chunk) + norm.scale_offset
        if "bias" in self.parameters:
            y += self.parameters["bias"](chunk)
        return activate(norm.activation, y).astype(self.kernel.dtype)


def present(**values: Any) -> dict[str, Any]:
    """Returns the values that are not None, in order."""
    return {name: value for name, value in values.items() if value is not None}
