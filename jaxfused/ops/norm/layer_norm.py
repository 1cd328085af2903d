"""layer_norm and rms_norm: validation, choice of implementation, gradient.

RMSNorm is LayerNorm without the mean, so both are one function to the kernels.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax

from jaxfused import dispatch
from jaxfused.ops.norm import (
    adaptive_norm,
    layer_norm_cuda,
    layer_norm_regimes,
    layer_norm_xla,
    quantized_norm,
)
from jaxfused.ops.norm.adaptive_norm import NormOptions
from jaxfused.ops.quantize.quantize_rows import check_row_dtype
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_epsilon,
    check_finite,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from jaxfused.runtime.vmap import batch_all, is_batched
from pallas_kernels.rows import layer_norm as pallas_layer_norm
from pallas_kernels.rows import layer_norm_backward as pallas_layer_norm_backward
from pallas_kernels.rows import layer_norm_configs as pallas_layer_norm_configs

Output = jax.Array | tuple[jax.Array, jax.Array]


@python_numbers
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    round_before_scale: bool = False,
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    residual: jax.Array | None = None,
    pre_bias: jax.Array | None = None,
    gate: jax.Array | None = None,
    pre_activation: str | None = None,
    activation: str | None = None,
    quantize_rows: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> Any:
    r"""Layer normalisation over the last axis, with the operations before and after it in one pass.

    .. math::
        h &= (x + \text{pre\_bias}) \cdot \text{gate} + \text{residual} \\
        u &= \text{pre\_activation}(h) \\
        v &= \frac{u - \operatorname{mean}(u)}{\sqrt{\operatorname{var}(u) + \epsilon}}
             \cdot (\text{scale} + \text{scale\_offset}) + \text{bias} \\
        y &= \text{activation}(v \cdot (1 + \text{image\_scale}) + \text{image\_shift})

    Every part but the normalisation is optional. Statistics are taken in float32 (float64 for float64
    inputs) and the variance is the mean of squared deviations, not a difference of two means.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); D from 1 up.
      scale: [D], multiplies the normalised values. Any float dtype, as for the other parameters.
        Or of the last axes of x, such as [G, D] for groups that are normalised separately (by XLA).
      bias: like scale, is added after it.
      epsilon: is added to the variance.
      scale_offset: is added to `scale`; 1.0 for checkpoints that store scale - 1, as those of
        Gemma's RMSNorm and of Nemotron's LayerNorm do.
      round_before_scale: whether the normalised values are rounded to x's dtype before scale and
        bias, as Llama's RMSNorm rounds them and Gemma's and OLMo 2's do not. By Pallas or XLA. It
        reproduces such checkpoints' code in 16 bits; it is not more accurate.
      image_scale: [*leading, D] for x [*leading, ..., D], such as [B, D] for [B, T, D]: modulates
        each image as an offset from 1, as in the adaptive norm of a diffusion Transformer.
      image_shift: like image_scale, is added after it.
      residual: [..., D] like x: the residual stream of a Transformer.
      pre_bias: [D], is added to x: the bias of the projection that made x.
      gate: [D], or [*leading, D] for each image: multiplies x + pre_bias, before the residual is added.
      pre_activation: None or a name of `jaxfused.ACTIVATIONS`, between the sum and the norm.
      activation: the same choice, after the norm.
      quantize_rows: "int8", "float8_e4m3fn" or "float8_e5m2": y is quantised, row by row, to be the x of
        `quantized_matmul`. With implementation "pallas" the pass that normalises does it.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, of x's shape and dtype. With `residual`: `(y, h)`, where h is the next residual, of the
      residual's dtype. With `quantize_rows`, y is the `QuantizedArray` that `jaxfused.quantize_rows`
      makes of it, and no gradient flows through it.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[1.0, 3.0], [2.0, -2.0]])
      >>> jaxfused.layer_norm(x, jnp.ones(2), jnp.zeros(2)).round(3)
      Array([[-1.,  1.],
             [ 1., -1.]], dtype=float32)
      >>> y, x = jaxfused.layer_norm(x, residual=jnp.ones((2, 2)))
      >>> x
      Array([[ 2.,  4.],
             [ 3., -1.]], dtype=float32)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450;
    image_scale, image_shift and gate: Peebles, Xie, "Scalable Diffusion Models with Transformers", 2022,
    https://arxiv.org/abs/2212.09748
    """
    options = NormOptions(
        "layer_norm", True, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    images = adaptive_norm.Images(image_scale, image_shift, gate)
    return _run(options, x, scale, bias, images, residual, pre_bias, quantize_rows, implementation)


@python_numbers
def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    round_before_scale: bool = False,
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    residual: jax.Array | None = None,
    pre_bias: jax.Array | None = None,
    gate: jax.Array | None = None,
    pre_activation: str | None = None,
    activation: str | None = None,
    quantize_rows: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> Any:
    r"""Root-mean-square normalisation over the last axis, with the operations around it in one pass.

    .. math::
        h &= (x + \text{pre\_bias}) \cdot \text{gate} + \text{residual} \\
        u &= \text{pre\_activation}(h) \\
        v &= \frac{u}{\sqrt{\operatorname{mean}(u^2) + \epsilon}}
             \cdot (\text{scale} + \text{scale\_offset}) + \text{bias} \\
        y &= \text{activation}(v \cdot (1 + \text{image\_scale}) + \text{image\_shift})

    The arguments, the result and the errors are those of `layer_norm`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.rms_norm(jnp.array([4.0, -4.0]), jnp.ones(2), epsilon=0.0).round(3)
      Array([ 1., -1.], dtype=float32)

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019,
    https://arxiv.org/abs/1910.07467
    """
    options = NormOptions(
        "rms_norm", False, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    images = adaptive_norm.Images(image_scale, image_shift, gate)
    return _run(options, x, scale, bias, images, residual, pre_bias, quantize_rows, implementation)


def _run(
    options, x, scale, bias, images, residual, pre_bias, row_dtype, implementation
) -> Output | quantized_norm.QuantizedOutput:
    x, scale, bias, residual, pre_bias = as_arrays(x, scale, bias, residual, pre_bias)
    images = adaptive_norm.Images(*as_arrays(*images))
    _validate(options, x, scale, bias, images, residual, pre_bias)
    if row_dtype is not None:
        return _quantized(
            options, x, scale, bias, images, residual, pre_bias, row_dtype, implementation
        )
    if any(array is not None for array in images):
        return adaptive_norm.run(
            options, x, scale, bias, images, residual, pre_bias, implementation
        )
    device = dispatch.current_device(x, residual)
    missing = {}
    if _of_groups(scale, bias):
        why = "the kernels have one scale and bias for all groups"
        missing = {"pallas": why, "cuda": why}
        scale, bias = (
            None if a is None else a.reshape((1,) * (x.ndim - a.ndim) + a.shape)
            for a in (scale, bias)
        )
    if takes_reference(options.op, implementation, device, x, missing=missing):
        y, next_residual = layer_norm_xla.norm(
            x, scale, bias, residual, pre_bias, **options.keywords()
        )
        y = named(y, options.op, "output")
        next_residual = named(next_residual, options.op, "next_residual")
        return y if next_residual is None else (y, next_residual)

    axes = _axes(x)
    forward = _Forward(options, save_statistics=False)
    whole, parts = forward.axes(x, residual, scale, bias, pre_bias).split(implementation)
    operands = sharding.align(
        (x, scale, bias, residual, pre_bias),
        operand_axes=(axes, "d", "d", axes, "d"),
        whole=whole,
        parts=parts,
    )
    y, next_residual = _norm(Runner(implementation, device), options, *operands)
    return y if next_residual is None else (y, next_residual)


def _quantized(
    options, x, scale, bias, images, residual, pre_bias, row_dtype, implementation
) -> quantized_norm.QuantizedOutput:
    """Computes the norm of checked operands and quantises the rows of its result y."""
    row_dtype = check_row_dtype(options.op, "quantize_rows", row_dtype)
    device = dispatch.current_device(x, residual)
    has_vectors = all(array is None for array in images) and not _of_groups(scale, bias)
    if has_vectors:
        if quantized_norm.is_one_pass(implementation, device, x, residual):
            return quantized_norm.run(
                options, x, scale, bias, residual, pre_bias, row_dtype, implementation
            )
        # XLA fuses the quantisation into its own norm; after a kernel's norm it would read y again.
        implementation = implementation or "xla"
    output: Any = _run(options, x, scale, bias, images, residual, pre_bias, None, implementation)
    return quantized_norm.of_output(output, row_dtype, implementation)


def _validate(options, x, scale, bias, images, residual, pre_bias) -> None:
    op = options.op
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but the norm needs a last axis of at least one feature;"
            " pass x of shape [..., features]."
        )
    features = x.shape[-1]
    parameters = dict(scale=scale, bias=bias, pre_bias=pre_bias)
    check_floating(op, dict(x=x, residual=residual, **parameters))
    for name, array in parameters.items():
        if name != "pre_bias" and _of_groups(array) and array.shape == x.shape[-array.ndim :]:
            continue
        check_shape(op, name, array, (features,), f"x has {features} features in its last axis")
    if _of_groups(scale, bias) and any(array is not None for array in images):
        raise ValueError(
            f"{op}: scale or bias differs from group to group, and image_scale, image_shift or gate"
            " from image to image; pass one of the two kinds, and apply the other outside."
        )
    check_shape(op, "residual", residual, x.shape, f"x has shape {x.shape}")
    for name in ("pre_activation", "activation"):
        check_activation(op, getattr(options, name), name)
    check_epsilon(op, options.epsilon)
    check_finite(op, "scale_offset", options.scale_offset)


def _of_groups(*parameters: Any) -> bool:
    """Returns whether scale or bias has several axes, one for each of the last axes of x."""
    return any(array is not None and array.ndim > 1 for array in parameters)


# --- gradient -------------------------------------------------------------------------------------


class _Residuals(NamedTuple):
    h: jax.Array
    """Next residual if the call has a residual, else x before pre_bias."""
    mean: jax.Array | None
    """Mean of each row, [...] in float32; None for an RMSNorm."""
    rstd: jax.Array
    """Reciprocal standard deviation of each row, [...] in float32."""
    scale: jax.Array | None
    bias: jax.Array | None
    pre_bias: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def _norm(run: Runner, options: NormOptions, x, scale, bias, residual, pre_bias):
    forward = _Forward(options, save_statistics=False)
    y, next_residual, _, _ = run(forward, x, residual, scale, bias, pre_bias)
    return y, next_residual


def _norm_fwd(run: Runner, options: NormOptions, x, scale, bias, residual, pre_bias):
    forward = _Forward(options, save_statistics=True)
    y, next_residual, mean, rstd = run(forward, x, residual, scale, bias, pre_bias)
    y = named(y, options.op, "output")
    next_residual = named(next_residual, options.op, "next_residual")
    mean, rstd = named((mean, rstd), options.op, "statistics")
    h = x if residual is None else next_residual
    return (y, next_residual), _Residuals(h, mean, rstd, scale, bias, pre_bias)


def _norm_bwd(run: Runner, options: NormOptions, saved: _Residuals, cotangents):
    dy, dnext_residual = cotangents
    backward = _Backward(options, batch_axes=0)
    dx, dscale, dbias, dpre_bias = run(backward, dy, dnext_residual, *saved)

    def parameter_gradient(gradient, parameter):
        return None if parameter is None else gradient.astype(parameter.dtype)

    return (
        dx.astype(dy.dtype),
        parameter_gradient(dscale, saved.scale),
        parameter_gradient(dbias, saved.bias),
        None if dnext_residual is None else dx,
        parameter_gradient(dpre_bias, saved.pre_bias),
    )


_norm.defvjp(_norm_fwd, _norm_bwd)


def _axes(x: jax.Array) -> str:
    """Returns a letter for each axis of x [..., D], as `sharding.align` takes them."""
    return sharding.leading_axes(x.ndim - 1) + "d"


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """Computes (y, next_residual, mean, rstd) from x and residual [rows, D] and the vectors [D]."""

    options: NormOptions
    save_statistics: bool

    xla_takes_rows: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.options.op} forward"

    def axes(self, x, residual, scale, bias, pre_bias) -> Axes:
        rows = ROWS + "d"
        saves_mean = self.save_statistics and self.options.subtract_mean
        return Axes(
            (rows, rows, "d", "d", "d"),
            (
                rows,
                None if residual is None else rows,
                ROWS if saves_mean else None,
                ROWS if self.save_statistics else None,
            ),
            parts="d",
            parts_by="xla",
        )

    def why_not(self, device, x, residual, *vectors) -> Mapping[str, str | None]:
        del vectors
        residual_dtype = None if residual is None else residual.dtype
        return _why_not(self.options, device, x, residual_dtype)

    def estimate(self, device, able, x, residual, *vectors) -> Estimate:
        del device
        norm = _norm_like(self.options, x, residual is not None, vectors)
        return layer_norm_regimes.forward(norm, able, saves_statistics=self.save_statistics)

    def configs(self, implementation, device, x, residual, *vectors) -> Sequence[Hashable]:
        del device
        if implementation == "xla":
            return ()
        kernels = pallas_layer_norm_configs if implementation == "pallas" else layer_norm_cuda
        matrices = 1 if residual is None else 2
        shape = (x.size // x.shape[-1], x.shape[-1], x.dtype.itemsize)
        return kernels.forward_candidates(*shape, matrices, _present(*vectors))

    def on_parts(self, names, call, x, residual, scale, bias, pre_bias) -> Results:
        """Runs XLA on one device's shard of the features; sums statistics over the mesh axes `names`."""
        del call
        results = layer_norm_xla.norm_and_statistics(
            x, scale, bias, residual, pre_bias, **self.options.keywords(), names=names
        )
        return results if self.save_statistics else (*results[:2], None, None)

    def run(
        self, implementation, device, x, residual, scale, bias, pre_bias, config=None
    ) -> Results:
        operands = (x, scale, bias, residual, pre_bias)
        keywords: dict[str, Any] = self.options.keywords()
        if implementation == "xla":
            return self._by_xla(device, *operands)
        keywords |= dict(save_statistics=self.save_statistics, config=config)
        if implementation == "cuda":
            del keywords["round_before_scale"]
            return layer_norm_cuda.forward(*operands, **keywords)
        results = pallas_layer_norm.forward(
            *operands, **keywords, multiprocessors=device.multiprocessors
        )
        return results[:4]

    def _by_xla(self, device, x, scale, bias, residual, pre_bias) -> Results:
        """Computes the forward in XLA, with the leading axes of x merged into one axis of rows."""
        norm = _norm_like(self.options, x, residual is not None, (scale, bias, pre_bias))
        dtype = None if residual is None else residual.dtype
        has_pallas = _why_not(self.options, device, x, dtype)["pallas"] is None
        shares = layer_norm_regimes.backward_shares(norm, has_pallas=has_pallas)
        shares = self.save_statistics and shares
        matrix = _matrix(x, tiled=not shares)
        residual = None if residual is None else _matrix(residual, tiled=not shares)
        y, next_residual, mean, rstd = layer_norm_xla.norm_and_statistics(
            matrix, scale, bias, residual, pre_bias, **self.options.keywords()
        )
        if self.save_statistics and not shares:
            # XLA computes y in one kernel only if nothing else reads the statistics within it. So those
            # that are saved are computed again, behind a barrier.
            total, vector = (matrix, pre_bias) if next_residual is None else (next_residual, None)
            mean, rstd = layer_norm_xla.statistics(
                jax.lax.optimization_barrier(total),
                vector,
                subtract_mean=self.options.subtract_mean,
                epsilon=self.options.epsilon,
                pre_activation=self.options.pre_activation,
            )
        statistics = (mean, rstd) if self.save_statistics else (None, None)
        return *(None if a is None else a.reshape(x.shape) for a in (y, next_residual)), *(
            None if a is None else a.reshape(x.shape[:-1]) for a in statistics
        )

    batched = batched_rows


