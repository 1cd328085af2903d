"""Policies of `jax.checkpoint` that recognise the values of this package's kernels.

JAX's policies decide by the primitive that computes a value, and none of them lists our kernels:
`dots_with_no_batch_dims_saveable` saves the products of a stock layer but nothing of a fused one, so
that all its forward kernels run twice. The policies here decide by the names that operators give their
values, "jaxfused.<operator>.<what>" (see `jaxfused.runtime.checkpoint_names`).

Example:
  >>> import jax, jax.numpy as jnp, jaxfused
  >>> from jax.ad_checkpoint import checkpoint_name
  >>> def block(x):
  ...     return jaxfused.layer_norm(checkpoint_name(jnp.sin(x), "wave"))
  >>> policy = jaxfused.remat_policies.save_only_these_names("wave", "layer_norm")
  >>> jax.grad(lambda x: jax.checkpoint(block, policy=policy)(x).sum())(jnp.ones((2, 4))).shape
  (2, 4)
"""

from collections.abc import Callable
from typing import Any, get_args

import jax

from jaxfused.runtime.checkpoint_names import PREFIX, What

Policy = Callable[..., Any]

_PRODUCTS = ("linear", "mlp", "gated_mlp", "qkv_projection")
"""Operators that consist of products without batch axes; all their named values are saved."""

_SMALL = ("statistics", "log_sum_exp")
"""Kinds of small values, always saved: an operator whose result is saved then runs only once."""

_OF_REFERENCES = {"jaxfused_preactivation": "preactivation", "jaxfused_statistics": "statistics"}
"""Checkpoint names of the implementation "xla", each with its kind of value."""


def save_only_these_names(*names: str) -> Policy:
    """Saves values with these checkpoint names, and the small values of this package's operators.

    Args:
      names: names that `jax.ad_checkpoint.checkpoint_name` gave; or for this package's operators, an
        operator, for all its values ("dot_product_attention"), a kind of value of all operators
        ("preactivation"; `jaxfused.runtime.checkpoint_names.What` lists them), or the whole name of
        a value ("jaxfused.mlp.output"). Statistics of norms and log-sum-exps are small and always
        saved: with them a saved result is all that a backward needs.

    Returns:
      A policy for `jax.checkpoint` and its relatives in Flax.

    Raises:
      ValueError: a name starts with "jaxfused." but has no known last part.
    """
    for name in names:
        if name.startswith(PREFIX) and name.rpartition(".")[2] not in get_args(What):
            kinds = ", ".join(get_args(What))
            raise ValueError(
                f"save_only_these_names: {name!r} is the name of nothing that an operator makes; pass"
                f" 'jaxfused.<operator>.<what>', where <what> is one of {kinds}."
            )
    wanted = frozenset(names)

    def policy(primitive: Any, *_: Any, **parameters: Any) -> bool:
        if primitive.name != "name":
            return False
        name = parameters["name"]
        operator, what = _parts(name)
        return name in wanted or operator in wanted or what in wanted or what in _SMALL

    return policy


def _parts(name: str) -> tuple[str | None, str | None]:
    """Returns the operator and the kind of value in a checkpoint name, each None if absent."""
    if name in _OF_REFERENCES:
        return None, _OF_REFERENCES[name]
    if not name.startswith(PREFIX):
        return None, None
    operator, _, what = name.removeprefix(PREFIX).rpartition(".")
    return operator, what


def _with_operators(policy: Policy, *operators: str) -> Policy:
    return jax.checkpoint_policies.save_from_both_policies(
        policy, save_only_these_names(*operators)
    )


dots_with_no_batch_dims_saveable: Policy = _with_operators(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, *_PRODUCTS
)
"""JAX's policy of that name for stock layers and fused ones: saves the results of products with weights.

It saves all that the backward of `linear`, `mlp`, `gated_mlp` and `qkv_projection` reads, so that their
kernels run once. Norms and attention run again, as they do in a stock layer.
"""

dots_saveable: Policy = _with_operators(
    jax.checkpoint_policies.dots_saveable, *_PRODUCTS, "dot_product_attention"
)
"""JAX's policy of that name for stock layers and fused ones; it saves attention's results as well.

For attention it saves the result and one log-sum-exp a row. No kernel writes the weights to memory.
"""

checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable
