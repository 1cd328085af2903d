"""Attention on Hopper: what the kernels support, and the one call of each.

attention_fwd and attention_bwd hold the kernels for long sequences, attention_short those for
T, S <= 256. They share two descriptions: attention_mask (which blocks are visited) and
attention_logits (from products to logits).

Each kernel module has `forward` or `backward` (attention_short both) of these signatures, letters as
in `Operands` and V the head size of the values::

    forward(query [B, T, N, H], key [B, S, K, H], value [B, S, K, V], operands, *,
            logits: Logits, multiprocessors, config=None) -> (out [B, T, N, V], lse [B, N, T])
    backward(query, key, value, operands, out, lse, dout, dlse, *,
             logits: Logits, multiprocessors, config=None) -> (dquery, dkey, dvalue, dbias, dsinks)

lse is float32, the natural logarithm, includes the sink, and is EMPTY_LSE for a row that attends to
nothing, whose out is 0. dlse [B, N, T] float32 may be None; dbias (float32, of the bias's shape) and
dsinks [N] are None where there is no operand. `why_unsupported` of each module states its limits.
"""
