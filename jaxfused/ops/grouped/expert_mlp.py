"""The experts of a mixture: rows in the order of their experts, grouped products, weighted sums."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.ops.grouped.ragged_mlp import check_perceptrons, ragged_mlp
from jaxfused.ops.grouped.ragged_quantized import checked_weights
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    check_word,
    python_numbers,
)
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.stated_gradient import stated_gradient

WeightOn = Literal["output", "input"]


@python_numbers
def expert_mlp(
    x: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    w_gate: jax.Array | QuantizedArray | None,
    w_up: jax.Array | QuantizedArray | None,
    w_down: jax.Array | QuantizedArray,
    *,
    activation: str | None = "silu",
    weight_on: WeightOn = "output",
    capacity: int | None = None,
    transpose_weights: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The perceptrons of a mixture of experts, each for the tokens that chose it.

    .. math::
        y_t = \sum_j w_{tj} \bigl(\text{activation}(x_t G_{e}) \odot (x_t U_{e})\bigr) D_{e},
        \quad e = \text{indices}_{tj}

    Rows are put in the order of their experts, go through `jaxfused.ragged_mlp`, and each token's
    results are added in float32. No token is dropped unless `capacity` says so, and results repeat bit
    for bit.

    Args:
      x: [..., D], float32, bfloat16 or float16.
      weights: [..., k], of each token's experts, as `jaxfused.router` returns them.
      indices: [..., k], integers: those experts. An index below 0 or from E on stands for no expert.
      w_gate: [E, D, F]; or [E, D, 2 F] with `w_up=None`: the gate's columns, then those of w_up; or
        None for experts without a gate: activation(x U) D.
      w_up: [E, D, F], or None where w_gate holds both.
      w_down: [E, F, D].
      activation: None or a name of `jaxfused.ACTIVATIONS`, of the gate.
      weight_on: whether the weights multiply the experts' "output", or their "input" as in Llama 4.
      capacity: largest number of tokens of an expert: first choices before second ones, then earlier
        tokens before later ones. Choices beyond it add nothing. None for no limit.
      transpose_weights: whether w_gate and w_up are [E, F, D] (or [E, 2 F, D]) and w_down is [E, D, F],
        as in most checkpoints. Weights may be quantised without it, as in `ragged_mlp`.
      precision: of the products, as in `jax.lax.dot`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [..., D], of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> x = jnp.ones((5, 8))
      >>> routes = jaxfused.router(jnp.zeros((5, 4)), 2, normalise="sum")
      >>> up, down = jnp.ones((4, 8, 16)), jnp.ones((4, 16, 8))
      >>> jaxfused.expert_mlp(x, *routes, up, up, down).shape
      (5, 8)

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
    Layer", 2017, https://arxiv.org/abs/1701.06538
    """
    op = "expert_mlp"
    x, weights, indices = as_arrays(x, weights, indices)
    w_gate, w_up, w_down = checked_weights(
        op, transpose_weights, w_gate=w_gate, w_up=w_up, w_down=w_down
    )
    check_experts(op, x, weights, indices, w_gate, w_up, w_down, transpose_weights)
    check_activation(op, activation)
    check_word(op, "weight_on", weight_on, WeightOn)
    if capacity is not None and capacity < 1:
        raise ValueError(f"{op}: capacity is {capacity}; pass at least 1, or None to drop nothing.")
    missing = {"cuda": f"there is no CUDA kernel of {op} yet"}
    dispatch.choose(op, implementation, {**missing, "pallas": None, "xla": None})
    if 0 in (*x.shape, *w_down.shape, indices.shape[-1]):
        return jnp.zeros_like(x)
    options = ExpertOptions(activation, weight_on, transpose_weights, precision, implementation)
    experts = (w_gate, w_up, w_down)
    if capacity is not None:  # An expert's tokens are counted over all devices.
        x, weights, indices = resharding.whole(x, weights, indices)
    leading = sharding.leading_axes(x.ndim - 1)
    return sharding.by_shards_of_rows(
        functools.partial(_of_tokens, options, capacity),
        (x, weights, indices),
        experts,
        axes=(leading + "d", leading + "k", leading + "k"),
        result_axes=leading + "d",
    )


def _of_tokens(options: "ExpertOptions", capacity, experts, x, weights, indices) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    by_row = (rows.shape[0], indices.shape[-1])
    y = options.sums(rows, weights.reshape(by_row), indices.reshape(by_row), experts, capacity)
    return y.astype(x.dtype).reshape(x.shape)