def _matrix(array: jax.Array, tiled: bool) -> jax.Array:
    """Returns [..., D] as [rows, D]; with `tiled`, XLA's norm reads several rows at a time.

    XLA's norm reads several rows at a time only if that number divides the length of the operand's last
    axis but one. For 197 rows there it reads one at a time, which takes three times as long. The barrier
    keeps XLA from undoing the merge of axes.
    """
    matrix = array.reshape(-1, array.shape[-1])
    if not tiled or array.ndim <= 2 or array.shape[-2] % _ROWS_OF_A_TILE == 0:
        return matrix
    return jax.lax.optimization_barrier(matrix)


_ROWS_OF_A_TILE = 16
"""Most rows that a thread block of XLA's norm reads at a time, if the rows are narrow."""


@dataclass(frozen=True)
class _Backward:
    """Computes (dx, dscale, dbias, dpre_bias) from dy, dnext_residual and the saved arrays.

    The first `batch_axes` axes of the rows are a batch. The entries share the parameters, but each has
    its own gradient of them, float32 [*batch, D].
    """

    options: NormOptions
    batch_axes: int

    @property
    def name(self) -> str:
        return f"{self.options.op} backward"

    def axes(self, dy, dnext_residual, h, mean, rstd, scale, bias, pre_bias) -> Axes:
        batch = "pqrstuvw"[: self.batch_axes]
        rows = batch + ROWS
        return Axes(
            (rows + "d", rows + "d", rows + "d", rows, rows, "d", "d", "d"),
            (
                rows + "d",
                *(None if p is None else batch + "d" for p in (scale, bias, pre_bias)),
            ),
            parts="d",
            parts_by="xla",
        )

    def why_not(self, device, dy, dnext_residual, h, *others) -> Mapping[str, str | None]:
        del others
        residual_dtype = None if dnext_residual is None else h.dtype
        return _why_not(self.options, device, dy, residual_dtype, self._batch(h))

    def estimate(self, device, able, dy, dnext_residual, h, mean, rstd, *vectors) -> Estimate:
        del device, dy, mean, rstd
        norm = _norm_like(self.options, h, dnext_residual is not None, vectors)
        return layer_norm_regimes.backward(norm, able)

    def _batch(self, h: Any) -> int:
        return math.prod(h.shape[: self.batch_axes])

    def configs(
        self, implementation, device, dy, dnext_residual, h, mean, rstd, scale, bias, pre_bias
    ) -> Sequence[Hashable]:
        del device, dy, mean, rstd
        matrices = 2 if dnext_residual is None else 3
        shape = (h.size // h.shape[-1], h.shape[-1], h.dtype.itemsize)
        if implementation == "pallas":
            read = (
                scale,
                None if self.options.activation is None else bias,
                pre_bias if dnext_residual is None else None,
            )
            return pallas_layer_norm_configs.backward_candidates(*shape, matrices, _present(*read))
        if implementation == "cuda":
            vectors = _present(scale, bias, pre_bias)
            return layer_norm_cuda.backward_candidates(*shape, matrices, vectors)
        return ()

    def on_parts(self, names, call, *operands) -> Results:
        """Runs XLA on one device's shard of the features; sums over features are over `names` too."""
        del call
        keywords = self.options.keywords()
        return self._gradients(layer_norm_xla.gradient, *operands, names=names, **keywords)

    def run(
        self,
        implementation,
        device,
        dy,
        dnext_residual,
        h,
        mean,
        rstd,
        *vectors,
        config=None,
    ) -> Results:
        functions: Mapping[str, Callable[..., Any]] = {
            "pallas": pallas_layer_norm_backward.backward,
            "cuda": layer_norm_cuda.backward,
            "xla": layer_norm_xla.gradient,
        }
        keywords: dict[str, Any] = self.options.keywords()
        if implementation == "cuda":
            del keywords["round_before_scale"]
        if implementation != "xla":
            keywords["config"] = config
        if implementation == "pallas":
            keywords["multiprocessors"] = device.multiprocessors
        operands = (dy, dnext_residual, h, mean, rstd, *vectors)
        return self._gradients(functions[implementation], *operands, **keywords)

    def _gradients(
        self, function, dy, dnext_residual, h, mean, rstd, *vectors, **keywords: Any
    ) -> Results:
        batch = h.shape[: self.batch_axes]
        dx, *gradients = function(
            *(None if a is None else a.reshape(-1, a.shape[-1]) for a in (dy, dnext_residual, h)),
            None if mean is None else mean.reshape(-1),
            rstd.reshape(-1),
            *vectors,
            segments=math.prod(batch),
            **keywords,
        )
        return dx.reshape(h.shape), *(
            None if g is None else g.reshape(*batch, g.shape[-1]) for g in gradients
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results | None:
        if is_batched(in_batched[5:]):
            return None
        rows = batch_all(axis_size, in_batched[:5], operands[:5])
        return call(replace(self, batch_axes=self.batch_axes + 1), *rows, *operands[5:])


def _why_not(options, device, x, residual_dtype, segments=1) -> dict[str, str | None]:
    """Returns why each implementation cannot run a norm of x [..., D], forward or backward, or None."""
    limits = dict(
        compute_capability=device.compute_capability,
        rows=x.size // x.shape[-1],
        features=x.shape[-1],
        dtype=x.dtype,
        residual_dtype=residual_dtype,
        segments=segments,
    )
    return {
        "pallas": pallas_layer_norm.why_unsupported(**limits),
        "cuda": layer_norm_cuda.why_unsupported(
            **limits, round_before_scale=options.round_before_scale
        ),
        "xla": None,
    }


def _present(*arrays: Any) -> int:
    return sum(array is not None for array in arrays)


def _norm_like(options, x, has_residual, vectors) -> layer_norm_regimes.Norm:
    """Returns the sizes and options of a norm of x [..., D] that decide which kernel is faster."""
    general = options.activation is not None or options.pre_activation not in (None, "relu")
    return layer_norm_regimes.Norm(
        rows=x.size // x.shape[-1],
        features=x.shape[-1],
        itemsize=x.dtype.itemsize,
        residual=has_residual,
        subtract_mean=options.subtract_mean,
        is_plain=not general and _present(*vectors) <= _REGISTER_VECTORS,
    )


_REGISTER_VECTORS = 2
"""Vectors [D] that the CUDA kernels hold in registers; they take a sixth longer if they read a third."""
