"""Muon: the momentum of a matrix, made orthogonal by Newton-Schulz iterations."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxfused.optim import newton_schulz
from jaxfused.optim.transformation import FusedTransformation, from_optax


def _matrices(tree: Any) -> Any:
    """Returns Optax's dimension numbers of the leaves with two axes, of which none is empty."""
    return jax.tree.map(
        lambda leaf: contrib.MuonDimensionNumbers() if leaf.ndim == 2 and leaf.size else None, tree
    )


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, contrib.MuonDimensionNumbers)


class _View(NamedTuple):
    """A leaf as matrices [batch, fan in, fan out]: its axes in this order, and how many are of each."""

    order: tuple[int, ...]
    batch_axes: int
    input_axes: int

    @classmethod
    def of(cls, numbers: contrib.MuonDimensionNumbers, leaf: jax.Array) -> "_View":
        inputs, outputs = (_axes(axis, leaf.ndim) for axis in numbers)
        if set(inputs) & set(outputs):
            raise ValueError(
                f"muon: reduction axes and output axes must differ, but {numbers} has {inputs} and"
                f" {outputs} of shape {leaf.shape}; pass other muon_weight_dimension_numbers."
            )
        batch = tuple(axis for axis in range(leaf.ndim) if axis not in (*inputs, *outputs))
        return cls((*batch, *inputs, *outputs), len(batch), len(inputs))

    def sizes(self, leaf: jax.Array) -> tuple[int, int, int]:
        shape = [leaf.shape[axis] for axis in self.order]
        split = self.batch_axes, self.batch_axes + self.input_axes
        return (
            math.prod(shape[: split[0]]),
            math.prod(shape[split[0] : split[1]]),
            math.prod(shape[split[1] :]),
        )

    def matrices(self, leaf: jax.Array) -> jax.Array:
        return leaf.transpose(self.order).reshape(self.sizes(leaf))

    def leaf(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        shape = [like.shape[axis] for axis in self.order]
        inverse = sorted(range(like.ndim), key=lambda axis: self.order[axis])
        return matrices.reshape(shape).transpose(inverse)


def _axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(axis % ndim for axis in axes)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = (3.4445, -4.775, 2.0315),
    ns_steps: int = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: jax.typing.ArrayLike = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    iteration_dtype: Any = None,
) -> FusedTransformation:
    r"""Muon: matrices move along their orthogonalised momentum, all other leaves as in AdamW.

    .. math::
        m &\leftarrow \beta m + (1 - \beta) g \\
        X_0 &= m / \lVert m \rVert_F, \quad
        X_{k+1} = a X_k + b (X_k X_k^T) X_k + c (X_k X_k^T)^2 X_k \\
        u &= -\alpha_t \sqrt{\max(1, \text{fan\_out} / \text{fan\_in})} \, X_5

    Arguments, state and, up to rounding, numbers are those of `optax.contrib.muon`. Matrices of one
    shape are multiplied as one batch, those of stacked layers included. Of matrices that are at least
    twice as long as wide, three iterations take one product with X, since the Gram matrices of all three
    follow from the first one's. Of each symmetric product a Pallas kernel (Hopper) multiplies half;
    the rest of `step` is jax.numpy.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      ns_coeffs: (a, b, c) above, one such triple for each iteration, or the name of a preset.
      ns_steps: the number of iterations.
      beta: decay of the momentum.
      eps: is added to the norm.
      weight_decay: decay of the matrices, multiplied by the learning rate.
      weight_decay_mask: which leaves decay, as in `adamw`.
      mu_dtype: dtype of the momentum; None for the parameter's.
      nesterov: use Nesterov momentum.
      adaptive: scale the step by the dual norm of the momentum.
      preconditioning: how the momentum is scaled before the iterations.
      adam_b1: b1 of AdamW.
      adam_b2: b2 of AdamW.
      adam_eps_root: eps_root of AdamW.
      adam_weight_decay: weight decay of AdamW.
      adam_learning_rate: AdamW's learning rate; None for the same one.
      muon_weight_dimension_numbers: which leaves are matrices and along which of their axes; None for
        the leaves with two axes.
      consistent_rms: scale steps to this root mean square of shape-independent size; None for the
        scale above.
      iteration_dtype: dtype of what the iterations multiply, which is not Optax's argument; sums are in
        float32. bfloat16, as Muon's author has it, takes half the time of float32 on a GPU, and changes
        singular values by less than the iterations leave them apart. None for the momentum's dtype.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      ValueError: preconditioning or the name of the coefficients is unknown, there are fewer triples of
        them than iterations, or the axes of a matrix overlap.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.muon(0.1)
      >>> params = {"w": jnp.eye(4), "b": jnp.ones(4)}
      >>> new, state = opt.step({"w": jnp.eye(4), "b": jnp.ones(4)}, opt.init(params), params)
      >>> round(float(new["b"][0]), 3), new["w"].shape
      (0.853, (4, 4))

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/
    """
    if preconditioning not in newton_schulz.PRECONDITIONINGS:
        raise ValueError(
            f"muon: preconditioning is {preconditioning!r}; pass one of"
            f" {', '.join(newton_schulz.PRECONDITIONINGS)}."
        )
    numbers = muon_weight_dimension_numbers
    if numbers is None:
        numbers = _matrices
    shared: dict[str, Any] = dict(mu_dtype=mu_dtype, nesterov=nesterov)
    theirs = contrib.muon(
        learning_rate,
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        weight_decay,
        weight_decay_mask,
        **shared,
        adaptive=adaptive,
        preconditioning=preconditioning,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=numbers,
        consistent_rms=consistent_rms,
    )

    def orthogonal(momentum: Any, coefficients: jax.Array) -> Any:
        leaves = jax.tree.leaves(momentum)
        treedef: Any = jax.tree.structure(momentum)
        of_leaves = treedef.flatten_up_to(_spread(numbers, momentum, lambda n: n))
        views = [_View.of(n, leaf) for n, leaf in zip(of_leaves, leaves, strict=True)]
        rows: list[Any] = [coefficients] * ns_steps if coefficients.ndim == 1 else [*coefficients]
        new = newton_schulz.orthogonalize(
            [view.matrices(leaf) for view, leaf in zip(views, leaves, strict=True)],
            rows,
            preconditioning=preconditioning,
            eps=eps,
            dtype=iteration_dtype,
        )
        updates = []
        for view, leaf, matrices in zip(views, leaves, new, strict=True):
            u = view.leaf(matrices, leaf)
            if adaptive:
                u = jnp.sum(leaf.conj() * u) * u
            _, fan_in, fan_out = view.sizes(leaf)
            scale: Any = math.sqrt(max(1, fan_out / fan_in))
            if consistent_rms is not None:
                scale = math.sqrt(max(fan_in, fan_out)) * consistent_rms
            updates.append(scale * u)
        return treedef.unflatten(updates)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
            now = optax.tree.bias_correction(grads, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)
        mu = optax.tree.cast(mu, mu_dtype)
        return orthogonal(momentum, state.ns_coeffs), state._replace(count=count, mu=mu)

    ours = optax.partition(
        {
            "muon": optax.chain(
                # The state is made by `theirs`; orthogonal momentum and the scale of its shape are one
                # function here, and Optax's second one has an empty state.
                optax.GradientTransformation(theirs.init, update),
                optax.identity(),
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": optax.adamw(
                learning_rate if adam_learning_rate is None else adam_learning_rate,
                b1=adam_b1,
                b2=adam_b2,
                eps=eps,
                eps_root=adam_eps_root,
                weight_decay=adam_weight_decay,
                **shared,
            ),
        },
        lambda tree: _spread(numbers, tree, lambda n: "adam" if n is None else "muon"),
    )
    return from_optax(optax.GradientTransformationExtraArgs(theirs.init, ours.update))


def _spread(numbers: Any, tree: Any, f: Callable[[Any], Any]) -> Any:
    """Returns `f` of each leaf's dimension numbers, which are given for a prefix, or by a function."""
    prefix = numbers(tree) if callable(numbers) else numbers
    return jax.tree.map(
        lambda n, part: jax.tree.map(lambda _: f(n), part), prefix, tree, is_leaf=_is_numbers
    )
