"""parallel.linear: a linear layer whose features are split over devices."""

from typing import Literal

import jax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.linear import linear_xla
from jaxfused.ops.linear.linear import check_affine, check_residual
from jaxfused.ops.linear.linear import linear as linear_operator
from jaxfused.parallel.parts import added_up
from jaxfused.parallel.placement import Placement, check_rows
from jaxfused.parallel.products import (
    Options,
    gathered_product,
    product_in_parts,
    product_scattered,
)
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_word,
    python_numbers,
)
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName

Split = Literal["columns", "rows"]


@python_numbers
def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    axis_name: AxisName,
    split: Split,
    sequence_parallel: bool = False,
    spec: P | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`jaxfused.linear` with features split over devices, whose collectives overlap its products.

    .. math:: y = \text{activation}(x w + \text{bias}) + \text{residual}

    - "columns" (w [D, F / n] on each of n devices): y has all tokens and a device's own features. With
      `sequence_parallel` x has a device's own tokens, which are sent round a ring while those that
      have arrived are multiplied.
    - "rows" (w [D / n, F]): x has all tokens and a device's own features, and the products are summed
      over devices: with `sequence_parallel` in a ring, at whose end y has a device's own tokens; else
      part by part, while the next rows are multiplied, and y has all tokens on each device.

    A layer of one kind feeds one of the other. The backward of each communicates as the other.

    Args:
      x: [..., T, D], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over `axis_name`
        all operands are a device's shards; else, under `jax.jit`, they are global arrays.
      w: [D, F], split by its columns or its rows.
      bias: [F], split as w's columns are; added once.
      axis_name: the mesh axis that splits the features, or a tuple of several.
      split: "columns" or "rows", of w.
      sequence_parallel: whether the axis splits the tokens of x ("columns") or y ("rows").
      spec: how the axes of x before T are split outside of `jax.shard_map`.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., T, F], split as y is.
      precision: of the product, as in `jax.numpy.matmul`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., T, F], of the residual's dtype, or x's.

    Raises:
      ValueError: shapes or the axis do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("model",), axis_types=(auto,))
      >>> x, w = jnp.ones((2, 4 * n, 8)), jnp.ones((8, 16 * n))
      >>> with jax.set_mesh(mesh):
      ...     y = jaxfused.parallel.linear(
      ...         x, w, axis_name="model", split="columns", sequence_parallel=True
      ...     )
      >>> y.shape == (2, 4 * n, 16 * n)
      True

    Source: that of `mlp`.
    """
    op = "parallel.linear"
    check_word(op, "split", split, Split)
    operands = as_arrays(x, w, bias, residual)
    check_floating(op, dict(zip(("x", "w", "bias", "residual"), operands, strict=True)))
    check_activation(op, activation)
    x, w, bias, residual = operands
    check_rows(op, x)
    check_affine(op, x, "w", w, "bias", bias)
    if residual is not None and residual.ndim != x.ndim:
        check_residual(op, residual, x, w.shape[1])
    placement = Placement(op, axis_name, sequence_parallel, spec)
    static = (axis_name, sequence_parallel, activation, precision, implementation)
    if split == "columns":
        return placement.run(_columns, static, operands, (".t-", "-f", "f", ".Tf"), ".Tf")
    return placement.run(_rows, static, operands, (".Tf", "f-", "-", ".t-"), ".t-")


def _columns(
    axis_name, sequence_parallel, activation, precision, implementation, x, w, bias, residual
) -> jax.Array:
    if not sequence_parallel:
        return linear_operator(
            x,
            w,
            bias,
            activation=activation,
            residual=residual,
            precision=precision,
            implementation=implementation,
        )
    run = Runner(implementation, dispatch.current_device(x))
    y = gathered_product(run, Options("linear", axis_name, activation, precision), x, w, bias)
    check_residual("parallel.linear", residual, y, w.shape[1])
    return linear_xla.add_residual(y, residual, _out_dtype(x, residual))


def _rows(
    axis_name, sequence_parallel, activation, precision, implementation, x, w, bias, residual
) -> jax.Array:
    run = Runner(implementation, dispatch.current_device(x))
    options = Options("linear", axis_name, None, precision)
    if sequence_parallel:
        z = product_scattered(run, options, x, w)
    else:
        z = added_up(axis_name, product_in_parts(run, options, x, w))
    check_residual("parallel.linear", residual, z, w.shape[1])
    y, _ = linear_xla.finish(
        z,
        bias,
        residual,
        activation=activation,
        out_dtype=_out_dtype(x, residual),
        save_preactivation=False,
    )
    return y


def _out_dtype(x: jax.Array, residual: jax.Array | None):
    return x.dtype if residual is None else residual.dtype
