"""The mixture of experts of nnx and linen."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.linear import promoted
from jaxfused.ops.grouped.expert_mlp import WeightOn, expert_mlp
from jaxfused.ops.grouped.expert_parallel import expert_parallel_mlp
from jaxfused.ops.grouped.router import Routes
from jaxfused.ops.linear.linear_xla import letters_of_rows
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.serialization import exportable
from jaxfused.runtime.shapes import is_symbolic
from jaxfused.runtime.sharding import AxisName

Router = Callable[..., Routes]
"""Function of logits [..., E] and an optional `bias`, such as `jaxfused.router` with a given `k`."""


@exportable
class Routing(NamedTuple):
    """The logits and the choice of a mixture's router, for losses and statistics."""

    logits: jax.Array
    """Logits [..., E] of the router, float32."""
    weights: jax.Array
    """Weights [..., k] of each token's experts, float32."""
    indices: jax.Array
    """Indices [..., k] of each token's experts, int32."""


class Experts(NamedTuple):
    """The parameters of a mixture: those of its router and of E experts."""

    router_kernel: jax.Array
    """Kernel [D, E] of the router."""
    correction_bias: jax.Array | None
    """Bias [E] that balances the load, or None."""
    w_gate: jax.Array | None
    """Weights [E, D, F] of the gate, or None."""
    w_up: jax.Array
    """Weights [E, D, F] of the hidden layer."""
    w_down: jax.Array
    """Weights [E, F, D] of the last layer."""


def mixture(
    x: jax.Array,
    experts: Experts,
    router: Router,
    *,
    dtype: Any,
    activation: str | None,
    weight_on: WeightOn,
    capacity_factor: float | None,
    expert_axis: AxisName | None,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
) -> tuple[jax.Array, Routing]:
    """Returns the weighted sum of each token's experts, without shared ones, and their `Routing`."""
    routed, features = jnp.asarray(x), experts.router_kernel.shape[0]
    if routed.shape[-1:] != (features,):
        raise ValueError(
            f"MoE: x has shape {routed.shape}, but the router takes {features} features; pass x of shape"
            f" [..., {features}]."
        )
    wide = accumulator_dtype(routed.dtype)
    # The router's product is in full float32, because a less precise one may choose other experts.
    rows = letters_of_rows(routed)
    logits = product(
        f"{rows}D,DE->{rows}E",
        routed.astype(wide),
        experts.router_kernel.astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    weights, indices = _routes(router, logits, experts.correction_bias)
    x = promoted(routed, experts.w_gate, experts.w_up, experts.w_down, dtype=dtype)
    if expert_axis is None:
        capacity = _capacity(capacity_factor, indices, experts.w_up.shape[0])
        run = functools.partial(expert_mlp, capacity=capacity)
    else:
        run = functools.partial(
            expert_parallel_mlp, axis_name=expert_axis, capacity_factor=capacity_factor
        )
    y = run(
        x,
        weights,
        indices,
        experts.w_gate,
        experts.w_up,
        experts.w_down,
        activation=activation,
        weight_on=weight_on,
        precision=precision,
        implementation=implementation,
    )
    return y, Routing(logits, weights, indices)


def _routes(router: Router, logits: jax.Array, bias: jax.Array | None) -> Routes:
    """Returns what the router found, after checks of what it takes and returns."""
    given = {} if bias is None else {"bias": bias}
    try:
        inspect.signature(router).bind(logits, **given)
    except TypeError as error:
        raise ValueError(
            f"MoE: router is {router!r}, but it is called with logits{' and bias=' * len(given)}"
            f" ({error}); pass a function, such as functools.partial(jaxfused.router, k=2)."
        ) from None
    routes = router(logits, **given)
    shapes = [jnp.shape(array) for array in jax.tree.leaves(routes)]
    leading = logits.shape[:-1]
    if len(shapes) != 2 or len(set(shapes)) > 1 or shapes[0][:-1] != leading:
        raise ValueError(
            f"MoE: router returned arrays of shapes {shapes} for logits of shape {logits.shape}, but it"
            f" returns weights and indices of experts, both of shape {(*leading, 'k')}; return"
            " jaxfused.Routes(weights, indices)."
        )
    return Routes(*routes)


def _capacity(factor: float | None, indices: jax.Array, experts: int) -> int | None:
    if factor is None:
        return None
    if is_symbolic(indices):
        raise ValueError(
            f"MoE: capacity_factor is {factor}, but x has a symbolic number of tokens, and a capacity is"
            " a constant of the program; pass capacity_factor=None, or export for known shapes."
        )
    return max(1, math.ceil(factor * math.prod(indices.shape) / experts))


def check_mixture(
    module: str, capacity_factor: float | None, shared_features: int, gate: bool
) -> None:
    """Checks the options of a mixture."""
    if capacity_factor is not None and not 0.0 < capacity_factor < math.inf:
        raise ValueError(
            f"{module}: capacity_factor is {capacity_factor}, but it is a share of the tokens that an"
            " expert gets where all are used alike; pass a positive number, or None to drop none."
        )
    if shared_features < 0:
        raise ValueError(
            f"{module}: shared_features is {shared_features}; pass 0 for no shared expert, or its size."
        )
    if gate and not shared_features:
        raise ValueError(
            f"{module}: use_shared_gate=True was passed, but there is no shared expert; pass its"
            " shared_features."
        )


def shared_expert_of(
    y: jax.Array, x: jax.Array, shared: jax.Array, gate_kernel: jax.Array | None
) -> jax.Array:
    """Returns y + shared; `shared` is multiplied by sigmoid(x @ gate_kernel [D, 1]) if there is one."""
    wide = accumulator_dtype(y.dtype)
    shared = shared.astype(wide)
    if gate_kernel is not None:
        rows = letters_of_rows(x)
        gate = product(f"{rows}D,DE->{rows}E", x.astype(wide), gate_kernel.astype(wide))
        shared = jax.nn.sigmoid(gate) * shared
    return (y.astype(wide) + shared).astype(y.dtype)
