"""gated_mlp: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8, mlp_fp8
from jaxfused.ops.linear import mlp_xla
from jaxfused.ops.linear.gated_mlp_stages import (
    GatedHiddenGradient,
    GatedInputGradient,
    GatedUnit,
    gate_axis_of,
)
from jaxfused.ops.linear.hidden_layer import (
    Options,
    Save,
    append_zeros,
    check_save,
    check_second_layer,
    fp8_dtypes,
    fp8_runner,
    zero_features,
)
from jaxfused.ops.linear.linear import check_affine, resolve_out_dtype
from jaxfused.ops.linear.weight_gradient import weight_and_bias_gradients, weight_gradients
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
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import sums_side_by_side
from jaxfused.runtime.runner import Runner


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
      save: what the forward saves for the backward besides the inputs: "preactivation" saves both
        products with x (2 F features in x's dtype); "inputs" saves nothing and computes them again;
        "hidden" saves them and the hidden layer (3 F), which is the fastest; implementation "xla"
        saves only the products then.

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
    hidden = check_first_layers(op, x, w_gate, b_gate, w_up, b_up)
    check_second_layer(op, x, hidden, "w_down", w_down, "b_down", b_down, residual)
    check_activation(op, activation)
    check_save(op, save)
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    words = dropout_words(op, dropout_rate, dropout_key)
    if fp8.is_fp8(precision):
        run = fp8_runner(op, implementation, device, x, words)
        if w_up is None:
            w_gate, w_up = jnp.split(w_gate, 2, axis=1)
            b_gate, b_up = (None, None) if b_gate is None else jnp.split(b_gate, 2)
        dtypes = fp8_dtypes(x, w_gate, w_down, residual)
        fp8_options = mlp_fp8.Options(op, activation, save, jnp.dtype(out_dtype), dtypes)
        rows = sharding.leading_axes(x.ndim - 1)
        aligned = sharding.align(
            (x, w_gate, b_gate, w_up.astype(w_gate.dtype), b_up, w_down, b_down, residual),
            operand_axes=(rows + "d", "df", "f", "df", "f", "fe", "e", rows + "e"),
            whole="dfe",
        )
        state = fp8.state_of(op, precision)
        return mlp_fp8.mlp(run, fp8_options, *mlp_fp8.by_layers(aligned), state)
    if takes_reference(op, implementation, device, x, missing=without_kernels(op, words)):
        y = mlp_xla.gated_mlp(
            *(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, words),
            activation=activation,
            dropout_rate=dropout_rate,
            save=save,
            precision=precision,
            out_dtype=out_dtype,
        )
        return named(y, op, "output")
    options = Options.of(op, activation, save, out_dtype, residual, precision)
    rows = sharding.leading_axes(x.ndim - 1)
    gate_axis = gate_axis_of(w_up)
    operands: Sequence[Any] = sharding.align(
        (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual),
        operand_axes=(rows + "d", "d" + gate_axis, gate_axis, "df", "f", "fe", "e", rows + "e"),
        # Without w_up, w_gate holds gate's columns, then up's. A shard of them would not be half gate
        # and half up, so they stay unsharded.
        whole="de" if w_up is not None else "dfge",
    )
    x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual = operands
    zeros = zero_features(implementation, device, x, hidden, w_down.shape[1])
    halves = 2 if w_up is None else 1
    w_gate, b_gate = (append_zeros(a, zeros, halves) for a in (w_gate, b_gate))
    w_up, b_up = (append_zeros(a, zeros) for a in (w_up, b_up))
    w_down = append_zeros(w_down, zeros, axis=0)
    operands = (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual)
    return _gated_mlp(Runner(implementation, device), options, *operands)


def check_first_layers(op, x, w_gate, b_gate, w_up, b_up) -> int:
    """Checks the weights and biases of gate and up; returns the hidden layer's number of features."""
    check_affine(op, x, "w_gate", w_gate, "b_gate", b_gate)
    if w_up is not None:
        check_shape(op, "w_up", w_up, w_gate.shape, f"w_gate has shape {w_gate.shape}")
        check_affine(op, x, "w_up", w_up, "b_up", b_up)
        return w_gate.shape[1]
    if w_gate.shape[1] % 2:
        raise ValueError(
            f"{op}: w_gate has shape {w_gate.shape}, but without w_up it holds two matrices of"
            " one width; pass w_gate of shape (features, 2 * hidden), or pass w_up."
        )
    if b_up is not None:
        raise ValueError(
            f"{op}: b_up was passed without w_up; append it to b_gate, as w_gate holds both."
        )
    return w_gate.shape[1] // 2


