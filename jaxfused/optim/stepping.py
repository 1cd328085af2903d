"""One step in place, as one function: an optimizer's update and the work before and after it.

Before the update come unscaling, the test for NaN and Inf, and clipping. After the update, the
parameters, their average and their low-precision copy are written, and the loss scale changes.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import get_opaque_trace_state

from jaxfused import dispatch
from jaxfused.ops.optimizer import optimizer_step
from jaxfused.optim import eight_bit
from jaxfused.optim import ema as averages
from jaxfused.optim.moving_leaves import flatten, of_moving_leaves
from jaxfused.runtime import stochastic_rounding
from jaxfused.runtime.checks import as_flag, python_numbers, said
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.reference_rules import with_reference_rules
from jaxfused.runtime.serialization import serializable

if TYPE_CHECKING:
    from jaxfused.optim.transformation import FusedTransformation, Hyperparameters, Leaves

_NUMBERS = (int, float, np.number, np.ndarray)

LARGEST_LOSS_SCALE = 2.0**127  # The doubled scale would be infinite in float32.


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class StepState:
    """The state of `step` next to the parameters, from step to step; made by `init_step`.

    The state is a pytree, so it goes through jit, scan, sharding and checkpoints. Fields that are not
    used are None.
    """

    optimizer: optax.OptState
    """Optax's state, which `optax.adamw(...).update` accepts unchanged."""
    ema: Any
    """Average of the parameters, in float32 or a wider dtype."""
    compute: Any
    """Copy of the parameters in the compute dtype."""
    loss_scale: jax.Array | None
    """Factor of the loss, a float32 scalar."""
    good_steps: jax.Array | None
    """Number of finite steps since the loss scale last changed, int32."""
    skipped: jax.Array
    """Number of steps skipped so far because a gradient was not finite, int32."""
    rounding: jax.Array | None
    """Seed of stochastic rounding and number of the next step, uint32 [2]."""
    ema_decay: averages.Decay | None = field(metadata={"static": True})
    growth_interval: int = field(metadata={"static": True})


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CountingStepState(StepState):
    """A `StepState` whose average has a decay that depends on how often it has been updated."""

    ema_updates: jax.Array
    """Number of updates of the average so far, int32."""


@python_numbers
def init_step(
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    ema_decay: averages.Decay | None,
    compute_dtype: Any,
    loss_scale: float | None,
    growth_interval: int,
    rounding_seed: int | None,
) -> StepState:
    """Implements `FusedTransformation.init_step`, which documents the arguments."""
    if ema_decay is not None:
        averages.check("init_step: ema_decay", ema_decay)
    if loss_scale is not None and not 1 <= loss_scale <= LARGEST_LOSS_SCALE:
        raise ValueError(
            f"init_step: loss_scale is {loss_scale}, but it must be from 1 to 2**127;"
            " pass 2.0**15, or None for no scaling."
        )
    if rounding_seed is not None and not 0 <= rounding_seed < 2**32:
        raise ValueError(
            f"init_step: rounding_seed is {rounding_seed}, but it must be from 0 to 2**32 - 1;"
            " pass 0, or None to round to the nearest."
        )
    if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
        raise ValueError(
            f"init_step: compute_dtype is {jnp.dtype(compute_dtype)}, but a copy of the parameters is of"
            " floats; pass jnp.bfloat16, or None for no copy."
        )
    if growth_interval < 1:
        raise ValueError(
            f"init_step: growth_interval is {growth_interval}, but the loss scale can only grow"
            " after one good step or more; pass 2000."
        )

    # The arrays are copied even where the dtype stays the same: `step` donates params and state,
    # and one buffer cannot be donated twice.
    def copy(dtype_of):
        return jax.tree.map(lambda p: jnp.array(p, dtype_of(p), copy=True), params)

    make: Callable[..., StepState] = StepState
    if callable(ema_decay):
        make = functools.partial(CountingStepState, ema_updates=jnp.zeros([], jnp.int32))
    return make(
        optimizer=tx.init(params),
        ema=None if ema_decay is None else copy(lambda p: accumulator_dtype(jnp.result_type(p))),
        compute=None if compute_dtype is None else copy(lambda p: compute_dtype),
        loss_scale=None if loss_scale is None else jnp.array(loss_scale, jnp.float32),
        good_steps=None if loss_scale is None else jnp.zeros([], jnp.int32),
        skipped=jnp.zeros([], jnp.int32),
        rounding=None if rounding_seed is None else jnp.array([rounding_seed, 0], jnp.uint32),
        ema_decay=ema_decay,
        growth_interval=growth_interval,
    )


