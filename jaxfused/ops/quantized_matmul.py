"""quantized_matmul: validation, choice of implementation, gradient."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference, sharding
from jaxfused.ops.kernel_call import (
    ROWS,
    Axes,
    Results,
    Runner,
    batched_rows,
    reference_only,
    takes_reference,
)
from jaxfused.ops.linear import (
    ActivationGradient,
    check_affine,
    check_residual,
    resolve_out_dtype,
    sum_rows,
)
from jaxfused.ops.validation import check_activation, check_floating
from jaxfused.quantization.quantized_array import Layout, QuantizedArray
from pallas_kernels.product import quantized as pallas_quantized
from pallas_kernels.product.quantized import Packed


def quantized_matmul(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with quantised weights and, optionally, quantised inputs.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    Float x: the weights are dequantised to x's dtype, and the product is accumulated in float32.
    Quantised x: with one scale a row of x and a column of w (or one for all) the values themselves are
    multiplied, integers with exact sums in int32 and float8 with sums in float32; otherwise both are
    dequantised to float32. Bias and residual are added in float32.

    The weights are frozen: gradients go to x (where it is float), bias and residual, and the scales'
    are zero. Gradients are of reverse mode, to any order where no kernel runs.

    The kernels read weights of layout "columns", and float x of at most 64 rows.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); or a
        `QuantizedArray` of that shape with axis -1, as `quantize_rows` makes it.
      w: a `QuantizedArray` of shape [D, F] with axis -2, as `quantize` makes it.
      bias: [F], of any float dtype, as is residual.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., F], is added after the activation.
      out_dtype: of y; by default the residual's dtype, else x's, else float32.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, D is so large that int32 could overflow, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[127.0, 0.0], [1.0, -127.0]])
      >>> jaxfused.quantized_matmul(x, jaxfused.quantize(w), activation="relu")
      Array([[129.,   0.]], dtype=float32)
      >>> jaxfused.quantized_matmul(jaxfused.quantize_rows(x), jaxfused.quantize(w)).shape
      (1, 2)

    Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339
    """
    op = "quantized_matmul"
    bias, residual = jax.tree.map(jnp.asarray, (bias, residual))
    check_floating(op, dict(bias=bias, residual=residual))
    check_activation(op, activation)
    _check_quantized(op, "w", w, -2, "quantize(w)")
    if isinstance(x, QuantizedArray):
        _check_quantized(op, "x", x, -1, "quantize_rows(x)")
        values, array = x.values, jax.eval_shape(x.dequantize)
    else:
        x = values = array = jnp.asarray(x)
        check_floating(op, dict(x=x))
    check_affine(op, array, "w", jax.eval_shape(w.dequantize), "bias", bias)
    check_residual(op, residual, array, w.shape[1])
    _check_sums_fit(op, x, w)
    out_dtype = jnp.dtype(resolve_out_dtype(op, out_dtype, array, residual))
    if isinstance(x, QuantizedArray):
        reference_only(op, implementation, values)
    elif not _takes_reference(op, implementation, x, w):
        residual_dtype = None if residual is None else residual.dtype
        options = _Options(activation, out_dtype, w.layout, w.dtype, x.dtype, residual_dtype)
        rows = sharding.leading_axes(x.ndim - 1)
        arrays = sharding.align(
            (x, w.values, *_of_columns(w), bias, residual),
            operand_axes=(rows + "d", options.letters, "gf", "gf", "f", rows + "f"),
            whole="dkg",
        )
        device = dispatch.current_device(x)
        return _quantized_matmul(Runner(implementation, device), options, *arrays)
    return reference.quantized_matmul.matmul(
        x, w, bias, residual, activation=activation, out_dtype=out_dtype
    )


def _takes_reference(op: str, implementation: str | None, x: jax.Array, w: QuantizedArray) -> bool:
    """Whether a product with float x is plain jax.numpy, whatever its shapes are."""
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    why_xla = None
    if w.layout != "columns":
        why_xla = (
            "its kernels read weights whose columns are contiguous: pass"
            " jaxfused.quantize(w, layout='columns')"
        )
        missing["pallas"] = why_xla
    device = dispatch.current_device(x)
    return takes_reference(op, implementation, device, x, why_xla=why_xla, missing=missing)


def _of_columns(w: QuantizedArray) -> tuple[jax.Array, jax.Array | None]:
    """The scale and the zero point [G, F]: one of the whole array is repeated for each column."""
    shape = (w.groups, w.shape[1])
    zero_point = w.zero_point
    return (
        jnp.broadcast_to(w.scale, shape),
        None if zero_point is None else jnp.broadcast_to(zero_point, shape),
    )


def _check_quantized(op: str, name: str, array: Any, axis: int, remedy: str) -> None:
    if not isinstance(array, QuantizedArray):
        raise ValueError(
            f"{op}: {name} is a {type(array).__name__}, but it has to be a QuantizedArray;"
            f" pass jaxfused.{remedy}."
        )
    if array.axis != axis:
        raise ValueError(
            f"{op}: {name} was quantised along axis {array.axis}, but the product sums over axis"
            f" {axis}; pass jaxfused.{remedy}."
        )


