"""Turns each case into functions of its operands: ours, the forms of stock JAX, and the truth.

Stock is what a user of JAX and Flax writes, never jaxfused's own reference. If an operator has several
usual forms, all are timed and the fastest counts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.fuzz import losses, norms, others, products
from benchmarks.fuzz.problem import Problem
from benchmarks.run.case import Function
from benchmarks.sweep import attention, fp8_programs, image_programs, quantized_programs
from benchmarks.sweep.configs import (
    MLP,
    Attention,
    Config,
    CrossEntropy,
    Linear,
    Norm,
    QKVProjection,
    Rope,
)
from benchmarks.sweep.image_configs import (
    Conv,
    DepthwiseConv,
    ImageNorm,
    InvertedResidual,
    Pool,
    Upsample,
)
from benchmarks.sweep.program_parts import (
    ACTIVATIONS,
    VARIANCES,
    Programs,
    dense,
    flax_norm,
    mean_square,
    of_problem,
    split_operands,
)
from benchmarks.sweep.quantized_configs import (
    Fp8Linear,
    Fp8MLP,
    QuantizedConv,
    QuantizedMatmul,
    QuantizedNorm,
    QuantizedProduct,
    QuantizedRows,
)


def of(config: Config) -> Programs:
    build: dict[type, Callable[[Any], Programs]] = {
        Norm: _norm,
        Attention: attention.programs,
        Linear: _linear,
        MLP: _mlp if config.operator == "mlp" else _gated_mlp,
        Rope: _rope,
        QKVProjection: _qkv_projection,
        CrossEntropy: _cross_entropy,
        ImageNorm: image_programs.image_norm,
        Conv: image_programs.conv,
        DepthwiseConv: image_programs.depthwise_conv,
        InvertedResidual: image_programs.inverted_residual,
        Pool: image_programs.max_pool,
        Upsample: image_programs.upsample,
        QuantizedMatmul: quantized_programs.quantized_matmul,
        QuantizedProduct: quantized_programs.quantized_product,
        QuantizedRows: quantized_programs.quantize_rows,
        QuantizedNorm: quantized_programs.quantized_norm,
        QuantizedConv: quantized_programs.quantized_conv,
        Fp8Linear: fp8_programs.fp8_linear,
        Fp8MLP: fp8_programs.fp8_mlp,
    }
    return build[type(config)](config)


def _rows(config: Norm | Linear | MLP | QKVProjection) -> tuple[int, ...]:
    """Returns the axes before the features; with batch 0 there is no batch axis."""
    return (config.batch, config.tokens) if config.batch else (config.tokens,)


# --- norms ----------------------------------------------------------------------------------------


def _norm(config: Norm) -> Programs:
    problem = (norms.layer_norm if config.operator == "layer_norm" else norms.rms_norm)(
        dict(
            shape=(*_rows(config), config.width),
            dtype=config.dtype,
            bias="float32" if config.bias else None,
            pre_bias="float32" if config.pre_bias else None,
            pre_activation="relu" if config.pre_bias else None,
            residual=config.dtype if config.residual else None,
        )
    )

    def stock(variance: Function, *args: jax.Array) -> Any:
        operands = dict(zip(problem.operands, args, strict=True))
        h, residual = operands["x"], operands.get("residual")
        if config.pre_bias:
            # flax.nnx.Linear casts its bias to the compute dtype before it adds it.
            h = jax.nn.relu(h + operands["pre_bias"].astype(h.dtype))
        h = h if residual is None else h + residual
        y = flax_norm(h, operands["scale"], operands.get("bias"), variance)
        return y if residual is None else (y, h)

    forms = {name: partial(stock, form) for name, form in VARIANCES[config.operator].items()}
    return of_problem(problem, forms, results=1 + config.residual)


# --- products -------------------------------------------------------------------------------------


def _layer(config: Linear | MLP | QKVProjection) -> dict[str, Any]:
    """Returns the options with which `benchmarks.fuzz` builds a layer over [batch, tokens, width]."""
    dtype = config.dtype if config.param_dtype == "same" else config.param_dtype
    return dict(
        rows=_rows(config),
        width=config.width,
        dtype=config.dtype,
        param_dtype=dtype,
        bias=config.bias,
    )


def _over_rows(config: Linear | MLP, forms: dict[str, Function], residual: bool) -> Any:
    """Adds stock on x reshaped to [rows, width], for which XLA may choose another kernel."""
    if config.batch <= 1:
        return forms

    def over_rows(*args: jax.Array) -> Any:
        x, *rest = args
        if residual:
            rest[-1] = rest[-1].reshape(-1, rest[-1].shape[-1])
        y = forms["flax"](x.reshape(-1, config.width), *rest)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return forms | {"rows": over_rows}


def _linear(config: Linear) -> Programs:
    residual = config.dtype if config.residual else None
    problem = products.linear(
        _layer(config) | dict(out=config.out, activation=config.activation, residual=residual)
    )

    def stock(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        y = ACTIVATIONS[config.activation](dense(x, w, bias))
        return y if residual is None else y + residual

    return of_problem(problem, _over_rows(config, {"flax": stock}, config.residual))


def _mlp_options(config: MLP) -> dict[str, Any]:
    return _layer(config) | dict(
        hidden=config.hidden,
        out=config.width,
        out_bias=config.bias,
        activation=config.activation,
        save=config.save,
        stacked=config.stacked,
        residual=config.dtype if config.residual else None,
    )


def _mlp_programs(config: MLP, problem: Problem, unit: Function) -> Programs:
    """Returns the programs of an MLP; `unit(x, *layers)` is stock's part before the last layer."""

    def stock(*args: jax.Array) -> Any:
        x, *rest = args
        residual = rest.pop() if config.residual else None
        step = 2 if config.bias else 1
        layers = [(*rest[i : i + step], None)[:2] for i in range(0, len(rest), step)]
        y = dense(unit(x, *layers[:-1]), *layers[-1])
        return y if residual is None else y + residual

    return of_problem(problem, _over_rows(config, {"flax": stock}, config.residual))