def step(
    tx: "FusedTransformation",
    grads: optax.Updates,
    state: Any,
    params: optax.Params,
    *,
    max_norm: float | jax.Array | None,
    skip_nonfinite: bool,
    implementation: str | None,
) -> tuple[optax.Params, Any]:
    """Implements `FusedTransformation.step`, which documents the arguments."""
    is_array = isinstance(max_norm, jax.Array) and not max_norm.ndim
    is_number = isinstance(max_norm, _NUMBERS) and not isinstance(max_norm, bool)
    if not (
        max_norm is None or is_array or (is_number and np.ndim(max_norm) == 0 and max_norm > 0)
    ):
        raise ValueError(
            f"step: max_norm is {said(max_norm)}, but gradients can only be clipped to a positive norm;"
            " pass 1.0, or None for no clipping."
        )
    skip_nonfinite = as_flag("step", "skip_nonfinite", skip_nonfinite, words=(), optional=False)
    why = _why(tx, grads, state, params)
    chosen = dispatch.choose("step", implementation, why)
    step = _keeping_step
    if is_outside_of_traces():
        step = _donating_step
        check_donated(grads, (params, state))
    return step(tx, grads, params, state, max_norm, skip_nonfinite, chosen, _Reasons(why))


def _why(
    tx: "FusedTransformation", grads: optax.Updates, state: Any, params: optax.Params
) -> dict[str, str | None]:
    """Returns why each implementation cannot take a step of this tree."""
    kept = (state.optimizer, state.ema, state.compute) if isinstance(state, StepState) else state
    leaves = jax.tree.leaves((grads, params, kept), is_leaf=eight_bit.is_coded)
    arrays = [leaf for leaf in leaves if not eight_bit.is_coded(leaf)]
    # Counts of steps and schedules are left out: no kernel reads them, so their dtype is
    # irrelevant.
    dtypes = [
        jnp.result_type(array)
        for array in arrays
        if jnp.ndim(array) > 0 or not jnp.issubdtype(jnp.result_type(array), jnp.integer)
    ]
    why = optimizer_step.reasons(dispatch.current_device(*arrays), dtypes)
    if tx.recipe is None and tx.kernel_update is None:
        why["cuda"] = "the formula of this transformation is not in the kernels"
    return why


@dataclass(frozen=True)
class _Reasons:
    """Why each implementation cannot run. All instances are equal, so that none causes a retrace."""

    why: dict[str, str | None] = field(compare=False)


class _Numbers(NamedTuple):
    """Inputs of one step that are neither gradients nor state.

    They include the values that an optimizer closes over: as arguments, JAX can differentiate and map a
    step with respect to them.
    """

    max_norm: Any
    average_decay: Any
    hyper: "Hyperparameters | None"
    """Hyperparameters at this step; None for a transformation without a recipe."""


