"""layer_norm and rms_norm with a scale and shift for each image, or a gate before the residual.

In the adaLN modulation of a diffusion Transformer a conditioning network gives a scale and a shift to
each image, and a gate multiplies a branch before it is added to the residual stream. The public
functions of layer_norm.py call this file if such an argument is given. The vectors of a call are
[*leading, D], and the gradient of each is a sum over the rows of its own image.
"""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.norm import layer_norm_regimes, layer_norm_xla
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import check_floating, check_shape
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner
from jaxfused.runtime.vmap import batch_all
from pallas_kernels.rows import layer_norm as pallas_layer_norm
from pallas_kernels.rows import layer_norm_backward as pallas_layer_norm_backward
from pallas_kernels.rows import layer_norm_configs as pallas_layer_norm_configs

Output = jax.Array | tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class NormOptions:
    """Static arguments of a call: the norm's kind and constants."""

    op: str
    subtract_mean: bool
    epsilon: float
    scale_offset: float
    pre_activation: str | None
    activation: str | None
    round_before_scale: bool = False

    def keywords(self) -> dict[str, Any]:
        """Returns the options as keyword arguments, which every implementation takes."""
        return dict(
            subtract_mean=self.subtract_mean,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            pre_activation=self.pre_activation,
            activation=self.activation,
            round_before_scale=self.round_before_scale,
        )


class Images(NamedTuple):
    """Parameters that may differ between images: [*leading, D] for x [*leading, ..., D], or None."""

    scale: jax.Array | None
    """Scale of each image, [*leading, D]: the norm is multiplied by 1 + scale."""
    shift: jax.Array | None
    gate: jax.Array | None
    """Factor of the branch, [*leading, D], or [D] for all images."""


class _Vectors(NamedTuple):
    """The kernels' parameters [*leading, D] or None; scale and bias include each image's modulation."""

    scale: jax.Array | None
    bias: jax.Array | None
    pre_bias: jax.Array | None
    gate: jax.Array | None


def run(
    options: NormOptions,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    images: Images,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    implementation: str | None,
) -> Output:
    """Computes the norm of x [*leading, ..., D] with parameters `images`, the only ones it validates."""
    _validate(options.op, x, images, residual)
    options, vectors = _vectors(options, x, scale, bias, images, pre_bias)
    device = dispatch.current_device(x, residual)
    takes_xla = takes_reference(
        options.op,
        implementation,
        device,
        x,
        missing={"cuda": "the CUDA kernels have no parameters of each image and no gate"},
    )
    if takes_xla:
        y, next_residual = layer_norm_xla.norm(
            x,
            vectors.scale,
            vectors.bias,
            residual,
            vectors.pre_bias,
            **options.keywords(),
            gate=vectors.gate,
        )
        y = named(y, options.op, "output")
        next_residual = named(next_residual, options.op, "next_residual")
        return y if next_residual is None else (y, next_residual)
    image_axes = max(vector.ndim for vector in vectors if vector is not None) - 1
    axes = _Forward(options, image_axes, False).axes(x, residual, *vectors)
    whole, parts = axes.split(implementation)
    inner = sharding.leading_axes(x.ndim - 1 - image_axes)
    operands = sharding.align(
        (x, residual, *vectors),
        operand_axes=[letters.replace(ROWS, inner) for letters in axes.operands],
        whole=whole,
        parts=parts,
    )
    y, next_residual = _norm(Runner(implementation, device), options, image_axes, *operands)
    return y if next_residual is None else (y, next_residual)


def _validate(op: str, x: jax.Array, images: Images, residual: jax.Array | None) -> None:
    features = x.shape[-1]
    named = dict(image_scale=images.scale, image_shift=images.shift, gate=images.gate)
    check_floating(op, named)
    if images.gate is not None and residual is None:
        raise ValueError(
            f"{op}: a gate was passed without a residual, but it multiplies what is added to one; pass"
            " residual too, or multiply x."
        )
    shapes = {
        name: array.shape
        for name, array in named.items()
        if array is not None and not (name == "gate" and array.shape == (features,))
    }
    for name, shape in shapes.items():
        if shape[-1:] != (features,) or shape[:-1] != x.shape[:-1][: len(shape) - 1]:
            raise ValueError(
                f"{op}: {name} has shape {shape}, but x has shape {x.shape}; pass {name} of the first"
                f" axes of x and its last one, such as {(*x.shape[:1], features)}."
            )
        first = next(iter(shapes))
        check_shape(op, name, named[name], shapes[first], f"{first} has shape {shapes[first]}")


def _vectors(
    options: NormOptions,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    images: Images,
    pre_bias: jax.Array | None,
) -> tuple[NormOptions, _Vectors]:
    """Returns the options, and parameters all [*leading, D]; scale and bias include the modulation."""
    like = max((array for array in images if array is not None), key=lambda array: array.ndim)
    shape = like.shape
    wide = accumulator_dtype(x.dtype)

    def of_images(array: jax.Array) -> jax.Array:
        array = resharding.split_with(array, like, range(-array.ndim, 0))
        if array.shape == shape:
            return array
        axes = (1,) * (len(shape) - array.ndim)
        return jnp.broadcast_to(array.reshape(axes + array.shape), shape)

    # Without scale and bias no sum or product is needed: kernels read image_scale itself and add 1.
    if images.scale is not None and scale is None and bias is None:
        scale, options = images.scale, replace(options, scale_offset=1.0)
    elif images.scale is not None:
        factor = 1.0 + of_images(images.scale).astype(wide)
        bias = None if bias is None else of_images(bias.astype(wide)) * factor
        if scale is not None:
            factor = (of_images(scale.astype(wide)) + options.scale_offset) * factor
        scale, options = factor, replace(options, scale_offset=0.0)
    if images.shift is not None and bias is None:
        bias = images.shift
    elif images.shift is not None:
        assert bias is not None
        bias = of_images(bias.astype(wide)) + of_images(images.shift).astype(wide)
    vectors = (scale, bias, pre_bias, images.gate)
    return options, _Vectors(*(None if v is None else of_images(v) for v in vectors))


# --- gradient -------------------------------------------------------------------------------------


class _Residuals(NamedTuple):
    h: jax.Array
    """Next residual if the call has a residual, else x before pre_bias."""
    mean: jax.Array | None
    rstd: jax.Array
    x: jax.Array | None
    """Branch that the gate multiplies, saved for the gate's gradient; None without a gate."""
    vectors: _Vectors


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2))
def _norm(run: Runner, options: NormOptions, image_axes: int, x, residual, *vectors):
    forward = _Forward(options, image_axes, save_statistics=False)
    y, next_residual, _, _ = run(forward, x, residual, *vectors)
    return y, next_residual


def _norm_fwd(run: Runner, options: NormOptions, image_axes: int, x, residual, *vectors):
    forward = _Forward(options, image_axes, save_statistics=True)
    y, next_residual, mean, rstd = run(forward, x, residual, *vectors)
    y = named(y, options.op, "output")
    next_residual = named(next_residual, options.op, "next_residual")
    mean, rstd = named((mean, rstd), options.op, "statistics")
    saved = _Vectors(*vectors)
    h = x if residual is None else next_residual
    return (y, next_residual), _Residuals(h, mean, rstd, None if saved.gate is None else x, saved)


def _norm_bwd(run: Runner, options: NormOptions, image_axes: int, saved: _Residuals, cotangents):
    dy, dnext_residual = cotangents
    dx, dresidual, *dvectors = run(
        _Backward(options, image_axes),
        dy,
        dnext_residual,
        saved.h,
        saved.mean,
        saved.rstd,
        saved.x,
        *saved.vectors,
    )
    if dnext_residual is not None and dresidual is None:
        dresidual = dx
    return (
        dx.astype(dy.dtype),
        dresidual,
        *(
            None if vector is None else gradient.astype(vector.dtype)
            for gradient, vector in zip(dvectors, saved.vectors, strict=True)
        ),
    )


_norm.defvjp(_norm_fwd, _norm_bwd)


# --- kernels --------------------------------------------------------------------------------------


