"""Rotary position embedding as a Flax Linen module, which has no parameters."""

import jax
from flax import linen

from jaxfused.dispatch import Implementation
from jaxfused.ops.rope import rope
from jaxfused.ops.rope.rope_scaling import RopeScaling
from jaxfused.ops.rope.rope_tables import rope_tables
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class RotaryEmbedding(linen.Module):
    r"""Rotates queries and keys by their positions.

    .. math:: y_a + i y_b = e^{i p \omega_j} (x_a + i x_b), \quad \omega_j = \theta^{-2 j / R}

    for position p and the pairs (a, b) of features, numbered by j.

    Attributes:
      rotary_dim: R, how many features of a head rotate, by default all.
      theta: the base of the frequencies.
      scaling: such as `YarnRope`; None for unscaled frequencies.
      interleaved: whether a pair is two neighbours (GPT-J, RoFormer), else two halves (GPT-NeoX).
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfused.linen
      >>> rope = jaxfused.linen.RotaryEmbedding(theta=500_000.0)
      >>> q, k = rope.apply({}, jnp.ones((2, 5, 8, 64)), jnp.ones((2, 5, 2, 64)))
      >>> q.shape, k.shape
      ((2, 5, 8, 64), (2, 5, 2, 64))

    Source: `jaxfused.rope`.
    """

    rotary_dim: int | None = None
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    implementation: Implementation | None = None

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        offset: int | jax.Array = 0,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Rotates q [..., T, N, H] and, if given, k [..., T, K, H], as `jaxfused.rope` does."""
        return rope.rope(
            q,
            k,
            positions=positions,
            offset=offset,
            rotary_dim=self.rotary_dim,
            theta=self.theta,
            scaling=self.scaling,
            interleaved=self.interleaved,
            implementation=self.implementation,
        )

    def tables(self, positions: jax.Array, head_size: int) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines that rotate heads of `head_size` features; see `rope_tables`."""
        rotary_dim = head_size if self.rotary_dim is None else self.rotary_dim
        return rope_tables(positions, rotary_dim, theta=self.theta, scaling=self.scaling)
