"""Muon: the momentum of a matrix, made orthogonal by Newton-Schulz iterations."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import contrib

from jaxfused import dispatch
from jaxfused.ops.linear.symmetric_product import why_not_both_ways
from jaxfused.ops.optimizer import momentum as momentum_op
from jaxfused.ops.optimizer.gradient_norm import clipping_factor, squared_norm
from jaxfused.optim import newton_schulz
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, from_optax
from jaxfused.runtime.checks import check_count
from jaxfused.runtime.product_xla import explicit_mesh

_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
PRESETS: Mapping[str, Any] = {
    "standard": (3.4445, -4.775, 2.0315),
    "dion": _QUINTIC,
    "quintic": _QUINTIC,
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
}
"""Coefficients (a, b, c) of each iteration, by preset. The first two presets are Optax's. Polar Express
has those of its authors' program, with their safety margin of 1 %."""


def _matrices(tree: Any) -> Any:
    """Returns MuonDimensionNumbers for non-empty leaves of two axes, None for others."""
    return jax.tree.map(
        lambda leaf: contrib.MuonDimensionNumbers() if leaf.ndim == 2 and leaf.size else None, tree
    )


def _flattened(tree: Any) -> Any:
    """Returns MuonDimensionNumbers for leaves of two or more axes, with the last axis as outputs."""

    def numbers(leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        if leaf.ndim < 2 or not leaf.size:
            return None
        return contrib.MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

    return jax.tree.map(numbers, tree)


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, contrib.MuonDimensionNumbers)


class _View(NamedTuple):
    """How a leaf becomes matrices [batch, fan in, fan out].

    `order` lists the leaf's axes: first `batch_axes` axes of the batch, then `input_axes` axes of the
    fan in, then those of the fan out.
    """

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

    @property
    def is_plain(self) -> bool:
        """True if the leaf's axes already have the order batch, fan in, fan out: no transposition."""
        return self.order == tuple(range(len(self.order)))

    def matrices(self, leaf: jax.Array) -> jax.Array:
        ordered = leaf.transpose(self.order)
        if explicit_mesh(leaf) is not None:
            # JAX's types cannot state the sharding of axes that a reshape merges: each axis that is
            # not alone in its group is all-gathered before.
            of_leaf = jax.typeof(ordered).sharding
            groups = self.batch_axes, self.input_axes, leaf.ndim - self.batch_axes - self.input_axes
            alone = [size == 1 for size in groups for _ in range(size)]
            spec = [name if own else None for name, own in zip(of_leaf.spec, alone, strict=True)]
            ordered = jax.sharding.reshard(ordered, of_leaf.update(spec=PartitionSpec(*spec)))
        return ordered.reshape(self.sizes(leaf))

    def leaf(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        shape = [like.shape[axis] for axis in self.order]
        inverse = sorted(range(like.ndim), key=lambda axis: self.order[axis])
        leaf = matrices.reshape(shape).transpose(inverse)
        if explicit_mesh(like) is not None:
            return jax.sharding.reshard(leaf, jax.typeof(like).sharding)
        return leaf


def _axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    axes = (axes,) if isinstance(axes, int) else axes
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"muon: muon_weight_dimension_numbers has axis {axis} for a leaf of {ndim} axes; pass"
                f" axes below {ndim}."
            )
    return tuple(axis % ndim for axis in axes)


