"""linear: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import cuda, dispatch, reference, sharding
from jaxfused.ops.row_kernel import ROWS, RowKernel
from jaxfused.ops.validation import check_activation, check_floating, check_shape
from jaxfused.reference.activation import activate
from jaxfused.reference.product import product
from pallas_kernels.product import linear as pallas_linear
from pallas_kernels.product import matmul as pallas_matmul
from pallas_kernels.product.mainloop import fills, wastes_wide_tiles


def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with its activation and the residual stream that it is added to.

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
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., F], is added after the activation.
      precision: of the product, as in `jax.numpy.matmul`.
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
    x, w, bias, residual = jax.tree.map(jnp.asarray, (x, w, bias, residual))
    check_floating(op, dict(x=x, w=w, bias=bias, residual=residual))
    check_activation(op, activation)
    check_affine(op, x, "w", w, "bias", bias)
    check_residual(op, residual, x, w.shape[1])
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    chosen = dispatch.choose(
        op,
        implementation,
        implementations(
            device,
            rows=math.prod(x.shape[:-1]),
            features=x.shape[-1],
            out_features=w.shape[1],
            has_bias=bias is not None,
            activation=activation,
            dtype=x.dtype,
            residual_dtype=None if residual is None else residual.dtype,
            out_dtype=out_dtype,
            precision=precision,
        ),
    )
    # Without rows there is nothing for a kernel to do.
    if chosen == "xla" or x.size == 0:
        return reference.linear.linear(
            x, w, bias, residual, activation=activation, precision=precision, out_dtype=out_dtype
        )
    launch = Launch(chosen, device.multiprocessors, precision)
    options = _Options(
        activation, jnp.dtype(out_dtype), None if residual is None else residual.dtype
    )
    rows = sharding.leading_axes(x.ndim - 1)
    operands = sharding.align(
        (x, w, bias, residual), operand_axes=(rows + "d", "df", "f", rows + "f"), whole="d"
    )
    return _linear(launch, options, *operands)


def implementations(
    device: dispatch.Device,
    *,
    rows: int,
    features: int,
    out_features: int,
    has_bias: bool,
    activation: str | None,
    dtype: Any,
    residual_dtype: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run these shapes on `device`."""
    # A bias or an activation takes XLA another pass. float32 is not measured.
    fast = (has_bias or activation is not None) and dtype != jnp.float32
    fast = fast and fills(device.multiprocessors, rows, out_features)
    reasons = {
        "pallas": pallas_matmul.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={"x": dtype, "residual": residual_dtype, "the result": out_dtype},
            features={"x": features, "the result": out_features},
            allows_tf32=allows_tf32(precision),
        ),
        "cuda": cuda.linear.why_unsupported(
            compute_capability=device.compute_capability, dtype=dtype
        ),
        "xla": None,
    }
    if not fast:
        return dispatch.preferring("xla", reasons)
    by_cublaslt = _is_faster_in_cublaslt(
        dtype=dtype,
        w_shape=(features, out_features),
        has_bias=has_bias,
        activation=activation,
        residual_dtype=residual_dtype,
        out_dtype=out_dtype,
    )
    return dispatch.preferring("cuda", reasons) if by_cublaslt else reasons


def _is_faster_in_cublaslt(
    *,
    dtype: Any,
    w_shape: tuple[int, ...],
    has_bias: bool,
    activation: str | None,
    residual_dtype: Any,
    out_dtype: Any,
) -> bool:
    """Whether cuBLASLt takes the layer in one product, and faster than the Pallas kernel does.

    It does so with gelu: [16384, 768] x [768, 3072] 114 us on an H200, Pallas 130, XLA 175; forward
    and backward 428, 536, 503. With a bias it does where Pallas has only narrow tiles: [25216, 4096]
    x [4096, 1024] 259 and 264 us, with a residual 270 and 284; but [50432, 768] x [768, 3072] 307 and
    303, 394 and 360.
    """
    adds = has_bias or residual_dtype is not None
    faster = activation == "gelu_tanh" or (adds and wastes_wide_tiles(w_shape[1]))
    return faster and cuda.linear.in_one_product(
        dtype=dtype,
        w_shape=w_shape,
        activation=activation,
        residual_dtype=residual_dtype,
        out_dtype=out_dtype,
    )


