"""parallel.qkv_projection: queries, keys and values with heads split over devices."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.linear import qkv_projection_xla
from jaxfused.ops.linear.linear import linear
from jaxfused.ops.rope.rope_tables import check_tables
from jaxfused.parallel.placement import Placement, check_rows
from jaxfused.parallel.products import Options, gathered_product
from jaxfused.runtime.checks import (
    as_arrays,
    check_epsilon,
    check_finite,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName

_OP = "parallel.qkv_projection"


@python_numbers
def qkv_projection(
    x: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    *,
    axis_name: AxisName,
    sequence_parallel: bool = False,
    spec: P | None = None,
    b_q: jax.Array | None = None,
    b_k: jax.Array | None = None,
    b_v: jax.Array | None = None,
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
    r"""`jaxfused.qkv_projection` with heads split over devices; its all-gather overlaps its products.

    .. math::
        q = \text{rope}(\text{rms\_norm}(x w_q + b_q, \text{q\_scale})), \quad
        k = \text{rope}(\text{rms\_norm}(x w_k + b_k, \text{k\_scale})), \quad
        v = x w_v + b_v

    Each device gets its own heads of all tokens. With `sequence_parallel` it has its own tokens of x,
    which are sent round a ring while those that have arrived are multiplied; in the backward the sums
    of x's gradient are sent. After attention, `linear` with split="rows" scatters the tokens again.

    Args:
      x: [..., T, D], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over `axis_name`
        all operands are a device's shards; else, under `jax.jit`, they are global arrays.
      w_q: [D, N, H], as Flax's attention has it; split by its heads, as are the others.
      w_k: [D, K, H].
      w_v: [D, K, H].
      axis_name: the mesh axis that splits the heads, or a tuple of several.
      sequence_parallel: whether it splits the tokens of x too.
      spec: how the axes of x before T are split outside of `jax.shard_map`.
      b_q: [N, H].
      b_k: [K, H].
      b_v: [K, H].
      q_scale: [H], of the norm of queries; None for no norm.
      k_scale: [H], of the norm of keys.
      epsilon: is added to the mean square.
      scale_offset: is added to the scales.
      cos: [T, R / 2] or [..., T, R / 2] of all tokens, as from `jaxfused.rope_tables`.
      sin: of the same shape.
      interleaved: whether pairs of neighbouring features are rotated.
      precision: of the products, as in `jax.numpy.matmul`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      (q, k, v): [..., T, N, H], [..., T, K, H] and [..., T, K, H], split by their heads, of x's dtype.

    Raises:
      ValueError: shapes or the axis do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("model",), axis_types=(auto,))
      >>> x, w = jnp.ones((2, 4 * n, 8)), jnp.ones((8, n, 4))
      >>> with jax.set_mesh(mesh):
      ...     q, k, v = jaxfused.parallel.qkv_projection(x, w, w, w, axis_name="model")
      >>> q.shape == (2, 4 * n, n, 4)
      True

    Source: that of `mlp`.
    """
    names = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "q_scale", "k_scale", "cos", "sin")
    operands = as_arrays(x, w_q, w_k, w_v, b_q, b_k, b_v, q_scale, k_scale, cos, sin)
    check_floating(_OP, dict(zip(names[:9], operands[:9], strict=True)))
    check_epsilon(_OP, epsilon)
    check_finite(_OP, "scale_offset", scale_offset)
    x, w_q, w_k, w_v, b_q, b_k, b_v, q_scale, k_scale, cos, sin = operands
    check_rows(_OP, x)
    _check(x, (w_q, w_k, w_v), (b_q, b_k, b_v), q_scale, k_scale)

    static = (
        axis_name,
        sequence_parallel,
        epsilon,
        scale_offset,
        interleaved,
        precision,
        implementation,
    )

    def of_table(name: str, table: jax.Array | None) -> str:
        if table is None:
            return ""
        if table.ndim < 3:
            return "--"[: table.ndim]
        whole = (*x.shape[:-2], *table.shape[-2:])
        check_shape(_OP, name, table, whole, f"x has shape {x.shape}")
        return ".T-"

    tables = (of_table("cos", cos), of_table("sin", sin))
    axes = (".t-", "-f-", "-f-", "-f-", "f-", "f-", "f-", "-", "-", *tables)
    placement = Placement(_OP, axis_name, sequence_parallel, spec)
    return placement.run(_on_a_device, static, operands, axes, (".Tf-",) * 3)


def _on_a_device(
    axis_name,
    sequence_parallel,
    epsilon,
    scale_offset,
    interleaved,
    precision,
    implementation,
    *operands,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, w_q, w_k, w_v, b_q, b_k, b_v, q_scale, k_scale, cos, sin = operands
    weights, biases = (w_q, w_k, w_v), (b_q, b_k, b_v)
    # The weights are concatenated for one product, since those of keys and values have few columns
    # each.
    w = jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], axis=1)
    bias = None if b_q is None else jnp.concatenate([b.reshape(-1) for b in biases])
    if sequence_parallel:
        run = Runner(implementation, dispatch.current_device(x))
        y = gathered_product(run, Options("linear", axis_name, None, precision), x, w, bias)
    else:
        y = linear(x, w, bias, precision=precision, implementation=implementation)
    heads, key_heads = w_q.shape[1], w_k.shape[1]
    y = y.reshape(*y.shape[:-1], heads + 2 * key_heads, w_q.shape[2])
    q, k, v = jnp.split(y, (heads, heads + key_heads), axis=-2)
    if cos is not None or sin is not None:
        cos, sin = check_tables(_OP, q.shape, cos, sin)
    finished = qkv_projection_xla.finish_both(
        q, k, q_scale, k_scale, cos, sin, epsilon, scale_offset, interleaved
    )
    return *finished, v


def _check(x, weights, biases, q_scale, k_scale) -> None:
    """Checks that weights [D, heads, H], biases [heads, H] and the norms' scales [H] fit together."""
    w_q, w_k, _ = weights
    for name, w, bias in zip("qkv", weights, biases, strict=True):
        if w.ndim != 3 or w.shape[0] != x.shape[-1] or w.shape[2] != w_q.shape[2]:
            raise ValueError(
                f"{_OP}: w_{name} has shape {w.shape}, but x has {x.shape[-1]} features in its last axis"
                f" and w_q has shape {w_q.shape}; pass w_{name} of shape ({x.shape[-1]}, heads,"
                " features of a head)."
            )
        if (bias is None) != (biases[0] is None):
            raise ValueError(
                f"{_OP}: b_{name} is {'absent' if bias is None else 'there'}, unlike b_q; pass all three"
                " biases, or none."
            )
        check_shape(_OP, f"b_{name}", bias, w.shape[1:], f"w_{name} has shape {w.shape}")
    check_shape(_OP, "w_v", weights[2], w_k.shape, f"w_k has shape {w_k.shape}")
    heads, key_heads = w_q.shape[1], w_k.shape[1]
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"{_OP}: there are {heads} query and {key_heads} key heads, but query heads"
            " share key heads evenly; pass w_q with a multiple of w_k's heads."
        )
    rule = f"w_q has {w_q.shape[2]} features for each head"
    check_shape(_OP, "q_scale", q_scale, w_q.shape[2:], rule)
    check_shape(_OP, "k_scale", k_scale, w_q.shape[2:], rule)
