"""qkv_projection: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8, qkv_projection_fp8
from jaxfused.ops.linear import linear_xla, qkv_projection_xla
from jaxfused.ops.linear.linear import check_affine
from jaxfused.ops.linear.qkv_projection_stages import Forward, InputGradient, Options, operand_axes
from jaxfused.ops.linear.weight_gradient import weight_and_bias_gradients, weight_gradients
from jaxfused.ops.rope.rope import rope, ungrouped
from jaxfused.ops.rope.rope_tables import check_tables
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_epsilon,
    check_finite,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_xla import side_by_side, unshared
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.shapes import merge_axes, split_axis


@python_numbers
def qkv_projection(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    heads: int,
    key_heads: int | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    interleaved: bool = False,
    precision: jax.lax.PrecisionLike | fp8.Precision = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""The projection before attention, with the norm and the rotation of queries and keys.

    .. math::
        (q', k', v) &= \text{split}(x w + \text{bias}) \\
        q &= \text{rope}(\text{rms\_norm}(q', \text{q\_scale})), \quad
        k = \text{rope}(\text{rms\_norm}(k', \text{k\_scale}))

    The norm is taken over each head's H features, where its scale is given; the rotation is taken
    where `cos` and `sin` are. The product is accumulated in float32, and rounded to x's dtype
    before norm and rotation.

    Args:
      x: [..., T, D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w: [D, (N + 2 K) H], of any float dtype, as are the other parameters: the columns of N query
        heads, then those of K key heads, then those of K value heads.
      bias: [(N + 2 K) H].
      heads: N.
      key_heads: K, by default N.
      q_scale: [H], of the queries' RMSNorm.
      k_scale: [H], of the keys' RMSNorm.
      epsilon: is added to the mean square.
      scale_offset: is added to q_scale and k_scale.
      cos: [T, R/2] or [..., T, R/2], from `rope_tables` or `axial_rope_tables`, with `sin`; or
        with an axis of heads, as in `rope`.
      sin: like `cos`.
      interleaved: which features are a pair, as in `rope`.
      precision: of the product, as in `jax.numpy.matmul`; or "fp8": the product and its gradients are
        taken of float8, each operand with one scale, as docs/quantisation.md says.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      (q, k, v) as `dot_product_attention` takes them: [..., T, N, H], [..., T, K, H] and
      [..., T, K, H], of x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> cos, sin = jaxfused.rope_tables(jnp.arange(5), 8)
      >>> q, k, v = jaxfused.qkv_projection(
      ...     jnp.ones((2, 5, 32)), jnp.ones((32, 64)), heads=4, key_heads=2,
      ...     q_scale=jnp.ones(8), k_scale=jnp.ones(8), cos=cos, sin=sin)
      >>> q.shape, k.shape, v.shape
      ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))

    Source: for the norm of queries and keys, Dehghani et al., "Scaling Vision Transformers to 22
    Billion Parameters", 2023, https://arxiv.org/abs/2302.05442; for the rotation see `rope`.
    """
    op = "qkv_projection"
    x, w, bias, q_scale, k_scale, cos, sin = as_arrays(x, w, bias, q_scale, k_scale, cos, sin)
    key_heads = heads if key_heads is None else key_heads
    check_floating(op, {"x": x, "w": w, "bias": bias, "q_scale": q_scale, "k_scale": k_scale})
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but positions need an axis before the features;"
            " pass x of shape (..., length, features)."
        )
    check_affine(op, x, "w", w, "bias", bias)
    head_size = _checked_head_size(op, w.shape[1], heads, key_heads)
    _check_norms(op, head_size, q_scale, k_scale, epsilon, scale_offset)
    if cos is not None or sin is not None:
        cos, sin = check_tables(op, (*x.shape[:-1], heads, head_size), cos, sin)
        if cos.ndim == x.ndim + 1:
            # The kernels rotate all heads of a position by the same angles.
            q, k, v = qkv_projection(
                x,
                w,
                bias,
                heads=heads,
                key_heads=key_heads,
                q_scale=q_scale,
                k_scale=k_scale,
                epsilon=epsilon,
                scale_offset=scale_offset,
                precision=precision,
                implementation=implementation,
            )
            turn = functools.partial(rope, cos=cos, sin=sin, interleaved=interleaved)
            q, k = cast(tuple[jax.Array, jax.Array], turn(q, k))
            return q, k, v
    device = dispatch.current_device(x)
    if fp8.is_fp8(precision):
        ends = (heads * head_size, (heads + key_heads) * head_size)
        in_three = [None] * 3 if bias is None else _split(ends, bias)
        widths = (ends[0], key_heads * head_size, key_heads * head_size)
        state = fp8.state_of(op, precision)
        q, k, v = _in_fp8(x, [w], in_three, widths, head_size, implementation, device, state)
        finished = qkv_projection_xla.finish_both(
            q, k, q_scale, k_scale, cos, sin, epsilon, scale_offset, interleaved
        )
        return *finished, v
    if takes_reference(op, implementation, device, x):
        projected = qkv_projection_xla.qkv_projection(
            *(x, w, bias, q_scale, k_scale, cos, sin),
            heads=heads,
            key_heads=key_heads,
            epsilon=epsilon,
            scale_offset=scale_offset,
            interleaved=interleaved,
            precision=precision,
        )
        return named(projected, op, "output")
    options = Options(head_size, epsilon, scale_offset, interleaved, precision)
    run = Runner(implementation, device)
    vectors = (q_scale, k_scale, cos, sin)
    return _of_one_array(run, options, x, w, bias, *vectors, heads=heads, key_heads=key_heads)


