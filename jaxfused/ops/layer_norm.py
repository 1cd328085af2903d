"""layer_norm and rms_norm: validation, choice of implementation, gradient.

RMSNorm is LayerNorm without the mean, so both are one function to the kernels.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfused import cuda, dispatch, reference, sharding
from jaxfused.ops.batching import batch_all, is_batched, one_by_one
from jaxfused.ops.validation import (
    check_activation,
    check_constant,
    check_floating,
    check_shape,
)
from pallas_kernels.rows import layer_norm as pallas_layer_norm

Output = jax.Array | tuple[jax.Array, jax.Array]


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    residual: jax.Array | None = None,
    pre_bias: jax.Array | None = None,
    pre_activation: str | None = None,
    activation: str | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Output:
    r"""Layer normalisation over the last axis, with what stands before and after it in one pass.

    .. math::
        h &= x + \text{pre\_bias} + \text{residual} \\
        u &= \text{pre\_activation}(h) \\
        y &= \text{activation}\Bigl(\frac{u - \operatorname{mean}(u)}
             {\sqrt{\operatorname{var}(u) + \epsilon}} \cdot \text{scale} + \text{bias}\Bigr)

    Every part but the normalisation is optional. Statistics are taken in float32 (float64 for float64
    inputs) and the variance is the mean of squared deviations, not a difference of two means.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); D from 1 up.
      scale: [D], multiplies the normalised values. Any float dtype, as for the other parameters.
      bias: [D], is added after `scale`.
      epsilon: is added to the variance.
      residual: [..., D] like x: the residual stream of a Transformer.
      pre_bias: [D], is added to x: the bias of the projection that made x.
      pre_activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu", between the sum and
        the norm.
      activation: the same choice, after the norm.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, of x's shape and dtype. With `residual`: `(y, h)`, where h is the next residual, of the
      residual's dtype.

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

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450
    """
    options = _Options("layer_norm", True, epsilon, 0.0, pre_activation, activation)
    return _run(options, x, scale, bias, residual, pre_bias, implementation)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: jax.Array | None = None,
    pre_bias: jax.Array | None = None,
    pre_activation: str | None = None,
    activation: str | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Output:
    r"""Root-mean-square normalisation over the last axis, with what stands around it in one pass.

    .. math::
        h &= x + \text{pre\_bias} + \text{residual} \\
        u &= \text{pre\_activation}(h) \\
        y &= \text{activation}\Bigl(\frac{u}{\sqrt{\operatorname{mean}(u^2) + \epsilon}}
             \cdot (\text{scale} + \text{scale\_offset}) + \text{bias}\Bigr)

    Args:
      scale_offset: is added to `scale`; 1.0 for checkpoints that store scale - 1, as Gemma's do.

    The other arguments, the result and the errors are those of `layer_norm`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.rms_norm(jnp.array([4.0, -4.0]), jnp.ones(2), epsilon=0.0).round(3)
      Array([ 1., -1.], dtype=float32)

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019,
    https://arxiv.org/abs/1910.07467
    """
    options = _Options("rms_norm", False, epsilon, scale_offset, pre_activation, activation)
    return _run(options, x, scale, bias, residual, pre_bias, implementation)


def implementations(
    device: dispatch.Device,
    *,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    pre_bias: bool = False,
    pre_activation: str | None = None,
    activation: str | None = None,
    backward: bool = False,
) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run these shapes on `device`.

    The order is that of the forward or of the backward, for what stands around the norm (`pre_bias`:
    whether there is one); what can run is the same for all.
    """
    limits = dict(rows=rows, features=features, dtype=dtype, residual_dtype=residual_dtype)
    capability = device.compute_capability
    reasons = {
        "pallas": pallas_layer_norm.why_unsupported(compute_capability=capability, **limits),
        "cuda": cuda.layer_norm.why_unsupported(compute_capability=capability, **limits),
        "xla": None,
    }
    # On an H200 in bfloat16, CUDA C and Pallas. Forward: layer_norm of [16384, 1024] 18.2 and 18.9 us,
    # of [16384, 8192] 132 and 149, after a residual 254 and 297, but [4096, 768] 5.3 and 5.2,
    # [32768, 384] 14.3 and 14.0; after bias and relu [16384, 1024] 18.2 and 19.0, [16384, 8192] 143
    # and 153, but [8192, 4096], more than a warp holds, 37.9 and 36.0; gelu after the norm of
    # [16384, 8192] 185 and 169. Backward: [4096, 16384] 109 and 176, whose registers do not hold so
    # long a row; [16384, 8192] 202 and 201, [50432, 768] 67 and 63.
    large = features >= 768 and rows * features * jnp.dtype(dtype).itemsize > 20 * 10**6
    if backward:
        prefers_cuda = features > 8192
    elif activation is not None or pre_activation not in (None, "relu"):
        prefers_cuda = False
    elif residual_dtype is None and (pre_bias or pre_activation):
        prefers_cuda = large and not 1024 < features < 8192
    else:
        prefers_cuda = large
    return dispatch.preferring("cuda", reasons) if prefers_cuda else reasons


