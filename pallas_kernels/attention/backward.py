"""Backward of attention on Hopper: what all of its kernels need, and their calls.

attention_bwd_dq and attention_bwd_dkv take seven products for a pair of blocks. One kernel takes five,
but its CTAs wait for each other to add up dQ in one order, and rely on being started in order, which
nobody promises. On an H200 it made a step 1 to 5 % faster in three of seven cases and up to 65 % slower
in the others.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.backward_bias import bias_gradient
from pallas_kernels.attention.backward_dkv import KeyGradientConfig, key_gradients
from pallas_kernels.attention.backward_dq import QueryGradientConfig, query_gradient
from pallas_kernels.attention.backward_rows import row_gradients, row_statistics
from pallas_kernels.attention.logits import Logits, Operands

_ROWS = 384
"""A multiple of all blocks of queries, to which vectors of T are filled up."""


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    logits: Logits,
    multiprocessors: int,
    query_config: QueryGradientConfig | None = None,
    key_config: KeyGradientConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(dquery, dkey, dvalue, dbias, dsinks) from what the forward returned.

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, V]; lse [B, N, R] float32 is the natural
    logarithm, R = saved_length(T). dbias and dsinks are float32, or None without the operand.
    """
    lse2, delta = row_statistics(out, lse, dout, dlse)
    dbias, dsinks = row_gradients(operands, lse2, delta, dlse)
    fill = ((0, 0), (0, 0), (0, -delta.shape[2] % _ROWS))
    lse2, delta = jnp.pad(lse2, fill, constant_values=jnp.inf), jnp.pad(delta, fill)
    if operands.bias is not None and dbias is None:
        dbias = bias_gradient(query, key, value, operands, lse2, delta, dout, logits=logits)
    arrays = (query, key, value, operands, lse2, delta, dout)
    options = dict(logits=logits, multiprocessors=multiprocessors)
    dquery = query_gradient(*arrays, **options, config=query_config)
    dkey, dvalue = key_gradients(*arrays, **options, config=key_config)
    return dquery, dkey, dvalue, dbias, dsinks