@dataclass(frozen=True)
class ExpertOptions:
    """Static arguments of the experts' perceptrons and of their weighted sum."""

    activation: str | None
    weight_on: WeightOn
    transpose_weights: bool
    precision: Any
    implementation: dispatch.Implementation | None

    def sums(
        self,
        x: jax.Array,
        weights: jax.Array,
        indices: jax.Array,
        experts: tuple[jax.Array | None, jax.Array | None, jax.Array],
        capacity: int | None = None,
    ) -> jax.Array:
        """Returns each token's weighted sum of its k experts' results, float32 [T, D], for x [T, D]."""
        k = indices.shape[1]
        order = order_of(indices, experts[2].shape[0], capacity)
        shares = shares_of(weights, indices, experts[2].shape[0], x.dtype)
        of_experts = repeated(k, x, order)
        if self.weight_on == "input":
            # Weights as a column [k T, 1], permuted like rows into the order of the experts.
            by_choice = shares.T.reshape(-1, 1)
            of_experts = (of_experts * _permuted(by_choice, order)).astype(x.dtype)
        results = self.perceptrons(of_experts, experts, order.sizes)
        return self.sum_of_choices(returned(results, order), shares)

    def perceptrons(self, rows: jax.Array, experts: Any, sizes: jax.Array) -> jax.Array:
        """Returns the results of rows [M, D] sorted by expert, of which expert e has sizes[e]."""
        w_gate, w_up, w_down = experts
        return ragged_mlp(
            rows,
            w_gate,
            w_up,
            w_down,
            sizes,
            activation=self.activation,
            transpose_weights=self.transpose_weights,
            precision=self.precision,
            implementation=self.implementation,
        )

    def sum_of_choices(self, results: jax.Array, shares: jax.Array) -> jax.Array:
        """Returns each token's sum, float32 [T, D], over the results [k T, D] of its k choices."""
        tokens, k = shares.shape
        wide = results.reshape(k, tokens, results.shape[1]).astype(shares.dtype)
        if self.weight_on == "output":
            wide = wide * shares.T[..., None]
        return jnp.sum(wide, axis=0)


def shares_of(weights: jax.Array, indices: jax.Array, experts: int, dtype: Any) -> jax.Array:
    """Returns the weights [T, k] in which results of `dtype` are summed; those of no expert are 0."""
    return jnp.where(_are_experts(indices, experts), weights.astype(accumulator_dtype(dtype)), 0)


def check_experts(op, x, weights, indices, w_gate, w_up, w_down, transposed) -> None:
    """Checks the dtypes and shapes of tokens, their experts' indices and weights, and the experts."""
    check_floating(op, dict(x=x, weights=weights))
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape (); pass x of shape [..., features].")
    check_perceptrons(op, x, w_gate, w_up, w_down, transposed)
    features = x.shape[-1]
    if w_down.shape[1 if transposed else 2] != features:
        raise ValueError(
            f"{op}: w_down has shape {w_down.shape}, but x has {features} features; pass w_down with as"
            " many results."
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer) or indices.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: indices have shape {indices.shape} and dtype {indices.dtype}, but x has shape"
            f" {x.shape}; pass integers of shape {(*x.shape[:-1], 'k')}."
        )
    check_shape(op, "weights", weights, indices.shape, f"indices have shape {indices.shape}")


# --- the order of rows ----------------------------------------------------------------------------


class Order(NamedTuple):
    """Permutation that sorts the k T choices by expert.

    Each of T tokens has k choices. Unsorted, choice j of token t has index j T + t.
    """

    choice: jax.Array
    """Index of the choice at each position of the sorted order, [k T]."""
    place: jax.Array
    """Position of each choice in the sorted order, [k T]: the inverse permutation."""
    sizes: jax.Array
    """Number of choices of each expert, [E]; choices of no expert, or beyond a capacity, come last."""


def _are_experts(indices: jax.Array, experts: int) -> jax.Array:
    """Returns whether indices are those of experts, whose number their dtype may be too narrow for."""
    indices = indices.astype(np.promote_types(indices.dtype, np.int32))
    return (indices >= 0) & (indices < experts)


def order_of(indices: jax.Array, experts: int, capacity: int | None = None) -> Order:
    """Returns the `Order` that sorts choices [T, k] by expert; those beyond `capacity` come last."""
    chosen = indices.T.reshape(-1)
    chosen = jnp.where(_are_experts(chosen, experts), chosen.astype(jnp.int32), experts)
    choice = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=experts + 1)[:experts].astype(jnp.int32)
    if capacity is not None:
        ordered = chosen[choice]
        starts = jnp.cumsum(sizes) - sizes
        rank = jnp.arange(chosen.shape[0]) - starts[jnp.minimum(ordered, experts - 1)]
        last = jnp.argsort(jnp.where(rank < capacity, ordered, experts), stable=True)
        choice, sizes = choice[last], jnp.minimum(sizes, capacity)
    place = jnp.argsort(choice)
    return Order(choice.astype(jnp.int32), place.astype(jnp.int32), sizes)


# The gradients are gathers, because the gradient of an indexing is a scatter-add, whose order of
# additions varies on a GPU.


@functools.partial(stated_gradient, nondiff_argnums=(0,), linear=(1,))
def repeated(k: int, x: jax.Array, order: Order) -> jax.Array:
    """Returns the row of x [T, D] for each choice, sorted by expert: [k T, D]."""
    return x[order.choice % x.shape[0]]


def _repeated_bwd(k: int, order: Order, dy: jax.Array):
    by_choice = dy[order.place].reshape(k, dy.shape[0] // k, dy.shape[1])
    return jnp.sum(by_choice.astype(accumulator_dtype(dy.dtype)), axis=0).astype(dy.dtype), None


repeated.defvjp(lambda k, x, order: (repeated(k, x, order), order), _repeated_bwd)


@functools.partial(stated_gradient, linear=(0,))
def _permuted(rows: jax.Array, order: Order) -> jax.Array:
    """Returns rows [k T, D], one for each choice, sorted by expert."""
    return rows[order.choice]


_permuted.defvjp(
    lambda rows, order: (_permuted(rows, order), order),
    lambda order, dy: (dy[order.place], None),
)


@functools.partial(stated_gradient, linear=(0,))
def returned(rows: jax.Array, order: Order) -> jax.Array:
    """Returns rows [k T, D], sorted by expert, in the original order of the choices."""
    return rows[order.place]


returned.defvjp(
    lambda rows, order: (returned(rows, order), order),
    lambda order, dy: (dy[order.choice], None),
)
