"""parallel.gated_mlp: the gated MLP with its hidden features split over devices."""

import jax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.linear import gated_mlp as gated_mlp_operator
from jaxfused.ops.linear.hidden_layer import Options, Save, check_second_layer
from jaxfused.parallel.perceptron import checked, perceptron
from jaxfused.parallel.placement import Placement
from jaxfused.runtime.checks import python_numbers
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName


@python_numbers
def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    axis_name: AxisName,
    sequence_parallel: bool = False,
    spec: P | None = None,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    activation: str | None = "silu",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`jaxfused.gated_mlp` with hidden features split over devices; collectives overlap its products.

    .. math::
        y = \sum_\text{devices} \bigl(\text{activation}(x w_\text{gate} + b_\text{gate})
            \odot (x w_\text{up} + b_\text{up})\bigr) w_\text{down} + b_\text{down} + \text{residual}

    Args:
      x: [..., T, D], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over `axis_name`
        all operands are a device's shards; else, under `jax.jit`, they are global arrays.
      w_gate: [D, F], split by its columns.
      w_up: [D, F], split alike. Unlike in `jaxfused.gated_mlp`, w_gate may not hold its columns too.
      w_down: [F, E], split by its rows.
      axis_name: the mesh axis that splits the hidden features, or a tuple of several.
      sequence_parallel: whether it splits the tokens of x, y and residual too.
      spec: how the axes of x before T are split outside of `jax.shard_map`.
      b_gate: [F], split as the columns are.
      b_up: [F], split alike.
      b_down: [E], replicated; added once.
      activation: of the gate; None for the bilinear form.
      residual: [..., T, E], added once.
      save: what is saved for the backward, as in `jaxfused.gated_mlp`.

    The other arguments, the result, the errors and the communication are those of `mlp`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("model",), axis_types=(auto,))
      >>> x, w, w_down = jnp.ones((2, 4, 8)), jnp.ones((8, 16 * n)), jnp.ones((16 * n, 8))
      >>> with jax.set_mesh(mesh):
      ...     jaxfused.parallel.gated_mlp(x, w, w, w_down, axis_name="model").shape
      (2, 4, 8)

    Source: that of `mlp`, and Shazeer, "GLU Variants Improve Transformer", 2020,
    https://arxiv.org/abs/2002.05202
    """
    op = "parallel.gated_mlp"
    first = dict(w_gate=w_gate, b_gate=b_gate, w_up=w_up, b_up=b_up)
    last = dict(w_down=w_down, b_down=b_down, residual=residual)
    operands = checked(op, activation, save, x=x, **first, **last)
    x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual = operands
    hidden = gated_mlp_operator.check_first_layers(op, x, w_gate, b_gate, w_up, b_up)
    check_second_layer(op, x, hidden, "w_down", w_down, "b_down", b_down, residual)
    placement = Placement(op, axis_name, sequence_parallel, spec)
    options = Options.of("gated_mlp", activation, save, x.dtype, None, precision)
    static = (options, implementation, axis_name, sequence_parallel)
    axes = (".t-", "-f", "f", "-f", "f", "f-", "-", ".t-")
    return placement.run(_on_a_device, static, operands, axes, ".t-")


def _on_a_device(
    options: Options,
    implementation: dispatch.Implementation | None,
    axis_name: AxisName,
    sequence_parallel: bool,
    x: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_up: jax.Array,
    b_up: jax.Array | None,
    *others: jax.Array | None,
) -> jax.Array:
    layers = gated_mlp_operator.Layers(Runner(implementation, dispatch.current_device(x)), options)
    weights = (w_gate, b_gate, w_up, b_up)
    return perceptron(layers, axis_name, sequence_parallel, x, weights, *others)