def _step(tx, grads, params, state, max_norm, skip_nonfinite, implementation, reasons):
    kept = state if isinstance(state, StepState) else None
    opt_state = state if kept is None else kept.optimizer
    _check_state(tx, opt_state, params)
    _check_gradients(grads, params)
    # The step promotes dtypes on purpose, also where the user has made JAX refuse promotions.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        numbers = _Numbers(
            max_norm,
            None if kept is None else _average_decay(kept),
            None if tx.recipe is None else tx.recipe.hyperparameters(opt_state),
        )
        if implementation == "cuda" and tx.recipe is None:
            # The kernels of `kernel_update` have rules for `jax.vmap` and differentiation of their
            # own.
            update = functools.partial(tx.kernel_update, max_norm=max_norm, why=reasons.why)
            return _by_update(tx, skip_nonfinite, grads, state, params, numbers, update)
        if implementation == "cuda":
            return _with_rules(
                functools.partial(_by_kernels, tx, skip_nonfinite, reasons.why),
                functools.partial(_by_update, tx, skip_nonfinite),
            )(grads, state, params, numbers)
        if tx.recipe is not None:
            leaves = [optimizer_step.Leaf(None, p) for p in jax.tree.leaves(params)]
            rule = tx.recipe.make_rule(*tx.recipe.constants).kernel
            optimizer_step.record(rule.stage, leaves, implementation, reasons.why)
        return _by_update(tx, skip_nonfinite, grads, state, params, numbers)


_STATIC = ("tx", "skip_nonfinite", "implementation", "reasons")
# Parameters and state come in the same order in arguments and results: JAX assigns donated buffers
# to results of the same shape in order, and XLA must copy where a result gets another array's
# buffer.
_donating_step = jax.jit(
    _step,
    static_argnames=_STATIC,
    donate_argnames=("state", "params"),
    keep_unused=True,  # The old compute copy is unread, but its buffer is reused.
)
# This jitted step donates nothing: if JAX differentiates it outside of jit, the backward reads the
# arrays that the forward read.
_keeping_step = jax.jit(_step, static_argnames=_STATIC)


def _state_without_a_trace() -> Any:
    """Returns JAX's trace state where nothing is traced, differentiated or mapped."""
    # The state is read in a new thread, which has no trace: this module may be imported during one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get_opaque_trace_state).result()


_NO_TRACE = _state_without_a_trace()


def is_outside_of_traces() -> bool:
    """Returns whether nothing is traced, differentiated or mapped here."""
    return get_opaque_trace_state() == _NO_TRACE


