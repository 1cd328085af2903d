"""expert_parallel_mlp: a mixture whose experts and tokens are split over devices."""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfused import dispatch
from jaxfused.ops.grouped.expert_mlp import (
    ExpertOptions,
    Order,
    WeightOn,
    check_experts,
    order_of,
    repeated,
    returned,
    shares_of,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_word,
    python_numbers,
)
from jaxfused.runtime.mapped import over_mesh
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.sharding import AxisName
from jaxfused.runtime.stated_gradient import stated_gradient

Method = Literal["all_gather", "all_to_all"]

_OP = "expert_parallel_mlp"


@python_numbers
def expert_parallel_mlp(
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    w_gate: jax.Array | QuantizedArray | None,
    w_up: jax.Array | QuantizedArray | None,
    w_down: jax.Array | QuantizedArray,
    *,
    axis_name: AxisName,
    spec: P | None = None,
    method: Method | None = None,
    capacity_factor: float | None = None,
    activation: str | None = "silu",
    weight_on: WeightOn = "output",
    transpose_weights: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`expert_mlp` of experts and tokens that are split over the devices of a mesh axis.

    .. math::
        y_t = \sum_j w_{tj} \bigl(\text{activation}(x_t G_{e}) \odot (x_t U_{e})\bigr) D_{e},
        \quad e = \text{indices}_{tj}

    Device i of n has the i-th part of the tokens and of the experts. Results and gradients are those of
    one device up to rounding, and repeat bit for bit. How tokens reach the experts, for T tokens of D
    numbers on a device, each with k choices:

    - "all_gather": each device gets all n T tokens, and returns its experts' sums in float32 by a
      reduce-scatter. No token is dropped.
    - "all_to_all": each device sends every other one the rows that chose its experts, and gets their
      results back: C rows in each direction, C = ceil(capacity_factor T k / n). Rows beyond C, in the
      order of the experts, add nothing. Without `capacity_factor` C is T k, and none is dropped.

    Args:
      x: [..., D], float32, bfloat16 or float16. Within `jax.shard_map` or `jax.pmap` over `axis_name` a
        device's own tokens; else, under `jax.jit`, all tokens.
      weights: [..., k], of each token's experts, as `jaxfused.router` returns them.
      indices: [..., k], integers: those experts, among all devices'. An index below 0 or from E on is
        no expert.
      w_gate: [E, D, F], of a device's own experts within `jax.shard_map`; the forms of `expert_mlp`, of
        floats.
      w_up: [E, D, F].
      w_down: [E, F, D].
      axis_name: the mesh axis that splits tokens and experts, or a tuple of several; under `jax.jit`
        of Auto or Explicit axes.
      spec: how the axes of x before D are split outside of `jax.shard_map`, as P("data"), where axes of
        the mesh are Auto. Types with Explicit axes state it themselves. `axis_name` splits the first
        axis too, unless it is in `spec`.
      method: None for "all_to_all" with a `capacity_factor`, else "all_gather".
      capacity_factor: C relative to the T k / n rows that equal use of all experts would send.
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      weight_on: as in `expert_mlp`.
      transpose_weights: as in `expert_mlp`.
      precision: of the products, as in `jax.lax.dot`.
      implementation: of `ragged_mlp`.

    Returns:
      y, [..., D], of x's dtype, split as x is.

    Raises:
      ValueError: shapes, dtypes, the axis or options do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> n, auto = jax.device_count(), jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((n,), ("expert",), axis_types=(auto,))
      >>> x, up, down = jnp.ones((4 * n, 8)), jnp.ones((n, 8, 16)), jnp.ones((n, 16, 8))
      >>> routes = jaxfused.router(jnp.zeros((4 * n, n)), 1)
      >>> with jax.set_mesh(mesh):
      ...     y = jaxfused.expert_parallel_mlp(x, *routes, up, up, down, axis_name="expert")
      >>> y.shape == x.shape
      True

    Source: Lepikhin et al., "GShard", 2020, https://arxiv.org/abs/2006.16668
    """
    given: dict[str, Any] = dict(w_gate=w_gate, w_up=w_up, w_down=w_down)
    for name, w in given.items():
        if isinstance(w, QuantizedArray):
            raise ValueError(
                f"{_OP}: {name} is a QuantizedArray of shape {w.shape}, but devices share experts of"
                f" floats only; pass {name}.dequantize(), or call jaxfused.expert_mlp, which takes"
                " quantised experts where each device has all of them."
            )
    x, weights, indices = as_arrays(x, weights, indices)
    gate, up, down = as_arrays(*given.values())
    check_floating(_OP, dict(w_gate=gate, w_up=up, w_down=down))
    check_experts(_OP, x, weights, indices, gate, up, down, transpose_weights)
    check_activation(_OP, activation)
    check_word(_OP, "weight_on", weight_on, WeightOn)
    if method is not None:
        check_word(_OP, "method", method, Method)
    if capacity_factor is not None and not 0.0 < capacity_factor < math.inf:
        raise ValueError(
            f"{_OP}: capacity_factor is {capacity_factor}; pass a positive number, or None to drop none."
        )
    if capacity_factor is not None and method == "all_gather":
        raise ValueError(
            f"{_OP}: capacity_factor was passed with method='all_gather', which drops no token; pass"
            " method='all_to_all'."
        )
    missing = {"cuda": f"there is no CUDA kernel of {_OP} yet"}
    dispatch.choose(_OP, implementation, {**missing, "pallas": None, "xla": None})
    if method is None:
        method = "all_gather" if capacity_factor is None else "all_to_all"
    options = ExpertOptions(activation, weight_on, transpose_weights, precision, implementation)
    static = (options, method, capacity_factor, axis_name)
    operands = (x, weights, indices, (gate, up, down))
    mesh = sharding.mesh_to_map(_OP, axis_name, x)
    if mesh is None:
        return _on_a_device(*static, *operands)
    rows, experts = _rows_spec(axis_name, spec, mesh, x), P(axis_name)
    sharding.check_split(_OP, "w_down", down.shape, experts, mesh)
    specs = (rows, rows, rows, jax.tree.map(lambda _: experts, operands[3]))
    return over_mesh(_on_a_device, static, operands, mesh=mesh, in_specs=specs, out_specs=rows)


def _rows_spec(axis_name: AxisName, spec: P | None, mesh: Any, x: jax.Array) -> P:
    """Returns the tokens' PartitionSpec: `axis_name` splits the first axis unless it splits another."""
    if x.ndim < 2:
        raise ValueError(
            f"{_OP}: x has shape {x.shape}, which is one token; pass x of shape [..., features] with an"
            f" axis that {axis_name!r} splits."
        )
    given = jax.typeof(x).sharding.spec if mesh.explicit_axes else spec or P()
    first, *others = (*given, *(None,) * x.ndim)[: x.ndim - 1]
    there = {name for entry in (first, *others) for name in sharding.names_of(entry)}
    missing = [name for name in sharding.names_of(axis_name) if name not in there]
    rows = P((*sharding.names_of(first), *missing), *others)
    sharding.check_split(_OP, "x", x.shape, rows, mesh)
    return rows


def _on_a_device(
    options: ExpertOptions,
    method: Method,
    capacity_factor: float | None,
    axis_name: AxisName,
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    experts: tuple[jax.Array | None, jax.Array | None, jax.Array],
) -> jax.Array:
    """Returns the results of a device's own tokens."""
    if 0 in (*x.shape, *experts[2].shape, indices.shape[-1]):
        return jnp.zeros_like(x)
    k = indices.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = (a.reshape(rows.shape[0], k) for a in (weights, indices))
    chosen = _as_int32(chosen)
    if method == "all_gather":
        y = _all_gather(options, axis_name, rows, shares, chosen, experts)
    else:
        y = _all_to_all(options, capacity_factor, axis_name, rows, shares, chosen, experts)
    return y.astype(x.dtype).reshape(x.shape)


def _as_int32(indices: jax.Array) -> jax.Array:
    """Returns indices as int32; larger ones are clipped to -1 or 2^31 - 1, which are no experts."""
    return (
        jnp.clip(indices, -1, 2**31 - 1).astype(jnp.int32)
        if indices.dtype.itemsize > 4
        else (indices.astype(jnp.int32))
    )


def _all_gather(options, axis_name, x, weights, indices, experts) -> jax.Array:
    first = lax.axis_index(axis_name) * experts[2].shape[0]
    gathered = (lax.all_gather(a, axis_name, tiled=True) for a in (x, weights, indices))
    all_x, all_weights, all_indices = gathered
    y = options.sums(all_x, all_weights, all_indices - first, experts)
    return lax.psum_scatter(y, axis_name, tiled=True)


# --- rows that are sent to their experts' devices -------------------------------------------------


class _Slots(NamedTuple):
    """Map between rows, sorted by expert, and the slots of the buffers sent to all devices."""

    row: jax.Array
    """Index of each slot's row; for an empty slot the number of rows, out of range."""
    slot: jax.Array
    """Index of each row's slot; for a row without one the number of slots, out of range."""


@functools.partial(stated_gradient, linear=(0,))
def _picked(rows: jax.Array, places: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns rows[places], with zeros where a place is out of range.

    `inverse` is the inverse map, by which the gradient gathers the rows of dy.
    """
    del inverse
    return jnp.take(rows, places, axis=0, mode="fill", fill_value=0)


_picked.defvjp(
    lambda rows, places, inverse: (_picked(rows, places, inverse), (places, inverse)),
    lambda saved, dy: (_picked(dy, saved[1], saved[0]), None, None),
)


def _all_to_all(options, capacity_factor, axis_name, x, weights, indices, experts) -> jax.Array:
    tokens, k = indices.shape
    devices, own = lax.axis_size(axis_name), experts[2].shape[0]
    room = tokens * k
    if capacity_factor is not None:
        room = min(room, max(1, math.ceil(capacity_factor * room / devices)))
    shares = shares_of(weights, indices, devices * own, x.dtype)
    order = order_of(indices, devices * own)
    slots, counts = _slots_of(order, devices, room)
    rows = repeated(k, x, order)
    if options.weight_on == "input":
        by_place = _picked(shares.T.reshape(-1, 1), order.choice, order.place)
        rows = (rows * by_place).astype(x.dtype)

    def exchange(array: jax.Array) -> jax.Array:
        return lax.all_to_all(array, axis_name, 0, 0, tiled=True)

    received = exchange(_picked(rows, slots.row, slots.slot))
    # Each sender's rows are sorted by this device's experts; the rest of its buffer is padding.
    ends = jnp.cumsum(exchange(counts).reshape(devices, own), axis=1, dtype=jnp.int32)
    place = jnp.arange(room, dtype=jnp.int32)
    expert = jnp.sum(place[None, :, None] >= ends[:, None], axis=-1, dtype=jnp.int32).reshape(-1, 1)
    regrouped = order_of(expert, own)
    results = options.perceptrons(repeated(1, received, regrouped), experts, regrouped.sizes)
    back = exchange(returned(results, regrouped))
    results = returned(_picked(back, slots.slot, slots.row), order)
    return options.sum_of_choices(results, shares)


def _slots_of(order: Order, devices: int, room: int) -> tuple[_Slots, jax.Array]:
    """Returns the slots of the rows, and the number of rows of each expert with a slot, [E]."""
    rows = order.choice.shape[0]
    by_device = order.sizes.reshape(devices, -1)
    of_device = jnp.sum(by_device, axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(of_device, dtype=jnp.int32) - of_device
    place = jnp.arange(room, dtype=jnp.int32)
    has_row = place[None] < jnp.minimum(of_device, room)[:, None]
    row = jnp.where(has_row, starts[:, None] + place[None], rows).reshape(-1)
    index = jnp.arange(rows, dtype=jnp.int32)
    ends = starts + of_device
    device = jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    within = index - starts[jnp.minimum(device, devices - 1)]
    has_slot = (device < devices) & (within < room)
    slot = jnp.where(has_slot, device * room + within, devices * room)
    kept = jnp.diff(
        jnp.minimum(jnp.cumsum(by_device, axis=1, dtype=jnp.int32), room), axis=1, prepend=0
    )
    return _Slots(row.astype(jnp.int32), slot.astype(jnp.int32)), kept.reshape(-1).astype(jnp.int32)
