"""Low-rank adapters (LoRA), a different one for each row of a batch."""

import functools
import math

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.grouped.expert_mlp import order_of, repeated, returned
from jaxfused.ops.grouped.ragged_dot import ragged_dot
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_arrays, check_floating, check_shape, python_numbers
from jaxfused.runtime.promotion import accumulator_dtype


@python_numbers
def batched_lora(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    indices: jax.Array,
    *,
    base: jax.Array | None = None,
    scale: jax.Array | float = 1.0,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Low-rank adapters, a different one for each row (or sequence) of a batch.

    .. math::
        y_t = \text{base}_t + \text{scale}_l \, (x_t A_l) B_l, \quad l = \text{indices}_t

    Rows are put in the order of their adapters, and two `jaxfused.ragged_dot` multiply them, so that an
    adapter's matrices are read once and not copied for each row. Results repeat bit for bit.

    Args:
      x: [..., D], float32, bfloat16 or float16.
      a: [L, D, r], the first matrix of each adapter.
      b: [L, r, F], the second one.
      indices: integers, the adapter of each row: of the shape of x without D, or of its first axes, such
        as [B] for x [B, T, D]. An index below 0 or from L on is no adapter.
      base: [..., F], the result of the adapted layer; None for zeros.
      scale: a number, or one for each adapter, [L]: alpha / r.
      precision: of the products, as in `jax.lax.dot`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [..., F], of base's dtype, or x's without base.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.ones((3, 4))
      >>> a, b = jnp.ones((2, 4, 1)), jnp.array([[[1.0]], [[2.0]]])
      >>> jaxfused.batched_lora(x, a, b, jnp.array([1, -1, 0])).ravel()
      Array([8., 0., 4.], dtype=float32)

    Source: Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685; Chen et al., "Punica: Multi-Tenant
    LoRA Serving", 2023, https://arxiv.org/abs/2310.18547
    """
    op = "batched_lora"
    x, a, b, indices, base, factors = as_arrays(x, a, b, indices, base, scale)
    check_floating(op, dict(x=x, a=a, b=b, base=base, scale=factors))
    _check_shapes(op, x, a, b, indices, base, factors)
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    dispatch.choose(op, implementation, {**missing, "pallas": None, "xla": None})
    out_dtype = x.dtype if base is None else base.dtype
    shape = (*x.shape[:-1], b.shape[2])
    if 0 in (*x.shape, *a.shape, *b.shape):
        return jnp.zeros(shape, out_dtype) if base is None else base
    leading = sharding.leading_axes(x.ndim - 1)
    return sharding.by_shards_of_rows(
        functools.partial(_of_rows, precision, implementation, out_dtype),
        (x, indices, base),
        (a, b, factors),
        axes=(leading + "d", leading[: indices.ndim], leading + "f"),
        result_axes=leading + "f",
    )


def _of_rows(precision, implementation, out_dtype, adapters, x, indices, base) -> jax.Array:
    a, b, factors = adapters
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    of_rows = indices.reshape(*indices.shape, *(1,) * (x.ndim - 1 - indices.ndim))
    of_rows = jnp.broadcast_to(of_rows, x.shape[:-1]).reshape(-1, 1)
    order = order_of(of_rows, a.shape[0])
    wide = accumulator_dtype(x.dtype)
    factors = factors.astype(wide)
    scaled = b.astype(wide) * (factors[:, None, None] if factors.ndim else factors)
    multiply = functools.partial(
        ragged_dot, group_sizes=order.sizes, precision=precision, implementation=implementation
    )
    hidden = multiply(repeated(1, rows, order), a.astype(x.dtype))
    y = multiply(hidden, scaled.astype(x.dtype))
    y = returned(y, order).reshape(*x.shape[:-1], b.shape[2])
    return y if base is None else (base.astype(wide) + y.astype(wide)).astype(out_dtype)


def _check_shapes(op, x, a, b, indices, base, scale) -> None:
    if x.ndim == 0 or a.ndim != 3 or a.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: a has shape {a.shape}, and x has shape {x.shape}; pass a of shape (adapters,"
            f" {x.shape[-1] if x.ndim else 'features'}, rank)."
        )
    adapters, _, rank = a.shape
    if b.ndim != 3 or b.shape[:2] != (adapters, rank):
        raise ValueError(
            f"{op}: b has shape {b.shape}, but a has shape {a.shape}; pass b of shape ({adapters},"
            f" {rank}, features)."
        )
    is_integer = jnp.issubdtype(indices.dtype, jnp.integer)
    if not is_integer or indices.shape != x.shape[:-1][: indices.ndim]:
        raise ValueError(
            f"{op}: indices have shape {indices.shape} and dtype {indices.dtype}, but x has shape"
            f" {x.shape}; pass integers of shape {x.shape[:-1]}, or of its first axes."
        )
    check_shape(op, "base", base, (*x.shape[:-1], b.shape[2]), f"x has shape {x.shape}")
    if scale.shape not in ((), (adapters,)):
        raise ValueError(
            f"{op}: scale has shape {scale.shape}, but there are {adapters} adapters; pass a number, or"
            " one for each."
        )
