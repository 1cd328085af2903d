"""qkv_projection: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxfused import dispatch, reference, sharding
from jaxfused.ops.batching import batch_all, is_batched, one_by_one
from jaxfused.ops.linear import check_affine, weight_gradient
from jaxfused.ops.rope import batch_tables, check_tables, ungrouped
from jaxfused.ops.validation import check_constant, check_floating, check_shape
from pallas_kernels.product import qkv_projection as pallas_qkv_projection
from pallas_kernels.product.mainloop import fills


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
    precision: jax.lax.PrecisionLike = None,
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
      cos: [T, R/2] or [..., T, R/2], from `rope_tables` or `axial_rope_tables`, with `sin`.
      sin: like `cos`.
      interleaved: which features are a pair, as in `rope`.
      precision: of the product, as in `jax.numpy.matmul`.
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
    x, w, bias, q_scale, k_scale, cos, sin = jax.tree.map(
        jnp.asarray, (x, w, bias, q_scale, k_scale, cos, sin)
    )
    key_heads = heads if key_heads is None else key_heads
    check_floating(op, {"x": x, "w": w, "bias": bias, "q_scale": q_scale, "k_scale": k_scale})
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but positions have an axis of their own;"
            " pass x of shape (..., length, features)."
        )
    check_affine(op, x, "w", w, "bias", bias)
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: heads is {heads} and key_heads {key_heads}, but query heads share key heads"
            " evenly; pass heads as a multiple of key_heads."
        )
    head_size, rest = divmod(w.shape[1], heads + 2 * key_heads)
    if rest:
        raise ValueError(
            f"{op}: w has {w.shape[1]} columns, but {heads} query, {key_heads} key and"
            f" {key_heads} value heads share them evenly; pass w with a multiple of"
            f" {heads + 2 * key_heads} columns."
        )
    rule = f"w has {head_size} columns for each head"
    check_shape(op, "q_scale", q_scale, (head_size,), rule)
    check_shape(op, "k_scale", k_scale, (head_size,), rule)
    check_constant(op, "epsilon", epsilon)
    check_constant(op, "scale_offset", scale_offset)
    if cos is not None or sin is not None:
        check_tables(op, (*x.shape[:-1], heads, head_size), cos, sin)
    device = dispatch.current_device(x)
    chosen = dispatch.choose(
        op,
        implementation,
        implementations(
            device,
            rows=math.prod(x.shape[:-1]),
            dtype=x.dtype,
            features=x.shape[-1],
            heads=heads,
            key_heads=key_heads,
            head_size=head_size,
            norm=q_scale is not None or k_scale is not None,
            rotary_dim=0 if cos is None else 2 * cos.shape[-1],
            interleaved=interleaved,
        ),
    )
    # Without rows there is nothing for a kernel to do.
    if chosen == "xla" or x.size == 0:
        return reference.qkv_projection.qkv_projection(
            x,
            w,
            bias,
            q_scale,
            k_scale,
            cos,
            sin,
            heads=heads,
            key_heads=key_heads,
            epsilon=epsilon,
            scale_offset=scale_offset,
            interleaved=interleaved,
            precision=precision,
        )
    launch = _Launch(device.multiprocessors, head_size, epsilon, scale_offset, precision)
    # A device's part of the columns is not a part of the queries, of the keys and of the values.
    whole: Any = sharding.align(
        (x, w, bias),
        operand_axes=(sharding.leading_axes(x.ndim - 1) + "d", "dc", "c"),
        whole="dc",
    )
    x, w, bias = whole
    # Queries with the keys that they share: by these groups devices can split all three.
    ends = (heads * head_size, (heads + key_heads) * head_size)

    def split(columns):
        parts = jnp.split(columns, ends, axis=-1)
        return [p.reshape(*p.shape[:-1], key_heads, -1, head_size) for p in parts]

    weights, biases = split(w), [None] * 3 if bias is None else split(bias)
    if cos is not None and sin is not None:
        cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    operands = (x, *weights, *biases, q_scale, k_scale, cos, sin)
    aligned = sharding.align(operands, operand_axes=_operand_axes(operands), whole=launch.whole)
    q, k, v = _qkv_projection(launch, *aligned)
    return ungrouped(q), ungrouped(k), ungrouped(v)


def implementations(
    device: dispatch.Device,
    *,
    rows: int,
    dtype: Any,
    features: int,
    heads: int,
    key_heads: int,
    head_size: int,
    norm: bool,
    rotary_dim: int,
    interleaved: bool,
) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run these shapes on `device`."""
    columns = (heads + 2 * key_heads) * head_size
    # 32768 x 4096 to 32 and 2 x 8 heads of 128 with rotation on an H200: 2.06 ms, XLA 2.19; heads of 64
    # 0.24 and 0.35 ms at 50432 x 768. Without rotation 2.0 and 2.2 ms, 0.23 and 0.36.
    fast = fills(device.multiprocessors, rows, columns)
    reasons = {
        "pallas": pallas_qkv_projection.why_unsupported(
            compute_capability=device.compute_capability,
            dtype=dtype,
            features=features,
            heads=heads,
            key_heads=key_heads,
            head_size=head_size,
            norm=norm,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
        ),
        "cuda": "there is no CUDA kernel of qkv_projection yet",
        "xla": None,
    }
    return reasons if fast else dispatch.preferring("xla", reasons)


