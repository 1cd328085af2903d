"""mlp and gated_mlp: validation, choice of implementation, gradient."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import cuda, dispatch, reference, sharding
from jaxfused.ops.linear import (
    Launch,
    allows_tf32,
    check_affine,
    check_residual,
    resolve_out_dtype,
    sum_rows,
)
from jaxfused.ops.row_kernel import ROWS
from jaxfused.ops.validation import check_activation, check_floating, check_shape
from pallas_kernels.product import matmul as pallas_matmul
from pallas_kernels.product import mlp as pallas_mlp
from pallas_kernels.product.mainloop import fills

Save = Literal["hidden", "preactivation", "inputs"]


def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None = None,
    *,
    activation: str | None = "gelu_tanh",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The two-layer perceptron of a Transformer block, with the residual stream it is added to.

    .. math::
        y = \text{activation}(x w_1 + b_1) w_2 + b_2 + \text{residual}

    Products are taken in x's dtype and accumulated in float32 (float64 for float64), as are the
    gradients; each gradient is rounded once, to the dtype of its operand.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w1: [D, F], of any float dtype, as are the other parameters and residual.
      b1: [F] or None.
      w2: [F, E].
      b2: [E] or None.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., E], is added last.
      save: what may be kept for the backward besides the inputs, in x's dtype: "preactivation"
        keeps x w1 + b1 [..., F]; "inputs" keeps nothing and takes that product again; "hidden" keeps
        two such arrays, the hidden layer and the activation's derivative. That is the fastest with
        implementation "pallas"; the others keep the preactivation then.
      precision: of the products, as in `jax.numpy.matmul`.
      out_dtype: of y; by default the residual's dtype, or x's where there is no residual.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., E].

    Raises:
      ValueError: shapes or dtypes do not fit, `save` is not known, or the named implementation
        cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[1.0, -2.0]])
      >>> jaxfused.mlp(x, jnp.eye(2), jnp.zeros(2), jnp.ones((2, 1)), activation="relu")
      Array([[1.]], dtype=float32)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.3,
    https://arxiv.org/abs/1706.03762
    """
    op = "mlp"
    x, w1, b1, w2, b2, residual = jax.tree.map(jnp.asarray, (x, w1, b1, w2, b2, residual))
    check_floating(op, dict(x=x, w1=w1, b1=b1, w2=w2, b2=b2, residual=residual))
    check_affine(op, x, "w1", w1, "b1", b1)
    _check_second_layer(op, x, w1.shape[1], "w2", w2, "b2", b2, residual)
    check_activation(op, activation)
    _check_save(op, save)
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    chosen = dispatch.choose(
        op,
        implementation,
        implementations(device, x, w1.shape[1], w2.shape[1], residual, out_dtype, precision),
    )
    # Without rows there is nothing for a kernel to do.
    if chosen == "xla" or x.size == 0:
        return reference.mlp.mlp(
            x,
            w1,
            b1,
            w2,
            b2,
            residual,
            activation=activation,
            save=save,
            precision=precision,
            out_dtype=out_dtype,
        )
    launch = Launch(chosen, device.multiprocessors, precision, takes_fastest=implementation is None)
    options = _Options.of(activation, save, out_dtype, residual)
    rows = sharding.leading_axes(x.ndim - 1)
    operands = sharding.align(
        (x, w1, b1, w2, b2, residual),
        operand_axes=(rows + "d", "df", "f", "fe", "e", rows + "e"),
        whole="dfe",
    )
    return _mlp(launch, options, *operands)


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    w_down: jax.Array,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    activation: str | None = "silu",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The gated perceptron: SwiGLU with "silu", GeGLU with a gelu, ReGLU with "relu".

    .. math::
        y = \bigl(\text{activation}(x w_\text{gate} + b_\text{gate})
            \odot (x w_\text{up} + b_\text{up})\bigr) w_\text{down} + b_\text{down}
            + \text{residual}

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w_gate: [D, F]; or [D, 2 F] with `w_up=None`: the gate's columns, then those of w_up.
      w_up: [D, F], or None where w_gate holds both.
      w_down: [F, E].
      b_gate: of w_gate's last axis.
      b_up: [F], only with w_up.
      b_down: [E].
      activation: of the gate; None for the bilinear form.
      save: what may be kept for the backward besides the inputs: "preactivation" keeps both
        products with x (2 F features in x's dtype); "inputs" keeps nothing and takes them again;
        "hidden" keeps them and the hidden layer (3 F), which is the fastest; implementation "xla"
        keeps the products then.

    The other arguments, the result and the errors are those of `mlp`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[2.0]]), jnp.array([[1.0, 3.0]])
      >>> jaxfused.gated_mlp(x, w, None, jnp.ones((1, 1)), activation="relu")
      Array([[12.]], dtype=float32)

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    op = "gated_mlp"
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual = jax.tree.map(
        jnp.asarray, (x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual)
    )
    arrays = dict(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    check_floating(op, arrays | dict(b_gate=b_gate, b_up=b_up, b_down=b_down, residual=residual))
    check_affine(op, x, "w_gate", w_gate, "b_gate", b_gate)
    if w_up is None:
        if w_gate.shape[1] % 2:
            raise ValueError(
                f"{op}: w_gate has shape {w_gate.shape}, but without w_up it holds two matrices of"
                " one width; pass w_gate of shape (features, 2 * hidden), or pass w_up."
            )
        if b_up is not None:
            raise ValueError(
                f"{op}: b_up was passed without w_up; append it to b_gate, as w_gate holds both."
            )
        hidden = w_gate.shape[1] // 2
    else:
        hidden = w_gate.shape[1]
        check_shape(op, "w_up", w_up, w_gate.shape, f"w_gate has shape {w_gate.shape}")
        check_affine(op, x, "w_up", w_up, "b_up", b_up)
    _check_second_layer(op, x, hidden, "w_down", w_down, "b_down", b_down, residual)
    check_activation(op, activation)
    _check_save(op, save)
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    chosen = dispatch.choose(
        op,
        implementation,
        implementations(device, x, hidden, w_down.shape[1], residual, out_dtype, precision),
    )
    if chosen == "xla" or x.size == 0:
        return reference.mlp.gated_mlp(
            x,
            w_gate,
            b_gate,
            w_up,
            b_up,
            w_down,
            b_down,
            residual,
            activation=activation,
            save=save,
            precision=precision,
            out_dtype=out_dtype,
        )
    launch = Launch(chosen, device.multiprocessors, precision, takes_fastest=implementation is None)
    options = _Options.of(activation, save, out_dtype, residual)
    rows = sharding.leading_axes(x.ndim - 1)
    gate_axis = _gate_axis(w_up)
    operands = sharding.align(
        (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual),
        operand_axes=(rows + "d", "d" + gate_axis, gate_axis, "df", "f", "fe", "e", rows + "e"),
        whole="dfge",
    )
    return _gated_mlp(launch, options, *operands)


def implementations(
    device: dispatch.Device,
    x: jax.Array,
    hidden: int,
    out_features: int,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    precision: Any = None,
) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run these shapes on `device`."""
    # On an H200 at [16384, 768, 3072], forward and backward: mlp 772 us, XLA 930. float32 is not
    # measured.
    fast = x.dtype != jnp.float32
    fast = fast and fills(device.multiprocessors, math.prod(x.shape[:-1]), hidden)
    reasons = {
        "pallas": pallas_matmul.why_unsupported(
            compute_capability=device.compute_capability,
            dtypes={
                "x": x.dtype,
                "residual": None if residual is None else residual.dtype,
                "the result": out_dtype,
            },
            features={"x": x.shape[-1], "the hidden layer": hidden, "the result": out_features},
            allows_tf32=allows_tf32(precision),
        ),
        "cuda": cuda.linear.why_unsupported(
            compute_capability=device.compute_capability, dtype=x.dtype
        ),
        "xla": None,
    }
    return reasons if fast else dispatch.preferring("xla", reasons)


def _check_second_layer(op, x, hidden, w_name, w, bias_name, bias, residual) -> None:
    if w.ndim != 2 or w.shape[0] != hidden:
        raise ValueError(
            f"{op}: {w_name} has shape {w.shape}, but the hidden layer has {hidden} features;"
            f" pass {w_name} of shape ({hidden}, features)."
        )
    features = w.shape[1]
    check_shape(op, bias_name, bias, (features,), f"{w_name} has {features} features")
    check_residual(op, residual, x, features)


def _check_save(op: str, save: str) -> None:
    if save not in reference.mlp.SAVE_POLICIES:
        names = ", ".join(repr(n) for n in reference.mlp.SAVE_POLICIES)
        raise ValueError(f"{op}: save={save!r} is not known; pass one of {names}.")


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """What is static in a call besides the kernels."""

    activation: str | None
    save: Save
    out_dtype: Any
    residual_dtype: Any

    @classmethod
    def of(cls, activation, save, out_dtype, residual) -> "_Options":
        residual_dtype = None if residual is None else residual.dtype
        return cls(activation, save, jnp.dtype(out_dtype), residual_dtype)

    @property
    def saves_preactivations(self) -> bool:
        return self.save != "inputs"

    def saves_hidden(self, launch: Launch) -> bool:
        """Whether the hidden layer is kept, with its derivative in place of the preactivation."""
        has_derivative = self.activation is not None
        return self.save == "hidden" and launch.implementation == "pallas" and has_derivative


class _MlpResiduals(NamedTuple):
    x: jax.Array
    w1: jax.Array
    b1: jax.Array | None
    w2: jax.Array
    b2: jax.Array | None
    preactivation: jax.Array | None
    hidden: tuple[jax.Array, jax.Array] | None
    """The hidden layer and the activation's derivative."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mlp(launch: Launch, options: _Options, x, w1, b1, w2, b2, residual):
    h, _ = launch.forward(x, w1, b1, None, activation=options.activation, out_dtype=x.dtype)
    y, _ = launch.forward(h, w2, b2, residual, activation=None, out_dtype=options.out_dtype)
    return y


def _mlp_fwd(launch: Launch, options: _Options, x, w1, b1, w2, b2, residual):
    preactivation, hidden = None, None
    if options.saves_hidden(launch):
        hidden_and_slope = launch.row_kernel(
            {"pallas": pallas_mlp.hidden_and_slope},
            (ROWS + "d", "df", "f"),
            (ROWS + "f", ROWS + "f"),
            "d",
            activation=options.activation,
        )
        hidden = hidden_and_slope(x, w1.astype(x.dtype), b1)
        h = hidden[0]
    else:
        h, preactivation = launch.forward(
            x,
            w1,
            b1,
            None,
            activation=options.activation,
            out_dtype=x.dtype,
            save_preactivation=options.saves_preactivations,
        )
    y, _ = launch.forward(h, w2, b2, residual, activation=None, out_dtype=options.out_dtype)
    return y, _MlpResiduals(x, w1, b1, w2, b2, preactivation, hidden)


def _mlp_bwd(launch: Launch, options: _Options, saved: _MlpResiduals, dy):
    x, w1, b1, w2, b2, z, hidden = saved
    dy_narrow = dy.astype(x.dtype)
    operand_axes = (ROWS + "e", "fe", ROWS + "f")
    sum_axes = None if b1 is None else "f"
    if hidden is not None:
        h, slope = hidden
        hidden_gradient = launch.row_kernel(
            {"pallas": pallas_mlp.hidden_gradient_by_slope},
            operand_axes,
            (ROWS + "f", sum_axes),
            "e",
            sum_rows=b1 is not None,
        )
        dz, db1 = hidden_gradient(dy_narrow, w2.astype(x.dtype), slope)
    else:
        if z is None:
            z, _ = launch.forward(x, w1, b1, None, activation=None, out_dtype=x.dtype)
        hidden_gradient = launch.row_kernel(
            {"pallas": pallas_mlp.hidden_gradient, "cuda": cuda.mlp.hidden_gradient},
            operand_axes,
            (ROWS + "f", ROWS + "f", sum_axes),
            "e",
            activation=options.activation,
            sum_rows=b1 is not None,
        )
        dz, h, db1 = hidden_gradient(dy_narrow, w2.astype(x.dtype), z)
    return (
        launch.input_gradient(dz, w1, x.dtype),
        launch.weight_gradient(x, dz, w1.dtype),
        None if b1 is None else db1.astype(b1.dtype),
        launch.weight_gradient(h, dy_narrow, w2.dtype),
        None if b2 is None else sum_rows(dy, b2.dtype),
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


class _GatedResiduals(NamedTuple):
    x: jax.Array
    w_gate: jax.Array
    b_gate: jax.Array | None
    w_up: jax.Array | None
    b_up: jax.Array | None
    w_down: jax.Array
    b_down: jax.Array | None
    preactivations: tuple[jax.Array | None, jax.Array | None]
    hidden: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_mlp(
    launch: Launch, options: _Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    h, _, _ = _gated_unit(launch, options, x, w_gate, b_gate, w_up, b_up, save=False)
    y, _ = launch.forward(h, w_down, b_down, residual, activation=None, out_dtype=options.out_dtype)
    return y


def _gated_mlp_fwd(
    launch: Launch, options: _Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    h, gate, up = _gated_unit(
        launch, options, x, w_gate, b_gate, w_up, b_up, save=options.saves_preactivations
    )
    y, _ = launch.forward(h, w_down, b_down, residual, activation=None, out_dtype=options.out_dtype)
    hidden = h if options.save == "hidden" else None
    return y, _GatedResiduals(x, w_gate, b_gate, w_up, b_up, w_down, b_down, (gate, up), hidden)


def _gated_mlp_bwd(launch: Launch, options: _Options, saved: _GatedResiduals, dy):
    x, w_gate, b_gate, w_up, b_up, w_down, b_down, (gate, up), hidden = saved
    has_biases = (b_gate is not None, (b_gate if w_up is None else b_up) is not None)
    dy_narrow, w_down_narrow = dy.astype(x.dtype), w_down.astype(x.dtype)
    operand_axes = (ROWS + "e", "fe", ROWS + "f", ROWS + "f")
    sum_axes = ["f" if has else None for has in has_biases]
    if gate is None:
        _, gate, up = _gated_unit(launch, options, x, w_gate, b_gate, w_up, b_up, save=True)
    hidden_gradient = launch.row_kernel(
        {"pallas": pallas_mlp.gated_hidden_gradient, "cuda": cuda.mlp.gated_hidden_gradient},
        operand_axes,
        (ROWS + "f", ROWS + "f", ROWS + "f" if hidden is None else None, *sum_axes),
        "e",
        activation=options.activation,
        sum_rows=has_biases,
        returns_hidden=hidden is None,
    )
    dgate, dup, h, db_gate, db_up = hidden_gradient(dy_narrow, w_down_narrow, gate, up)
    if hidden is not None:
        h = hidden
    gate_axis = _gate_axis(w_up)
    input_gradient = launch.row_kernel(
        {"pallas": pallas_mlp.gated_input_gradient, "cuda": cuda.mlp.gated_input_gradient},
        (ROWS + "f", ROWS + "f", "d" + gate_axis, "df"),
        (ROWS + "d",),
        "fg",
    )
    (dx,) = input_gradient(dgate, dup, *_narrow((w_gate, w_up), x.dtype))
    dw_gate = launch.weight_gradient(x, dgate, w_gate.dtype)
    dw_up: Any = launch.weight_gradient(x, dup, w_gate.dtype if w_up is None else w_up.dtype)
    if w_up is None:
        dw_gate, dw_up = jnp.concatenate([dw_gate, dw_up], axis=-1), None
        if b_gate is not None:
            db_gate, db_up = jnp.concatenate([db_gate, db_up]), None
    return (
        dx,
        dw_gate,
        None if b_gate is None else db_gate.astype(b_gate.dtype),
        dw_up,
        None if b_up is None else db_up.astype(b_up.dtype),
        launch.weight_gradient(h, dy_narrow, w_down.dtype),
        None if b_down is None else sum_rows(dy, b_down.dtype),
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)


def _gated_unit(launch: Launch, options: _Options, x, w_gate, b_gate, w_up, b_up, *, save: bool):
    """(activation(gate) * up, gate, up), the latter two if they are to be saved."""
    kernel = launch.row_kernel(
        {"pallas": pallas_mlp.gated_forward, "cuda": cuda.mlp.gated_forward},
        _gated_operand_axes(w_up),
        (ROWS + "f", *((ROWS + "f",) * 2 if save else (None, None))),
        "dg",
        activation=options.activation,
        save_preactivations=save,
    )
    return kernel(x, *_narrow((w_gate, w_up), x.dtype), b_gate, b_up)


def _gated_operand_axes(w_up: jax.Array | None) -> tuple[str, ...]:
    """Of x, w_gate, w_up, b_gate and b_up."""
    gate_axis = _gate_axis(w_up)
    return (ROWS + "d", "d" + gate_axis, "df", gate_axis, "f")


def _gate_axis(w_up: jax.Array | None) -> str:
    """The last axis of w_gate: another one if it holds both, as a shard of it has no two halves."""
    return "g" if w_up is None else "f"


def _narrow(weights: tuple[jax.Array | None, ...], dtype: Any) -> tuple[jax.Array | None, ...]:
    return tuple(None if w is None else w.astype(dtype) for w in weights)
