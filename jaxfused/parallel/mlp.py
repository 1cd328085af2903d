"""parallel.mlp: the MLP with its hidden features split over devices."""

import jax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.linear import mlp as mlp_operator
from jaxfused.ops.linear.hidden_layer import Options, Save, check_second_layer
from jaxfused.ops.linear.linear import check_affine
from jaxfused.parallel.perceptron import checked, perceptron
from jaxfused.parallel.placement import Placement
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName


@python_numbers
def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None = None,
    *,
    axis_name: AxisName,
    sequence_parallel: bool = False,
    spec: P | None = None,
    activation: str | None = "gelu_tanh",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`jaxfused.mlp` with hidden features split over devices; collectives overlap its products.

    .. math::
        y = \sum_\text{devices} \text{activation}(x w_1 + b_1) w_2 + b_2 + \text{residual}

    Results and gradients are those of one device up to rounding, and repeat bit for bit. Devices add
    their parts in x's dtype, as XLA does.

    - By default each device has all rows of x and of y. The last product is computed in up to four parts
      of the rows, and a part is summed over devices while the next is multiplied; in the backward the
      gradient to x is summed while those of the weights are computed. A device receives
      2 (n - 1) / n of y in the forward, and as much of x in the backward.
    - `sequence_parallel`: each device has its own tokens of x, y and residual. Rows of x are
      sent round a ring while those that have arrived are multiplied, and the sums of y with them. Half
      of the rows go the other way. A device receives (n - 1) / n of x and of y in the forward, and as
      much in the backward, where y's cotangents go round with the sums of x's gradient.

    Args:
      x: [..., T, D], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over `axis_name`
        all operands are a device's shards; else, under `jax.jit`, they are global arrays.
      w1: [D, F], split by its columns.
      b1: [F], split alike; or None.
      w2: [F, E], split by its rows.
      b2: [E], replicated; added once.
      axis_name: the mesh axis that splits the hidden features, or a tuple of several.
      sequence_parallel: whether it splits the tokens of x, y and residual too.
      spec: how the axes of x before T are split outside of `jax.shard_map`, as P("data"), where axes of
        the mesh are Auto. Types with Explicit axes state it themselves.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., T, E], added once.
      save: what is saved for the backward, as in `jaxfused.mlp`.
      precision: of the products, as in `jax.numpy.matmul`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., T, E], of the residual's dtype, or x's.

    Raises:
      ValueError: shapes or the axis do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("model",), axis_types=(auto,))
      >>> x, w1, w2 = jnp.ones((2, 4 * n, 8)), jnp.ones((8, 16 * n)), jnp.ones((16 * n, 8))
      >>> with jax.set_mesh(mesh):
      ...     jaxfused.parallel.mlp(
      ...         x, w1, None, w2, axis_name="model", sequence_parallel=True
      ...     ).shape[2:]
      (8,)

    Forward-mode differentiation and gradients of gradients are refused on a GPU.

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023,
    https://dl.acm.org/doi/10.1145/3567955.3567959; Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", 2022, https://arxiv.org/abs/2205.05198.
    """
    op = "parallel.mlp"
    placement = Placement(op, axis_name, sequence_parallel, spec)
    operands = checked(op, activation, save, x=x, w1=w1, b1=b1, w2=w2, b2=b2, residual=residual)
    x, w1, b1, w2, b2, residual = operands
    check_affine(op, x, "w1", w1, "b1", b1)
    check_second_layer(op, x, w1.shape[1], "w2", w2, "b2", b2, residual)
    options = Options.of("mlp", activation, save, x.dtype, None, precision)
    static = (options, implementation, axis_name, sequence_parallel)
    axes = (".t-", "-f", "f", "f-", "-", ".t-")
    return placement.run(_on_a_device, static, operands, axes, ".t-")


def _on_a_device(
    options: Options,
    implementation: dispatch.Implementation | None,
    axis_name: AxisName,
    sequence_parallel: bool,
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    *others: jax.Array | None,
) -> jax.Array:
    layers = mlp_operator.Layers(Runner(implementation, dispatch.current_device(x)), options)
    return perceptron(layers, axis_name, sequence_parallel, x, (w1, b1), *others)