def _with_rules(
    by_kernels: Callable[..., Any], by_update: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps `by_kernels` so that `jax.vmap` and differentiation use `by_update` instead."""

    def call(*args):
        leaves = jax.tree.leaves(args)
        treedef: Any = jax.tree.structure(args)
        # The results, parameters and state, have the structure of these arguments.
        results: Any = jax.tree.structure((args[2], args[1]))
        # Python's numbers are not made arrays: arrays would promote 16-bit operands to float32.
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def flat(f):
            def of_arrays(*arrays):
                replaced = dict(zip(places, arrays, strict=True))
                here = [replaced.get(i, leaf) for i, leaf in enumerate(leaves)]
                return tuple(jax.tree.leaves(f(*treedef.unflatten(here))))

            return of_arrays

        run = with_reference_rules(flat(by_kernels), flat(by_update))
        return results.unflatten(run(*(leaves[i] for i in places)))

    return call


def _by_kernels(
    tx: "FusedTransformation",
    skip_nonfinite: bool,
    why: dict[str, str | None],
    grads: optax.Updates,
    state: Any,
    params: optax.Params,
    numbers: _Numbers,
) -> tuple[optax.Params, Any]:
    """Takes a step with CUDA kernels that update all leaves in place."""
    recipe, hyper = tx.recipe, numbers.hyper
    assert recipe is not None and hyper is not None
    kept = state if isinstance(state, StepState) else None
    opt_state = state if kept is None else kept.optimizer
    leaves = recipe.take_apart(grads, opt_state, params)
    loss_scale = None if kept is None else kept.loss_scale
    max_norm, decay = numbers.max_norm, numbers.average_decay
    rule = recipe.make_rule(*hyper.constants).kernel
    scalars = rule.scalars(leaves.count)._replace(
        learning_rate=hyper.learning_rate,
        weight_decay=0.0 if hyper.weight_decay is None else hyper.weight_decay,
        max_norm=0.0 if max_norm is None else max_norm,
        inverse_loss_scale=1.0 if loss_scale is None else 1 / loss_scale,
        average_decay=0.0 if decay is None else decay,
        one_minus_average_decay=0.0 if decay is None else 1 - decay,
    )
    rows = _rows(leaves, kept)
    moving = [i for i, row in enumerate(rows) if row.gradient is not None and row.parameter.size]
    skips = skip_nonfinite or loss_scale is not None
    new, finite = optimizer_step.step(
        rule,
        scalars,
        [rows[i] for i in moving],
        [leaves.decays[i] for i in moving],
        clips=max_norm is not None,
        skips_nonfinite=skips,
        why=why,
        numbers=moving,
        rounding=None if kept is None else kept.rounding,
        coding=None if recipe.coding is None else recipe.coding(leaves.count),
    )
    rows = [_at_rest(row, decay, finite) if row.gradient is None else row for row in rows]
    for i, row in zip(moving, new, strict=True):
        rows[i] = row

    def tree(field: str) -> Any:
        return leaves.treedef.unflatten([getattr(row, field) for row in rows])

    moments = {
        name: [_moment(row, which) for row in rows]
        for name, which in zip(leaves.moments, ("first", "second"), strict=False)
    }
    new_opt_state = recipe.next_state(leaves, opt_state, moments, finite if skips else None)
    new_params = tree("parameter")
    if kept is None:
        return new_params, new_opt_state
    return new_params, replace(
        _counted(kept, finite),
        optimizer=new_opt_state,
        ema=None if kept.ema is None else tree("average"),
        compute=None if kept.compute is None else tree("copy"),
    )


def _rows(leaves: "Leaves", kept: StepState | None) -> list[optimizer_step.Leaf]:
    """Returns the arrays of each leaf; for a leaf without a gradient (None) they may be trees."""
    count = len(leaves.gradients)
    absent = [None] * count

    def column(tree: Any) -> list[Any]:
        return absent if tree is None else leaves.treedef.flatten_up_to(tree)

    first, second, *_ = (*leaves.moments.values(), absent, absent)
    average = column(None if kept is None else kept.ema)
    copy = column(None if kept is None else kept.compute)
    rows = zip(leaves.gradients, leaves.params, first, second, average, copy, strict=True)
    return [_row(*row) for row in rows]


def _row(g: Any, p: Any, first: Any, second: Any, average: Any, copy: Any) -> optimizer_step.Leaf:
    first, first_scale = eight_bit.codes_and_scales(first)
    second, second_scale = eight_bit.codes_and_scales(second)
    return optimizer_step.Leaf(g, p, first, second, average, copy, first_scale, second_scale)


def _moment(row: optimizer_step.Leaf, which: str) -> Any:
    """Returns a moment for Optax's state: an array, or an `EightBitMoment` of codes and scales."""
    values, scales = getattr(row, f"{which}_moment"), getattr(row, f"{which}_scale")
    return values if scales is None else eight_bit.EightBitMoment(values, scales)


def _at_rest(row: optimizer_step.Leaf, d: Any, taken: jax.Array) -> optimizer_step.Leaf:
    """Returns a leaf without a gradient after a step, which changes only its average, with decay d."""
    if d is None:
        return row
    return row._replace(
        average=jax.tree.map(
            lambda e, p: jnp.where(taken, d * e + (1 - d) * p.astype(e.dtype), e),
            row.average,
            row.parameter,
        )
    )


def _by_update(
    tx: "FusedTransformation",
    skip_nonfinite: bool,
    grads: optax.Updates,
    state: Any,
    params: optax.Params,
    numbers: _Numbers,
    clipping_update: Callable[..., tuple[Any, Any]] | None = None,
) -> tuple[optax.Params, Any]:
    """Takes a step as Optax does, by update and write; `clipping_update`, if given, also clips."""
    kept = state if isinstance(state, StepState) else None
    opt_state = state if kept is None else kept.optimizer
    if kept is not None:
        grads = jax.tree.map(lambda g: g.astype(accumulator_dtype(g.dtype)), grads)
        if kept.loss_scale is not None:
            skip_nonfinite = True
            grads = jax.tree.map(lambda g: g / kept.loss_scale, grads)
    finite = _all_finite(grads) if skip_nonfinite else jnp.array(True)
    if numbers.max_norm is not None and clipping_update is None:
        grads = _clip(grads, numbers.max_norm)

    rounding = None if kept is None else kept.rounding
    wide = (opt_state, params) if rounding is None else _without_bfloat16((opt_state, params))
    if clipping_update is not None:
        updates, new_opt_state = clipping_update(grads, *wide)
    elif tx.recipe is None or numbers.hyper is None:
        updates, new_opt_state = of_moving_leaves(tx.init, tx.update)(grads, *wide)
    else:
        updates, new_opt_state = tx.recipe.update_with(numbers.hyper, grads, *wide)

    def write(old, new, number=0, array=None):
        if rounding is not None and array is not None and old.dtype == jnp.bfloat16:
            seeds = stochastic_rounding.leaf_seeds(rounding, number, array)
            halves = stochastic_rounding.random_halves(seeds, old.shape)
            new = stochastic_rounding.round_to_bfloat16(new.astype(jnp.float32), halves)
        new = new.astype(old.dtype)
        return jnp.where(finite, new, old) if skip_nonfinite else new

    def write_column(array, old, new):
        """Returns the written arrays of one kind (parameters, say, or one moment), one for each leaf."""
        treedef: Any = jax.tree.structure(grads, is_leaf=lambda g: g is None)
        pairs = zip(treedef.flatten_up_to(old), treedef.flatten_up_to(new), strict=True)
        return treedef.unflatten(
            [
                jax.tree.map(functools.partial(write, number=i, array=array), *pair)
                for i, pair in enumerate(pairs)
            ]
        )

    summed = jax.tree.map(
        lambda u, p: p if u is None else p + u, updates, params, is_leaf=lambda u: u is None
    )
    new_params = write_column("parameter", params, summed)
    if rounding is None or tx.recipe is None:
        new_opt_state = jax.tree.map(write, opt_state, new_opt_state)
    else:
        old, new = opt_state[0]._asdict(), new_opt_state[0]._asdict()
        names = [name for name in old if name != "count"]
        arrays = dict(zip(names, stochastic_rounding.ARRAYS[1:], strict=False))
        fields = {
            name: write_column(arrays[name], old[name], new[name])
            if name in arrays
            else write(old[name], new[name])
            for name in old
        }
        rest = jax.tree.map(write, opt_state[1:], new_opt_state[1:])
        new_opt_state = (type(opt_state[0])(**fields), *rest)
    if kept is None:
        return new_params, new_opt_state

    ema = kept.ema
    d = numbers.average_decay
    if d is not None:
        ema = jax.tree.map(
            lambda e, p: write(e, d * e + (1 - d) * p.astype(e.dtype)), ema, new_params
        )
    compute = kept.compute
    if compute is not None:
        compute = jax.tree.map(lambda c, p: p.astype(c.dtype), compute, new_params)
    return new_params, replace(
        _counted(kept, finite),
        optimizer=new_opt_state,
        ema=ema,
        compute=compute,
    )


def _without_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, tree)


