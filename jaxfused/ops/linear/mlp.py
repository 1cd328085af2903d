"""mlp: validation, choice of implementation, gradient."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8, mlp_fp8
from jaxfused.ops.linear import mlp_xla
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
from jaxfused.ops.linear.input_gradient import input_gradient
from jaxfused.ops.linear.linear import (
    check_affine,
    resolve_out_dtype,
)
from jaxfused.ops.linear.mlp_stages import HiddenAndSlope, HiddenGradient, HiddenGradientBySlope
from jaxfused.ops.linear.weight_gradient import weight_and_bias_gradients, weight_gradient
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_activation, check_floating, python_numbers
from jaxfused.runtime.dropout_arguments import dropout_words, without_kernels
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner


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
    r"""The two-layer perceptron of a Transformer block, with a residual stream added to its result.

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
      save: what the forward saves for the backward besides the inputs, in x's dtype: "preactivation"
        saves x w1 + b1 [..., F]; "inputs" saves nothing and computes it again; "hidden" saves two
        arrays [..., F], the hidden layer and the activation's derivative. That is the fastest with
        implementation "pallas"; the others save the preactivation then.
      dropout_rate: the fraction of the hidden layer to drop, to the nearest 1/65536; the rest is divided
        by the fraction that is kept. No kernel drops yet: implementation "xla" runs where it is not 0.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0. Which elements are dropped depends
        only on the key, the row and the feature (`jaxfused.runtime.dropout.keep_rows`); the backward
        computes it again.
      precision: of the products, as in `jax.numpy.matmul`; or "fp8": they and their gradients are taken
        of float8, each operand with one scale, as docs/quantisation.md says. "preactivation"
        and "hidden" then save the hidden layer and the activation's derivative, in a byte each;
        dropout_rate must be 0.
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
    check_second_layer(op, x, w1.shape[1], "w2", w2, "b2", b2, residual)
    check_activation(op, activation)
    check_save(op, save)
    out_dtype = resolve_out_dtype(op, out_dtype, x, residual)
    device = dispatch.current_device(x)
    words = dropout_words(op, dropout_rate, dropout_key)
    if fp8.is_fp8(precision):
        run = fp8_runner(op, implementation, device, x, words)
        dtypes = fp8_dtypes(x, w1, w2, residual)
        fp8_options = mlp_fp8.Options(op, activation, save, jnp.dtype(out_dtype), dtypes)
        rows = sharding.leading_axes(x.ndim - 1)
        axes = (rows + "d", "df", "f", "fe", "e", rows + "e")
        aligned = sharding.align((x, w1, b1, w2, b2, residual), operand_axes=axes, whole="dfe")
        state = fp8.state_of(op, precision)
        return mlp_fp8.mlp(run, fp8_options, *mlp_fp8.by_layers(aligned), state)
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
    options = Options.of(op, activation, save, out_dtype, residual, precision)
    rows = sharding.leading_axes(x.ndim - 1)
    operands: Sequence[Any] = sharding.align(
        (x, w1, b1, w2, b2, residual),
        operand_axes=(rows + "d", "df", "f", "fe", "e", rows + "e"),
        whole="de",
    )
    x, w1, b1, w2, b2, residual = operands
    zeros = zero_features(implementation, device, x, w1.shape[1], w2.shape[1])
    w1, b1 = (append_zeros(a, zeros) for a in (w1, b1))
    w2 = append_zeros(w2, zeros, axis=0)
    return _mlp(Runner(implementation, device), options, x, w1, b1, w2, b2, residual)


class _MlpResiduals(NamedTuple):
    x: jax.Array
    w1: jax.Array
    b1: jax.Array | None
    w2: jax.Array
    b2: jax.Array | None
    hidden: "HiddenLayer"


