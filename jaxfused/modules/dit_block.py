"""The computation of a DiTBlock from its parameters: norms with adaLN modulation, gated branches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.mlp import Layer
from jaxfused.modules.transformer_block import project, self_attention
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.norm import layer_norm
from jaxfused.runtime.promotion import common_dtype

CHUNKS = 6
"""Chunks of the modulation: shift, scale and gate of the attention, then of the perceptron."""

Stream = tuple[jax.Array, jax.Array, jax.Array]
"""The last branch, the residual stream to add it to, and the gate that multiplies the branch first."""


def dit_block(
    x: jax.Array,
    modulation: jax.Array,
    qkv: Layer,
    out: Layer,
    mlp: Callable[[jax.Array], jax.Array],
    *,
    residual: jax.Array | None,
    gate: jax.Array | None,
    num_heads: int,
    epsilon: float,
    mlp_epsilon: float | None,
    mask: jax.Array | AttentionMask | None,
    dtype: Any,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation | None,
    attention_implementation: AttentionImplementation | None,
) -> jax.Array | Stream:
    """Applies a block to x [..., T, D].

    Args:
      modulation: [..., 6 D] for each image.
      qkv: the (kernel, bias) of queries, keys and values.
      out: the (kernel, bias) of the attention's projection.
      mlp: the perceptron.
      residual: the residual stream if x is a branch that is still to be added to it.
      gate: the gate of that branch, [..., D].

    The other arguments are those of the block.
    """
    if (residual is None) != (gate is None):
        raise ValueError(
            "DiTBlock: residual and gate go together, as the gate multiplies what is added to the"
            " residual; pass both of them, or neither."
        )
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(modulation, CHUNKS, axis=-1)
    options: dict[str, Any] = dict(implementation=implementation)
    stream = x if residual is None else residual
    wide = x.dtype if dtype is None else common_dtype(dtype)
    first: dict[str, Any] = dict(image_scale=scale1, image_shift=shift1, epsilon=epsilon, **options)
    if residual is None:
        y = layer_norm.layer_norm(x, **first)
    else:
        y, stream = layer_norm.layer_norm(x, residual=residual, gate=gate, **first)
    assert isinstance(y, jax.Array)
    attended = self_attention(
        y.astype(wide),
        *qkv,
        None,
        None,
        interleaved=False,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        epsilon=epsilon,
        mask=mask,
        segment_ids=None,
        is_causal=False,
        precision=precision,
        implementation=implementation,
        attention_implementation=attention_implementation,
    )
    # The bias is added here and not by the next norm: with a gate, the norm's backward sums three
    # gradients over rows, and a fourth, that of this bias, would not fit into its registers.
    branch, _ = project(
        attended,
        *out,
        drops=True,
        dtype=dtype,
        precision=precision,
        implementation=implementation,
    )
    y, stream = layer_norm.layer_norm(
        branch.astype(stream.dtype),
        image_scale=scale2,
        image_shift=shift2,
        residual=stream,
        gate=gate1,
        epsilon=epsilon if mlp_epsilon is None else mlp_epsilon,
        **options,
    )
    branch = mlp(y.astype(wide)).astype(stream.dtype)
    if residual is None:
        rows = (1,) * (branch.ndim - gate2.ndim)
        gates = gate2.reshape(*gate2.shape[:-1], *rows, gate2.shape[-1])
        return stream + gates.astype(stream.dtype) * branch
    return branch, stream, gate2


def check_heads(features: int, num_heads: int) -> None:
    """Checks that the number of heads divides the features."""
    if features % num_heads:
        raise ValueError(
            f"DiTBlock: {features} features are not shared evenly by {num_heads} heads; pass a num_heads"
            " that divides the features."
        )
