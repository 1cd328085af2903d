"""The perceptrons of nnx and linen: one operator, or linear layers if a kernel is no float array."""

from collections.abc import Callable
from typing import Any

import jax

from jaxfused.dispatch import Implementation
from jaxfused.modules.linear import (
    CalledKernel,
    Kernel,
    KernelStandIn,
    LoRAKernel,
    QuantizedKernel,
    linear,
    promoted,
)
from jaxfused.modules.promotion import floating
from jaxfused.ops.linear import gated_mlp as gated_mlp_operator
from jaxfused.ops.linear import mlp as mlp_operator
from jaxfused.ops.linear import mlp_xla
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.ops.quantized.quantized_gated_unit import gated_unit, why_apart
from jaxfused.runtime import dropout_arguments
from jaxfused.runtime.quantized_array import QuantizedArray

Layer = tuple[Kernel, jax.Array | None]


def mlp(
    x: jax.Array,
    up: Layer,
    down: Layer,
    *,
    dtype: Any,
    activation: str | None,
    residual: jax.Array | None,
    save: Save,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Runs `jaxfused.mlp` on the (kernel, bias) of both layers."""
    x = promoted(x, *up, *down, dtype=dtype)
    (w1, b1), (w2, b2) = (tuple(floating(p, x.dtype) for p in layer) for layer in (up, down))
    if not (isinstance(w1, KernelStandIn) or isinstance(w2, KernelStandIn)):
        return mlp_operator.mlp(
            x,
            w1,
            b1,
            w2,
            b2,
            activation=activation,
            residual=residual,
            save=save,
            precision=precision,
            implementation=implementation,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
        )
    words = _dropout_words(dropout_rate, dropout_key, w1, w2)

    def layers(x: jax.Array, residual: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = dict(precision=precision, implementation=implementation)
        h = linear(x, *up, activation=activation, **options)
        h = mlp_xla.dropped(h, words, dropout_rate).astype(x.dtype)
        return linear(h, *down, residual=residual, **options)

    return _saving(save, layers, w1, w2)(x, residual)


def gated_mlp(
    x: jax.Array,
    gate: Layer,
    up: Layer,
    down: Layer,
    *,
    dtype: Any,
    activation: str | None,
    residual: jax.Array | None,
    save: Save,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Runs `jaxfused.gated_mlp` on the (kernel, bias) of the three layers."""
    x = promoted(x, *gate, *up, *down, dtype=dtype)
    (w_gate, b_gate), (w_up, b_up), (w_down, b_down) = (
        tuple(floating(p, x.dtype) for p in layer) for layer in (gate, up, down)
    )
    if not (
        isinstance(w_gate, KernelStandIn)
        or isinstance(w_up, KernelStandIn)
        or isinstance(w_down, KernelStandIn)
    ):
        return gated_mlp_operator.gated_mlp(
            x,
            w_gate,
            w_up,
            w_down,
            b_gate=b_gate,
            b_up=b_up,
            b_down=b_down,
            activation=activation,
            residual=residual,
            save=save,
            precision=precision,
            implementation=implementation,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
        )
    words = _dropout_words(dropout_rate, dropout_key, w_gate, w_up, w_down)

    def layers(x: jax.Array, residual: jax.Array | None) -> jax.Array:
        options: dict[str, Any] = dict(precision=precision, implementation=implementation)
        weights = _in_one_pass(w_gate, w_up)
        if weights is not None and precision is None:
            h = gated_unit(
                x,
                *weights,
                b_gate,
                b_up,
                activation=activation,
                implementation=implementation,
            )
        else:
            h = linear(x, *gate, activation=activation, **options) * linear(x, *up, **options)
        h = mlp_xla.dropped(h, words, dropout_rate).astype(x.dtype)
        return linear(h, *down, residual=residual, **options)

    return _saving(save, layers, w_gate, w_up, w_down)(x, residual)


def _in_one_pass(gate: Kernel, up: Kernel) -> tuple[QuantizedArray, QuantizedArray] | None:
    """Returns the weights of two kernels that one pass can read: quantised alike, float inputs."""
    if not (isinstance(gate, QuantizedKernel) and isinstance(up, QuantizedKernel)):
        return None
    as_it_is = all(
        k.input_dtype is None and k.input_divisor is None and k.permutation is None
        for k in (gate, up)
    )
    if not as_it_is or why_apart(gate.array, up.array) is not None:
        return None
    return gate.array, up.array


def check_layer_names(module: str, names: tuple[str, ...], count: int) -> None:
    """Checks that there are as many different names as layers."""
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"{module}: layer_names is {names!r}, but each of the {count} layers has a name of its own;"
            f" pass {count} different names."
        )


def _dropout_words(rate: float, key: jax.Array | None, *kernels: Kernel) -> jax.Array | None:
    """Returns the seed words of dropout. Layers with a quantised kernel are only trained with a LoRA."""
    trained = LoRAKernel | CalledKernel
    if rate > 0.0 and not any(isinstance(kernel, trained) for kernel in kernels):
        raise ValueError(
            f"mlp: dropout_rate is {rate}, but layers with a quantised kernel are for inference and drop"
            " nothing; pass deterministic=True."
        )
    return dropout_arguments.dropout_words("mlp", rate, key)


def _saving(
    save: Save, layers: Callable[..., jax.Array], *kernels: Kernel
) -> Callable[..., jax.Array]:
    """Returns `layers` under `jax.checkpoint`, so that only their inputs are saved, if `save` says so.

    Layers with a `CalledKernel` are excluded: an interceptor may keep their results, which must not be
    tracers of `jax.checkpoint`'s inner program.
    """
    called = any(isinstance(kernel, CalledKernel) for kernel in kernels)
    return jax.checkpoint(layers) if save == "inputs" and not called else layers
