"""Adafactor: second moments as rows and columns of a matrix instead of all its elements."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfused.ops.optimizer import adafactor_step
from jaxfused.optim.options import checked_options
from jaxfused.optim.transformation import FusedTransformation, from_optax
from jaxfused.runtime.promotion import accumulator_dtype


@checked_options
def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: jax.typing.ArrayLike = 0.8,
    decay_offset: jax.typing.ArrayLike = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    dtype_momentum: Any = "float32",
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
) -> FusedTransformation:
    r"""Adafactor: a matrix's second moments are the product of its rows' and columns' means.

    .. math::
        r &\leftarrow \beta_t r + (1 - \beta_t) \operatorname{mean}_j (g_{ij}^2 + \epsilon) \\
        c &\leftarrow \beta_t c + (1 - \beta_t) \operatorname{mean}_i (g_{ij}^2 + \epsilon) \\
        u &= g / \sqrt{r c / \operatorname{mean}(r)}, \quad \beta_t = 1 - t^{-\text{decay\_rate}}

    and then clipping of the root mean square of u, the learning rate, the parameter's scale, momentum
    and decay. Arguments, numbers and state are those of `optax.adafactor`.

    For leaves whose last two axes are factored, kernels on a GPU read the gradients three times: for the
    norm of all gradients and both means, for the root mean square of u, and to write the parameters.
    They compute in float32. All other leaves, such as vectors, are left to XLA.

    torch, transformers and Keras always factor the last two axes: their numbers are those of
    `min_dim_size_to_factor=1` where no axis before these is larger. Their relative step is a schedule,
    `lambda count: jnp.minimum(rate, (count + 1.0) ** -0.5)`, and torch's and Keras' weight decay is
    multiplied by the learning rate: pass `weight_decay_rate=decay * rate`. torch's default `eps` is a
    floor of the root of the moments instead of eps above.

    Args:
      learning_rate: a constant or a schedule (step count -> value); None for 1.
      min_dim_size_to_factor: the two largest axes are factored where both have at least this size.
      decay_rate: the exponent in beta.
      decay_offset: the step at which fine-tuning begins.
      multiply_by_parameter_scale: multiply by the root mean square of the parameter.
      clipping_threshold: the largest root mean square of u, at least 1; None for no clipping.
      momentum: decay of a momentum of the steps; None for none.
      dtype_momentum: dtype of the momentum.
      weight_decay_rate: a constant or a schedule, not multiplied by the learning rate; None for none.
      eps: is added to the squares.
      factored: whether to factor; if False, all leaves have second moments of all elements.
      weight_decay_mask: which leaves decay, as in `adamw`.

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> opt = jaxfused.optim.adafactor(0.1)
      >>> params = jnp.array([1.0, 2.0])
      >>> params, state = opt.step(jnp.array([0.5, -3.0]), opt.init(params), params)
      >>> [round(float(p), 3) for p in params]
      [0.842, 2.158]

    Source: Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
    https://arxiv.org/abs/1804.04235
    """
    least: Any = min_dim_size_to_factor
    if isinstance(least, jax.core.Tracer):
        raise ValueError(
            "adafactor: min_dim_size_to_factor is traced, but it decides the shapes of the state; pass"
            ' static_args="min_dim_size_to_factor" to optax.inject_hyperparams.'
        )
    stages = _Stages(
        optax.scale_by_factored_rms(
            factored, decay_rate, decay_offset, min_dim_size_to_factor, eps
        ),
        None if clipping_threshold is None else optax.clip_by_block_rms(clipping_threshold),
        None
        if learning_rate is None
        else optax.scale_by_learning_rate(learning_rate, flip_sign=False),
        optax.scale_by_param_block_rms() if multiply_by_parameter_scale else None,
        None
        if momentum is None
        else optax.ema(momentum, debias=False, accumulator_dtype=dtype_momentum),
        None
        if weight_decay_rate is None
        else optax.add_decayed_weights(weight_decay_rate, mask=weight_decay_mask),
        optax.scale(-1),
    )

    def kernel_update(
        grads: Any, state: Any, params: Any, *, max_norm: Any, why: Mapping[str, str | None]
    ) -> tuple[Any, Any]:
        count = state[0].count
        decay = 1 - jnp.asarray(count - decay_offset + 1, jnp.float32) ** -jnp.asarray(decay_rate)
        scalars = adafactor_step.Scalars(
            decay,
            1 - decay,
            eps,
            1.0 if clipping_threshold is None else clipping_threshold,
            0.0 if max_norm is None else max_norm,
            0.0,
        )
        return _by_kernels(stages, scalars, max_norm is not None, why, grads, state, params)

    return from_optax(optax.chain(*stages.present()), kernel_update)


class _Stages(NamedTuple):
    """The transformations that Optax's Adafactor chains, in their order; None for omitted ones."""

    factored: optax.GradientTransformation
    clip: optax.GradientTransformation | None
    learning_rate: optax.GradientTransformation | None
    parameter_scale: optax.GradientTransformation | None
    momentum: optax.GradientTransformation | None
    decay: optax.GradientTransformation | None
    sign: optax.GradientTransformation

    def present(self) -> list[optax.GradientTransformation]:
        return [stage for stage in self if stage is not None]