def _check_sums_fit(op: str, x: jax.Array | QuantizedArray, w: QuantizedArray) -> None:
    """Checks that int32 can hold the sums of integer products without wrapping around."""
    if not (isinstance(x, QuantizedArray) and {x.dtype, w.dtype} <= {"int8", "int4"}):
        return
    largest = 1
    for q in (x, w):
        largest *= 128 if q.zero_point is None else 255
    limit = (2**31 - 1) // largest
    if w.shape[0] > limit:
        raise ValueError(
            f"{op}: w has {w.shape[0]} input features, but sums of more than {limit} products of"
            " these integers may not fit into int32; pass x as floats, or split the features."
        )


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """What is static in a call."""

    activation: str | None
    out_dtype: Any
    layout: Layout
    w_dtype: str
    x_dtype: Any
    residual_dtype: Any

    @property
    def letters(self) -> str:
        """The axes of the stored values; "k" are words of several numbers."""
        return "fk" if self.w_dtype == "int4" else "fd"

    def forward(self, *, save_preactivation: bool) -> "_Layer":
        """The kernel of the forward."""
        return _Layer(self, save_preactivation)

    def weights(self, values: jax.Array, scale: jax.Array, zero_point: Any) -> QuantizedArray:
        """The weights of which these are the arrays."""
        return QuantizedArray(values, scale, zero_point, -2, self.layout)


class _Residuals(NamedTuple):
    w: QuantizedArray
    bias: jax.Array | None
    preactivation: jax.Array | None
    """x @ w + bias in x's dtype, where there is an activation."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized_matmul(run: Runner, options: _Options, x, values, scale, zero_point, bias, residual):
    layer = options.forward(save_preactivation=False)
    y, _ = run(layer, x, values, scale, zero_point, bias, residual)
    return y


def _quantized_matmul_fwd(
    run: Runner, options: _Options, x, values, scale, zero_point, bias, residual
):
    layer = options.forward(save_preactivation=options.activation is not None)
    y, preactivation = run(layer, x, values, scale, zero_point, bias, residual)
    w = options.weights(values, scale, zero_point)
    return y, _Residuals(w, bias, preactivation)


def _quantized_matmul_bwd(run: Runner, options: _Options, saved: _Residuals, dy):
    dtype, bias = options.x_dtype, saved.bias
    if saved.preactivation is None:
        dz, dbias = dy.astype(dtype), None if bias is None else sum_rows(dy, bias.dtype)
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, saved.preactivation)
        dbias = None if bias is None else sums.astype(bias.dtype)
    return (
        reference.quantized_matmul.input_gradient(dtype, saved.w, dz),
        None,
        None,
        None,
        dbias,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_quantized_matmul.defvjp(_quantized_matmul_fwd, _quantized_matmul_bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """(activation(x @ w + bias) + residual, x @ w + bias if it is saved) of x [M, D] and w [D, F]."""

    options: _Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "quantized_matmul forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes(
            (ROWS + "d", self.options.letters, "gf", "gf", "f", ROWS + "f"),
            (ROWS + "f", ROWS + "f" if self.save_preactivation else None),
            whole="dkg",
        )

    def reasons(
        self, device, x, values, scale, zero_point, bias, residual
    ) -> Mapping[str, str | None]:
        del bias
        reason = pallas_quantized.why_unsupported(
            compute_capability=device.compute_capability,
            x_dtype=x.dtype,
            out_dtype=self.options.out_dtype,
            residual_dtype=None if residual is None else residual.dtype,
            x_shape=x.shape,
            w=Packed(values, scale, zero_point),
        )
        return {"pallas": reason, "xla": None}

    def configs(
        self, implementation, device, x, values, scale, zero_point, bias, residual
    ) -> Sequence[Hashable]:
        del bias
        if implementation != "pallas":
            return ()
        return pallas_quantized.fitting(
            x,
            Packed(values, scale, zero_point),
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=self.options.out_dtype.itemsize
            + (x.dtype.itemsize if self.save_preactivation else 0),
            multiprocessors=device.multiprocessors,
        )

    def run(
        self, implementation, device, x, values, scale, zero_point, bias, residual, config=None
    ) -> Results:
        options = self.options
        if implementation == "pallas":
            return pallas_quantized.forward(
                x,
                Packed(values, scale, zero_point),
                bias,
                residual,
                activation=options.activation,
                save_preactivation=self.save_preactivation,
                out_dtype=options.out_dtype,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return reference.quantized_matmul.layer(
            x,
            options.weights(values, scale, zero_point),
            bias,
            residual,
            activation=options.activation,
            save_preactivation=self.save_preactivation,
            out_dtype=options.out_dtype,
        )

    batched = batched_rows