def _checked_head_size(op: str, columns: int, heads: int, key_heads: int) -> int:
    """Returns the features of a head, from the number of columns of w and the numbers of heads."""
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: heads is {heads} and key_heads {key_heads}, but query heads share key heads"
            " evenly; pass heads as a multiple of key_heads."
        )
    head_size, rest = divmod(columns, heads + 2 * key_heads)
    if rest:
        raise ValueError(
            f"{op}: w has {columns} columns, but {heads} query, {key_heads} key and"
            f" {key_heads} value heads share them evenly; pass w with a multiple of"
            f" {heads + 2 * key_heads} columns."
        )
    return head_size


def _check_norms(op: str, head_size: int, q_scale, k_scale, epsilon, scale_offset) -> None:
    rule = f"w has {head_size} columns for each head"
    check_shape(op, "q_scale", q_scale, (head_size,), rule)
    check_shape(op, "k_scale", k_scale, (head_size,), rule)
    check_epsilon(op, epsilon)
    check_finite(op, "scale_offset", scale_offset)


def _of_one_array(
    run: Runner, options: Options, x, w, bias, q_scale, k_scale, cos, sin, *, heads, key_heads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values by kernels, for weights (and biases) in one array."""
    # w's columns are those of queries, then keys, then values, so a shard of them would not hold equal
    # shards of the three: the axis c stays unsharded.
    whole: Any = sharding.align(
        (x, w, bias),
        operand_axes=(sharding.leading_axes(x.ndim - 1) + "d", "dc", "c"),
        whole="dc",
    )
    x, w, bias = whole
    of_one = replace(options, one_array=(key_heads, heads // key_heads))
    weights: Sequence[Any]
    biases: Sequence[Any]
    if sharding.is_in_one_piece(x, w):
        # w stays one array: XLA multiplies x by all of its columns at once. A kernel's call splits it
        # into the weights of queries, keys and values.
        options, weights, biases = of_one, (w, None, None), (bias, None, None)
    else:
        # Query heads are grouped by key head, so that devices can split queries, keys and values alike.
        ends = (heads * options.head_size, (heads + key_heads) * options.head_size)
        weights, biases = (
            [None] * 3 if array is None else of_one.grouped(_split(ends, array))
            for array in (w, bias)
        )
    if cos is not None and sin is not None:
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    operands = (x, *weights, *biases, q_scale, k_scale, cos, sin)
    return _aligned(run, options, operands)


def separate_projections(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    *,
    precision: jax.lax.PrecisionLike | fp8.Precision,
    implementation: dispatch.Implementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k and v for weights of their own, each [D, heads, H], which are not concatenated.

    Modules hold such weights. Devices may split their heads, but the columns of one matrix would have to
    be gathered first.

    Args:
      x: [..., T, D].
      weights: weights of queries, keys and values, of one dtype.
      biases: their biases, [N, H] and twice [K, H], or None three times.
      precision: as in `qkv_projection`.
      implementation: as in `qkv_projection`.
    """
    op = "qkv_projection"
    device = dispatch.current_device(x)
    if fp8.is_fp8(precision):
        flat = [merge_axes(w, 1) for w in weights]
        flat_biases = [None if bias is None else merge_axes(bias, 0) for bias in biases]
        head_size = weights[0].shape[-1]
        widths = (flat[0].shape[1], flat[1].shape[1], flat[2].shape[1])
        state = fp8.state_of(op, precision)
        return _in_fp8(x, flat, flat_biases, widths, head_size, implementation, device, state)
    if takes_reference(op, implementation, device, x):
        projections = []
        for w, bias in zip(weights, biases, strict=True):
            y = linear_xla.linear(
                x,
                merge_axes(w, 1),
                None if bias is None else merge_axes(bias, 0),
                None,
                activation=None,
                precision=precision,
                out_dtype=x.dtype,
            )
            projections.append(split_axis(y, y.ndim - 1, *w.shape[1:]))
        q, k, v = named(projections, op, "output")
        return q, k, v
    key_heads, head_size = weights[1].shape[1:]

    def grouped(array):
        if array is None:
            return None
        return split_axis(array, array.ndim - 2, key_heads, array.shape[-2] // key_heads)

    operands = (x, *map(grouped, weights), *map(grouped, biases), None, None, None, None)
    options = Options(head_size, 0.0, 0.0, False, precision)
    return _aligned(Runner(implementation, device), options, operands)


def _in_fp8(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    widths: tuple[int, int, int],
    head_size: int,
    implementation: dispatch.Implementation | None,
    device: dispatch.Device,
    state: fp8.Fp8State | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, k and v [..., T, heads, H] of x [..., T, D], times one array or three in float8."""
    run = fp8.runner("qkv_projection", implementation, device, x)
    weight_axes = ("dc",) if len(weights) == 1 else ("de", "df", "dg")
    aligned: Any = sharding.align(
        (x, *weights, *biases),
        operand_axes=(sharding.leading_axes(x.ndim - 1) + "d", *weight_axes, "e", "f", "g"),
        whole="dcefg",
    )
    x, *parameters = aligned
    options = qkv_projection_fp8.Options(
        widths, x.dtype, parameters[0].dtype, in_one=len(weights) == 1
    )
    projected = qkv_projection_fp8.projections(
        run, options, x, tuple(parameters[:-3]), tuple(parameters[-3:]), state
    )
    q, k, v = (y.reshape(*y.shape[:-1], y.shape[-1] // head_size, head_size) for y in projected)
    return q, k, v


def _aligned(
    run: Runner, options: "Options", operands: Sequence[jax.Array | None]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Aligns the sharding of the operands, and returns queries, keys and values."""
    aligned = sharding.align(operands, operand_axes=operand_axes(operands), whole=options.whole)
    q, k, v = _qkv_projection(run, options, *aligned)
    return ungrouped(q), ungrouped(k), ungrouped(v)


class _Residuals(NamedTuple):
    x: jax.Array
    weights: Sequence[jax.Array]
    biases: Sequence[jax.Array | None]
    scales: Sequence[jax.Array | None]
    tables: Sequence[jax.Array | None]
    projections: Sequence[jax.Array | None]
    """Queries and keys before norm and rotation, or None if gradients do not need them."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="qkv_projection")
def _qkv_projection(run: Runner, options: Options, *operands):
    q, k, v, _, _ = run(Forward(options, save_projections=False), *operands)
    return q, k, v


def _qkv_projection_fwd(run: Runner, options: Options, *primals):
    operands: list[Any] = [None if primal is None else primal.value for primal in primals]
    x, *weights = operands[:4]
    scales, tables = operands[7:9], operands[9:]
    # The rotation is linear: its gradient to queries and keys needs only the angles, not its input.
    save = any(scale is not None for scale in scales) or any(
        table is not None and table.perturbed for table in primals[9:]
    )
    q, k, v, *projections = run(Forward(options, save), *operands)
    q, k, v = named((q, k, v), "qkv_projection", "output")
    projections = named(projections, "qkv_projection", "projections")
    saved = _Residuals(x, weights, operands[4:7], scales, tables, projections)
    return (q, k, v), saved


def _qkv_projection_bwd(run: Runner, options: Options, saved: _Residuals, cotangents):
    x, weights, biases, scales, tables, projections = saved
    dq, dk, dv = (
        jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in cotangents
    )
    dscales: Any = [None, None]
    dtables: Any = [None, None]
    if any(a is not None for a in (*scales, *tables)):

        def finish(q, k, scales, tables):
            return options.finish(q, scales[0], *tables), options.finish(k, scales[1], *tables)

        # Zeros replace projections that were not saved: without norms and without gradients of the
        # tables `finish` is a rotation, whose vjp does not depend on q and k.
        q, k = (
            jnp.zeros_like(dy) if projection is None else projection
            for projection, dy in zip(projections, (dq, dk), strict=True)
        )
        _, vjp = jax.vjp(finish, q, k, scales, tables)
        dq, dk, dscales, dtables = vjp((dq, dk))
    dys = (dq, dk, dv)
    (dx,) = run(InputGradient(options), *dys, *weights)
    dweights, dbiases = _parameter_gradients(run, options, x, weights, biases, dys)
    return dx, *dweights, *dbiases, *dscales, *dtables


_qkv_projection.defvjp(_qkv_projection_fwd, _qkv_projection_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split(ends: tuple[int, ...], columns: jax.Array) -> Sequence[jax.Array]:
    """Splits an array [..., columns] at column indices `ends`; the gradient is one concatenation."""
    return jnp.split(columns, ends, axis=-1)


_split.defvjp(
    lambda ends, columns: (jnp.split(columns, ends, axis=-1), None),
    lambda ends, _, parts: (jnp.concatenate(parts, axis=-1),),
)


def _parameter_gradients(run: Runner, options: Options, x, weights, biases, dys):
    """Returns the gradients of the weights and of the biases (None without biases).

    `dys` are the cotangents of q, k and v before norm and rotation, [..., T, key heads, g, H].
    """
    flat = [dy.reshape(*dy.shape[:-3], math.prod(dy.shape[-3:])) for dy in dys]
    dtype, has_biases = weights[0].dtype, biases[0] is not None
    dws: Sequence[Any]
    dbs: Sequence[Any] | None
    if sharding.is_in_one_piece(x, *(w for w in weights if w is not None)):
        # XLA's gradient of x (dgrad) reads the cotangents of q, k and v concatenated.
        for_x = run.choice(InputGradient(options), *dys, *weights).implementation == "xla"
        joined = options.one_array is not None
        if joined and for_x:
            # wgrad then reads the concatenated cotangents too, so that XLA writes them only once.
            flat = [side_by_side(flat, options.head_size)]
        dws, dbs = weight_gradients(
            run,
            "qkv_projection",
            x,
            flat,
            dtype,
            options.precision,
            sums_rows=has_biases,
            side_by_side=len(flat) > 1 and for_x,
            piece=options.head_size,
            joined=joined and len(flat) > 1,
        )
    else:
        # Heads may be sharded. Cotangents of q, k and v concatenated along heads would then have to be
        # exchanged between devices, so each gets a product of its own.
        pairs = ((x, flat[0]), *(unshared(x, dy) for dy in flat[1:]))
        gradients = [
            weight_and_bias_gradients(run, "qkv_projection", *pair, dtype, bias, options.precision)
            for pair, bias in zip(pairs, biases, strict=True)
        ]
        dws, dbs = zip(*gradients, strict=True)
    if not has_biases:
        dbs = None
    absent = [None] * (3 - len(dws))
    dweights = [dw.reshape(w.shape) for dw, w in zip(dws, weights, strict=False)]
    if dbs is None:
        return [*dweights, *absent], [None] * 3
    dbiases = [db.astype(b.dtype).reshape(b.shape) for db, b in zip(dbs, biases, strict=False)]
    return [*dweights, *absent], [*dbiases, *absent]