def _mlp(config: MLP) -> Programs:
    activation = ACTIVATIONS[config.activation]

    def unit(x, first):
        return activation(dense(x, *first))

    return _mlp_programs(config, products.mlp(_mlp_options(config)), unit)


def _gated_mlp(config: MLP) -> Programs:
    activation = ACTIVATIONS[config.activation]

    def unit(x, gate, *up):
        gate = dense(x, *gate)
        gate, up = (gate, dense(x, *up[0])) if up else jnp.split(gate, 2, axis=-1)
        return activation(gate) * up

    return _mlp_programs(config, products.gated_mlp(_mlp_options(config)), unit)


# --- rope and qkv_projection ----------------------------------------------------------------------


def _rope(config: Rope) -> Programs:
    problem = others.rope(
        dict(
            batch=(config.batch,),
            tokens=config.tokens,
            heads=config.heads,
            key_heads=config.key_heads,
            head_size=config.head_size,
            rotary_dim=config.rotary_dim,
            dtype=config.dtype,
            interleaved=config.interleaved,
            angles="tables" if config.tables else "from 0",
        )
    )
    heads = len(problem.operands)

    def stock(rotate: Function, *args: jax.Array) -> Any:
        cos, sin = args[heads:] if config.tables else _angles(config.tokens, config.rotary_dim)
        rotated = tuple(
            rotate(x, cos[:, None], sin[:, None], config.interleaved) for x in args[:heads]
        )
        return rotated if heads > 1 else rotated[0]

    forms = {"halves": partial(stock, rotate_halves)}
    if not config.interleaved:
        forms["rotate_half"] = partial(stock, rotate_whole)
    return of_problem(problem, forms, results=heads)