def _by_kernels(
    stages: _Stages,
    scalars: adafactor_step.Scalars,
    clips: bool,
    why: Mapping[str, str | None],
    grads: Any,
    state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Implements `update`: CUDA kernels for leaves whose last two axes are factored, XLA for others."""
    factored = state[0]
    gradients = jax.tree.leaves(grads)
    treedef: Any = jax.tree.structure(grads)
    columns = [
        treedef.flatten_up_to(t) for t in (params, factored.v_row, factored.v_col, factored.v)
    ]
    rows = [_Leaf(g, *row) for g, *row in zip(gradients, *columns, strict=True)]
    ours = [i for i, row in enumerate(rows) if row.is_factored]
    rest = [i for i, row in enumerate(rows) if not row.is_factored]
    others = [gradients[i].astype(accumulator_dtype(gradients[i].dtype)) for i in rest]
    squares = sum(jnp.sum(g * g) for g in others)
    scaled, factor = adafactor_step.step(
        scalars._replace(other_squares=squares),
        [rows[i].arrays for i in ours],
        [rows[i].normalizes_columns for i in ours],
        clips=clips,
        clips_updates=stages.clip is not None,
        multiplies_by_parameter=stages.parameter_scale is not None,
        why=why,
    )
    updates: dict[int, jax.Array] = {}
    moments: dict[int, tuple[jax.Array, jax.Array, jax.Array]] = {}
    for i, new in zip(ours, scaled, strict=True):
        row, column = new.row_moment, new.column_moment
        updates[i] = gradients[i] * (jax.lax.rsqrt(row) * new.scale[..., None])[..., None]
        updates[i] *= jax.lax.rsqrt(column)[..., None, :]
        moments[i] = (
            (column, row, rows[i].v) if rows[i].normalizes_columns else (row, column, rows[i].v)
        )
    # Optax updates the leaves that kernels do not take, as a tree that is a list.
    tree = [factor.astype(g.dtype) * g for g in others]
    own = [[row[i] for i in rest] for row in zip(*(row[1:] for row in rows), strict=True)]
    of_rest, new = stages.factored.update(
        tree, factored._replace(v_row=own[1], v_col=own[2], v=own[3]), own[0]
    )
    for stage in (stages.clip, stages.parameter_scale):
        if stage is not None:
            of_rest, _ = stage.update(of_rest, optax.EmptyState(), own[0])
    for place, i in enumerate(rest):
        updates[i] = of_rest[place]
        moments[i] = new.v_row[place], new.v_col[place], new.v[place]
    fields = zip(*(moments[i] for i in range(len(rows))), strict=True)
    trees = [treedef.unflatten(field) for field in fields]
    new_state = [factored._replace(count=new.count, v_row=trees[0], v_col=trees[1], v=trees[2])]
    result = treedef.unflatten([updates[i] for i in range(len(rows))])
    for name, stage in stages._asdict().items():
        if stage is None or name == "factored":
            continue
        place = len(new_state)
        # The kernels' and Optax's updates above include clipping and the parameters' scale.
        if name in ("clip", "parameter_scale"):
            new_state.append(state[place])
            continue
        result, of_stage = stage.update(result, state[place], params)
        new_state.append(of_stage)
    return result, tuple(new_state)


class _Leaf(NamedTuple):
    """A parameter, its gradient, and its second moments (fields of Optax's `FactoredState`)."""

    gradient: jax.Array
    parameter: jax.Array
    v_row: jax.Array
    v_col: jax.Array
    v: jax.Array

    @property
    def is_factored(self) -> bool:
        """True if the last two axes are factored: the kernels then update the leaf as matrices."""
        shape = self.parameter.shape
        moments = {self.v_row.shape, self.v_col.shape}
        return (
            self.parameter.ndim >= 2
            and self.parameter.size > 0
            and self.v.shape != shape
            and moments == {shape[:-1], (*shape[:-2], shape[-1])}
        )

    @property
    def normalizes_columns(self) -> bool:
        """True if `v_row`, which Optax divides by its mean, has the means of the columns.

        Optax takes the means in `v_row` over the largest axis, or over the last of equally large ones.
        """
        rows, columns = self.parameter.shape[-2:]
        return rows > columns

    @property
    def arrays(self) -> adafactor_step.Leaf:
        of_rows, of_columns = (self.v_col, self.v_row) if self.normalizes_columns else self[2:4]
        return adafactor_step.Leaf(of_rows, of_columns, self.gradient, self.parameter)