def _average_decay(kept: StepState) -> Any:
    """Returns the decay, in this step, of the parameters' exponential moving average."""
    if isinstance(kept, CountingStepState) and callable(kept.ema_decay):
        return kept.ema_decay(kept.ema_updates)
    return kept.ema_decay


def _counted(kept: StepState, finite: jax.Array) -> StepState:
    """Returns the state after a step: its next loss scale, and its counts of steps."""
    kept = replace(_rescale_loss(kept, finite), skipped=kept.skipped + jnp.where(finite, 0, 1))
    if kept.rounding is not None:
        step = jnp.stack([jnp.uint32(0), finite.astype(jnp.uint32)])
        kept = replace(kept, rounding=kept.rounding + step)
    if isinstance(kept, CountingStepState):
        kept = replace(kept, ema_updates=kept.ema_updates + jnp.where(finite, 1, 0))
    return kept


def _rescale_loss(kept: StepState, finite: jax.Array) -> StepState:
    """Returns the state with the loss scale doubled after enough finite steps in a row, or halved."""
    if kept.loss_scale is None or kept.good_steps is None:
        return kept
    good_steps = jnp.where(finite, kept.good_steps + 1, 0)
    grows = good_steps == kept.growth_interval
    factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
    return replace(
        kept,
        loss_scale=jnp.clip(kept.loss_scale * factor, 1.0, LARGEST_LOSS_SCALE),
        good_steps=jnp.where(grows, 0, good_steps),
    )