def _angles(tokens: int, rotary_dim: int) -> tuple[jax.Array, jax.Array]:
    frequencies = 10000.0 ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate_halves(x, cos, sin, interleaved):
    """Rotates as Gemma and MaxText do: tables in float32, the result in x's dtype."""
    rotary_dim = 2 * cos.shape[-1]
    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    else:
        first, second = jnp.split(rotary, 2, axis=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotary.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def rotate_whole(x, cos, sin, interleaved):
    """Rotates as Hugging Face's Llama does: x cos + rotate_half(x) sin."""
    assert not interleaved
    rotary_dim = 2 * cos.shape[-1]
    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = jnp.split(rotary, 2, axis=-1)
    half = jnp.concatenate([-second, first], axis=-1)
    cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, sin], axis=-1)
    rotated = (rotary * cos + half * sin).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _qkv_projection(config: QKVProjection) -> Programs:
    problem = others.qkv_projection(
        _layer(config)
        | dict(
            batch=(config.batch,),
            tokens=config.tokens,
            key_heads=config.key_heads,
            group=config.group,
            head_size=config.head_size,
            rotary_dim=config.head_size,
            q_scale=config.norm,
            k_scale=config.norm,
            rope=config.rope,
            interleaved=config.interleaved,
        )
    )
    names = (*problem.operands, *problem.constants)
    heads = (config.heads + 2 * config.key_heads, config.head_size)

    def stock(project: Function, *args: jax.Array) -> Any:
        operands = dict(zip(names, args, strict=True))
        qkv = project(operands["x"], operands["w"], operands.get("bias"))
        q, k, v = jnp.split(qkv, (config.heads, config.heads + config.key_heads), axis=-2)
        if config.norm:
            q = flax_norm(q, operands["q_scale"], None, mean_square)
            k = flax_norm(k, operands["k_scale"], None, mean_square)
        if config.rope:
            cos, sin = operands["cos"][:, None], operands["sin"][:, None]
            q = rotate_halves(q, cos, sin, config.interleaved)
            k = rotate_halves(k, cos, sin, config.interleaved)
        return q, k, v

    def reshaped(x, w, bias):
        return dense(x, w, bias).reshape(*x.shape[:-1], *heads)

    def einsum(x, w, bias):
        # The form of flax.linen.DenseGeneral with an axis for the heads.
        w = w.astype(x.dtype).reshape(config.width, *heads)
        qkv = jnp.einsum("btd,dnh->btnh", x, w)
        return qkv if bias is None else qkv + bias.astype(x.dtype).reshape(heads)

    forms = {"reshape": partial(stock, reshaped), "einsum": partial(stock, einsum)}
    return of_problem(problem, forms, results=3)


# --- losses ---------------------------------------------------------------------------------------


def _cross_entropy(config: CrossEntropy) -> Programs:
    problem = losses.softmax_cross_entropy(
        dict(
            rows=(config.batch, config.tokens),
            classes=config.classes,
            dtype=config.dtype,
            label_smoothing=config.smoothing,
            ignore=config.ignored,
        )
    )

    def stock(widens: bool, logits: jax.Array, labels: jax.Array) -> Any:
        logits = logits.astype(jnp.float32) if widens else logits
        counts = labels >= 0
        classes = jnp.where(counts, labels, 0)
        if config.smoothing:
            targets = jax.nn.one_hot(classes, config.classes, dtype=logits.dtype)
            smooth = optax.smooth_labels(targets, config.smoothing)
            found = optax.softmax_cross_entropy(logits, smooth)
        else:
            found = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
        if not config.ignored:
            return found.mean().astype(jnp.float32)
        return (jnp.sum(found * counts) / jnp.maximum(counts.sum(), 1)).astype(jnp.float32)

    # A loss in the logits' own dtype is also a form of stock, although its accuracy is poor.
    forms = {"as they are": partial(stock, False), "float32": partial(stock, True)}
    return of_problem(problem, forms)
