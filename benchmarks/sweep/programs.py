"""Each case as functions of its operands: ours, the forms of stock JAX, and the truth.

Stock is what a user of JAX and Flax writes, never jaxfused's own reference. If an operator has several
usual forms, all are timed and the fastest counts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxfused
from benchmarks.run.case import Arrays, Function
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
    EPSILON,
    VARIANCES,
    Programs,
    RandomArrays,
    dense,
    flax_norm,
    mean_square,
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
        Attention: attention_programs,
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


# --- norms ----------------------------------------------------------------------------------------


def _norm(config: Norm) -> Programs:
    shape, dtype = (config.batch, config.tokens, config.width), jnp.dtype(config.dtype)
    has_mean = config.operator == "layer_norm"

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(shape, dtype, mean=0.5, deviation=2.0)]
        operands.append(random.small(config.width, jnp.float32, mean=1.0))
        if config.bias:
            operands.append(random.small(config.width, jnp.float32))
        rows = 3 if config.residual else 1
        return (*operands, *(random.normal(shape, dtype) for _ in range(rows)))

    def ours(*args: jax.Array) -> Any:
        x, scale, bias, residual = split_operands(config, args)
        norm = jaxfused.layer_norm if has_mean else jaxfused.rms_norm
        return norm(x, scale, bias, residual=residual, epsilon=EPSILON)

    def stock(variance: Function, *args: jax.Array) -> Any:
        x, scale, bias, residual = split_operands(config, args)
        h = x if residual is None else x + residual
        y = flax_norm(h, scale, bias, variance)
        return y if residual is None else (y, h)

    return Programs(
        make_inputs,
        ours,
        {name: partial(stock, variance) for name, variance in VARIANCES[config.operator].items()},
        differentiable=2 + config.bias + config.residual,
        cotangents=1 + config.residual,
    )


# --- attention ------------------------------------------------------------------------------------


def attention_programs(config: Attention) -> Programs:
    dtype = jnp.dtype(config.dtype)
    query = (config.batch, config.queries, config.heads, config.head_size)
    key_shape = (config.batch, config.keys, config.key_heads, config.head_size)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(shape, dtype) for shape in (query, key_shape, key_shape)]
        if config.bias_batch:
            shape = (config.bias_batch, config.heads, config.queries, config.keys)
            operands.append(random.normal(shape, dtype))
        operands += attention.masks(config, jax.random.fold_in(key, 1))
        return (*operands, random.normal(query, dtype))

    stock: dict[str, Function] = {}
    if attention.stock_fits(config):
        stock["jax.nn"] = partial(attention.of_jax, config, implementation="xla")
        if config.group == 1:
            stock["flax"] = partial(attention.of_flax, config)
    return Programs(
        make_inputs,
        partial(attention.ours, config),
        stock,
        differentiable=3 + (config.bias_batch > 0),
        peers={"cudnn": partial(attention.of_jax, config, implementation="cudnn")},
        reference=partial(attention.in_pieces, config),
        # If one key has all the weight, the gradients of q and k are differences of equal numbers, one
        # of which comes from a 16-bit output.
        terms=(
            0.0,
            config.keys**-0.5,
            (config.queries * config.group) ** 0.5 / config.keys,
            0.0,
            *[1.0] * (config.bias_batch > 0),
        ),
    )


# --- products -------------------------------------------------------------------------------------


def _param_dtype(config: Linear | MLP | QKVProjection) -> Any:
    return jnp.dtype(config.dtype if config.param_dtype == "same" else config.param_dtype)


def _linear(config: Linear) -> Programs:
    rows, dtype, param_dtype = (
        (config.batch, config.tokens),
        jnp.dtype(config.dtype),
        _param_dtype(config),
    )

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal((*rows, config.width), dtype)]
        operands.append(random.weight((config.width, config.out), param_dtype))
        if config.bias:
            operands.append(random.small(config.out, param_dtype))
        results = 2 if config.residual else 1
        return (
            *operands,
            *(random.normal((*rows, config.out), dtype) for _ in range(results)),
        )

    def ours(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        return jaxfused.linear(x, w, bias, activation=config.activation, residual=residual)

    def stock(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        y = ACTIVATIONS[config.activation](dense(x, w, bias))
        return y if residual is None else y + residual

    def over_rows(*args: jax.Array) -> Any:
        x, *rest = args
        if config.residual:
            rest[-1] = rest[-1].reshape(-1, config.out)
        return stock(x.reshape(-1, config.width), *rest).reshape(*rows, config.out)

    return Programs(
        make_inputs,
        ours,
        {"flax": stock, "rows": over_rows} if config.batch > 1 else {"flax": stock},
        differentiable=2 + config.bias + config.residual,
    )


def _mlp_inputs(config: MLP, weights: list[tuple[int, int]], key: jax.Array) -> Arrays:
    """Returns x, each weight with its bias, the residual and the cotangent."""
    random, dtype, param_dtype = RandomArrays(key), jnp.dtype(config.dtype), _param_dtype(config)
    shape = (config.batch, config.tokens, config.width)
    operands = [random.normal(shape, dtype)]
    for weight in weights:
        operands.append(random.weight(weight, param_dtype))
        if config.bias:
            operands.append(random.small(weight[1], param_dtype))
    rows = 2 if config.residual else 1
    return (*operands, *(random.normal(shape, dtype) for _ in range(rows)))


def _mlp_operands(config: MLP, args: Arrays) -> tuple[Any, list[tuple[Any, Any]], Any]:
    """Splits operands into (x, [(weight, bias or None)], residual or None)."""
    x, *rest = args
    residual = rest.pop() if config.residual else None
    if config.bias:
        return x, list(zip(rest[::2], rest[1::2], strict=True)), residual
    return x, [(w, None) for w in rest], residual


def _mlp_programs(
    config: MLP, weights: list[tuple[int, int]], ours: Function, stock: Function
) -> Programs:
    def of_operands(f: Function, *args: jax.Array) -> Any:
        return f(*_mlp_operands(config, args))

    def flat(x, layers, residual):
        y = stock(
            x.reshape(-1, config.width),
            layers,
            None if residual is None else residual.reshape(-1, config.width),
        )
        return y.reshape(x.shape)

    forms = {"flax": stock, "rows": flat} if config.batch > 1 else {"flax": stock}
    return Programs(
        partial(_mlp_inputs, config, weights),
        partial(of_operands, ours),
        {name: partial(of_operands, form) for name, form in forms.items()},
        differentiable=1 + len(weights) * (2 if config.bias else 1) + config.residual,
    )


def _mlp(config: MLP) -> Programs:
    activation = ACTIVATIONS[config.activation]

    def ours(x, layers, residual):
        (w1, b1), (w2, b2) = layers
        options: Any = dict(activation=config.activation, residual=residual, save=config.save)
        return jaxfused.mlp(x, w1, b1, w2, b2, **options)

    def stock(x, layers, residual):
        first, second = layers
        y = dense(activation(dense(x, *first)), *second)
        return y if residual is None else y + residual

    weights = [(config.width, config.hidden), (config.hidden, config.width)]
    return _mlp_programs(config, weights, ours, stock)


def _gated_mlp(config: MLP) -> Programs:
    activation = ACTIVATIONS[config.activation]
    first = (config.width, config.hidden)

    def ours(x, layers, residual):
        (w_gate, b_gate), *up, (w_down, b_down) = layers
        w_up, b_up = up[0] if up else (None, None)
        options: Any = dict(activation=config.activation, residual=residual, save=config.save)
        biases = dict(b_gate=b_gate, b_up=b_up, b_down=b_down)
        return jaxfused.gated_mlp(x, w_gate, w_up, w_down, **biases, **options)

    def stock(x, layers, residual):
        if config.stacked:
            gate, up = jnp.split(dense(x, *layers[0]), 2, axis=-1)
        else:
            gate, up = dense(x, *layers[0]), dense(x, *layers[1])
        y = dense(activation(gate) * up, *layers[-1])
        return y if residual is None else y + residual

    firsts = [(config.width, 2 * config.hidden)] if config.stacked else [first, first]
    return _mlp_programs(config, [*firsts, (config.hidden, config.width)], ours, stock)


# --- rotations ------------------------------------------------------------------------------------


def _rope(config: Rope) -> Programs:
    dtype = jnp.dtype(config.dtype)
    heads = [config.heads, *([config.key_heads] if config.key_heads else [])]
    shapes = [(config.batch, config.tokens, n, config.head_size) for n in heads]

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        rows = [random.normal(shape, dtype) for shape in shapes]
        tables = _angles(config.tokens, config.rotary_dim) if config.tables else ()
        return (*rows, *tables, *(random.normal(shape, dtype) for shape in shapes))

    def ours(*args: jax.Array) -> Any:
        q, k = args[0], args[1] if config.key_heads else None
        options: dict[str, Any] = dict(interleaved=config.interleaved, rotary_dim=config.rotary_dim)
        if config.tables:
            options = dict(interleaved=config.interleaved, cos=args[-2], sin=args[-1])
        return jaxfused.rope(q, k, **options)

    def stock(rotate: Function, *args: jax.Array) -> Any:
        cos, sin = args[-2:] if config.tables else _angles(config.tokens, config.rotary_dim)
        rotated = tuple(
            rotate(x, cos[:, None], sin[:, None], config.interleaved) for x in args[: len(heads)]
        )
        return rotated if len(heads) > 1 else rotated[0]

    forms = {"halves": rotate_halves}
    if not config.interleaved:
        forms["rotate_half"] = rotate_whole
    return Programs(
        make_inputs,
        ours,
        {name: partial(stock, rotate) for name, rotate in forms.items()},
        differentiable=len(heads),
        cotangents=len(heads),
    )


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
    dtype, param_dtype = jnp.dtype(config.dtype), _param_dtype(config)
    parts = (config.heads, config.key_heads, config.key_heads)
    rows = (config.batch, config.tokens)
    differentiable = 2 + config.bias + 2 * config.norm

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal((*rows, config.width), dtype)]
        operands.append(random.weight((config.width, config.out), param_dtype))
        if config.bias:
            operands.append(random.small(config.out, param_dtype))
        if config.norm:
            sizes = [config.head_size] * 2
            operands += [random.small(size, jnp.float32, mean=1.0) for size in sizes]
        tables = _angles(config.tokens, config.head_size) if config.rope else ()
        dys = (random.normal((*rows, n, config.head_size), dtype) for n in parts)
        return (*operands, *tables, *dys)

    def split(args: Arrays) -> dict[str, Any]:
        names = ["x", "w", *["bias"] * config.bias, *["q_scale", "k_scale"] * config.norm]
        names += ["cos", "sin"] * config.rope
        return dict(zip(names, args, strict=True))

    def ours(*args: jax.Array) -> Any:
        operands = split(args)
        x, w, bias = operands.pop("x"), operands.pop("w"), operands.pop("bias", None)
        sizes = dict(heads=config.heads, key_heads=config.key_heads, epsilon=EPSILON)
        return jaxfused.qkv_projection(
            x, w, bias, interleaved=config.interleaved, **sizes, **operands
        )

    def stock(project: Function, *args: jax.Array) -> Any:
        operands = split(args)
        qkv = project(operands["x"], operands["w"], operands.get("bias"))
        ends = (config.heads, config.heads + config.key_heads)
        q, k, v = jnp.split(qkv, ends, axis=-2)
        if config.norm:
            q = flax_norm(q, operands["q_scale"], None, mean_square)
            k = flax_norm(k, operands["k_scale"], None, mean_square)
        if config.rope:
            cos, sin = operands["cos"][:, None], operands["sin"][:, None]
            q = rotate_halves(q, cos, sin, config.interleaved)
            k = rotate_halves(k, cos, sin, config.interleaved)
        return q, k, v

    def reshaped(x, w, bias):
        return dense(x, w, bias).reshape(*rows, sum(parts), config.head_size)

    def einsum(x, w, bias):
        # The form of flax.linen.DenseGeneral with an axis for the heads.
        heads = (sum(parts), config.head_size)
        w = w.astype(x.dtype).reshape(config.width, *heads)
        qkv = jnp.einsum("btd,dnh->btnh", x, w)
        return qkv if bias is None else qkv + bias.astype(x.dtype).reshape(heads)

    return Programs(
        make_inputs,
        ours,
        {"reshape": partial(stock, reshaped), "einsum": partial(stock, einsum)},
        differentiable=differentiable,
        cotangents=3,
    )


# --- losses ---------------------------------------------------------------------------------------


def _cross_entropy(config: CrossEntropy) -> Programs:
    rows = (config.batch, config.tokens)

    def make_inputs(key: jax.Array) -> Arrays:
        of_logits, of_labels, of_counts = jax.random.split(key, 3)
        shape = (*rows, config.classes)
        logits = 3.0 * jax.random.normal(of_logits, shape, jnp.dtype(config.dtype))
        labels = jax.random.randint(of_labels, rows, 0, config.classes)
        if config.ignored:
            labels = jnp.where(jax.random.bernoulli(of_counts, 0.2, rows), -1, labels)
        return logits.astype(config.dtype), labels, jnp.ones(())

    def ours(logits: jax.Array, labels: jax.Array) -> Any:
        return jaxfused.softmax_cross_entropy(
            logits,
            labels,
            label_smoothing=config.smoothing,
            ignore_index=-1 if config.ignored else None,
        )

    def stock(widens: bool, logits: jax.Array, labels: jax.Array) -> Any:
        logits = logits.astype(jnp.float32) if widens else logits
        counts = labels >= 0
        classes = jnp.where(counts, labels, 0)
        if config.smoothing:
            targets = jax.nn.one_hot(classes, config.classes, dtype=logits.dtype)
            smooth = optax.smooth_labels(targets, config.smoothing)
            losses = optax.softmax_cross_entropy(logits, smooth)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
        if not config.ignored:
            return losses.mean().astype(jnp.float32)
        return (jnp.sum(losses * counts) / jnp.maximum(counts.sum(), 1)).astype(jnp.float32)

    # A program that stays in the logits' dtype is stock too, although few rely on its losses.
    forms = {"as they are": partial(stock, False), "float32": partial(stock, True)}
    return Programs(make_inputs, ours, forms, differentiable=1)
