"""Magnitude pruning: the parameters of the smallest magnitude become zero, and stay zero."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfused.optim.moving_leaves import flatten
from jaxfused.optim.options import checked_options
from jaxfused.runtime.checks import check_count


class PruningState(NamedTuple):
    """State of `magnitude_pruning`."""

    step: jax.Array
    """Number of steps taken, int32."""
    kept: Any
    """Bools for each pruned parameter, true where an element is not pruned; None for others."""


@checked_options
def magnitude_pruning(
    sparsity: optax.ScalarOrSchedule,
    *,
    every: int = 100,
    block_size: int = 1,
    mask: Any = None,
) -> optax.GradientTransformation:
    r"""Magnitude pruning: the smallest parameters become zero, more of them by a schedule.

    .. math:: u \leftarrow \begin{cases} u & \text{where kept} \\ -p & \text{elsewhere} \end{cases}

    It comes last in an `optax.chain`, since p + u is then the new parameter. Every `every` steps the
    elements to keep are chosen anew, by the magnitudes of the new parameters; in between, pruned
    elements stay 0. In each parameter floor(sparsity * count) of its elements (or blocks) are pruned;
    among equal ones those that come first.

    Args:
      sparsity: the fraction that is pruned, a constant or a schedule (step count -> value), such as
        `optax.polynomial_schedule(0.0, 0.9, power=3, transition_steps=10_000)`, the cubic one.
      every: steps from one choice to the next. The first step chooses.
      block_size: prunes square blocks of so many rows and columns of the last two axes, by the sums of
        their squares, for `jaxfused.BlockSparse.from_dense`; parameters that it does not divide are left
        alone. 1 prunes single numbers.
      mask: which parameters are pruned: a tree of booleans like the parameters or a prefix of them, or a
        function from such a tree to one. None for those of two and more axes.

    Returns:
      An `optax.GradientTransformation`, whose `update` needs params.

    Raises:
      ValueError: an option is out of its range, or `update` is called without params.

    Example:
      >>> import jax.numpy as jnp, jaxfused, optax
      >>> opt = optax.chain(optax.sgd(0.5), jaxfused.optim.magnitude_pruning(0.5))
      >>> params = {"w": jnp.array([[1.0, -3.0], [2.0, 0.5]]), "b": jnp.array([0.1])}
      >>> gradients = {"w": jnp.zeros((2, 2)), "b": jnp.ones(1)}
      >>> updates, state = opt.update(gradients, opt.init(params), params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([[ 0., -3.],
             [ 2.,  0.]], dtype=float32)

    Source: Zhu, Gupta, "To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model
    Compression", 2017, https://arxiv.org/abs/1710.01878
    """
    op = "magnitude_pruning"
    check_count(op, "every", every)
    check_count(op, "block_size", block_size)
    is_known = not callable(sparsity) and not isinstance(sparsity, jax.core.Tracer)
    if is_known and not 0 <= float(sparsity) <= 1:
        raise ValueError(
            f"{op}: sparsity is {sparsity}, but it is a fraction; pass a number from 0 to 1, or a"
            " schedule."
        )

    def is_pruned(params: Any) -> Any:
        if mask is None:
            chosen = jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)
        else:
            tree = mask(params) if callable(mask) else mask
            chosen = jax.tree.map(
                lambda flag, below: jax.tree.map(lambda _: bool(flag), below), tree, params
            )
        return jax.tree.map(lambda flag, p: flag and _is_divided(p, block_size), chosen, params)

    def init(params: Any) -> PruningState:
        kept = jax.tree.map(
            lambda flag, p: jnp.ones(_grid(p, block_size), jnp.bool_) if flag else None,
            is_pruned(params),
            params,
        )
        return PruningState(jnp.zeros((), jnp.int32), kept)

    def update(updates: Any, state: PruningState, params: Any = None) -> tuple[Any, PruningState]:
        if params is None:
            raise ValueError(
                f"{op}: update was called without params, but the new parameters are pruned; pass"
                " params."
            )
        fraction = sparsity(state.step) if callable(sparsity) else sparsity
        due = state.step % every == 0

        def of_leaf(u: Any, p: Any, kept: Any) -> tuple[Any, Any]:
            if u is None or kept is None:
                return u, kept
            accurate = jnp.promote_types(jnp.result_type(u, p), jnp.float32)
            new = p.astype(accurate) + u.astype(accurate)
            kept = jax.lax.cond(
                due,
                lambda: _largest(_sizes(new, block_size), fraction),
                lambda: kept,
            )
            whole = _whole(kept, p.shape, block_size)
            # The wider of the two dtypes holds -p exactly, so that p plus its update is exactly 0.
            wide = jnp.result_type(u, p)
            return jnp.where(whole, u.astype(wide), -p.astype(wide)), kept

        leaves, treedef = flatten(updates)
        trees = (treedef.flatten_up_to(tree) for tree in (params, state.kept))
        pairs = [of_leaf(*row) for row in zip(leaves, *trees, strict=True)]
        new_updates, kept = (treedef.unflatten([pair[i] for pair in pairs]) for i in range(2))
        return new_updates, PruningState(optax.safe_increment(state.step), kept)

    return optax.GradientTransformation(init, update)


def _is_divided(p: Any, block_size: int) -> bool:
    if block_size == 1:
        return True
    return jnp.ndim(p) >= 2 and all(size % block_size == 0 for size in jnp.shape(p)[-2:])


def _grid(p: Any, block_size: int) -> tuple[int, ...]:
    """Returns the number of units (elements, or blocks to be pruned together) along each axis of p."""
    if block_size == 1:
        return jnp.shape(p)
    *batch, rows, columns = jnp.shape(p)
    return (*batch, rows // block_size, columns // block_size)


def _sizes(p: jax.Array, block_size: int) -> jax.Array:
    if block_size == 1:
        return jnp.abs(p)
    *batch, down, across = _grid(p, block_size)
    blocks = jnp.abs(p).reshape(*batch, down, block_size, across, block_size)
    return jnp.sum(jnp.square(blocks), axis=(-3, -1))


def _largest(sizes: jax.Array, fraction: Any) -> jax.Array:
    """Returns bools in the shape of `sizes`, false for the floor(fraction * count) smallest entries."""
    count = math.prod(sizes.shape)
    # Without 1e-3, a product that should be an integer, such as 0.7 * 10, may round to just below
    # that integer, and `floor` would return one less.
    pruned = jnp.floor(jnp.asarray(fraction, jnp.float32) * count + 1e-3).astype(jnp.int32)
    order = jnp.argsort(sizes.reshape(-1), stable=True)
    rank = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32))
    return (rank >= pruned).reshape(sizes.shape)


def _whole(kept: jax.Array, shape: tuple[int, ...], block_size: int) -> jax.Array:
    """Repeats bools of elements or blocks to `shape`, the parameter's: one bool for each element."""
    if block_size == 1:
        return kept
    repeated = jnp.repeat(jnp.repeat(kept, block_size, axis=-2), block_size, axis=-1)
    return repeated.reshape(shape)