@checked_options
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
    adam_nesterov: bool = False,
    bias_correction: bool = True,
    clamp_norm: bool = False,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps: jax.typing.ArrayLike | None = None,
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

    m is corrected for its start at 0, :math:`m / (1 - \beta^t)`, and with `nesterov`
    :math:`\beta m / (1 - \beta^{t+1}) + (1 - \beta) g / (1 - \beta^t)` takes its place.

    State and, up to rounding, numbers are those of `optax.contrib.muon(nesterov=...)` for matrices, and
    of `optax.adamw(nesterov=adam_nesterov)` for all other leaves; Optax gives both the same `nesterov`.
    With `bias_correction=False, clamp_norm=True, eps=1e-7, adam_eps=1e-8` they are those of torch's
    Muon, whose "match_rms_adamw" is `consistent_rms=0.2`, and with that those of Keras'. timm's Muon is
    `nesterov=False, ns_coeffs="quintic", consistent_rms=0.2` with matrices of "flatten".

    Matrices of one shape are multiplied as one batch, those of stacked layers included. Of matrices
    that are at least twice as long as wide, three iterations share one product with X, since the Gram
    matrices of all three follow from that of the first. On a Hopper GPU a CUDA kernel writes the
    momentum of all leaves of a shape together, also transposed, and Pallas kernels multiply: of each
    symmetric product half, and the others from both sides, so that no matrix is transposed or divided
    by its norm by a pass of its own.

    Args:
      learning_rate: alpha, a constant or a schedule (step count -> value).
      ns_coeffs: (a, b, c) above, a triple for each iteration of which the first `ns_steps` are taken, or
        the name of a preset: "standard", the default, or "quintic" (Optax's "dion"), "polar_express",
        whose last triple is repeated in more iterations than they have.
      ns_steps: the number of iterations.
      beta: decay of the momentum.
      eps: is added to the norm.
      weight_decay: decay of the matrices, multiplied by the learning rate.
      weight_decay_mask: which leaves decay, as in `adamw`.
      mu_dtype: dtype of the momentum; None for the parameter's.
      nesterov: use Nesterov momentum for matrices.
      adam_nesterov: use it in AdamW.
      bias_correction: divide by 1 - beta^t as above.
      clamp_norm: divide by the norm or `eps`, whichever is larger, instead of by their sum.
      adaptive: scale the step by the dual norm of the momentum.
      preconditioning: how the momentum is scaled before the iterations.
      adam_b1: b1 of AdamW.
      adam_b2: b2 of AdamW.
      adam_eps: eps of AdamW; None for `eps`.
      adam_eps_root: eps_root of AdamW.
      adam_weight_decay: weight decay of AdamW.
      adam_learning_rate: AdamW's learning rate; None for the same one.
      muon_weight_dimension_numbers: which leaves are matrices and along which of their axes; None for
        the leaves with two axes, "flatten" for those with two or more, of which the last are outputs, as
        in Flax's kernels of convolutions. To leave embeddings and heads to AdamW, pass Optax's numbers,
        or a function of the tree that returns them, and None for these leaves.
      consistent_rms: scale steps to this root mean square of shape-independent size; None for the
        scale above.
      iteration_dtype: dtype of what the iterations multiply, which is not Optax's argument; sums are in
        float32. bfloat16, as Muon's author has it, takes half the time of float32 on a GPU, and changes
        singular values by less than the iterations leave them apart. None for the momentum's dtype.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Raises:
      ValueError: preconditioning or the name of the coefficients is unknown, they are no triples, there
        are fewer triples than iterations, or the axes of a matrix overlap or do not exist.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.muon(0.1)
      >>> params = {"w": jnp.eye(4), "b": jnp.ones(4)}
      >>> new, state = opt.step({"w": jnp.eye(4), "b": jnp.ones(4)}, opt.init(params), params)
      >>> round(float(new["b"][0]), 3), new["w"].shape
      (0.9, (4, 4))

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/
    """
    if preconditioning not in newton_schulz.PRECONDITIONINGS:
        known = ", ".join(newton_schulz.PRECONDITIONINGS)
        raise ValueError(f"muon: preconditioning is {preconditioning!r}; pass one of {known}.")
    if not hasattr(ns_steps, "dtype"):
        check_count("muon", "ns_steps", ns_steps)
    coefficients = _coefficients(ns_coeffs, ns_steps)
    numbers = _numbers(muon_weight_dimension_numbers)
    momentum = _Momentum(
        numbers=numbers,
        steps=ns_steps,
        beta=beta,
        eps=eps,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
        bias_correction=bias_correction,
        clamp_norm=clamp_norm,
        adaptive=adaptive,
        preconditioning=preconditioning,
        consistent_rms=consistent_rms,
        iteration_dtype=iteration_dtype,
    )

    def init(params: Any) -> contrib.MuonState:
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return contrib.MuonState(jnp.zeros([], jnp.int32), mu, jnp.asarray(coefficients))

    adamw = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps if adam_eps is None else adam_eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=adam_nesterov,
    )

    tx = optax.partition(
        {
            "muon": optax.chain(
                # Optax has two transformations for momentum and scale, the second with an empty
                # state. One function does both here; the identity stands for the second.
                optax.GradientTransformationExtraArgs(init, momentum.update),
                optax.identity(),
                optax.add_decayed_weights(weight_decay, weight_decay_mask),
                optax.scale_by_learning_rate(learning_rate),
            ),
            "adam": _after_factor(adamw),
        },
        lambda tree: _spread(numbers, tree, lambda n: "adam" if n is None else "muon"),
    )

    def kernel_update(
        grads: Any, state: Any, params: Any, *, max_norm: Any, why: Mapping[str, str | None]
    ) -> tuple[Any, Any]:
        del why
        if max_norm is None:
            return tx.update(grads, state, params)
        norm = jnp.sqrt(squared_norm(jax.tree.leaves(grads)))
        return tx.update(grads, state, params, factor=clipping_factor(norm, max_norm))

    return from_optax(tx, kernel_update)


def _after_factor(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `tx` so that it first multiplies the gradients by `factor`, if one is given."""

    def update(grads: Any, state: Any, params: Any = None, *, factor: Any = None) -> Any:
        if factor is not None:
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        return tx.update(grads, state, params)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _numbers(given: Any) -> Any:
    """Returns Optax's dimension numbers, or a function from the tree to them."""
    if given is None:
        return _matrices
    if not isinstance(given, str):
        return given
    if given != "flatten":
        raise ValueError(
            f"muon: muon_weight_dimension_numbers is {given!r}; pass None, 'flatten', or Optax's"
            " MuonDimensionNumbers in a tree."
        )
    return _flattened


def _coefficients(given: Any, steps: Any) -> Any:
    """Returns checked coefficients: one triple, or one for each iteration."""
    is_known = not isinstance(steps, jax.core.Tracer)
    if isinstance(given, str):
        if given not in PRESETS:
            raise ValueError(f"muon: ns_coeffs is {given!r}; pass one of {', '.join(PRESETS)}.")
        given = PRESETS[given]
        if is_known and len(jnp.asarray(given).shape) == 2:
            given = (*given, *[given[-1]] * max(0, int(steps) - len(given)))
    shape = jnp.asarray(given).shape
    if len(shape) not in (1, 2) or shape[-1] != 3:
        raise ValueError(
            f"muon: ns_coeffs has shape {shape}; pass a triple (a, b, c), or one for each iteration."
        )
    if len(shape) == 1 or not is_known:
        return given
    if shape[0] < steps:
        raise ValueError(
            f"muon: ns_coeffs has {shape[0]} triples, but ns_steps is {steps}; pass"
            f" ns_steps={shape[0]}, or a triple for each iteration."
        )
    return given[: int(steps)]


_power = jax.jit(operator.pow, inline=True)
"""Jitted power, because outside of `jax.jit` the power would be compiled again for each known count."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Momentum:
    """The matrices' orthogonalised momentum, scaled by their shapes. Its state is Optax's MuonState."""

    numbers: Any
    steps: Any
    beta: Any
    eps: Any
    mu_dtype: Any
    nesterov: bool
    bias_correction: bool
    clamp_norm: bool
    adaptive: bool
    preconditioning: str
    consistent_rms: Any
    iteration_dtype: Any

    def update(
        self,
        grads: Any,
        state: contrib.MuonState,
        params: Any = None,
        *,
        factor: Any = None,
    ) -> tuple[Any, contrib.MuonState]:
        """Returns updates and state for the gradients, multiplied by `factor` if it is given."""
        del params
        gradients = jax.tree.leaves(grads)
        treedef: Any = jax.tree.structure(grads)
        momenta = treedef.flatten_up_to(state.mu)
        of_leaves = treedef.flatten_up_to(_spread(self.numbers, grads, lambda n: n))
        views = [_View.of(n, leaf) for n, leaf in zip(of_leaves, gradients, strict=True)]
        count = optax.safe_increment(state.count)
        updates: list[Any] = [None] * len(gradients)
        new: list[Any] = [None] * len(gradients)
        rest = list(range(len(gradients)))
        for batch in self._of_kernels(gradients, momenta, views):
            rest = [i for i in rest if i not in batch]
            here = [views[i].matrices(gradients[i]) for i in batch]
            of_batch = [views[i].matrices(momenta[i]) for i in batch]
            results = self._by_kernels(here, of_batch, state, count, factor)
            for i, x, moved in zip(batch, *results, strict=True):
                updates[i], new[i] = views[i].leaf(x, gradients[i]), moved.reshape(momenta[i].shape)
        directions = []
        for i in rest:
            direction, new[i] = self._moved(gradients[i], momenta[i], count, factor)
            directions.append(views[i].matrices(direction))
        made = newton_schulz.orthogonalize(
            directions,
            state.ns_coeffs,
            self.steps,
            preconditioning=self.preconditioning,
            eps=self.eps,
            clamps_norm=self.clamp_norm,
            dtype=self.iteration_dtype,
        )
        for i, direction, x in zip(rest, directions, made, strict=True):
            if self.adaptive:
                x = jnp.sum(direction.conj() * x) * x
            updates[i] = views[i].leaf(x, gradients[i])
        scaled = [
            self._scale(view, leaf) * u
            for view, leaf, u in zip(views, gradients, updates, strict=True)
        ]
        state = state._replace(count=count, mu=treedef.unflatten(new))
        return treedef.unflatten(scaled), state

    def _weights(self, count: jax.Array) -> tuple[Any, Any]:
        """Returns (a, b): the matrix to orthogonalise is a * momentum + b * gradient."""
        now, ahead = 1.0, 1.0
        if self.bias_correction:
            now = 1 - _power(self.beta, count)
            ahead = 1 - self.beta ** optax.safe_increment(count)
        if self.nesterov:
            return self.beta / ahead, (1 - self.beta) / now
        return 1 / now, 0.0

    def _moved(
        self, g: jax.Array, m: jax.Array, count: jax.Array, factor: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the matrix to orthogonalise and the new momentum, both in the shape of g and m."""
        if factor is not None:
            g = (g * factor).astype(g.dtype)
        moved = (1 - self.beta) * g + self.beta * m
        now, ahead = count, optax.safe_increment(count)
        direction = moved
        if self.nesterov:
            direction = self.beta * self._corrected(moved, ahead)
            direction += (1 - self.beta) * self._corrected(g, now)
        else:
            direction = self._corrected(moved, now)
        return direction, moved.astype(m.dtype if self.mu_dtype is None else self.mu_dtype)

    def _corrected(self, moment: jax.Array, count: jax.Array) -> jax.Array:
        if not self.bias_correction:
            return moment
        return moment / (1 - _power(self.beta, count)).astype(moment.dtype)

    def _scale(self, view: _View, leaf: jax.Array) -> Any:
        _, fan_in, fan_out = view.sizes(leaf)
        if self.consistent_rms is not None:
            return math.sqrt(max(fan_in, fan_out)) * self.consistent_rms
        return math.sqrt(max(1, fan_out / fan_in))

    # --- kernels ------------------------------------------------------------------------------------

    def _of_kernels(
        self, gradients: Sequence[Any], momenta: Sequence[Any], views: Sequence[_View]
    ) -> list[list[int]]:
        """Returns lists of indices of leaves that GPU kernels update as a batch, wide matrices first."""
        if self.adaptive or self.preconditioning != "frobenius" or not _is_known(self.steps):
            return []
        plain = [i for i, view in enumerate(views) if view.is_plain]
        matrices = {i: views[i].matrices(gradients[i]) for i in plain}
        found = []
        for batch in newton_schulz.batches([matrices[i] for i in plain]):
            of_batch = sorted((plain[k] for k in batch), key=lambda i: _is_tall(matrices[i]))
            if (
                self._why_no_kernels(
                    [matrices[i] for i in of_batch], [momenta[i] for i in of_batch]
                )
                is None
            ):
                found.append(of_batch)
        return found

    def _why_no_kernels(self, gradients: Sequence[Any], momenta: Sequence[Any]) -> str | None:
        device = dispatch.current_device(*gradients)
        reason = momentum_op.why_unsupported(device, gradients, momenta)
        dtype = self._dtype(gradients[0], momenta[0])
        if reason is None and dtype not in (jnp.float32, jnp.bfloat16):
            reason = f"the sums of squares of {dtype} may be too large for it"
        if reason is None and any(m.dtype != momenta[0].dtype for m in momenta):
            reason = "momenta have several dtypes"
        if reason is None and momenta[0].dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            reason = f"a momentum has dtype {momenta[0].dtype}"
        if reason is None:
            sides = sorted(gradients[0].shape[1:])
            reason = why_not_both_ways(device, (1, *sides), dtype)
        return reason

    def _dtype(self, gradient: jax.Array, momentum: jax.Array) -> Any:
        """Returns the dtype of the iterations' operands."""
        if self.iteration_dtype is not None:
            return jnp.dtype(self.iteration_dtype)
        return jnp.result_type(gradient, momentum)

    def _by_kernels(
        self,
        gradients: Sequence[jax.Array],
        momenta: Sequence[jax.Array],
        state: contrib.MuonState,
        count: jax.Array,
        factor: Any,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the orthogonalised matrices and the new momenta, computed by the fused GPU kernels."""
        of_momentum, of_gradient = self._weights(count)
        wide, tall, squares, new = momentum_op.momentum_both_ways(
            gradients,
            momenta,
            beta=self.beta,
            factor=1.0 if factor is None else factor,
            of_momentum=of_momentum,
            of_gradient=of_gradient,
            dtype=self._dtype(gradients[0], momenta[0]),
        )
        first_tall = sum(g.shape[0] for g in gradients if not _is_tall(g))
        wide, tall = newton_schulz.orthogonalize_both_ways(
            wide,
            tall,
            squares,
            newton_schulz.rows(state.ns_coeffs, self.steps),
            first_tall=first_tall,
            eps=self.eps,
            clamps_norm=self.clamp_norm,
        )
        made, first = [], 0
        dtype = jnp.result_type(gradients[0], momenta[0])
        for g in gradients:
            source = tall if _is_tall(g) else wide
            made.append(source[first : first + g.shape[0]].astype(dtype))
            first += g.shape[0]
        return made, new


def _is_tall(matrices: jax.Array) -> bool:
    return matrices.shape[1] > matrices.shape[2]


def _is_known(steps: Any) -> bool:
    return not isinstance(steps, jax.core.Tracer)


def _spread(numbers: Any, tree: Any, f: Callable[[Any], Any]) -> Any:
    """Returns `f` of each leaf's dimension numbers; `numbers` is a prefix or a function of the tree."""
    prefix = numbers(tree) if callable(numbers) else numbers

    def of_part(n: Any, part: Any) -> Any:
        if not _is_numbers(n):
            raise ValueError(
                f"muon: muon_weight_dimension_numbers has {n!r} for a leaf; pass Optax's"
                " MuonDimensionNumbers, or None for AdamW."
            )
        return jax.tree.map(lambda _: f(n), part)

    return jax.tree.map(of_part, prefix, tree, is_leaf=_is_numbers)
