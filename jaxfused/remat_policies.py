"""Policies of `jax.checkpoint` that know what this package's kernels make.

A policy of JAX decides by the primitive that makes a value, and a kernel is one that none of them knows:
`dots_with_no_batch_dims_saveable` saves the products of a stock layer and nothing of a fused one, whose
forward kernels then all run twice. The operators name what they make instead, as
"jaxfused.<operator>.<what>" (see `jaxfused.runtime.checkpoint_names`); these policies go by that name.

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
"""Operators whose forward is products without batch axes, and what goes with them."""

_SMALL = ("statistics", "log_sum_exp")
"""What has one number for many: an operator whose result is saved need not run again for it."""

_OF_REFERENCES = {"jaxfused_preactivation": "preactivation", "jaxfused_statistics": "statistics"}
"""Names inside the programs of implementation "xla", with what they stand for."""


def save_only_these_names(*names: str) -> Policy:
    """Saves what has one of these names, and of this package's operators what makes a name enough.

    Args:
      names: of values that `jax.ad_checkpoint.checkpoint_name` marks; and of this package's operators,
        an operator for all that it makes ("dot_product_attention"), a kind for that of all operators
        ("preactivation"; `jaxfused.runtime.checkpoint_names.What` lists them), or the whole name of
        a value ("jaxfused.mlp.output"). The small ones, statistics of norms and logarithms of sums,
        are saved in any case: with them a saved result is all that a backward needs.

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
    """The operator and the kind that a name tells, or None where it is a name of the user's."""
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

Of `linear`, `mlp`, `gated_mlp` and `qkv_projection` all is saved that the backward reads, so that their
kernels run once. Norms and attention run again, as they do in a stock layer.
"""

dots_saveable: Policy = _with_operators(
    jax.checkpoint_policies.dots_saveable, *_PRODUCTS, "dot_product_attention"
)
"""JAX's policy of that name for stock layers and fused ones: attention is saved as well.

Of attention that is the result and a logarithm a row, not the weights, which no kernel has in memory.
"""

checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable
