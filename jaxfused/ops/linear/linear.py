"""linear: validation, choice of implementation, gradient."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8
from jaxfused.ops.linear import linear_fp8, linear_xla
from jaxfused.ops.linear.input_gradient import (
    InputGradient,
    are_few,
    input_gradient,
)
from jaxfused.ops.linear.linear_stages import ActivationGradient, Layer
from jaxfused.ops.linear.weight_gradient import (
    WeightGradients,
    weight_and_bias_gradients,
    weight_gradient,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import LeftToXla, choose_without_stages, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.roofline import is_modelled
from jaxfused.runtime.runner import Results, Runner, StageCall
from jaxfused.runtime.shapes import why_symbolic


@python_numbers
def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike | fp8.Precision = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with an activation and a residual stream, to which the result is added.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    The product is taken in x's dtype and accumulated in float32 (float64 for float64). So are the
    gradients, and each is rounded once, to the dtype of its operand: a float32 `w` under
    bfloat16 `x` receives the float32 sums. The activation reads its argument as rounded to x's
    dtype; bias and residual are added in float32.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w: [D, F], of any float dtype, as are bias and residual.
      bias: [F].
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., F], is added after the activation.
      precision: of the product, as in `jax.numpy.matmul`; or "fp8": the product and its gradients are
        taken of float8, each operand with one scale, as docs/quantisation.md says.
      out_dtype: of y; by default the residual's dtype, or x's where there is no residual.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, -1.0], [1.0, 0.0]])
      >>> jaxfused.linear(x, w, jnp.ones(2), activation="relu", residual=jnp.ones((1, 2)))
      Array([[5., 1.]], dtype=float32)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: the affine layer, as `flax.linen.Dense` has it.
    """
    op = "linear"
    x, w, bias, residual = as_arrays(x, w, bias, residual)
    check_floating(op, dict(x=x, w=w, bias=bias, residual=residual))
    check_activation(op, activation)
    check_affine(op, x, "w", w, "bias", bias)
    check_residual(op, residual, x, w.shape[1])
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    if fp8.is_fp8(precision):
        run = fp8.runner(op, implementation, device, x)
        residual_dtype = None if residual is None else residual.dtype
        fp8_options = linear_fp8.Options(activation, jnp.dtype(out_dtype), residual_dtype)
        rows = sharding.leading_axes(x.ndim - 1)
        axes = (rows + "d", "df", "f", rows + "f")
        aligned = sharding.align((x, w, bias, residual), operand_axes=axes, whole="d")
        return linear_fp8.linear(run, fp8_options, *aligned, fp8.state_of(op, precision))
    run = Runner(implementation, device)
    is_bare = bias is None and activation is None
    options = _Options(
        activation,
        jnp.dtype(out_dtype),
        None if residual is None else residual.dtype,
        precision,
        forward_in_xla=is_bare and implementation is None,
    )
    left = functools.partial(_left_to_xla, run, options, x, w, residual) if is_bare else None
    if takes_reference(op, implementation, device, x, why_xla=left):
        y = linear_xla.linear(
            x, w, bias, residual, activation=activation, precision=precision, out_dtype=out_dtype
        )
        return named(y, op, "output")
    rows = sharding.leading_axes(x.ndim - 1)
    operands = sharding.align(
        (x, w, bias, residual), operand_axes=(rows + "d", "df", "f", rows + "f"), parts="d"
    )
    return _linear(run, options, *operands)


_WHY_BARE = "no product is faster than XLA's, and there is nothing to fuse"


def _left_to_xla(
    run: Runner, options: "_Options", x: jax.Array, w: jax.Array, residual: jax.Array | None
) -> LeftToXla | None:
    """Returns why XLA runs a layer without bias and activation, or None if a custom gradient is faster.

    A custom gradient is faster if a kernel's wgrad is faster than XLA's. It also lets XLA's product add
    a residual of 16 bits. Without it JAX differentiates the product itself, to every order.
    """
    if why_symbolic(x, w) is not None or not sharding.is_in_one_piece(x, w):
        return LeftToXla(_WHY_BARE)
    if residual is not None and x.dtype.itemsize == 2 and is_modelled(run.device) and w.size:
        return None
    left = run.left_to_xla(_WHY_BARE, _stages(options, x, w, residual))
    wgrad_in_xla = left is not None and left.stages[-1].implementation == "xla"
    return left if wgrad_in_xla else None


def _stages(options: "_Options", x: Any, w: Any, residual: Any) -> Iterator[StageCall]:
    """Yields the kernel calls of a layer without bias and activation, wgrad last."""
    dy = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), x.dtype)
    yield options.forward(save_preactivation=False), (x, w, None, residual)
    if are_few(x):
        yield InputGradient(options.precision), (dy, w)
    yield WeightGradients("linear", w.dtype, options.precision, 1, False, False), (x, dy)


def check_affine(
    op: str, x: jax.Array, w_name: str, w: jax.Array, bias_name: str, bias: jax.Array | None
) -> None:
    """Checks that x [..., D], w [D, F] and bias [F] fit together."""
    if x.ndim == 0:
        raise ValueError(
            f"{op}: x has shape (), but its last axis is multiplied;"
            " pass x of shape [..., features]."
        )
    if w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: {w_name} has shape {w.shape}, but x has {x.shape[-1]} features in its last"
            f" axis; pass {w_name} of shape ({x.shape[-1]}, features)."
        )
    check_shape(
        op, bias_name, bias, (w.shape[1],), f"{w_name} has {w.shape[1]} features in its last axis"
    )


def check_residual(op: str, residual: jax.Array | None, x: jax.Array, features: int) -> None:
    """Checks that the residual, if there is one, has the shape of the result."""
    rule = f"x has shape {x.shape} and the result has {features} features"
    check_shape(op, "residual", residual, (*x.shape[:-1], features), rule)


def resolve_out_dtype(op: str, out_dtype: Any, x: jax.Array, residual: jax.Array | None) -> Any:
    """Returns the caller's `out_dtype` if it is not None, else the residual's dtype, else x's."""
    if out_dtype is None:
        return x.dtype if residual is None else residual.dtype
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: out_dtype is {jnp.dtype(out_dtype)}, but the result is of floating-point numbers;"
            " pass jnp.float32, jnp.bfloat16 or jnp.float16."
        )
    return out_dtype


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """Static arguments of a call."""

    activation: str | None
    out_dtype: Any
    residual_dtype: Any
    precision: Any
    forward_in_xla: bool = False
    """True if XLA runs the forward unless another implementation was measured to be faster."""

    def forward(self, *, save_preactivation: bool) -> "Layer":
        """Returns the forward: a product with bias, activation and residual."""
        return Layer(
            "linear forward",
            self.activation,
            self.out_dtype,
            save_preactivation,
            self.precision,
        )


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    preactivation: jax.Array | None
    """x @ w + bias in x's dtype; None without an activation."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="linear")
def _linear(run: Runner, options: _Options, x, w, bias, residual):
    y, _ = _forward(run, options, False, x, w, bias, residual)
    return y


def _forward(run: Runner, options: _Options, saves: bool, *operands: Any) -> Results:
    layer = options.forward(save_preactivation=saves)
    left = run.left_to_xla(_WHY_BARE, [(layer, operands)]) if options.forward_in_xla else None
    if left is None:
        return run(layer, *operands)
    why_not = {"pallas": left.why, "cuda": left.why, "xla": None}
    choose_without_stages(layer.name, None, why_not, *operands[:2], stages=left.stages)
    return layer.run("xla", run.device, *operands)


def _linear_fwd(run: Runner, options: _Options, x, w, bias, residual):
    saves = options.activation is not None
    y, preactivation = _forward(run, options, saves, x, w, bias, residual)
    y = named(y, "linear", "output")
    preactivation = named(preactivation, "linear", "preactivation")
    return y, _Residuals(x, w, bias, preactivation)


def _linear_bwd(run: Runner, options: _Options, saved: _Residuals, dy):
    x, w, bias, preactivation = saved
    if preactivation is None:
        dz = dy.astype(x.dtype)
        dw, dbias = weight_and_bias_gradients(
            run, "linear", x, dy, w.dtype, bias, options.precision
        )
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, preactivation)
        dbias = None if bias is None else sums.astype(bias.dtype)
        dw = weight_gradient(run, "linear", x, dz, w.dtype, options.precision)
    return (
        input_gradient(run, dz, w, x.dtype, options.precision),
        dw,
        dbias,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_linear.defvjp(_linear_fwd, _linear_bwd)
