"""mlp and gated_mlp: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8, mlp_fp8
from jaxfused.ops.linear import mlp_cuda, mlp_xla
from jaxfused.ops.linear.linear import (
    CHEAP_ACTIVATIONS,
    Layer,
    are_weights_converted,
    check_affine,
    check_residual,
    input_gradient,
    product_configs,
    product_estimate,
    product_why_not,
    resolve_out_dtype,
    weight_itemsize,
    weights_for,
)
from jaxfused.ops.linear.weight_gradient import (
    weight_and_bias_gradients,
    weight_gradient,
    weight_gradients,
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
from jaxfused.runtime.dropout_arguments import dropout_words, without_kernels
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_choice import Passes
from jaxfused.runtime.product_xla import side_by_side, sums_side_by_side
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.gemm import cost, matmul, small_m
from pallas_kernels.gemm import mlp as pallas_mlp
from pallas_kernels.gemm.operands import SWIZZLE_BYTES

Save = Literal["hidden", "preactivation", "inputs"]


@python_numbers
def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None = None,
    *,
    activation: str | None = "gelu_tanh",
    residual: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike | fp8.Precision = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The two-layer perceptron of a Transformer block, with the residual stream it is added to.

    .. math::
        y = \text{dropout}(\text{activation}(x w_1 + b_1)) w_2 + b_2 + \text{residual}

    Products are taken in x's dtype and accumulated in float32 (float64 for float64), as are the
    gradients; each gradient is rounded once, to the dtype of its operand.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w1: [D, F], of any float dtype, as are the other parameters and residual.
      b1: [F] or None.
      w2: [F, E].
      b2: [E] or None.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., E], is added last.
      save: what may be kept for the backward besides the inputs, in x's dtype: "preactivation"
        keeps x w1 + b1 [..., F]; "inputs" keeps nothing and takes that product again; "hidden" keeps
        two such arrays, the hidden layer and the activation's derivative. That is the fastest with
        implementation "pallas"; the others keep the preactivation then.
      dropout_rate: the fraction of the hidden layer to drop, to the nearest 1/65536; the rest is divided
        by the fraction that is kept. No kernel drops yet: implementation "xla" runs where it is not 0.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0. What is kept depends on the key,
        the row and the feature alone, by `jaxfused.runtime.dropout.keep_rows`, and is not saved for
        the backward.
      precision: of the products, as in `jax.numpy.matmul`; or "fp8": they and their gradients are taken
        of float8, each operand with one scale, as docs/quantisation.md says. "preactivation"
        and "hidden" then keep the hidden layer and the activation's derivative, in a byte each;
        nothing is dropped.
      out_dtype: of y; by default the residual's dtype, or x's where there is no residual.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., E].

    Raises:
      ValueError: shapes or dtypes do not fit, `save` is not known, dropout_rate is out of its range or
        has no key, or the named implementation cannot run.

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
    x, w1, b1, w2, b2, residual = as_arrays(x, w1, b1, w2, b2, residual)
    check_floating(op, dict(x=x, w1=w1, b1=b1, w2=w2, b2=b2, residual=residual))
    check_affine(op, x, "w1", w1, "b1", b1)
    _check_second_layer(op, x, w1.shape[1], "w2", w2, "b2", b2, residual)
    check_activation(op, activation)
    _check_save(op, save)
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    words = dropout_words(op, dropout_rate, dropout_key)
    if fp8.is_fp8(precision):
        run = _fp8_runner(op, implementation, device, x, words)
        dtypes = _fp8_dtypes(x, w1, w2, residual)
        fp8_options = mlp_fp8.Options.of_mlp(activation, save, jnp.dtype(out_dtype), dtypes)
        rows = sharding.leading_axes(x.ndim - 1)
        axes = (rows + "d", "df", "f", "fe", "e", rows + "e")
        aligned = sharding.align((x, w1, b1, w2, b2, residual), operand_axes=axes, whole="dfe")
        return mlp_fp8.mlp(run, fp8_options, *aligned, fp8.state_of(op, precision))
    if takes_reference(op, implementation, device, x, missing=without_kernels(op, words)):
        y = mlp_xla.mlp(
            x,
            w1,
            b1,
            w2,
            b2,
            residual,
            words,
            activation=activation,
            dropout_rate=dropout_rate,
            save=save,
            precision=precision,
            out_dtype=out_dtype,
        )
        return named(y, op, "output")
    options = _Options.of(op, activation, save, out_dtype, residual, precision)
    rows = sharding.leading_axes(x.ndim - 1)
    operands: Sequence[Any] = sharding.align(
        (x, w1, b1, w2, b2, residual),
        operand_axes=(rows + "d", "df", "f", "fe", "e", rows + "e"),
        whole="de",
    )
    x, w1, b1, w2, b2, residual = operands
    zeros = _zero_features(implementation, device, x, w1.shape[1], w2.shape[1])
    w1, b1 = (_append_zeros(a, zeros) for a in (w1, b1))
    w2 = _append_zeros(w2, zeros, axis=0)
    return _mlp(Runner(implementation, device), options, x, w1, b1, w2, b2, residual)


@python_numbers
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
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike | fp8.Precision = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The gated perceptron: SwiGLU with "silu", GeGLU with a gelu, ReGLU with "relu".

    .. math::
        y = \text{dropout}\bigl(\text{activation}(x w_\text{gate} + b_\text{gate})
            \odot (x w_\text{up} + b_\text{up})\bigr) w_\text{down} + b_\text{down}
            + \text{residual}

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w_gate: [D, F]; or [D, 2 F] with `w_up=None`: the gate's columns, then those of w_up, as
        Phi-3, GLM and Flux 2 pack them. The "geglu" and "swiglu" of diffusers are packed the other
        way round: pass `jnp.split(w, 2, axis=1)` as w_up and w_gate, or the result is silently that
        of another network.
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
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual = as_arrays(
        x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual
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
    words = dropout_words(op, dropout_rate, dropout_key)
    if fp8.is_fp8(precision):
        run = _fp8_runner(op, implementation, device, x, words)
        if w_up is None:
            w_gate, w_up = jnp.split(w_gate, 2, axis=1)
            b_gate, b_up = (None, None) if b_gate is None else jnp.split(b_gate, 2)
        dtypes = _fp8_dtypes(x, w_gate, w_down, residual)
        fp8_options = mlp_fp8.Options(activation, save, jnp.dtype(out_dtype), dtypes)
        rows = sharding.leading_axes(x.ndim - 1)
        aligned = sharding.align(
            (x, w_gate, b_gate, w_up.astype(w_gate.dtype), b_up, w_down, b_down, residual),
            operand_axes=(rows + "d", "df", "f", "df", "f", "fe", "e", rows + "e"),
            whole="dfe",
        )
        return mlp_fp8.gated_mlp(run, fp8_options, *aligned, fp8.state_of(op, precision))
    if takes_reference(op, implementation, device, x, missing=without_kernels(op, words)):
        y = mlp_xla.gated_mlp(
            x,
            w_gate,
            b_gate,
            w_up,
            b_up,
            w_down,
            b_down,
            residual,
            words,
            activation=activation,
            dropout_rate=dropout_rate,
            save=save,
            precision=precision,
            out_dtype=out_dtype,
        )
        return named(y, op, "output")
    options = _Options.of(op, activation, save, out_dtype, residual, precision)
    rows = sharding.leading_axes(x.ndim - 1)
    gate_axis = _gate_axis(w_up)
    operands: Sequence[Any] = sharding.align(
        (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual),
        operand_axes=(rows + "d", "d" + gate_axis, gate_axis, "df", "f", "fe", "e", rows + "e"),
        # A device's part of the columns of two concatenated matrices is not two halves.
        whole="de" if w_up is not None else "dfge",
    )
    x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual = operands
    zeros = _zero_features(implementation, device, x, hidden, w_down.shape[1])
    halves = 2 if w_up is None else 1
    w_gate, b_gate = (_append_zeros(a, zeros, halves) for a in (w_gate, b_gate))
    w_up, b_up = (_append_zeros(a, zeros) for a in (w_up, b_up))
    w_down = _append_zeros(w_down, zeros, axis=0)
    operands = (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual)
    return _gated_mlp(Runner(implementation, device), options, *operands)


def _fp8_runner(op, implementation, device, x, words) -> Runner:
    """Returns the Runner of products in float8. Dropout is refused."""
    if words is not None:
        raise ValueError(
            f'{op}: dropout_rate is not 0 and precision is "fp8", but the pass that quantises the hidden'
            " layer drops nothing; pass dropout_rate=0.0, or leave precision out."
        )
    return fp8.runner(op, implementation, device, x)


def _fp8_dtypes(x, w1, w2, residual) -> tuple[Any, ...]:
    return x.dtype, w1.dtype, w2.dtype, None if residual is None else residual.dtype


def _zero_features(
    implementation: str | None, device: dispatch.Device, x: jax.Array, hidden: int, features: int
) -> int:
    """Returns how many hidden features of zero weights to append, so that Pallas's kernels can run.

    The kernels, and XLA's fastest products, need rows of the hidden layer that start at multiples of 16
    bytes. Copying the weights costs little compared with products of many rows, and a feature with zero
    weights to the result adds nothing to it.
    """
    grain = matmul.GRAIN
    if implementation not in (None, "pallas") or x.dtype.itemsize != 2 or hidden % grain == 0:
        return 0
    if sharding.is_explicit(x):
        return 0  # Hidden features that devices split cannot be padded on each device.
    can_run = matmul.why_unsupported(
        compute_capability=device.compute_capability,
        dtypes=dict(x=x.dtype),
        features=dict(x=x.shape[-1], result=features),
    )
    rows = math.prod(x.shape[:-1])
    if can_run is not None or rows <= small_m.MAX_ROWS or hidden == 0:
        return 0
    if implementation is None and rows * hidden < _SMALLEST_TO_PAD:
        return 0
    # Padded to whole steps of the sums, or only to whole instructions if that is many more features.
    step = SWIZZLE_BYTES // x.dtype.itemsize
    zeros = -hidden % step
    return zeros if zeros <= hidden // _LARGEST_SHARE_OF_ZEROS else -hidden % grain


_SMALLEST_TO_PAD = 2**21
"""Fewest elements of a hidden layer that is padded. Below, copying weights costs more than it saves."""
_LARGEST_SHARE_OF_ZEROS = 8
"""Whole steps are padded with zeros for up to 1/8 of the features: more cost more than they save."""


def _append_zeros(a: Any, zeros: int, parts: int = 1, axis: int = -1) -> Any:
    """Appends zeros to each of the `parts` that an axis consists of; None stays None."""
    if a is None or zeros == 0:
        return a
    pads = [(0, 0)] * a.ndim
    pads[axis] = (0, zeros)
    return jnp.concatenate([jnp.pad(part, pads) for part in jnp.split(a, parts, axis)], axis)


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
    if save not in mlp_xla.SAVE_POLICIES:
        names = ", ".join(repr(n) for n in mlp_xla.SAVE_POLICIES)
        raise ValueError(f"{op}: save={save!r} is not known; pass one of {names}.")


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """Static arguments of a call, except for the Runner."""

    op: str
    activation: str | None
    save: Save
    out_dtype: Any
    residual_dtype: Any
    precision: Any

    @classmethod
    def of(cls, op, activation, save, out_dtype, residual, precision) -> "_Options":
        residual_dtype = None if residual is None else residual.dtype
        return cls(op, activation, save, jnp.dtype(out_dtype), residual_dtype, precision)

    @property
    def saves_preactivations(self) -> bool:
        return self.save != "inputs"

    def saves_slope(self, run: Runner) -> bool:
        """Whether the hidden layer and the activation's derivative are saved, not the preactivation.

        CUDA C has no kernel for that.
        """
        has_derivative = self.activation is not None
        return self.save == "hidden" and run.implementation != "cuda" and has_derivative

    def first_layer(
        self, x: jax.Array, *, activation: str | None, saves: bool, again: bool = False
    ) -> Layer:
        """Returns the stage of the first layer; `again` is `Layer.weights_read_again`."""
        return Layer(f"{self.op} first layer", activation, x.dtype, saves, self.precision, again)

    @property
    def last_layer(self) -> Layer:
        """The stage of the last layer."""
        return Layer(f"{self.op} last layer", None, self.out_dtype, False, self.precision)


class _MlpResiduals(NamedTuple):
    x: jax.Array
    w1: jax.Array
    b1: jax.Array | None
    w2: jax.Array
    b2: jax.Array | None
    preactivation: jax.Array | None
    hidden: tuple[jax.Array, jax.Array] | None
    """The hidden layer and the activation's derivative."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="mlp")
