"""Optax transformations from one formula per leaf, with a `step` that also writes the parameters.

Optax chains transformations, each of which is a pass over the whole tree. Here an optimizer is a `Rule`,
the formula for one leaf, with the few operations that all optimizers share: weight decay, a trust ratio,
the learning rate. `update` and `step` run the same formula; the state is Optax's.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfused.ops.optimizer.optimizer_step import KernelRule
from jaxfused.optim import eight_bit, ema, stepping
from jaxfused.optim.moving_leaves import flatten, of_moving_leaves
from jaxfused.runtime import stochastic_rounding
from jaxfused.runtime.checks import said

Moments = tuple[jax.Array, ...]
LeafRule = Callable[[jax.Array, Moments], tuple[jax.Array, Moments]]
"""Function (gradient, moments) -> (direction, moments) for one leaf."""


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula with its constants, such as b1 and b2."""

    at: Callable[[Any], LeafRule]
    """Function from the step's number, from 1 up, to the rule for each leaf at this step.

    Scalars that all leaves share must be computed outside of the leaf rule: XLA rounds a division by a
    scalar differently if each leaf computes the scalar, and results would differ from Optax's.
    """
    kernel: KernelRule
    """The same formula for the CUDA kernels: its name and its scalars."""


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An `optax.GradientTransformation` that can also write parameters, by `step`.

    As the pair `(init, update)` that Optax expects, it can be used wherever such a pair can: in
    `optax.chain`, `optax.multi_transform`, `optax.MultiSteps`, `optax.inject_hyperparams`, Flax's
    `TrainState` and `nnx.Optimizer`. The transformations that those functions return are Optax's and
    have no `step`.
    """

    recipe: "Recipe | None" = None
    """Formula that `step` can run in fused GPU kernels; None for other transformations."""
    kernel_update: Callable[..., tuple[Any, Any]] | None = None
    """Function (grads, state, params, max_norm=, why=) -> (updates, state): `update` in GPU kernels,
    with clipping to a norm. None if there are no kernels, or if `recipe` has them."""

    def step(
        self,
        grads: optax.Updates,
        state: Any,
        params: optax.Params,
        *,
        max_norm: float | jax.Array | None = None,
        skip_nonfinite: bool = False,
        implementation: str | None = None,
    ) -> tuple[optax.Params, Any]:
        r"""Takes one step in place: clipping, moments, decay and write in one jitted function.

        .. math::
            g &\leftarrow g \cdot \min(1, \text{max\_norm} / \lVert g \rVert) \\
            u, s &\leftarrow \text{update}(g, s, p) \\
            p &\leftarrow p + u

        `state` and `params` are donated: their buffers become the results', so the arrays passed in
        must not be used again. Inside another jitted function that function's `donate_argnums`
        decides, and in a function that JAX differentiates or maps nothing is donated: the backward
        reads what the step has read. `grads` are only read: no result would fit their buffers. Every
        leaf of the parameters and of the state keeps its dtype and its sharding.

        A step has gradients to all that it is computed from: parameters, gradients, state, and the
        hyperparameters that the optimizer was made with.

        Args:
          grads: gradients, a tree like params. A leaf that is None leaves its parameter as it is.
          state: from `init`, or from `init_step` to keep more than Optax's state between steps.
          params: the parameters.
          max_norm: gradients are scaled down to this global norm, as `optax.clip_by_global_norm`
            does; the norm is taken in float32. None for no clipping.
          skip_nonfinite: where any gradient is NaN or infinite, leave params and state untouched.
            Always so where the state has a loss scale.
          implementation: "cuda" for kernels that update all leaves in one pass over memory and compute
            in float32, "xla" for `update` and the write in jax.numpy, or None for the fastest one that
            can run. Under `jax.vmap`, and where a step is differentiated, "xla" runs.

        Returns:
          (params, state), both new.

        Raises:
          ValueError: the state is not this optimizer's for these parameters, grads have a leaf of
            another place or shape, an array is there twice and would be donated twice, max_norm is not
            positive, or the named implementation cannot run.

        Example:
          >>> import jax, jax.numpy as jnp, jaxfused
          >>> opt = jaxfused.optim.adamw(0.1)
          >>> params = {"w": jnp.array([1.0, 2.0])}
          >>> state = opt.init(params)
          >>> for _ in range(3):
          ...     grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
          ...     params, state = opt.step(grads, state, params, max_norm=1.0)
          >>> [round(float(w), 2) for w in params["w"]]
          [0.7, 1.7]
        """
        return stepping.step(
            self,
            grads,
            state,
            params,
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
            implementation=implementation,
        )

    def init_step(
        self,
        params: optax.Params,
        *,
        ema_decay: ema.Decay | None = None,
        compute_dtype: Any = None,
        loss_scale: float | None = None,
        growth_interval: int = 2000,
        rounding_seed: int | None = None,
    ) -> stepping.StepState:
        r"""A state for `step` that also keeps an average, a low-precision copy, or a loss scale.

        .. math::
            \text{ema} &\leftarrow d \cdot \text{ema} + (1 - d) \cdot p \\
            \text{compute} &\leftarrow \text{cast}(p)

        With such a state `step` takes gradients in any float dtype, those of a bfloat16 copy for
        instance, and computes in float32 (float64 for float64 gradients).

        Args:
          params: the parameters.
          ema_decay: d above, in [0, 1): keep an exponential moving average of the parameters, in
            float32 at least, that starts at their values. Or a function from the number of updates so
            far, 0 at the first step, to d: `jaxfused.optim.ema` has those in which averages warm up.
            None for no average.
          compute_dtype: keep a copy of the parameters in this dtype, written in the same pass; take
            gradients with respect to it. None for no copy.
          loss_scale: the first dynamic loss scale, at least 1; multiply the loss by
            `state.loss_scale`. `step` divides the gradients by it. Where one of them is not finite
            it skips the step and halves the scale (not below 1); after `growth_interval` good steps
            in a row it doubles the scale. None for no scaling.
          growth_interval: good steps after which the scale doubles.
          rounding_seed: round parameters in bfloat16, and moments in bfloat16, up or down at random
            such that the mean is right, so that steps too small for bfloat16 are not lost. The bits
            depend on this seed, the step, the leaf and the element's place in the whole array, however
            it is split over devices. None to round to the nearest.

        Returns:
          A `StepState`; `state.optimizer` is Optax's own state.

        Raises:
          ValueError: an argument is out of its range.

        Example:
          >>> import jax, jax.numpy as jnp, jaxfused
          >>> opt = jaxfused.optim.sgd(0.5)
          >>> params = jnp.array([1.0, 2.0])
          >>> state = opt.init_step(
          ...     params, ema_decay=0.5, compute_dtype=jnp.float16, loss_scale=8.0
          ... )
          >>> loss = lambda p: state.loss_scale * jnp.sum(p**2) / 2
          >>> params, state = opt.step(jax.grad(loss)(state.compute), state, params)
          >>> params, state.ema
          (Array([0.5, 1. ], dtype=float32), Array([0.75, 1.5 ], dtype=float32))
          >>> state.compute
          Array([0.5, 1. ], dtype=float16)

        Source: Micikevicius et al., "Mixed Precision Training", 2018,
        https://arxiv.org/abs/1710.03740
        """
        return stepping.init_step(
            self,
            params,
            ema_decay=ema_decay,
            compute_dtype=compute_dtype,
            loss_scale=loss_scale,
            growth_interval=growth_interval,
            rounding_seed=rounding_seed,
        )


def fuse(
    make_rule: Callable[..., Rule],
    constants: Sequence[Any],
    like: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: optax.ScalarOrSchedule | None = None,
    mask: Any = None,
    rescale: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    coding: Callable[[jax.Array], jax.Array] | None = None,
) -> FusedTransformation:
    """Returns the transformation that runs a rule on every leaf.

    Args:
      make_rule: constants -> the optimizer's formula for one leaf.
      constants: the formula's constants, which may be traced.
      like: Optax's optimizer of the same arguments; its `init` makes the state, whose first element
        holds the moments of the rule.
      learning_rate: a constant, or a schedule whose count is in the state's last element.
      weight_decay: a constant, or a schedule whose count is in the state's second element; None for
        an optimizer that has no decay in its state.
      mask: which leaves decay, as in `optax.add_decayed_weights`.
      rescale: (direction, parameter) -> direction, after the decay.
      coding: for an optimizer with moments in 8 bits, the number of the step -> the seed words of its
        random bits.
    """
    recipe = Recipe(make_rule, tuple(constants), learning_rate, weight_decay, mask, rescale, coding)

    def init(params: optax.Params) -> Any:
        try:
            return like.init(params)
        except ValueError:
            recipe.decayed(params)  # It raises if the mask does not fit, and names the mask.
            raise

    tx = FusedTransformation(init, recipe.update)
    tx.recipe = recipe
    return tx


def from_optax(
    tx: optax.GradientTransformation, kernel_update: Callable[..., tuple[Any, Any]] | None = None
) -> FusedTransformation:
    """Returns one of Optax's transformations with `step`, in jax.numpy or by `kernel_update`."""
    tx = optax.with_extra_args_support(tx)
    update_all = of_moving_leaves(tx.init, tx.update)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        with _optax_promotions():
            return update_all(updates, state, params, **extra_args)

    ours = FusedTransformation(tx.init, update)
    if kernel_update is not None:
        ours.kernel_update = of_moving_leaves(tx.init, kernel_update)
    return ours


