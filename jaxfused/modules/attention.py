"""What the hooks `attention_fn` of nnx and linen share: which calls the operator serves, and how."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import ops
from jaxfused.modules.fallback import why_complex, why_given
from jaxfused.ops.attention import AttentionImplementation


def why_flax(
    dtype: Any,
    *,
    precision: Any,
    sow_weights: bool,
    dropout_is_active: bool,
    broadcast_dropout: bool,
) -> str | None:
    """None where the operator can serve a call, else why it takes Flax's own code.

    Args:
      dtype: of query, key and value once promoted.
      precision: as for the other arguments, what the hook was given.
    """
    if sow_weights:
        return "the attention weights are to be sown"
    if dropout_is_active and broadcast_dropout:
        return "broadcast_dropout drops the same weights in every head"
    return why_given(precision=precision is not None) or why_complex(dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    """The operator over any number of batch axes, with Flax's masks of any dtype.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H].
      value: [..., S, K, V].
      bias: broadcasts to [..., N, T, S].
      mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S].
      segment_ids: [..., T], of queries and of as many keys.
    """
    batch = query.shape[:-3]

    def fold(array: jax.Array, kept: int = 3) -> jax.Array:
        """The array with its axes before the last `kept` as one; axes of 1 may broadcast."""
        if len(batch) <= 1 or array.ndim <= kept:
            return array
        array = jnp.broadcast_to(array, (*batch, *array.shape[-kept:]))
        return array.reshape(math.prod(batch), *array.shape[-kept:])

    segment_ids = None if segment_ids is None else fold(segment_ids, kept=1)
    output = ops.attention.dot_product_attention(
        fold(query),
        fold(key),
        fold(value),
        None if bias is None else fold(bias),
        None if mask is None else fold(mask.astype(jnp.bool_)),
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )
    assert isinstance(output, jax.Array)
    return output.reshape(*batch, *output.shape[-3:])
