"""The backward kernel of layer_norm and rms_norm on Hopper.

It sums the parameter gradients in registers over all rows of a CTA and writes one partial sum a CTA; XLA
adds these in a fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import derivative
from pallas_kernels.rows.layer_norm import Norm, present
from pallas_kernels.rows.layer_norm_configs import backward_guesses, best_of_backward, check_config
from pallas_kernels.rows.tiles import Place, RowConfig, RowTiles


class Gradients(NamedTuple):
    """Results of the backward; gradients of absent operands are None."""

    x: jax.Array
    residual: jax.Array | None
    """Gradient of the residual [M, D]; None if it equals that of x, as it does without a gate."""
    scale: jax.Array | None
    """Gradient of the scale, float32 [segments, D]; so are those of bias, pre_bias and gate."""
    bias: jax.Array | None
    pre_bias: jax.Array | None
    gate: jax.Array | None


def backward(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Calls `gradients` without a gate; returns (dx, dscale, dbias, dpre_bias)."""
    found = gradients(
        dy, dnext_residual, h, mean, rstd, None, scale, bias, pre_bias, None, **keywords
    )
    return found.x, found.scale, found.bias, found.pre_bias


def gradients(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    x: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    gate: jax.Array | None,
    *,
    segments: int,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    multiprocessors: int,
    round_before_scale: bool = False,
    config: RowConfig | None = None,
) -> Gradients:
    """Returns the gradients, given dy and h [M, D], and mean and rstd [M] from the forward.

    Those of the vectors are sums over each of `segments` equal runs of rows, [segments, D].

    With `dnext_residual`, `h` is the next residual; without it, `h` is x before pre_bias is added. The
    vectors are [D], or [segments, D] with one for each run of rows. `x` is needed only with a gate.
    """
    rows, features = h.shape
    of_segments = any(v is not None and v.ndim == 2 for v in (scale, bias, pre_bias, gate))
    if rows == 0:
        zeros = jnp.zeros_like(h, shape=(segments, features), dtype=jnp.float32)
        of_vectors = (None if v is None else zeros for v in (scale, bias, pre_bias, gate))
        return Gradients(h, None if gate is None else h, *of_vectors)
    matrices = present(h=h, dy=dy, dnext_residual=dnext_residual, x=None if gate is None else x)
    statistics = present(mean=mean if subtract_mean else None, rstd=rstd)
    vectors = present(
        scale=scale,
        bias=None if activation is None else bias,
        pre_bias=None if dnext_residual is not None and gate is None else pre_bias,
        gate=gate,
    )
    sums = tuple(present(scale=scale, bias=bias, pre_bias=pre_bias, gate=gate))
    itemsize = h.dtype.itemsize
    tiled = rows // segments if of_segments else rows
    if config is None:
        config = best_of_backward(
            backward_guesses(tiled, features, itemsize, len(matrices), len(vectors)),
            tiled,
            features,
            len(matrices) * itemsize,
            segments if of_segments else 1,
            multiprocessors,
        )
    check_config(config, tiled, features, len(matrices) * itemsize, sums=True)
    tiles = RowTiles.plan(config, rows, features, segments, multiprocessors)

    matrix = jax.ShapeDtypeStruct(tiles.matrix_shape, h.dtype)
    outputs = present(
        dx=matrix,
        dresidual=None if gate is None else matrix,
        partials=jax.ShapeDtypeStruct(tiles.partials_shape(len(sums)), jnp.float32)
        if sums
        else None,
    )
    norm = Norm(
        subtract_mean, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    operands = (tuple(names) for names in (matrices, statistics, vectors))
    kernel = _BackwardKernel(norm, tiles, h.dtype, *operands, sums, tuple(outputs))
    named = kernel.launch(matrices, statistics, vectors, outputs)
    summed: dict[str, jax.Array] = {}
    if sums:
        partials = named["partials"].reshape(len(sums), segments, tiles.ctas_per_segment, features)
        given = (v for v in (scale, bias, pre_bias, gate) if v is not None)
        are_rounded = any(vector.dtype.itemsize < 4 for vector in given)
        summed = dict(zip(sums, _over_ctas(partials, are_rounded), strict=True))
    return Gradients(
        named["dx"].reshape(h.shape),
        None if gate is None else named["dresidual"].reshape(h.shape),
        *(summed.get(name) for name in ("scale", "bias", "pre_bias", "gate")),
    )


_FEW_CTAS = 16
"""Largest number of CTAs whose partial sums XLA adds elementwise, without a reduction kernel."""


def _over_ctas(partials: jax.Array, are_rounded: bool) -> Sequence[jax.Array]:
    """Sums [quantities, segments, CTAs, features] over the CTAs, in the fewest kernels of XLA.

    A joint `lax.reduce` of several arrays is one kernel, but a rounding after it is a further kernel for
    each quantity: rounded quantities are summed one by one. With few CTAs, XLA fuses the sum, the
    rounding and the slices into one kernel.
    """
    if partials.shape[2] <= _FEW_CTAS:
        return list(jnp.sum(partials, axis=2))
    if are_rounded:
        return [jnp.sum(quantity, axis=1) for quantity in partials]

    def add(totals, values):
        return tuple(map(jnp.add, totals, values))

    zeros = (jnp.float32(0),) * len(partials)
    return lax.reduce(tuple(partials), zeros, add, (1,))


@dataclass(frozen=True)
class _BackwardKernel:
    """Backward kernel over `tiles`, with the names of its operands and results in global memory."""

    norm: Norm
    tiles: RowTiles
    dtype: Any
    matrices: tuple[str, ...]
    statistics: tuple[str, ...]
    vectors: tuple[str, ...]
    sums: tuple[str, ...]
    """Names of the parameters whose gradients, sums over rows, the kernel computes."""
    outputs: tuple[str, ...]

    def launch(
        self,
        matrices: Mapping[str, jax.Array],
        statistics: Mapping[str, jax.Array],
        vectors: Mapping[str, jax.Array],
        outputs: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Runs the kernel; returns its outputs keyed by name."""
        results = plgpu.kernel(
            self.layer_norm_backward,
            out_type=tuple(outputs.values()),
            scratch_types=dict(
                **self.tiles.ring_scratch({name: m.dtype for name, m in matrices.items()}),
                **self.tiles.exchange_scratch(2),
                **self.tiles.partial_scratch(),
            ),
            **self.tiles.launch,
        )(
            *(self.tiles.matrix_view(m) for m in matrices.values()),
            *statistics.values(),
            *(self.tiles.vector_view(v) for v in vectors.values()),
        )
        return dict(zip(outputs, results, strict=True))

    def layer_norm_backward(
        self, *refs, ring_barriers, exchange_smem, exchange_barrier, **smem
    ) -> None:
        tiles = self.tiles
        names = (*self.matrices, *self.statistics, *self.vectors, *self.outputs)
        gmem = dict(zip(names, refs, strict=True))
        place = tiles.place()
        layout = tiles.layout(self.dtype.itemsize)
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in self.vectors}
        zero = plgpu.layout_cast(jnp.zeros(tiles.shape, jnp.float32), layout)
        last_step = tiles.tile_count(place) - 1
        start = tiles.first_row(place, 0)
        warpgroup = _BackwardWarpgroup(
            self, gmem, place, layout, parameters, exchange_smem, exchange_barrier, last_step
        )
        totals, _ = tiles.for_each_tile(
            place,
            [(gmem[name], smem[f"{name}_smem"]) for name in self.matrices],
            ring_barriers,
            warpgroup.gradient_tile,
            (
                {name: [zero] * tiles.config.chunks for name in self.sums},
                {n: tiles.load_statistic(gmem[n], start) for n in self.statistics},
            ),
        )
        for index, name in enumerate(self.sums):
            tiles.store_partial(
                gmem["partials"].at[index, place.cta_idx],
                totals[name],
                smem.get("partial_smem"),
                exchange_barrier,
                place,
            )


@dataclass(frozen=True)
class _BackwardWarpgroup:
    """A backward warpgroup's arrays, vectors and buffers, the same for all of its tiles."""

    kernel: _BackwardKernel
    gmem: Mapping[str, Any]
    place: Place
    layout: plgpu.Layout
    parameters: Mapping[str, Callable[[int], jax.Array]]
    exchange_smem: Any
    exchange_barrier: Any
    last_step: Any

    def gradient_tile(self, step_idx, row, tile_refs, carry):
        """Computes dx of a tile. The carry is a pair: sums over rows so far, and the tile's statistics.

        Sums are lists of column blocks [lines, columns] keyed by parameter; the statistics are mean and
        rstd.
        """
        kernel, tiles, norm = self.kernel, self.kernel.tiles, self.kernel.norm
        sums_so_far, row_statistics = carry
        # Statistics are loaded one tile ahead, so that this tile's work hides the latency.
        next_row = tiles.first_row(self.place, jnp.minimum(step_idx + 1, self.last_step))
        next_statistics = {
            n: tiles.load_statistic(self.gmem[n], next_row) for n in kernel.statistics
        }
        rstd_tile = tiles.across_columns(row_statistics["rstd"])
        own = tiles.counted(self.place, step_idx, self.layout) if tiles.ragged else None
        new_sums = {name: list(so_far) for name, so_far in sums_so_far.items()}

        def add(name, chunk, value):
            if name in kernel.sums:
                value = value if own is None else jnp.where(own, value, 0.0)
                new_sums[name][chunk] += value

        block = tiles.per_chunk(
            lambda chunk: self._block(tile_refs, row_statistics, rstd_tile, chunk)
        )
        products, gradients = [], []
        for chunk in range(tiles.config.chunks):
            _, v, dz, g = block(chunk)
            add("scale", chunk, dz * norm.scaled(v, kernel.dtype))
            add("bias", chunk, dz)
            products.append(g * v)
            gradients.append(g)
        means = self._means(step_idx, products, gradients)
        for chunk in range(tiles.config.chunks):
            pre_slope, v, _, g = block(chunk)
            dh = g - v * means[0]
            if norm.subtract_mean:
                dh -= means[1]
            dh *= rstd_tile
            if norm.pre_activation is not None:
                dh *= pre_slope
            if "dnext_residual" in kernel.matrices:
                dh += tiles.load(tile_refs[2], chunk, self.layout)
            if "gate" in self.parameters:
                tiles.store(self.gmem["dresidual"], self.place, row, chunk, dh.astype(kernel.dtype))
                x = tiles.load(tile_refs[3], chunk, self.layout)
                if "pre_bias" in self.parameters:
                    x += self.parameters["pre_bias"](chunk)
                add("gate", chunk, dh * x)
                dh *= self.parameters["gate"](chunk)
            add("pre_bias", chunk, dh)
            tiles.store(self.gmem["dx"], self.place, row, chunk, dh.astype(kernel.dtype))
        return new_sums, next_statistics

    def _block(self, tile_refs, row_statistics, rstd_tile, chunk: int):
        """Returns a column block of pre_activation's derivative, normalised values, dz and dz * scale.

        dz is the gradient of z = normalised * scale + bias, to which `activation` is applied.
        """
        tiles, norm, parameters = self.kernel.tiles, self.kernel.norm, self.parameters
        v = tiles.load(tile_refs[0], chunk, self.layout)
        if "pre_bias" in parameters and "dnext_residual" not in self.kernel.matrices:
            v += parameters["pre_bias"](chunk)
        pre_slope = derivative(norm.pre_activation, v)
        v = activate(norm.pre_activation, v)
        if norm.subtract_mean:
            v -= tiles.across_columns(row_statistics["mean"])
        v *= rstd_tile
        dz = tiles.load(tile_refs[1], chunk, self.layout)
        gain = None
        if "scale" in parameters:
            gain = parameters["scale"](chunk) + norm.scale_offset
        if norm.activation is not None:
            z = norm.scaled(v, self.kernel.dtype)
            z = z if gain is None else z * gain
            if "bias" in parameters:
                z += parameters["bias"](chunk)
            dz *= derivative(norm.activation, z)
        return pre_slope, v, dz, dz if gain is None else dz * gain

    def _means(
        self, step_idx, products: Sequence[jax.Array], gradients: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns row means of `products` and, if the norm subtracts the mean, of `gradients`.

        Both have an array [lines, columns] for each column block.
        """
        tiles = self.kernel.tiles
        lines = [tiles.line_sum(products.__getitem__)]
        if self.kernel.norm.subtract_mean:
            lines.append(tiles.line_sum(gradients.__getitem__))
        parity = lax.rem(step_idx, jnp.int32(2))
        totals = tiles.total(lines, self.exchange_smem, self.exchange_barrier, parity, self.place)
        return [tiles.across_columns(total * (1.0 / tiles.features)) for total in totals]
