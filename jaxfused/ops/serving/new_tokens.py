"""Masks of new tokens that form a tree, and ALiBi, as arguments of attention to a copy of a cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime.checks import check_shape


def check(op: str, query: jax.Array, tree_mask: Any, alibi_slopes: Any) -> tuple[Any, Any]:
    """Returns the mask and the slopes as arrays after checking them against queries [B, T, N, H]."""
    batch, tokens, heads = query.shape[:3]
    if tree_mask is not None:
        tree_mask = jnp.asarray(tree_mask)
        what = f"query has {tokens} new tokens of {batch} sequences"
        check_shape(op, "tree_mask", tree_mask, (batch, tokens, tokens), what)
        if tree_mask.dtype != bool:
            raise ValueError(
                f"{op}: tree_mask has dtype {tree_mask.dtype}, but it says which tokens are seen; pass"
                " tree_mask.astype(bool)."
            )
    if alibi_slopes is not None:
        alibi_slopes = jnp.asarray(alibi_slopes)
        check_shape(op, "alibi_slopes", alibi_slopes, (heads,), f"there are {heads} query heads")
        alibi_slopes = alibi_slopes.astype(jnp.float32)
    return tree_mask, alibi_slopes


def tree_options(
    tree: jax.Array, before: jax.Array, keys: int, left: int | None
) -> dict[str, jax.Array]:
    """Returns the mask [B, 1, T, S] by which new tokens see all earlier ones, and new ones as in `tree`.

    Args:
      tree: [B, T, T] bool, whether new token t sees new token u.
      before: [B], the tokens of each sequence that are not new.
      keys: S.
      left: how many positions back a token sees; None for all.
    """
    new = jnp.arange(keys, dtype=jnp.int32)[None] - before[:, None]
    number = jnp.clip(new, 0, tree.shape[1] - 1)
    # If a sequence has fewer than T tokens, `before` is negative, and its first queries are
    # padding.
    is_token = before[:, None] + jnp.arange(tree.shape[1], dtype=jnp.int32)[None] >= 0
    mask = is_token[:, :, None] & ((new[:, None] < 0) | _of_keys(tree, number))
    if left is not None:
        depth = _depth(tree)
        of_key = jnp.where(new < 0, new, jnp.take_along_axis(depth, number, axis=1))
        mask &= of_key[:, None] >= depth[:, :, None] - left
    return dict(mask=mask[:, None])


def alibi_options(
    slopes: jax.Array, tree: jax.Array | None, before: jax.Array
) -> dict[str, Callable[..., jax.Array]]:
    """Returns the score_mod that adds slopes[h] * (key's position - query's position), slopes [N].

    In a `tree` [B, T, T], a new token's position, counted from the first new one, is its depth: the
    number of other new tokens that it sees. `before` [B] is the number of tokens that are not new.
    """
    if tree is None:
        return dict(score_mod=lambda score, b, h, q, k: score + slopes[h] * (k - q))
    depth = _depth(tree)

    def position(b: jax.Array, token: jax.Array) -> jax.Array:
        new = token - before[b]
        return jnp.where(new < 0, new, depth[b, jnp.clip(new, 0, depth.shape[1] - 1)])

    return dict(
        score_mod=lambda score, b, h, q, k: score + slopes[h] * (position(b, k) - position(b, q))
    )


def _depth(tree: jax.Array) -> jax.Array:
    """Returns each new token's depth [B, T] in `tree` [B, T, T]: how many others it sees."""
    return jnp.sum(tree, axis=2, dtype=jnp.int32) - 1


def _of_keys(tree: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the columns of `tree` at the indices `number` [B, S], as [B, T, S]."""
    shape = (*tree.shape[:2], number.shape[1])
    return jnp.take_along_axis(tree, jnp.broadcast_to(number[:, None], shape), axis=2)