# --- gradient -------------------------------------------------------------------------------------

_HEADS = ("ngh", "nkh", "nkh")
"""The letters of queries, keys and values: groups that share keys, heads of a group, features."""


@dataclass(frozen=True)
class _Launch:
    """How the kernels run."""

    multiprocessors: int
    head_size: int
    epsilon: float
    scale_offset: float
    precision: Any

    @property
    def whole(self) -> str:
        """The axes that a device must have whole."""
        # The kernel takes columns in sixteens, which the groups of narrower heads may not be.
        return "dgkhsr" if self.head_size % 16 == 0 else "dngkhsr"

    def finish(self, y, scale, cos, sin):
        """The norm and the rotation of grouped heads, by XLA."""
        finished = reference.qkv_projection.finish(
            ungrouped(y),
            scale,
            cos,
            sin,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            interleaved=False,
        )
        return finished.reshape(y.shape)


@dataclass(frozen=True)
class _Forward:
    """Queries, keys and values, and the former two before their norms where they are saved.

    Of x [..., T, D], weights [D, n, heads, H], biases [n, heads, H], scales and tables.
    """

    launch: _Launch
    save_projections: bool

    def __call__(self, x, *parameters):
        *weights, q_bias, k_bias, v_bias, q_scale, k_scale, cos, sin = parameters
        results = pallas_qkv_projection.forward(
            x.reshape(-1, x.shape[-1]),
            [w.astype(x.dtype).reshape(len(w), -1) for w in weights],
            None if q_bias is None else [b.reshape(-1) for b in (q_bias, k_bias, v_bias)],
            (q_scale, k_scale),
            *(
                None if table is None else table.reshape(-1, table.shape[-1])
                for table in (cos, sin)
            ),
            head_size=self.launch.head_size,
            epsilon=self.launch.epsilon,
            scale_offset=self.launch.scale_offset,
            save_projections=self.save_projections,
            multiprocessors=self.launch.multiprocessors,
        )
        groups, _, head_size = weights[0].shape[1:]
        return tuple(
            None if y is None else y.reshape(*x.shape[:-1], groups, -1, head_size) for y in results
        )

    def axes(self, operands: Sequence[Any]) -> tuple[Sequence[str], Sequence[str | None]]:
        rows = sharding.leading_axes(operands[0].ndim - 1)
        results = [rows + group for group in _HEADS]
        saved = results[:2] if self.save_projections else (None, None)
        return _operand_axes(operands), (*results, *saved)

    def batched(self, axis_size: int, in_batched, operands) -> Sequence[Any] | None:
        """The operands with the batch among the rows; None where what the rows share is batched."""
        x, *parameters, cos, sin = operands
        if is_batched(in_batched[1:-2]):
            return None
        tables: Sequence[Any] = (cos, sin)
        if cos is not None:
            rows = x.shape[1 if is_batched(in_batched[0]) else 0 : -1]
            tables = batch_tables(axis_size, in_batched[-2:], tables, rows)
        return *batch_all(axis_size, in_batched[:1], (x,)), *parameters, *tables


@dataclass(frozen=True)
class _InputGradient:
    """The sum of the cotangents of queries, keys and values, each times its weights' transpose."""

    launch: _Launch

    def __call__(self, *operands):
        dys, weights = operands[:3], operands[3:]
        (dx,) = pallas_qkv_projection.input_gradient(
            [dy.reshape(-1, math.prod(dy.shape[-3:])) for dy in dys],
            [w.astype(dys[0].dtype).reshape(len(w), -1) for w in weights],
            multiprocessors=self.launch.multiprocessors,
        )
        return (dx.reshape(*dys[0].shape[:-3], -1),)

    def axes(self, operands: Sequence[Any]) -> tuple[Sequence[str], Sequence[str | None]]:
        rows = sharding.leading_axes(operands[0].ndim - 3)
        return [*(rows + g for g in _HEADS), *("d" + g for g in _HEADS)], (rows + "d",)

    def batched(self, axis_size: int, in_batched, operands) -> Sequence[Any] | None:
        """As that of `_Forward`."""
        if is_batched(in_batched[3:]):
            return None
        return *batch_all(axis_size, in_batched[:3], operands[:3]), *operands[3:]


def _run(kernel: _Forward | _InputGradient, *operands):
    """The kernel over shards, with a rule for `jax.vmap`."""

    @custom_vmap
    def call(*operands):
        operand_axes, result_axes = kernel.axes(operands)
        return sharding.per_shard(
            kernel,
            operands,
            operand_axes=operand_axes,
            result_axes=result_axes,
            whole=kernel.launch.whole,
        )

    @call.def_vmap
    def rule(axis_size, in_batched, *operands):
        batched = kernel.batched(axis_size, in_batched, operands)
        if batched is None:
            results = one_by_one(call, in_batched, operands)
        else:
            results = _run(kernel, *batched)
        return results, jax.tree.map(lambda _: True, results)

    return call(*operands)


def _operand_axes(operands: Sequence[Any]) -> Sequence[str]:
    """The letters of x, the weights, the biases, the scales and the tables, for `sharding`."""
    rows = sharding.leading_axes(operands[0].ndim - 1)
    cos = operands[-1]
    table = "" if cos is None else rows[len(rows) - (cos.ndim - 1) :] + "r"
    return rows + "d", *("d" + g for g in _HEADS), *_HEADS, "s", "s", table, table


class _Residuals(NamedTuple):
    x: jax.Array
    weights: Sequence[jax.Array]
    biases: Sequence[jax.Array | None]
    scales: Sequence[jax.Array | None]
    tables: Sequence[jax.Array | None]
    projections: Sequence[jax.Array | None]
    """Queries and keys before norm and rotation, where gradients need them."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qkv_projection(launch: _Launch, *operands):
    q, k, v, _, _ = _run(_Forward(launch, save_projections=False), *operands)
    return q, k, v


def _qkv_projection_fwd(launch: _Launch, *primals):
    operands: list[Any] = [None if primal is None else primal.value for primal in primals]
    x, *weights = operands[:4]
    scales, tables = operands[7:9], operands[9:]
    # The rotation is linear: its gradient to queries and keys needs the angles alone.
    save = any(scale is not None for scale in scales) or any(
        table is not None and table.perturbed for table in primals[9:]
    )
    q, k, v, *projections = _run(_Forward(launch, save), *operands)
    saved = _Residuals(x, weights, operands[4:7], scales, tables, projections)
    return (q, k, v), saved


def _qkv_projection_bwd(launch: _Launch, saved: _Residuals, cotangents):
    x, weights, biases, scales, tables, projections = saved
    dq, dk, dv = (
        jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in cotangents
    )
    dscales: Any = [None, None]
    dtables: Any = [None, None]
    if any(a is not None for a in (*scales, *tables)):

        def finish(q, k, scales, tables):
            return launch.finish(q, scales[0], *tables), launch.finish(k, scales[1], *tables)

        # Where they are not saved, nothing reads them.
        q, k = (
            jnp.zeros_like(dy) if projection is None else projection
            for projection, dy in zip(projections, (dq, dk), strict=True)
        )
        _, vjp = jax.vjp(finish, q, k, scales, tables)
        dq, dk, dscales, dtables = vjp((dq, dk))
    dys = (dq, dk, dv)
    (dx,) = _run(_InputGradient(launch), *dys, *weights)

    def gradient_of_weight(w, dy):
        # XLA merges products that share an operand into one, for which it has the slower generator.
        mine, dy = jax.lax.optimization_barrier((x, dy.reshape(*dy.shape[:-3], -1)))
        return weight_gradient(mine, dy, w.dtype, launch.precision).reshape(w.shape)

    dweights = [gradient_of_weight(w, dy) for w, dy in zip(weights, dys, strict=True)]
    dbiases = [
        None
        if bias is None
        else jnp.sum(dy, axis=range(dy.ndim - 3), dtype=jnp.float32).astype(bias.dtype)
        for bias, dy in zip(biases, dys, strict=True)
    ]
    return dx, *dweights, *dbiases, *dscales, *dtables


_qkv_projection.defvjp(_qkv_projection_fwd, _qkv_projection_bwd, symbolic_zeros=True)