def _mlp(run: Runner, options: _Options, x, w1, b1, w2, b2, residual):
    layer = options.first_layer(x, activation=options.activation, saves=False)
    h, _ = run(layer, x, w1, b1, None)
    y, _ = run(options.last_layer, h, w2, b2, residual)
    return y


def _mlp_fwd(run: Runner, options: _Options, x, w1, b1, w2, b2, residual):
    preactivation, hidden = None, None
    if options.saves_slope(run):
        hidden = run(_HiddenAndSlope(str(options.activation), options.precision), x, w1, b1)
        hidden = named(hidden, "mlp", "hidden")
        h = hidden[0]
    else:
        layer = options.first_layer(
            x,
            activation=options.activation,
            saves=options.saves_preactivations,
            again=are_weights_converted(x, w1),
        )
        h, preactivation = run(layer, x, w1, b1, None)
        preactivation = named(preactivation, "mlp", "preactivation")
    y, _ = run(options.last_layer, h, w2, b2, residual)
    y = named(y, "mlp", "output")
    return y, _MlpResiduals(x, w1, b1, w2, b2, preactivation, hidden)


def _mlp_bwd(run: Runner, options: _Options, saved: _MlpResiduals, dy):
    x, w1, b1, w2, b2, z, hidden = saved
    dy_narrow = dy.astype(x.dtype)
    if hidden is not None:
        h, slope = hidden
        by_slope = _HiddenGradientBySlope(b1 is not None, options.precision)
        dz, db1 = run(by_slope, dy_narrow, w2, slope)
    else:
        if z is None:
            z, _ = run(options.first_layer(x, activation=None, saves=False), x, w1, b1, None)
        gradient = _HiddenGradient(options.activation, b1 is not None, options.precision)
        dz, h, db1 = run(gradient, dy_narrow, w2, z)
    dw2, db2 = weight_and_bias_gradients(run, "mlp", h, dy, w2.dtype, b2, options.precision)
    return (
        input_gradient(run, dz, w1, x.dtype, options.precision),
        weight_gradient(run, "mlp", x, dz, w1.dtype, options.precision),
        None if b1 is None else db1.astype(b1.dtype),
        dw2,
        db2,
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


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="gated_mlp")
def _gated_mlp(
    run: Runner, options: _Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    unit = _GatedUnit(options.activation, False, options.precision)
    h, _, _ = run(unit, x, w_gate, w_up, b_gate, b_up)
    y, _ = run(options.last_layer, h, w_down, b_down, residual)
    return y


def _gated_mlp_fwd(
    run: Runner, options: _Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    unit = _GatedUnit(options.activation, options.saves_preactivations, options.precision)
    h, gate, up = run(unit, x, w_gate, w_up, b_gate, b_up)
    gate, up = named((gate, up), "gated_mlp", "preactivation")
    if options.save == "hidden":
        h = named(h, "gated_mlp", "hidden")
    y, _ = run(options.last_layer, h, w_down, b_down, residual)
    y = named(y, "gated_mlp", "output")
    hidden = h if options.save == "hidden" else None
    return y, _GatedResiduals(x, w_gate, b_gate, w_up, b_up, w_down, b_down, (gate, up), hidden)


def _gated_mlp_bwd(run: Runner, options: _Options, saved: _GatedResiduals, dy):
    x, w_gate, b_gate, w_up, b_up, w_down, b_down, (gate, up), hidden = saved
    dy_narrow = dy.astype(x.dtype)
    if gate is None:
        unit = _GatedUnit(options.activation, True, options.precision)
        _, gate, up = run(unit, x, w_gate, w_up, b_gate, b_up)
    hidden_gradient = _GatedHiddenGradient(
        options.activation,
        (b_gate is not None, (b_gate if w_up is None else b_up) is not None),
        hidden is None,
        options.precision,
    )
    input_gradient = _GatedInputGradient(options.precision)
    joined = False
    if w_up is None and sharding.is_in_one_piece(x, w_gate):
        # The cotangents of gate and up are concatenated if XLA computes the gradient of x.
        joining = replace(hidden_gradient, joined=True)
        by_xla = run.choice(joining, dy_narrow, w_down, gate, up).implementation == "xla"
        input_gradient = replace(input_gradient, finds_joined=by_xla)
        joined = run.choice(input_gradient, gate, up, w_gate, None).implementation == "xla"
        hidden_gradient = joining if joined else hidden_gradient
    dgate, dup, h, db_gate, db_up = run(hidden_gradient, dy_narrow, w_down, gate, up)
    if hidden is not None:
        h = hidden
    cotangents = (dgate,) if joined else (dgate, dup)
    if joined:
        dgate, dup = jnp.split(dgate, 2, axis=-1)
    (dx,) = run(input_gradient, dgate, dup, w_gate, w_up)
    to_join = w_up is None and not joined
    dws, _ = weight_gradients(
        run,
        "gated_mlp",
        x,
        cotangents,
        w_gate.dtype if w_up is None else jnp.promote_types(w_gate.dtype, w_up.dtype),
        options.precision,
        side_by_side=to_join and _are_joined_faster(x, gate, w_gate),
        joined=to_join,
    )
    dw_gate, dw_up = dws[0], None
    if w_up is None:
        if db_up is not None:
            db_gate, db_up = sums_side_by_side([db_gate, db_up]), None
    else:
        dw_gate, dw_up = dws[0].astype(w_gate.dtype), dws[1].astype(w_up.dtype)
    dw_down, db_down = weight_and_bias_gradients(
        run, "gated_mlp", h, dy, w_down.dtype, b_down, options.precision
    )
    return (
        dx,
        dw_gate,
        None if b_gate is None else db_gate.astype(b_gate.dtype),
        dw_up,
        None if b_up is None else db_up.astype(b_up.dtype),
        dw_down,
        db_down,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)


def _are_joined_faster(x, gate, w_gate) -> bool:
    """Returns whether concatenating the cotangents moves fewer bytes than concatenating their wgrads."""
    rows = math.prod(x.shape[:-1])
    return rows * gate.dtype.itemsize <= x.shape[-1] * w_gate.dtype.itemsize


def _gate_axis(w_up: jax.Array | None) -> str:
    """Returns the letter of w_gate's last axis: "g" if it holds both, as a shard is not two halves."""
    return "g" if w_up is None else "f"


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HiddenAndSlope:
    """Computes the activation of x @ w1 + b1 and its derivative [M, F], of x [M, D] and w1 [D, F]."""

    activation: str
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden and slope"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "d", "df", "f"), (ROWS + "f", ROWS + "f"), whole="d")

    def work(self, x, w1, b1) -> cost.Work:
        del b1
        return _work(x, w1, w1.shape[1], written=2, activations=2)

    def why_not(self, device, x, w1, b1) -> Mapping[str, str | None]:
        return _why_not(device, self.precision, x, self.work(x, w1, b1), cuda_kernel=False)

    def estimate(self, device, able, x, w1, b1) -> Estimate:
        work = self.work(x, w1, b1)
        passes = _passes(work, self.activation, evaluations=1)
        return product_estimate(device, able, x.dtype, work, passes)

    def run(self, implementation, device, x, w1, b1, config=None) -> Results:
        operands = (x, weights_for(implementation, w1, x.dtype), b1)
        if implementation == "pallas":
            return pallas_mlp.hidden_and_slope(
                *operands,
                activation=self.activation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return mlp_xla.hidden_and_slope(
            *operands, activation=self.activation, precision=self.precision
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class _HiddenGradientBySlope:
    """Computes dz and its row sums from dy [M, E], w2 [F, E] and the activation's derivative [M, F]."""

    sums_rows: bool
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden gradient by slope"

    def axes(self, *operands) -> Axes:
        del operands
        sums = "f" if self.sums_rows else None
        return Axes((ROWS + "e", "fe", ROWS + "f"), (ROWS + "f", sums), whole="e")

    def work(self, dy, w2, slope) -> cost.Work:
        return _work(dy, w2, slope.shape[1], read=1, k_last=True)

    def why_not(self, device, dy, w2, slope) -> Mapping[str, str | None]:
        return _why_not(device, self.precision, dy, self.work(dy, w2, slope), cuda_kernel=False)

    def estimate(self, device, able, dy, w2, slope) -> Estimate:
        work = self.work(dy, w2, slope)
        passes = _passes(work, None, evaluations=int(self.sums_rows))
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w2, slope, config=None) -> Results:
        operands = (dy, weights_for(implementation, w2, dy.dtype), slope)
        if implementation == "pallas":
            return pallas_mlp.hidden_gradient_by_slope(
                *operands,
                sum_rows=self.sums_rows,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return mlp_xla.hidden_gradient_by_slope(
            *operands, sum_rows=self.sums_rows, precision=self.precision
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class _HiddenGradient:
    """Computes (dz, activation(z), row sums of dz) from dy [M, E], w2 [F, E] and z [M, F]."""

    activation: str | None
    sums_rows: bool
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden gradient"

    def axes(self, *operands) -> Axes:
        del operands
        sums = "f" if self.sums_rows else None
        return Axes((ROWS + "e", "fe", ROWS + "f"), (ROWS + "f", ROWS + "f", sums), whole="e")

    def work(self, dy, w2, z) -> cost.Work:
        activations = 0 if self.activation is None else 2
        return _work(dy, w2, z.shape[1], read=1, written=2, activations=activations, k_last=True)

    def why_not(self, device, dy, w2, z) -> Mapping[str, str | None]:
        return _why_not(device, self.precision, dy, self.work(dy, w2, z))

    def estimate(self, device, able, dy, w2, z) -> Estimate:
        work = self.work(dy, w2, z)
        evaluations = work.activations + int(self.sums_rows)
        passes = _passes(work, self.activation, evaluations=evaluations)
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w2, z, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.hidden_gradient,
            "cuda": mlp_cuda.hidden_gradient,
            "xla": mlp_xla.hidden_gradient,
        }
        return functions[implementation](
            dy,
            weights_for(implementation, w2, dy.dtype),
            z,
            activation=self.activation,
            sum_rows=self.sums_rows,
            **_product_keywords(implementation, device, self.precision, config),
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class _GatedUnit:
    """Computes (activation(gate) * up, gate, up) from x [M, D] and weights [D, F]; gate and up if saved.

    Without w_up, w_gate [D, 2 F] and b_gate [2 F] hold both.
    """

    activation: str | None
    saves_preactivations: bool
    precision: Any

    @property
    def name(self) -> str:
        return "gated_mlp gated unit"

    def axes(self, x, w_gate, w_up, b_gate, b_up) -> Axes:
        del x, w_gate, b_gate, b_up
        gate_axis = _gate_axis(w_up)
        saved = (ROWS + "f",) * 2 if self.saves_preactivations else (None, None)
        return Axes(
            (ROWS + "d", "d" + gate_axis, "df", gate_axis, "f"), (ROWS + "f", *saved), whole="dg"
        )

    def work(self, x, w_gate, w_up, b_gate, b_up) -> cost.Work:
        del b_gate, b_up
        hidden = w_gate.shape[1] // (2 if w_up is None else 1)
        written = 3 if self.saves_preactivations else 1
        one = _work(x, w_gate, hidden, written=written, activations=1)
        return replace(one, products=2, weights_apart=w_up is not None)

    def configs(self, implementation, device, x, w_gate, w_up, *biases) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_mlp.gated_forward_candidates(
            self.work(x, w_gate, w_up, *biases),
            stacked=w_up is None,
            save_preactivations=self.saves_preactivations,
            multiprocessors=device.multiprocessors,
        )

    def why_not(self, device, x, *parameters) -> Mapping[str, str | None]:
        return _why_not(device, self.precision, x, self.work(x, *parameters))

    def estimate(self, device, able, x, w_gate, w_up, *biases) -> Estimate:
        work = self.work(x, w_gate, w_up, *biases)
        # XLA writes gate and up in any case, and again if they are the halves of one array.
        moved = 3 if w_up is not None or not self.saves_preactivations else 5
        passes = _passes(work, self.activation, evaluations=1, matrices=moved)
        time = functools.partial(
            pallas_mlp.gated_forward_time,
            work,
            stacked=w_up is None,
            save_preactivations=self.saves_preactivations,
            multiprocessors=device.multiprocessors,
        )
        return product_estimate(device, able, x.dtype, work, passes, pallas_time=time)

    def run(self, implementation, device, x, w_gate, w_up, b_gate, b_up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_forward,
            "cuda": mlp_cuda.gated_forward,
            "xla": functools.partial(mlp_xla.gated_unit, converted=w_gate.dtype != x.dtype),
        }
        return functions[implementation](
            x,
            *(weights_for(implementation, w, x.dtype) for w in (w_gate, w_up)),
            b_gate,
            b_up,
            activation=self.activation,
            save_preactivations=self.saves_preactivations,
            **_product_keywords(implementation, device, self.precision, config),
        )

    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class _GatedHiddenGradient:
    """Computes (dgate, dup, h, row sums of dgate and dup) from dy [M, E], w_down, gate and up [M, F].

    h = activation(gate) * up is None unless `returns_hidden`.
    """

    activation: str | None
    sums_rows: tuple[bool, bool]
    returns_hidden: bool
    precision: Any
    joined: bool = False
    """True if dgate and dup are concatenated, as are their sums. The second results are then None."""

    @property
    def name(self) -> str:
        return "gated_mlp hidden gradient"

    def axes(self, *operands) -> Axes:
        del operands
        rows, columns = ROWS + "f", ("g", None) if self.joined else ("f", "f")
        return Axes(
            (ROWS + "e", "fe", rows, rows),
            (
                *(None if f is None else ROWS + f for f in columns),
                rows if self.returns_hidden else None,
                *(f if sums else None for f, sums in zip(columns, self.sums_rows, strict=True)),
            ),
            whole="ef" if self.joined else "e",
        )

    def work(self, dy, w_down, gate, up) -> cost.Work:
        del up
        activations = 0 if self.activation is None else 2
        written = 3 if self.returns_hidden else 2
        return _work(
            dy,
            w_down,
            gate.shape[1],
            read=2,
            written=written,
            activations=activations,
            k_last=True,
        )

    def why_not(self, device, dy, w_down, gate, up) -> Mapping[str, str | None]:
        return _why_not(device, self.precision, dy, self.work(dy, w_down, gate, up))

    def estimate(self, device, able, dy, w_down, gate, up) -> Estimate:
        work = self.work(dy, w_down, gate, up)
        evaluations = work.activations + sum(self.sums_rows)
        passes = _passes(work, self.activation, evaluations=evaluations)
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w_down, gate, up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_hidden_gradient,
            "cuda": mlp_cuda.gated_hidden_gradient,
            "xla": functools.partial(mlp_xla.gated_hidden_gradient, joined=self.joined),
        }
        results: Any = functions[implementation](
            dy,
            weights_for(implementation, w_down, dy.dtype),
            gate,
            up,
            activation=self.activation,
            sum_rows=self.sums_rows,
            returns_hidden=self.returns_hidden,
            **_product_keywords(implementation, device, self.precision, config),
        )
        if implementation == "xla" or not self.joined:
            return results
        dgate, dup, h, db_gate, db_up = results
        sums = None if db_gate is None else sums_side_by_side([db_gate, db_up])
        return side_by_side([dgate, dup]), None, h, sums, None

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class _GatedInputGradient:
    """Computes (dgate @ w_gate^T + dup @ w_up^T,) from cotangents [M, F] and weights [D, F]."""

    precision: Any
    finds_joined: bool = False
    """True if XLA computes dgate and dup, and so can write them concatenated."""

    @property
    def name(self) -> str:
        return "gated_mlp input gradient"

    def axes(self, dgate, dup, w_gate, w_up) -> Axes:
        del dgate, dup, w_gate
        gate_axis = _gate_axis(w_up)
        whole = "" if gate_axis == "f" else "fg"
        return Axes((ROWS + "f", ROWS + "f", "d" + gate_axis, "df"), (ROWS + "d",), whole=whole)

    def work(self, dgate, dup, w_gate, w_up) -> cost.Work:
        del dup, w_up
        one = self._one_product(dgate, w_gate)
        return replace(one, k=2 * one.k, terms=2)

    def _one_product(self, dgate, w_gate) -> cost.Work:
        return _work(dgate, w_gate, w_gate.shape[0], k_last=True)

    def why_not(self, device, dgate, dup, w_gate, w_up) -> Mapping[str, str | None]:
        del dup, w_up
        return _why_not(device, self.precision, dgate, self._one_product(dgate, w_gate))

    def estimate(self, device, able, dgate, dup, w_gate, w_up) -> Estimate:
        del dup
        work = self._one_product(dgate, w_gate)
        if w_up is not None:
            # Two products, which XLA adds in a pass.
            passes = _passes(work, None, matrices=3)
            return product_estimate(device, able, dgate.dtype, work, passes, terms=2)
        # One product. XLA concatenates the cotangents for it, unless the weights' gradient has.
        is_free = self.finds_joined or work.m <= work.n
        matrices = 0 if is_free else math.ceil(4 * work.k / work.n)
        passes = Passes(bytes_of_element=matrices * work.itemsize)
        return product_estimate(device, able, dgate.dtype, replace(work, k=2 * work.k), passes)

    def run(self, implementation, device, dgate, dup, w_gate, w_up, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.gated_input_gradient,
            "cuda": mlp_cuda.gated_input_gradient,
            "xla": mlp_xla.gated_input_gradient,
        }
        return functions[implementation](
            dgate,
            dup,
            *(weights_for(implementation, w, dgate.dtype) for w in (w_gate, w_up)),
            **_product_keywords(implementation, device, self.precision, config),
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


def _work(
    x: jax.Array,
    w: jax.Array,
    columns: int,
    *,
    read: int = 0,
    written: int = 1,
    activations: int = 0,
    k_last: bool = False,
) -> cost.Work:
    """Returns x [M, K] @ w [K, columns] as work; `read` and `written` count matrices of x's dtype."""
    size = x.dtype.itemsize
    return cost.Work(
        x.shape[0],
        columns,
        x.shape[1],
        itemsize=size,
        w_itemsize=weight_itemsize(x, w),
        read_bytes=read * size,
        written_bytes=written * size,
        activations=activations,
        k_last=k_last,
    )


def _passes(
    work: cost.Work, activation: str | None, *, evaluations: int = 0, matrices: int = 0
) -> Passes:
    """Returns XLA's passes over the product and the epilogue's operands, or over `matrices`."""
    epilogue = work.read_bytes + work.written_bytes + work.itemsize
    return Passes(
        bytes_of_element=matrices * work.itemsize or epilogue,
        evaluations=0 if activation in CHEAP_ACTIVATIONS else evaluations,
        slow=activation == "gelu_erf",
    )


def _why_not(
    device: dispatch.Device,
    precision: Any,
    x: jax.Array,
    work: cost.Work,
    *,
    cuda_kernel: bool = True,
) -> Mapping[str, str | None]:
    """Returns why each implementation, CUDA's only if `cuda_kernel`, cannot run x [M, K] times w."""
    features = {"what is multiplied": work.k, "the result": work.n}
    why_not = product_why_not(device, precision, {"x": x}, features)
    if not cuda_kernel:
        del why_not["cuda"]
    return why_not


def _product_keywords(
    implementation: str, device: dispatch.Device, precision: Any, config: Any
) -> Any:
    """Returns further keyword arguments of each implementation of a product."""
    if implementation == "pallas":
        return {"multiprocessors": device.multiprocessors, "config": config}
    return {"precision": precision}