def allows_tf32(precision: Any) -> bool:
    """Whether `precision` lets a product round float32 to tf32, as XLA's do by default."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    preset = jax.lax.DotAlgorithmPreset
    if isinstance(precision, preset | jax.lax.DotAlgorithm):
        return precision in (preset.DEFAULT, preset.TF32_TF32_F32)
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    lowest = (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH)
    return all(p is None or jax.lax.Precision(p) in lowest for p in pair)


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
    """Checks that the residual, where there is one, has the shape of the result."""
    rule = f"x has shape {x.shape} and the result has {features} features"
    check_shape(op, "residual", residual, (*x.shape[:-1], features), rule)


def resolve_out_dtype(op: str, out_dtype: Any, x: jax.Array, residual: jax.Array | None) -> Any:
    """What the caller asked for, else the residual stream's dtype, else x's."""
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
class Launch:
    """Which kernels run, and how."""

    implementation: str
    multiprocessors: int
    precision: Any
    takes_fastest: bool = False
    """Whether `forward` may be cuBLASLt's where that is faster, whatever else runs."""

    def row_kernel(
        self,
        functions: Mapping[str, Callable[..., Any]],
        operand_axes: tuple[str, ...],
        result_axes: tuple[str | None, ...],
        whole: str,
        **keywords: Any,
    ) -> RowKernel:
        """The function of this launch's implementation, with its keywords and the launch's own."""
        if self.implementation == "pallas":
            keywords["multiprocessors"] = self.multiprocessors
        else:
            keywords["precision"] = self.precision
        function = functions[self.implementation]
        return RowKernel(function, tuple(keywords.items()), operand_axes, result_axes, whole)

    def forward(
        self,
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        residual: jax.Array | None,
        *,
        activation: str | None,
        out_dtype: Any,
        save_preactivation: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """activation(x @ w + bias) + residual, and x @ w + bias if it is to be saved."""
        launch = self
        if self.takes_fastest and _is_faster_in_cublaslt(
            dtype=x.dtype,
            w_shape=w.shape,
            has_bias=bias is not None,
            activation=activation,
            residual_dtype=None if residual is None else residual.dtype,
            out_dtype=out_dtype,
        ):
            launch = replace(self, implementation="cuda")
        kernel = launch.row_kernel(
            {"pallas": pallas_linear.forward, "cuda": cuda.linear.forward},
            (ROWS + "d", "df", "f", ROWS + "f"),
            (ROWS + "f", ROWS + "f" if save_preactivation else None),
            "d",
            activation=activation,
            out_dtype=out_dtype,
            save_preactivation=save_preactivation,
        )
        return kernel(x, w.astype(x.dtype), bias, residual)

    def input_gradient(self, dy: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
        """The gradient of x where y = x @ w: dy [..., F] times the transpose of w [D, F]."""
        rows = sharding.leading_axes(dy.ndim - 1)
        return _product(f"{rows}f,df->{rows}d", dy, w, dtype, self.precision)

    def weight_gradient(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
        """x^T @ dy over all rows."""
        return weight_gradient(x, dy, dtype, self.precision)


def weight_gradient(x: jax.Array, dy: jax.Array, dtype: Any, precision: Any) -> jax.Array:
    """The transpose of x [..., D] times dy [..., F], over all rows."""
    rows = sharding.leading_axes(x.ndim - 1)
    return _product(f"{rows}d,{rows}f->df", x, dy, dtype, precision)


def _product(subscripts: str, a: jax.Array, b: jax.Array, dtype: Any, precision: Any) -> jax.Array:
    """`product` in a's dtype; where explicit axes split the sum, its parts are added in float32."""
    if not sharding.is_explicit(a, b):
        return _ProductOfShards(subscripts, dtype, precision)(a, b)[0]
    operand_axes, result_axes = subscripts.split("->")
    (y,) = sharding.per_shard(
        _ProductOfShards(subscripts, jnp.dtype(jnp.float32), precision),
        (a, b),
        operand_axes=operand_axes.split(","),
        result_axes=(result_axes,),
    )
    assert y is not None
    return y.astype(dtype)


@dataclass(frozen=True)
class _ProductOfShards:
    subscripts: str
    dtype: Any
    precision: Any

    def __call__(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        y = product(
            self.subscripts, a, b, dtype=a.dtype, out_dtype=self.dtype, precision=self.precision
        )
        return (y,)


@dataclass(frozen=True)
class _Options:
    """What else is static in a call."""

    activation: str | None
    out_dtype: Any
    residual_dtype: Any


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    preactivation: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(launch: Launch, options: _Options, x, w, bias, residual):
    y, _ = launch.forward(
        x, w, bias, residual, activation=options.activation, out_dtype=options.out_dtype
    )
    return y


def _linear_fwd(launch: Launch, options: _Options, x, w, bias, residual):
    y, preactivation = launch.forward(
        x,
        w,
        bias,
        residual,
        activation=options.activation,
        out_dtype=options.out_dtype,
        save_preactivation=options.activation is not None,
    )
    return y, _Residuals(x, w, bias, preactivation)


def _linear_bwd(launch: Launch, options: _Options, saved: _Residuals, dy):
    x, w, bias, preactivation = saved
    if preactivation is None:
        dz, dbias = dy.astype(x.dtype), None if bias is None else sum_rows(dy, bias.dtype)
    else:
        dz, dbias = _activation_gradient(launch, options.activation, dy, preactivation, bias)
    return (
        launch.input_gradient(dz, w, x.dtype),
        launch.weight_gradient(x, dz, w.dtype),
        dbias,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_linear.defvjp(_linear_fwd, _linear_bwd)


def _activation_gradient(
    launch: Launch, activation: str | None, dy: jax.Array, z: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of the preactivation z, in its dtype, and of the bias in it."""
    if launch.implementation == "cuda":
        kernel = RowKernel(
            cuda.linear.activation_gradient,
            (("activation", activation), ("sum_rows", bias is not None)),
            (ROWS + "f", ROWS + "f"),
            (ROWS + "f", None if bias is None else "f"),
            whole="",
        )
        dz, sums = kernel(dy, z)
        return dz, None if bias is None else sums.astype(bias.dtype)
    _, vjp = jax.vjp(functools.partial(activate, activation), z.astype(jnp.float32))
    (dz,) = vjp(dy.astype(jnp.float32))
    return dz.astype(z.dtype), None if bias is None else sum_rows(dz, bias.dtype)


def sum_rows(dy: jax.Array, dtype: Any) -> jax.Array:
    """The gradient of a bias: dy [..., F] summed over all of its rows in float32."""
    return jnp.sum(dy, axis=range(dy.ndim - 1), dtype=jnp.float32).astype(dtype)