def _letters(image_axes: int) -> tuple[str, str]:
    """Returns the letters of x's axes but the last, and of the vectors [*images, D]."""
    images = "pqrstuvw"[:image_axes]
    return images + ROWS, images + "d"


@dataclass(frozen=True)
class _Forward:
    """Computes (y, next_residual, mean, rstd) of x and residual [*images, rows, D]."""

    options: NormOptions
    image_axes: int
    save_statistics: bool

    @property
    def name(self) -> str:
        return f"{self.options.op} forward"

    def axes(self, x, residual, *vectors) -> Axes:
        rows, vector = _letters(self.image_axes)
        saves_mean = self.save_statistics and self.options.subtract_mean
        return Axes(
            (rows + "d", rows + "d", *(vector for _ in vectors)),
            (
                rows + "d",
                None if residual is None else rows + "d",
                rows if saves_mean else None,
                rows if self.save_statistics else None,
            ),
            parts="d",
            parts_by="xla",
        )

    def why_not(self, device, x, residual, *vectors) -> Mapping[str, str | None]:
        return _why_not(self, device, x, residual, _Vectors(*vectors))

    def estimate(self, device, able, x, residual, *vectors) -> Estimate:
        del device, vectors
        norm = _norm_like(self.options, x, residual)
        return layer_norm_regimes.of_images(norm, able, alone=not self.save_statistics)

    def configs(self, implementation, device, x, residual, *vectors) -> Sequence[Hashable]:
        del device
        if implementation == "xla":
            return ()
        return pallas_layer_norm_configs.forward_candidates(
            *_tiled_shape(x, self.image_axes), 1 if residual is None else 2, _present(*vectors)
        )

    def on_parts(self, names, call, x, residual, *vectors) -> Results:
        """Runs XLA on one device's shard of the features; sums statistics over the mesh axes `names`."""
        del call
        scale, bias, pre_bias, gate = vectors
        found = layer_norm_xla.norm_and_statistics(
            x, scale, bias, residual, pre_bias, gate=gate, **self.options.keywords(), names=names
        )
        return found if self.save_statistics else (*found[:2], None, None)

    def run(self, implementation, device, x, residual, *vectors, config=None) -> Results:
        keywords: dict[str, Any] = self.options.keywords()
        if implementation == "xla":
            return self.on_parts((), None, x, residual, *vectors)
        scale, bias, pre_bias, gate = _by_segments(vectors)
        results = pallas_layer_norm.forward(
            x.reshape(-1, x.shape[-1]),
            scale,
            bias,
            _rows(residual),
            pre_bias,
            gate=gate,
            segments=math.prod(x.shape[: self.image_axes]),
            save_statistics=self.save_statistics,
            multiprocessors=device.multiprocessors,
            config=config,
            **keywords,
        )
        # y and next_residual [rows, D] get x's shape; statistics [rows] get it without the axis D.
        return tuple(
            None if result is None else result.reshape(x.shape[: x.ndim - (2 - result.ndim)])
            for result in results[:4]
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _batched(self, call, axis_size, in_batched, operands)


@dataclass(frozen=True)
class _Backward:
    """Computes (dx, dresidual, dscale, dbias, dpre_bias, dgate) from what the forward has saved.

    The gradients of the vectors are float32 [*images, D]; dresidual is None if it equals dx.
    """

    options: NormOptions
    image_axes: int

    @property
    def name(self) -> str:
        return f"{self.options.op} backward"

    def axes(self, dy, dnext_residual, h, mean, rstd, x, *vectors) -> Axes:
        rows, vector = _letters(self.image_axes)
        matrix = rows + "d"
        return Axes(
            (matrix, matrix, matrix, rows, rows, matrix, *(vector for _ in vectors)),
            (
                matrix,
                None if x is None else matrix,
                *(None if v is None else vector for v in vectors),
            ),
            parts="d",
            parts_by="xla",
        )

    def why_not(
        self, device, dy, dnext_residual, h, mean, rstd, x, *vectors
    ) -> Mapping[str, str | None]:
        residual = None if dnext_residual is None else h
        return _why_not(self, device, dy, residual, _Vectors(*vectors))

    def estimate(self, device, able, dy, dnext_residual, h, mean, rstd, x, *vectors) -> Estimate:
        del device, h, mean, rstd, x, vectors
        return layer_norm_regimes.of_images(_norm_like(self.options, dy, dnext_residual), able)

    def configs(
        self, implementation, device, dy, dnext_residual, h, mean, rstd, x, *vectors
    ) -> Sequence[Hashable]:
        del device, dy, mean, rstd
        if implementation == "xla":
            return ()
        scale, bias, pre_bias, gate = vectors
        read = (
            scale,
            None if self.options.activation is None else bias,
            pre_bias if dnext_residual is None or gate is not None else None,
            gate,
        )
        matrices = _present(h, h, dnext_residual, x)
        return pallas_layer_norm_configs.backward_candidates(
            *_tiled_shape(h, self.image_axes), matrices, _present(*read)
        )

    def on_parts(self, names, call, *operands) -> Results:
        """Runs XLA on one device's shard of the features; sums over features are over `names` too."""
        del call
        return self._gradients(layer_norm_xla.gradients, *operands, names=names)

    def run(self, implementation, device, *operands, config=None) -> Results:
        if implementation == "xla":
            return self.on_parts((), None, *operands)
        return self._gradients(
            pallas_layer_norm_backward.gradients,
            *operands,
            multiprocessors=device.multiprocessors,
            config=config,
        )

    def _gradients(
        self, function, dy, dnext_residual, h, mean, rstd, x, *vectors, **keywords: Any
    ) -> Results:
        images = h.shape[: self.image_axes]
        dx, dresidual, *sums = function(
            *map(_rows, (dy, dnext_residual, h)),
            None if mean is None else mean.reshape(-1),
            rstd.reshape(-1),
            _rows(x),
            *_by_segments(vectors),
            segments=math.prod(images),
            **self.options.keywords(),
            **keywords,
        )
        return (
            dx.reshape(h.shape),
            None if dresidual is None else dresidual.reshape(h.shape),
            *(None if s is None else s.reshape(*images, s.shape[-1]) for s in sums),
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        return _batched(self, call, axis_size, in_batched, operands)


def _batched(kernel, call, axis_size, in_batched, operands) -> Results:
    """Implements `jax.vmap`: the mapped axis becomes the first axis of images."""
    batched = batch_all(axis_size, in_batched, operands)
    return call(replace(kernel, image_axes=kernel.image_axes + 1), *batched)


def _rows(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array.reshape(-1, array.shape[-1])


def _by_segments(vectors: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """Returns vectors [*images, D] as [images, D]; vectors [D] are unchanged."""
    return [v if v is None or v.ndim == 1 else v.reshape(-1, v.shape[-1]) for v in vectors]


def _tiled_shape(x: Any, image_axes: int) -> tuple[int, int, int]:
    """Returns the sizes that tiles depend on: rows of an image, features, and bytes per element."""
    return math.prod(x.shape[image_axes:-1]), x.shape[-1], x.dtype.itemsize


def _why_not(kernel, device, x, residual, vectors) -> dict[str, str | None]:
    """Returns why each implementation cannot run x [*images, rows, D], forward or backward, or None."""
    reason = pallas_layer_norm.why_unsupported(
        compute_capability=device.compute_capability,
        rows=x.size // x.shape[-1],
        features=x.shape[-1],
        dtype=x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
        segments=math.prod(x.shape[: kernel.image_axes]),
        vectors_of_segments=kernel.image_axes > 0,
        gated=vectors.gate is not None,
    )
    return {"pallas": reason, "xla": None}


def _norm_like(options, x, residual) -> layer_norm_regimes.Norm:
    """Returns the sizes and options of a norm that decide which implementation is faster."""
    return layer_norm_regimes.Norm(
        rows=x.size // x.shape[-1],
        features=x.shape[-1],
        itemsize=x.dtype.itemsize,
        residual=residual is not None,
        subtract_mean=options.subtract_mean,
    )


def _present(*arrays: Any) -> int:
    return sum(array is not None for array in arrays)
