"""Masks of a call's heads, in the forms that the implementations take."""

import jax
import jax.numpy as jnp

from jaxfused.ops.attention.masks.blocks import BlockedMasks, prepare
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.attention.masks.positions import CausalMask, LocalMask


class Pattern:
    """The distinct masks of a call's heads; a separate array has the index of each head's mask.

    The class is no dataclass, because its `repr` is part of autotuning tables' keys.
    """

    def __init__(self, masks: tuple[AttentionMask, ...]) -> None:
        self.masks = masks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.masks == other.masks

    def __hash__(self) -> int:
        return hash(self.masks)

    def __repr__(self) -> str:
        return f"Pattern({self.masks!r})"

    @classmethod
    def of(cls, mask: AttentionMask) -> tuple["Pattern", jax.Array | None]:
        """Returns the pattern, and the index of each head's mask [N], or None if all share one."""
        masks = tuple(dict.fromkeys(mask.of_heads))
        if len(masks) == 1:
            return cls(masks), None
        return cls(masks), jnp.asarray([masks.index(own) for own in mask.of_heads], jnp.int32)

    def limited(
        self, is_causal: bool, window: tuple[int, int] | None, query_offset: int
    ) -> "Pattern":
        """Returns the pattern intersected with limits of positions: causal, or a window."""
        masks = self.masks
        if is_causal:
            masks = tuple(mask & CausalMask(mask.shape, query_offset) for mask in masks)
        if window is not None:
            masks = tuple(mask & LocalMask(mask.shape, window, query_offset) for mask in masks)
        return Pattern(masks)

    def tiles(self, query_block: int, key_block: int) -> BlockedMasks:
        """Cuts the masks into tiles, and classifies these as empty, full or partial."""
        return prepare(self.masks, query_block, key_block)

    def allowed(self, heads: jax.Array | None) -> jax.Array:
        """Returns the whole masks, computed on the device: bool [1, N, T, S], or [1, 1, T, S].

        Args:
          heads: the index of each head's mask [N], or None if all share one.
        """
        query, key = (jnp.arange(size, dtype=jnp.int32) for size in self.masks[0].shape)
        allowed = [mask.allowed(query[:, None], key[None]) for mask in self.masks]
        stack = jnp.stack([jnp.broadcast_to(a, (query.size, key.size)) for a in allowed])
        return (stack if heads is None else stack[heads])[None]