class HiddenLayer(NamedTuple):
    """Arrays [..., F] that the forward saves for the backward; None for those that it does not save."""

    preactivation: jax.Array | None
    value_and_slope: tuple[jax.Array, jax.Array] | None
    """The hidden layer activation(z), and activation'(z), for the preactivation z."""


@dataclass(frozen=True)
class Layers:
    """Computes the first layer of an mlp, and its gradients, from x [..., D] and weights (w1, b1)."""

    run: Runner
    options: Options

    @property
    def op(self) -> str:
        return self.options.op

    def hidden(self, x, weights, *, saves: bool) -> tuple[jax.Array, HiddenLayer]:
        """Returns the hidden layer, and the arrays to save for the backward."""
        options = self.options
        if saves and options.saves_slope(self.run):
            stage = HiddenAndSlope(str(options.activation), options.precision)
            hidden = named(self.run(stage, x, *weights), "mlp", "hidden")
            return hidden[0], HiddenLayer(None, hidden)
        saves = saves and options.saves_preactivations
        layer = options.first_layer(x, activation=options.activation, saves=saves)
        h, preactivation = self.run(layer, x, *weights, None)
        return h, HiddenLayer(named(preactivation, "mlp", "preactivation"), None)

    def hidden_gradient(self, x, weights, w2, saved: HiddenLayer, dy):
        """Returns ((dz,), hidden layer, (db1,)): dz is the gradient of x @ w1 + b1, both [..., F]."""
        options, has_bias = self.options, weights[1] is not None
        if saved.value_and_slope is not None:
            h, slope = saved.value_and_slope
            by_slope = HiddenGradientBySlope(has_bias, options.precision)
            dz, db1 = self.run(by_slope, dy, w2, slope)
            return (dz,), h, (db1,)
        z = saved.preactivation
        if z is None:
            layer = options.first_layer(x, activation=None, saves=False)
            z, _ = self.run(layer, x, *weights, None)
        gradient = HiddenGradient(options.activation, has_bias, options.precision)
        dz, h, db1 = self.run(gradient, dy, w2, z)
        return (dz,), h, (db1,)

    def input_gradient(self, dzs, weights, dtype) -> jax.Array:
        """Returns dx [..., D] from `dzs`, which is (dz [..., F],)."""
        (dz,) = dzs
        return input_gradient(self.run, dz, weights[0], dtype, self.options.precision)

    def weight_gradients(self, x, dzs, weights, dbs) -> tuple[jax.Array, jax.Array | None]:
        """Returns the gradients of (w1, b1)."""
        (w1, b1), (dz,) = weights, dzs
        dw = weight_gradient(self.run, self.op, x, dz, w1.dtype, self.options.precision)
        return dw, None if b1 is None else dbs[0].astype(b1.dtype)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="mlp")
def _mlp(run: Runner, options: Options, x, w1, b1, w2, b2, residual):
    h, _ = Layers(run, options).hidden(x, (w1, b1), saves=False)
    y, _ = run(options.last_layer, h, w2, b2, residual)
    return y


def _mlp_fwd(run: Runner, options: Options, x, w1, b1, w2, b2, residual):
    h, hidden = Layers(run, options).hidden(x, (w1, b1), saves=True)
    y, _ = run(options.last_layer, h, w2, b2, residual)
    y = named(y, "mlp", "output")
    return y, _MlpResiduals(x, w1, b1, w2, b2, hidden)


def _mlp_bwd(run: Runner, options: Options, saved: _MlpResiduals, dy):
    x, w1, b1, w2, b2, hidden = saved
    layers = Layers(run, options)
    dzs, h, dbs = layers.hidden_gradient(x, (w1, b1), w2, hidden, dy.astype(x.dtype))
    dw2, db2 = weight_and_bias_gradients(run, "mlp", h, dy, w2.dtype, b2, options.precision)
    return (
        layers.input_gradient(dzs, (w1, b1), x.dtype),
        *layers.weight_gradients(x, dzs, (w1, b1), dbs),
        dw2,
        db2,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