def _all_finite(grads: optax.Updates) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return functools.reduce(jnp.logical_and, leaves, jnp.array(True))


def _clip(grads: optax.Updates, max_norm: float | jax.Array) -> optax.Updates:
    """Applies `optax.clip_by_global_norm` in float32, because 256 squared overflows float16."""
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(accumulator_dtype(g.dtype)), grads))
    return jax.tree.map(
        lambda g: jnp.where(norm < max_norm, g, (g / norm * max_norm).astype(g.dtype)), grads
    )


def _check_state(tx: optax.GradientTransformation, state: Any, params: optax.Params) -> None:
    expected, received = _shapes(jax.eval_shape(tx.init, params)), _shapes(state)
    if expected != received:
        raise ValueError(
            "step: the state is not this optimizer's for these parameters: of the leaves and"
            f" shapes, it lacks {sorted(expected - received)[:3]} and has"
            f" {sorted(received - expected)[:3]} too many; pass a state made by this optimizer's"
            " init(params) or init_step(params)."
        )


def check_donated(grads: optax.Updates, donated: Any) -> None:
    """Checks that no array occurs twice where its buffer is to become a result's."""
    leaves, read = jax.tree.leaves(donated), list(map(id, jax.tree.leaves(grads)))

    def are_apart(places: list[int]) -> bool:
        return len(set(places)) == len(places) and set(places).isdisjoint(read)

    # Python's numbers, which are copied, may be one object too. To ask what each leaf is takes longer.
    if not are_apart(list(map(id, leaves))) and not are_apart(
        [id(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
    ):
        raise ValueError(
            "step: one array has two places in grads, params and state, but the step writes its results"
            " into the arrays of params and state; keep a shared parameter in one place of the tree, or"
            " pass copies, by jnp.array(x, copy=True)."
        )


def _check_gradients(grads: optax.Updates, params: optax.Params) -> None:
    leaves, treedef = flatten(grads)
    try:
        treedef.flatten_up_to(params)
    except ValueError:
        of_grads, of_params = _shapes(grads), _shapes(params)
        raise ValueError(
            f"step: grads are a {type(grads).__name__} and params a {type(params).__name__}: grads have"
            f" leaves and shapes that params do not have, {sorted(of_grads - of_params)[:3]}, lack"
            f" {sorted(of_params - of_grads)[:3]}, or have other types of nodes; pass gradients in a"
            " tree like params, with None for a parameter that stays."
        ) from None
    if any(jnp.result_type(leaf) == jax.dtypes.float0 for leaf in leaves if leaf is not None):
        raise ValueError(
            "step: grads have a leaf of dtype float0, as jax.grad gives it to integers; pass None in its"
            " place, and the parameter stays as it is."
        )
    strangers = sorted(_shapes(grads) - _shapes(params))
    if strangers:
        raise ValueError(
            f"step: grads have leaves and shapes that params do not have, {strangers[:3]}; pass"
            " gradients in a tree like params."
        )


def _shapes(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    """Returns the path and the shape of each leaf."""
    return {(jax.tree_util.keystr(k), jnp.shape(x)) for k, x in jax.tree.leaves_with_path(tree)}
