"""Muon: the momentum of a matrix, made orthogonal by Newton-Schulz iterations."""

from typing import Any, Literal

import jax
import optax
from optax import contrib

from jaxfused.optim.transformation import FusedTransformation, from_optax


def _matrices(tree: Any) -> Any:
    """Returns Optax's dimension numbers of the leaves with two axes, of which none is empty."""
    return jax.tree.map(
        lambda leaf: contrib.MuonDimensionNumbers() if leaf.ndim == 2 and leaf.size else None, tree
    )


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
) -> FusedTransformation:
    r"""Muon: matrices move along their orthogonalised momentum, all other leaves as in AdamW.

    .. math::
        m &\leftarrow \beta m + (1 - \beta) g \\
        X_0 &= m / \lVert m \rVert_F, \quad
        X_{k+1} = a X_k + b (X_k X_k^T) X_k + c (X_k X_k^T)^2 X_k \\
        u &= -\alpha_t \sqrt{\max(1, \text{fan\_out} / \text{fan\_in})} \, X_5

    Arguments, numbers and state are those of `optax.contrib.muon`. There are no kernels of it yet:
    `step` runs in jax.numpy.

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

    Returns:
      An `optax.GradientTransformation` with `step` and `init_step`; see `FusedTransformation`.

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
    return from_optax(
        contrib.muon(
            learning_rate,
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            weight_decay,
            weight_decay_mask,
            mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_eps_root=adam_eps_root,
            adam_weight_decay=adam_weight_decay,
            adam_learning_rate=adam_learning_rate,
            muon_weight_dimension_numbers=_matrices
            if muon_weight_dimension_numbers is None
            else muon_weight_dimension_numbers,
            consistent_rms=consistent_rms,
        )
    )