@dataclass(frozen=True)
class _Options:
    """What is static in a call: which norm, and its constants."""

    op: str
    subtract_mean: bool
    epsilon: float
    scale_offset: float
    pre_activation: str | None
    activation: str | None

    def keywords(self) -> dict[str, Any]:
        """The options as every implementation takes them."""
        return dict(
            subtract_mean=self.subtract_mean,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            pre_activation=self.pre_activation,
            activation=self.activation,
        )


def _run(options, x, scale, bias, residual, pre_bias, implementation) -> Output:
    x = jnp.asarray(x)
    scale, bias, residual, pre_bias = (
        None if a is None else jnp.asarray(a) for a in (scale, bias, residual, pre_bias)
    )
    _validate(options, x, scale, bias, residual, pre_bias)
    features = x.shape[-1]
    rows = x.size // features
    device = dispatch.current_device(x, residual)
    limits = dict(
        rows=rows,
        features=features,
        dtype=x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
        pre_bias=pre_bias is not None,
        pre_activation=options.pre_activation,
        activation=options.activation,
    )
    forward, backward = (
        dispatch.choose(
            options.op, implementation, implementations(device, **limits, backward=backward)
        )
        for backward in (False, True)
    )
    # Without rows there is nothing for a kernel to do, and an empty launch is an error in CUDA.
    if forward == "xla" or rows == 0:
        y, next_residual = reference.layer_norm.norm(
            x, scale, bias, residual, pre_bias, **options.keywords()
        )
        return y if next_residual is None else (y, next_residual)

    launch = _Launch(options, forward, backward, device.multiprocessors)
    axes = _axes(x)
    operands = sharding.align(
        (x, scale, bias, residual, pre_bias), operand_axes=(axes, "d", "d", axes, "d"), whole="d"
    )
    y, next_residual = _norm(launch, *operands)
    return y if next_residual is None else (y, next_residual)


def _validate(options, x, scale, bias, residual, pre_bias) -> None:
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
        check_shape(op, name, array, (features,), f"x has {features} features in its last axis")
    check_shape(op, "residual", residual, x.shape, f"x has shape {x.shape}")
    for name in ("pre_activation", "activation"):
        check_activation(op, getattr(options, name), name)
    for name in ("epsilon", "scale_offset"):
        check_constant(op, name, getattr(options, name))


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """Which kernels run, and how: the static argument of the custom_vjp."""

    options: _Options
    forward_implementation: str
    backward_implementation: str
    multiprocessors: int

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward kernel, with all that is static filled in."""
        return self._kernel(self.forward_implementation, "forward")

    @property
    def backward(self) -> Callable[..., Any]:
        """The same for the backward; either takes the statistics of either."""
        return self._kernel(self.backward_implementation, "backward")

    def _kernel(self, implementation: str, name: str) -> Callable[..., Any]:
        keywords = self.options.keywords()
        if implementation == "cuda":
            return functools.partial(getattr(cuda.layer_norm, name), **keywords)
        keywords["multiprocessors"] = self.multiprocessors
        return functools.partial(getattr(pallas_layer_norm, name), **keywords)


class _Residuals(NamedTuple):
    h: jax.Array
    """The next residual where there is one, else x: pre_bias is still to be added to x."""
    mean: jax.Array | None
    rstd: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None
    pre_bias: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(launch: _Launch, x, scale, bias, residual, pre_bias):
    y, next_residual, _, _ = _forward(
        launch, x, scale, bias, residual, pre_bias, save_statistics=False
    )
    return y, next_residual


def _norm_fwd(launch: _Launch, x, scale, bias, residual, pre_bias):
    y, next_residual, mean, rstd = _forward(
        launch, x, scale, bias, residual, pre_bias, save_statistics=True
    )
    h = x if residual is None else next_residual
    return (y, next_residual), _Residuals(h, mean, rstd, scale, bias, pre_bias)


def _norm_bwd(launch: _Launch, saved: _Residuals, cotangents):
    dy, dnext_residual = cotangents
    has_residual = dnext_residual is not None
    dx, dscale, dbias, dpre_bias = _backward(launch, dy, dnext_residual, saved)

    def parameter_gradient(gradient, parameter):
        return None if parameter is None else gradient.astype(parameter.dtype)

    return (
        dx,
        parameter_gradient(dscale, saved.scale),
        parameter_gradient(dbias, saved.bias),
        dx if has_residual else None,
        parameter_gradient(dpre_bias, saved.pre_bias),
    )


_norm.defvjp(_norm_fwd, _norm_bwd)


def _axes(x: jax.Array) -> str:
    """The letters of x [..., D] for `sharding`."""
    return sharding.leading_axes(x.ndim - 1) + "d"


def _rows(x: jax.Array | None) -> jax.Array | None:
    """[..., D] to the [M, D] that the kernels take."""
    return None if x is None else x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Forward:
    """The forward kernel, over a shard of any rank."""

    launch: _Launch
    save_statistics: bool

    def __call__(self, x, residual, scale, bias, pre_bias):
        outputs = self.launch.forward(
            _rows(x), scale, bias, _rows(residual), pre_bias, save_statistics=self.save_statistics
        )
        return tuple(None if o is None else o.reshape(*x.shape[:-1], *o.shape[1:]) for o in outputs)


@dataclass(frozen=True)
class _Backward:
    """The backward kernel, over a shard of any rank whose first `batch_axes` axes are a batch."""

    launch: _Launch
    batch_axes: int

    def __call__(self, dy, dnext_residual, h, mean, rstd, scale, bias, pre_bias):
        batch = h.shape[: self.batch_axes]
        dx, *gradients = self.launch.backward(
            _rows(dy),
            _rows(dnext_residual),
            _rows(h),
            None if mean is None else mean.reshape(-1),
            rstd.reshape(-1),
            scale,
            bias,
            pre_bias,
            segments=math.prod(batch),
        )
        return dx.reshape(h.shape), *(
            None if g is None else g.reshape(*batch, *g.shape[1:]) for g in gradients
        )


def _forward(launch: _Launch, x, scale, bias, residual, pre_bias, *, save_statistics: bool):
    """(y, next_residual, mean, rstd) of x [..., D], with a rule for `jax.vmap`."""

    @custom_vmap
    def forward(x, residual, scale, bias, pre_bias):
        axes, row = _axes(x), _axes(x)[:-1]
        save_mean = save_statistics and launch.options.subtract_mean
        return sharding.per_shard(
            _Forward(launch, save_statistics),
            (x, residual, scale, bias, pre_bias),
            operand_axes=(axes, axes, "d", "d", "d"),
            result_axes=(
                axes,
                None if residual is None else axes,
                row if save_mean else None,
                row if save_statistics else None,
            ),
            whole="d",
        )

    @forward.def_vmap
    def rule(axis_size, in_batched, x, residual, scale, bias, pre_bias):
        if is_batched(in_batched[2:]):
            outputs = one_by_one(forward, in_batched, (x, residual, scale, bias, pre_bias))
        else:
            x, residual = batch_all(axis_size, in_batched[:2], (x, residual))
            outputs = forward(x, residual, scale, bias, pre_bias)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return forward(x, residual, scale, bias, pre_bias)


def _backward(launch: _Launch, dy, dnext_residual, saved: _Residuals, *, batch_axes: int = 0):
    """(dx, dscale, dbias, dpre_bias), the last three of shape [*batch, D] or None.

    The first `batch_axes` axes of the rows are that batch: the parameters that they share have
    gradients for each of its entries.
    """

    @custom_vmap
    def backward(rows, parameters):
        _, _, h, _, _ = rows
        axes = _axes(h)
        return sharding.per_shard(
            _Backward(launch, batch_axes),
            (*rows, *parameters),
            operand_axes=(axes, axes, axes, axes[:-1], axes[:-1], "d", "d", "d"),
            result_axes=(
                axes,
                *(None if p is None else axes[:batch_axes] + "d" for p in parameters),
            ),
            whole="d",
        )

    @backward.def_vmap
    def rule(axis_size, in_batched, rows, parameters):
        rows_batched, parameters_batched = in_batched
        if is_batched(parameters_batched):
            leaves, treedef = jax.tree.flatten((rows, parameters))
            outputs = one_by_one(
                lambda *leaves: backward(*jax.tree.unflatten(treedef, leaves)),
                jax.tree.leaves(in_batched),
                leaves,
            )
        else:
            dy, dnext_residual, *statistics = batch_all(axis_size, rows_batched, rows)
            outputs = _backward(
                launch,
                dy,
                dnext_residual,
                _Residuals(*statistics, *parameters),
                batch_axes=batch_axes + 1,
            )
        return outputs, jax.tree.map(lambda _: True, outputs)

    h, mean, rstd, *parameters = saved
    return backward((dy, dnext_residual, h, mean, rstd), tuple(parameters))
