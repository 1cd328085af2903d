"""qkv_projection: validation and choice of implementation."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.linear import check_affine
from jaxfused.ops.rope import check_tables
from jaxfused.ops.validation import check_constant, check_floating, check_shape


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
    dispatch.choose(op, implementation, implementations(dispatch.current_device(x)))
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


def implementations(device: dispatch.Device) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run on `device`."""
    del device
    return {
        "pallas": "there is no Pallas kernel of qkv_projection yet",
        "cuda": "there is no CUDA kernel of qkv_projection yet",
        "xla": None,
    }