class Hyperparameters(NamedTuple):
    """An optimizer's hyperparameters at one step: numbers, also for those that are schedules."""

    learning_rate: Any
    weight_decay: Any
    constants: tuple[Any, ...]
    """Constants of the rule, such as b1 and b2."""


class Leaves(NamedTuple):
    """The leaves of one step as lists of equal length; the gradient of a leaf may be None."""

    treedef: Any
    gradients: list[Any]
    params: list[Any]
    decays: list[bool]
    moments: dict[str, list[Any]]
    count: Any
    """Number of this step, from 1 up; None for an optimizer that does not count."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """The formula and options in which optimizers differ: the arguments of `fuse`."""

    make_rule: Callable[..., Rule]
    constants: tuple[Any, ...]
    learning_rate: optax.ScalarOrSchedule
    weight_decay: optax.ScalarOrSchedule | None
    mask: Any
    rescale: Callable[[jax.Array, jax.Array], jax.Array] | None
    coding: Callable[[jax.Array], jax.Array] | None

    def hyperparameters(self, state: Any) -> Hyperparameters:
        """Returns the hyperparameters of the step that starts from `state`."""
        decay = self.weight_decay
        return Hyperparameters(
            _at("learning_rate", self.learning_rate, state[-1]),
            None if decay is None else _at("weight_decay", decay, state[1]),
            self.constants,
        )

    def update(
        self, updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        """Implements `update` of Optax's transformations."""
        del extra_args  # In a chain, Optax passes an argument meant for one member to all members.
        parts = state if type(state) is tuple else (state,)
        if not all(hasattr(part, "_fields") for part in parts):
            raise ValueError(
                f"update: the state is {[type(part).__name__ for part in parts]}, but this optimizer's"
                " is a tuple of named tuples; pass one made by its init(params) (of init_step's,"
                " state.optimizer), and restore a checkpoint with it as the target."
            )
        with _optax_promotions():
            return self.update_with(self.hyperparameters(state), updates, state, params)

    def update_with(
        self, hyper: Hyperparameters, updates: optax.Updates, state: Any, params: Any
    ) -> tuple[optax.Updates, Any]:
        """Implements `update` with these hyperparameters."""
        if params is None and (self.weight_decay is not None or self.rescale is not None):
            raise ValueError(
                "update: params is None, but this optimizer's update depends on the parameters;"
                " pass update(grads, state, params)."
            )
        leaves = self.take_apart(updates, state, params)
        leaf_rule = self.make_rule(*hyper.constants).at(leaves.count)

        def update_leaf(number, g, p, decays, *leaf_moments):
            if g is None:
                return None, leaf_moments
            if any(map(eight_bit.is_coded, leaf_moments)):
                g = g.astype(jnp.float32)
            u, new_moments = leaf_rule(g, tuple(map(eight_bit.decode, leaf_moments)))
            leaf_moments = self._coded(number, leaves.count, new_moments, leaf_moments)
            if decays:
                u = u + hyper.weight_decay * p
            if self.rescale is not None:
                u = self.rescale(u, p)
            if callable(self.learning_rate):
                return jnp.asarray(-hyper.learning_rate, u.dtype) * u, leaf_moments
            return -hyper.learning_rate * u, leaf_moments

        rows = zip(
            leaves.gradients, leaves.params, leaves.decays, *leaves.moments.values(), strict=True
        )
        results = [update_leaf(i, *row) for i, row in enumerate(rows)]
        moments = {
            name: [leaf_moments[i] for _, leaf_moments in results]
            for i, name in enumerate(leaves.moments)
        }
        return leaves.treedef.unflatten([u for u, _ in results]), self.next_state(
            leaves, state, moments
        )

    def _coded(
        self, number: int, count: Any, new: Moments, old: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Returns a leaf's new moments in the format of `old`: arrays, or 8-bit codes with scales."""
        if self.coding is None:
            return new
        words = self.coding(count)
        arrays = stochastic_rounding.ARRAYS[1:]
        return tuple(
            eight_bit.encode(n, o, stochastic_rounding.leaf_seeds(words, number, array))
            if eight_bit.is_coded(o)
            else n
            for n, o, array in zip(new, old, arrays, strict=True)
        )

    def take_apart(self, updates: optax.Updates, state: Any, params: Any) -> Leaves:
        """Returns gradients, parameters and state of a step as `Leaves`."""
        moments = state[0]._asdict()
        count = moments.pop("count", None)
        leaves, treedef = flatten(updates)
        return Leaves(
            treedef,
            leaves,
            [None] * len(leaves) if params is None else treedef.flatten_up_to(params),
            self.decayed(updates),
            {name: treedef.flatten_up_to(tree) for name, tree in moments.items()},
            None if count is None else optax.safe_increment(count),
        )

    def next_state(
        self,
        leaves: Leaves,
        state: Any,
        moments: dict[str, list[Any]],
        taken: jax.Array | None = None,
    ) -> Any:
        """Returns Optax's state with these moments; counts do not change if the step is not `taken`."""

        def counted(new, old):
            return new if taken is None else jnp.where(taken, new, old)

        fields = {name: leaves.treedef.unflatten(new) for name, new in moments.items()}
        if leaves.count is not None:
            fields["count"] = counted(leaves.count, state[0].count)
        # The rest of the state holds only the counts of schedules.
        schedules = jax.tree.map(lambda c: counted(optax.safe_increment(c), c), state[1:])
        return (type(state[0])(**fields), *schedules)

    def decayed(self, updates: optax.Updates) -> list[bool]:
        """Returns, for each leaf of gradients or parameters, whether weight decay applies to it."""
        leaves, treedef = flatten(updates)
        constant_zero = isinstance(self.weight_decay, (int, float)) and self.weight_decay == 0
        if self.weight_decay is None or constant_zero:
            return [False] * len(leaves)
        if self.mask is None:
            return [True] * len(leaves)
        # A mask that is a module may be callable: the mask counts as a function only if it is
        # itself its one leaf.
        is_function = all(map(callable, jax.tree.leaves(self.mask) or [None]))
        mask = self.mask(updates) if is_function else self.mask
        try:
            decayed = treedef.flatten_up_to(jax.tree.broadcast(mask, updates))
        except ValueError as error:
            raise ValueError(
                f"weight decay: the mask is a {jax.tree.structure(mask)}, but the parameters are a"
                f" {treedef}; pass bools in a tree like the parameters, or in a prefix of it."
            ) from error
        for flag in decayed:
            if isinstance(flag, str) or np.ndim(flag):
                raise ValueError(
                    f"weight decay: the mask has {said(flag)}, but says whether a parameter decays;"
                    " pass True or False."
                )
        return decayed


def stored(new: jax.Array, old: jax.Array, dtype: Any) -> jax.Array:
    """Returns the moment `new` in the dtype of `old`, or unchanged if `dtype` is None, as in Optax."""
    return new if dtype is None else new.astype(old.dtype)


def _at(name: str, value: optax.ScalarOrSchedule, state: Any) -> Any:
    """Returns a hyperparameter at this step: a constant, or a schedule at the count in `state`."""
    if not callable(value):
        return value
    found = value(*jax.tree.leaves(state))
    if not isinstance(found, (int, float, np.number, np.ndarray, jax.Array)) or np.ndim(found):
        raise ValueError(
            f"update: the schedule of {name} returned {said(found)}, but a step has one number; pass a"
            " function from the count of steps to a scalar."
        )
    return found


@contextlib.contextmanager
def _optax_promotions() -> Iterator[None]:
    """Allows JAX's default promotions in this context, so that results equal Optax's."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