class _GatedResiduals(NamedTuple):
    x: jax.Array
    weights: tuple[Any, ...]
    w_down: jax.Array
    b_down: jax.Array | None
    hidden: "HiddenLayer"


class HiddenLayer(NamedTuple):
    """Arrays [..., F] that the forward saves for the backward; None for those that it does not save."""

    gate: jax.Array | None
    up: jax.Array | None
    value: jax.Array | None


@dataclass(frozen=True)
class Layers:
    """Computes gate and up, and their gradients, from x [..., D] and (w_gate, b_gate, w_up, b_up)."""

    run: Runner
    options: Options

    @property
    def op(self) -> str:
        return self.options.op

    def hidden(self, x, weights, *, saves: bool) -> tuple[jax.Array, HiddenLayer]:
        """Returns activation(gate) * up [..., F], and the arrays to save for the backward."""
        w_gate, b_gate, w_up, b_up = weights
        options = self.options
        keeps = saves and options.saves_preactivations
        unit = GatedUnit(options.activation, keeps, options.precision)
        h, gate, up = self.run(unit, x, w_gate, w_up, b_gate, b_up)
        gate, up = named((gate, up), "gated_mlp", "preactivation")
        if not saves or options.save != "hidden":
            return h, HiddenLayer(gate, up, None)
        h = named(h, "gated_mlp", "hidden")
        return h, HiddenLayer(gate, up, h)

    def recomputed(self, x, weights, saved: HiddenLayer) -> HiddenLayer:
        """Returns `saved` with gate and up [..., F], which are computed again if they were not saved."""
        if saved.gate is not None:
            return saved
        w_gate, b_gate, w_up, b_up = weights
        unit = GatedUnit(self.options.activation, True, self.options.precision)
        _, gate, up = self.run(unit, x, w_gate, w_up, b_gate, b_up)
        return saved._replace(gate=gate, up=up)

    def gradient_stage(self, weights, saved: HiddenLayer) -> GatedHiddenGradient:
        """Returns the operation that computes the gradients of gate and up from dy and w_down."""
        _, b_gate, w_up, b_up = weights
        biases = (b_gate is not None, (b_gate if w_up is None else b_up) is not None)
        return GatedHiddenGradient(
            self.options.activation, biases, saved.value is None, self.options.precision
        )

    def hidden_gradient(self, x, weights, w_down, saved: HiddenLayer, dy, *, joined: bool = False):
        """Returns ((dgate, dup), activation(gate) * up, (db_gate, db_up)); the first four are [..., F].

        If `joined`, the first result is one array [..., 2 F] of dgate and dup, and so are the sums.
        """
        saved = self.recomputed(x, weights, saved)
        stage = replace(self.gradient_stage(weights, saved), joined=joined)
        dgate, dup, h, *dbs = self.run(stage, dy, w_down, saved.gate, saved.up)
        h = h if saved.value is None else saved.value
        return ((dgate,) if joined else (dgate, dup)), h, tuple(dbs)

    def input_gradient(self, dzs, weights, dtype, *, finds_joined: bool = False) -> jax.Array:
        """Returns dx [..., D] from `dzs`, (dgate, dup) [..., F] or one [..., 2 F], in their dtype."""
        del dtype
        dgate, dup = jnp.split(dzs[0], 2, axis=-1) if len(dzs) == 1 else dzs
        stage = GatedInputGradient(self.options.precision, finds_joined)
        (dx,) = self.run(stage, dgate, dup, weights[0], weights[2])
        return dx

    def weight_gradients(self, x, dzs, weights, dbs) -> tuple[jax.Array | None, ...]:
        """Returns the gradients of (w_gate, b_gate, w_up, b_up)."""
        w_gate, b_gate, w_up, b_up = weights
        db_gate, db_up = dbs
        to_join = w_up is None and len(dzs) == 2
        dws, _ = weight_gradients(
            self.run,
            self.op,
            x,
            dzs,
            w_gate.dtype if w_up is None else jnp.promote_types(w_gate.dtype, w_up.dtype),
            self.options.precision,
            side_by_side=to_join and _are_joined_faster(x, dzs[0], w_gate),
            joined=to_join,
        )
        dw_gate, dw_up = dws[0], None
        if w_up is None:
            if db_up is not None:
                db_gate, db_up = sums_side_by_side([db_gate, db_up]), None
        else:
            dw_gate, dw_up = dws[0].astype(w_gate.dtype), dws[1].astype(w_up.dtype)
        return (
            dw_gate,
            None if b_gate is None else db_gate.astype(b_gate.dtype),
            dw_up,
            None if b_up is None else db_up.astype(b_up.dtype),
        )


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="gated_mlp")
def _gated_mlp(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    h, _ = Layers(run, options).hidden(x, (w_gate, b_gate, w_up, b_up), saves=False)
    y, _ = run(options.last_layer, h, w_down, b_down, residual)
    return y


def _gated_mlp_fwd(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    weights = (w_gate, b_gate, w_up, b_up)
    h, hidden = Layers(run, options).hidden(x, weights, saves=True)
    y, _ = run(options.last_layer, h, w_down, b_down, residual)
    y = named(y, "gated_mlp", "output")
    return y, _GatedResiduals(x, weights, w_down, b_down, hidden)


def _gated_mlp_bwd(run: Runner, options: Options, saved: _GatedResiduals, dy):
    x, weights, w_down, b_down, hidden = saved
    layers = Layers(run, options)
    dy_narrow = dy.astype(x.dtype)
    hidden = layers.recomputed(x, weights, hidden)
    joined, finds_joined = _joined(layers, x, weights, w_down, hidden, dy_narrow)
    dzs, h, dbs = layers.hidden_gradient(x, weights, w_down, hidden, dy_narrow, joined=joined)
    dx = layers.input_gradient(dzs, weights, x.dtype, finds_joined=finds_joined)
    dweights = layers.weight_gradients(x, dzs, weights, dbs)
    dw_down, db_down = weight_and_bias_gradients(
        run, "gated_mlp", h, dy, w_down.dtype, b_down, options.precision
    )
    dresidual = None if options.residual_dtype is None else dy.astype(options.residual_dtype)
    return dx, *dweights, dw_down, db_down, dresidual


def _joined(layers: Layers, x, weights, w_down, hidden: HiddenLayer, dy) -> tuple[bool, bool]:
    """Returns whether dgate and dup become one array [..., 2 F], and whether XLA computes them.

    They become one array if XLA computes dgrad (one product with w_gate [D, 2 F], which holds gate and
    up unsharded).
    """
    w_gate, _, w_up, _ = weights
    if w_up is not None or not sharding.is_in_one_piece(x, w_gate):
        return False, False
    run, gate, up = layers.run, hidden.gate, hidden.up
    joining = replace(layers.gradient_stage(weights, hidden), joined=True)
    by_xla = run.choice(joining, dy, w_down, gate, up).implementation == "xla"
    stage = GatedInputGradient(layers.options.precision, finds_joined=by_xla)
    return run.choice(stage, gate, up, w_gate, None).implementation == "xla", by_xla


_gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)


def _are_joined_faster(x, gate, w_gate) -> bool:
    """Returns whether concatenating dgate and dup [..., F] copies no more bytes than their wgrads'.

    Otherwise the wgrads [D, F] are concatenated, because w_gate [D, 2 F] is one array.
    """
    rows = math.prod(x.shape[:-1])
    return rows * gate.dtype.itemsize <= x.shape[-1] * w_gate.dtype.itemsize
