"""dot_product_attention: the function, the choice of an implementation, and the gradient."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfused import dispatch
from jaxfused.ops.attention import attention_cudnn, attention_xla
from jaxfused.ops.attention.attention_arguments import (
    broadcastable,
    check_kinds,
    check_places,
    first_place,
    mask_of,
    scale_of,
    validate,
)
from jaxfused.ops.attention.attention_stages import (
    WHOLE,
    Arrays,
    Backward,
    Forward,
    Options,
    within,
)
from jaxfused.ops.attention.call_functions import CallFunctions
from jaxfused.ops.attention.index_function import IndexFunction
from jaxfused.ops.attention.mask import Mask
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.linear.linear_stages import allows_tf32
from jaxfused.runtime import dropout_arguments, sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_soft_cap, python_numbers
from jaxfused.runtime.dropout import Bits
from jaxfused.runtime.gate import choose_without_stages, takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.shapes import merge_axes, split_axis, why_symbolic
from pallas_kernels.attention import attention as pallas_attention

AttentionImplementation = dispatch.Implementation | Literal["cudnn"]


@python_numbers
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | AttentionMask | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: AttentionImplementation | None = None,
    return_residual: bool = False,
    query_offset: int | jax.Array | Literal["bottom_right"] | None = None,
    return_lse: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    mask_mod: Callable[..., jax.Array] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Scaled dot-product attention: `jax.nn.dot_product_attention` with more inside one pass.

    .. math::
        L &= \text{cap} \cdot \tanh(\text{scale} \cdot Q K^T / \text{cap}) + \text{bias} \\
        P_{ts} &= \frac{e^{L_{ts}}}{e^{\text{sink}} + \sum_{s'} e^{L_{ts'}}} \\
        O &= \text{dropout}(P) V

    over the keys that the mask allows. Without a cap L is the scaled product plus bias, and without
    sinks their term is absent. Letters: B batch, T queries, S keys, N query heads, K key heads, H
    head size, V head size of the values. Arguments up to `return_residual` are those of
    `jax.nn.dot_product_attention`.

    A query that may attend to nothing gets 0, and gives zero gradients; it is not an error.

    Args:
      query: [B, T, N, H] or [T, N, H], float32, bfloat16 or float16 (float64 and integers with "xla").
      key: [B, S, K, H] or [S, K, H], of the query's dtype. N is a multiple of K; neighbouring query
        heads share a key head.
      value: [B, S, K, V] or [S, K, V], of the query's dtype.
      bias: is added to the logits; up to 4 axes that broadcast to [B, N, T, S]. Any float dtype.
        Its gradient has its shape. Pass `mask` for keys that must not be seen: a query whose logits are
        all lowered by 1e9 is not one without keys, but attends to all of them alike. "cudnn" saves only
        the log-sum-exp, and from 1e5 on float32 lacks digits for the gradients of such a query.
      mask: bool, True where a query may attend to a key; broadcasts to [B, N, T, S] too. Or a mask of
        `jaxfused.masks` of shape (T, S), or (N, T, S) of a `MultiHeadMask`.
      scale: of the logits, finite; by default 1 / sqrt(H). An array that broadcasts to [B, N, T, S],
        such as one of each head [N, 1, 1], gets a gradient, in "xla".
      is_causal: query t, which stands at key p = t + query_offset, attends to keys s <= p.
      query_seq_lengths: [B] integers, clipped to the range 0 to T; queries beyond them give 0.
      key_value_seq_lengths: [B] integers, likewise; keys beyond are masked.
      local_window_size: (left, right), or one number for both: p - left <= s <= p + right.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla", "cudnn". None
        never chooses cuDNN, whose gradients may differ from run to run.
      return_residual: whether to return the log-sum-exp too, as JAX does: in the key's dtype, and no
        gradient flows into it.
      query_offset: where the first query stands among the keys, for `is_causal` and
        `local_window_size`: a number or [B] integers, of any sign; None, as in JAX, for 0 also where T
        and S differ. "bottom_right" puts the last query at the last key: the number of keys minus that
        of queries, both by their lengths. It is for new tokens whose keys are the last of a cache.
      return_lse: whether to return the log-sum-exp too, in float32 (float64 with "xla" of float64), with
        its gradient. It serves to merge attention over two parts of the keys.
      logits_soft_cap: keeps the logits before bias within (-cap, cap); finite and above 0.
      query_segment_ids: [B, T] or [T] integers, with key_value_segment_ids: a query attends to keys
        of its own segment.
      key_value_segment_ids: [B, S] or [S] integers.
      sinks: [N], one learned logit a head, which adds to the softmax's denominator only.
      dropout_rate: the fraction of probabilities to drop, to the nearest 1/65536; the others are
        divided by the fraction that is kept.
      dropout_key: a `jax.random` key, needed where dropout_rate > 0. Which probabilities are kept
        depends only on the key and on (b, n, t, s), by `jaxfused.runtime.dropout.keep`, and is the
        same in every implementation. Under `shard_map` or `pmap` fold the device's index into the key.
      score_mod: a function (score, b, h, q, k) of a logit, after cap and bias and before the mask, and
        its indices: batch entry, query head, position of the query among the keys (its index plus
        `query_offset`), and key. It is traced for scalars, may index arrays that it closes
        over, and these get gradients.
      mask_mod: a function (b, h, q, k) of the same indices: whether the query attends to the key.

    Returns:
      The output, [B, T, N, V] or [T, N, V], of the query's dtype. With `return_residual` or
      `return_lse` also the log-sum-exp of L (and the sink), [B, T, N] or [T, N]; where a query attends
      to nothing, -0.7 times the largest float32.

      For integer inputs the result has integers, and as in JAX the probabilities are cast to integers
      before they multiply the values: those below 1 become 0.

    Raises:
      ValueError: shapes or dtypes do not fit, a function does not trace, or the named implementation
        cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> jaxfused.dot_product_attention(q, k, v, is_causal=True).shape
      (2, 5, 4, 8)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762; the
    cap: Gemma Team, "Gemma 2", 2024, https://arxiv.org/abs/2408.00118; sinks: OpenAI, "gpt-oss-120b
    & gpt-oss-20b Model Card", 2025, https://arxiv.org/abs/2508.10925
    """
    check_kinds(bias, return_residual, return_lse)
    query, key, value, bias, sinks = as_arrays(query, key, value, bias, sinks)
    has_batch = query.ndim != 3
    if not has_batch:
        query, key, value = (a[None] if a.ndim == 3 else a for a in (query, key, value))
    validate(query, key, value, bias, sinks)
    batch, query_length, heads, head_size = query.shape
    key_length = key.shape[1]
    allows = None if mask_mod is None else IndexFunction.of("mask_mod", mask_mod, None)
    query_offset = first_place(query_offset, query, key, query_seq_lengths, key_value_seq_lengths)
    if mask_mod is not None or score_mod is not None:
        check_places(query_offset, query_length)
    if bias is not None:
        bias = broadcastable("bias", bias, (batch, heads, query_length, key_length))
    device = dispatch.current_device(query, key, value)
    functions = CallFunctions(
        why_no_kernel=_why_not_on_tiles(implementation, device, query, key, value),
        query_offset=query_offset,
        sizes=(batch, heads, query_length, key_length),
    )
    bias, score = functions.of_score(score_mod, bias, query.dtype)
    # context_parallel_attention passes Bits, after the same checks.
    dropout_words = (
        dropout_key
        if isinstance(dropout_key, Bits)
        else dropout_arguments.dropout_words("dot_product_attention", dropout_rate, dropout_key)
    )
    check_soft_cap("dot_product_attention", logits_soft_cap)
    scale = scale_of(scale, head_size, (batch, heads, query_length, key_length))
    is_reference = implementation != "cudnn" and _takes_reference(
        implementation, device, query, key, scale, functions.why_no_score, dropout_words
    )
    who, rest = mask_of(
        *(query, key, mask, is_causal, local_window_size, query_offset),
        *(query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids),
        allows,
        divides=not is_reference and implementation != "cudnn",
    )
    if rest is not None and not functions.takes_mask(rest):
        who = who.limited_to(rest.over(functions.places))
    if implementation == "cudnn":
        used = {
            "scale as an array": isinstance(scale, jax.Array),
            "return_residual": return_residual,
            "return_lse": return_lse,
            "logits_soft_cap": logits_soft_cap is not None,
            "segment ids": who.query_segments is not None,
            "query_offset": who.query_offset is not None,
            "sinks": sinks is not None,
            "dropout": dropout_words is not None,
            "a score_mod that does more than add": score is not None,
        }
        output = _in_cudnn(device, query, key, value, bias, who, scale, used)
        return output if has_batch else output[0]
    lse: Any = None
    if is_reference:
        output, lse = attention_xla.attention(
            *(query, key, value, bias, sinks, who, dropout_words),
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            dropout_rate=dropout_rate,
            score_mod=score,
        )
        output = named(output, "dot_product_attention", "output")
        lse = named(lse, "dot_product_attention", "log_sum_exp")
    else:
        options = _options(who, query.dtype, scale, logits_soft_cap, dropout_rate, functions)
        run = Runner(implementation, device)
        reads = functions.reads()
        output, saved = _run(
            run, options, query, key, value, bias, sinks, who, dropout_words, reads
        )
        if return_residual or return_lse:
            lse = _lse_of_queries(saved, query_length, sinks, who)
    if not has_batch:
        output, lse = output[0], None if lse is None else lse[0]
    if return_residual:
        return output, jax.lax.stop_gradient(lse.astype(key.dtype))
    return (output, lse) if return_lse else output


def _in_cudnn(device, query, key, value, bias, who: Mask, scale, used) -> jax.Array:
    """Returns cuDNN's output; raises if one of the options that it lacks is `used`."""
    reason = attention_cudnn.why_unsupported(
        device, query, key, value, who, [name for name, is_used in used.items() if is_used]
    )
    choose_without_stages("dot_product_attention", "cudnn", {"cudnn": reason}, query, key, value)
    [query] = attention_xla.cleared_beyond(who.query_lengths, query)
    output = attention_cudnn.attend(query, key, value, bias, who, scale)
    [output] = attention_xla.cleared_beyond(who.query_lengths, output)
    return named(output, "dot_product_attention", "output")


def _options(
    who: Mask, dtype, scale, logits_soft_cap, dropout_rate, functions: CallFunctions
) -> Options:
    return Options(
        is_causal=who.is_causal,
        window=who.window,
        scale=float(scale),
        soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
        dropout_rate=float(dropout_rate),
        pattern=who.pattern,
        score=None if functions.score is None else functions.score.function,
        allows=None if functions.mask is None else functions.mask.function,
        allows_tf32=dtype == jnp.float32 and allows_tf32(None),
    )


def _why_not_on_tiles(implementation, device, query, key, value) -> str | None:
    """Returns why no Pallas kernel can evaluate score_mod or mask_mod of the call, or None."""
    if implementation not in (None, "pallas"):
        return f"implementation is {implementation!r}"
    if (unknown := why_symbolic(query, key, value)) is not None:
        return unknown
    sizes = dict(head_size=query.shape[3], value_size=value.shape[3])
    if pallas_attention.are_wide(**sizes):
        return "functions are evaluated in the kernels for heads up to 256"
    return pallas_attention.why_unsupported(
        compute_capability=device.compute_capability,
        dtype=query.dtype,
        query_count=query.shape[1],
        key_count=key.shape[1],
        **sizes,
    )


def _takes_reference(
    implementation, device, query, key, scale, why_no_kernel: str | None, dropout_words
) -> bool:
    """Returns whether plain jax.numpy runs the call, as where scale is an array: kernels take floats."""
    if isinstance(scale, jax.Array):
        why_no_kernel = "scale must be a Python float, as it is a constant of the kernels"
    if isinstance(dropout_words, Bits) and dropout_words.is_moved():
        why_no_kernel = (
            "kernels draw dropout's bits by an index that starts at 0, and these tokens are within a"
            " sequence (context_parallel_attention's method 'all_to_all' has kernels with dropout)"
        )
    missing = None if why_no_kernel is None else dict.fromkeys(("pallas", "cuda"), why_no_kernel)
    return takes_reference(
        "dot_product_attention", implementation, device, query, key, missing=missing
    )


def _run(
    run: Runner,
    options: Options,
    query,
    key,
    value,
    bias,
    sinks,
    mask: Mask,
    dropout_words,
    reads: tuple[jax.Array, ...] = (),
):
    """Returns the kernels' output [B, T, N, V] and log-sum-exp [B, K, G, R], where R is T padded."""
    batch, query_count, heads, _ = query.shape
    key_heads = key.shape[2]
    groups = heads // key_heads
    [query] = attention_xla.cleared_beyond(mask.query_lengths, query)

    def matrix(array):
        if array is None:
            return None
        return split_axis(array, 1, *((1, 1) if array.shape[1] == 1 else (key_heads, groups)))

    seeds = None
    if dropout_words is not None:
        [seeds, *_] = Bits.of(dropout_words, batch, heads)
        seeds = seeds.reshape(2, batch, key_heads, groups)
    arrays = Arrays(
        split_axis(query, 2, key_heads, groups),
        key,
        value,
        matrix(bias),
        None if sinks is None else sinks.astype(jnp.float32).reshape(key_heads, groups),
        mask.query_lengths,
        mask.key_lengths,
        mask.query_offset,
        mask.query_segments,
        mask.key_segments,
        matrix(None if mask.explicit is None else mask.explicit.astype(jnp.int8)),
        seeds,
        None if mask.pattern_heads is None else mask.pattern_heads.reshape(key_heads, groups),
        tuple(map(matrix, reads)),
    )
    aligned = sharding.align(arrays.operands(), operand_axes=arrays.axes(), whole=WHOLE)
    arrays = Arrays.of(*aligned)
    output, lse = _attention(run, options, arrays)
    return output.reshape(batch, query_count, heads, value.shape[-1]), lse


def _lse_of_queries(saved, query_count: int, sinks, mask: Mask):
    """Returns the log-sum-exp [B, T, N] from the kernels' padded [B, K, G, R]."""
    lse = merge_axes(saved[..., :query_count], 1).swapaxes(1, 2)
    if sinks is not None and mask.query_lengths is not None:
        # The kernels skip queries beyond the length. These attend to their sink alone, which is then
        # the log-sum-exp.
        lse = jnp.where(within(mask, query_count), lse, sinks.astype(lse.dtype)[None, None])
    return lse


class _Residuals(NamedTuple):
    arrays: Arrays
    output: jax.Array
    """Output [B, T, K, G, V]."""
    saved: list[jax.Array]
    """Log-sum-exp [B, K, G, R] with R = `saved_length(T)`; entries from T on are padding. Then its rest,
    with a bias or a score."""
    differentiated: tuple[tuple[()] | None, ...]
    """For each of `arrays.reads`, () if it needs a gradient, else None."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="dot_product_attention")
def _attention(run: Runner, options: Options, arrays: Arrays):
    return run(Forward(options), *arrays.operands())[:2]


def _attention_fwd(run: Runner, options: Options, primals: Arrays):
    differentiated = tuple(() if read.perturbed else None for read in primals.reads)
    arrays = jax.tree.map(lambda primal: primal.value, primals)
    output, *saved = run(Forward(options), *arrays.operands())
    output = named(output, "dot_product_attention", "output")
    saved = [named(x, "dot_product_attention", "log_sum_exp") for x in saved]
    return (output, saved[0]), _Residuals(arrays, output, saved, differentiated)


def _attention_bwd(run: Runner, options: Options, saved: _Residuals, cotangents):
    arrays = saved.arrays
    doutput, dlse = (
        jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in cotangents
    )
    options = options.with_gradients(tuple(read == () for read in saved.differentiated))
    bias, query = arrays.bias, arrays.query
    # Devices split only the axes of the batch and of the key heads.
    own_bias = bias is not None and bias.shape[:2] == (query.shape[0], query.shape[2])
    dquery, dkey, dvalue, dbias, dsinks, *dreads = run(
        Backward(options, own_bias, len(saved.saved)),
        *(saved.output, *saved.saved, doutput, dlse, *arrays.operands()),
    )
    if dbias is not None:
        dbias = dbias.astype(arrays.bias.dtype)
    reads = tuple(
        None if dread is None else dread.astype(read.dtype)
        for dread, read in zip(dreads, arrays.reads, strict=True)
    )
    return (Arrays(dquery, dkey, dvalue, dbias, dsinks, reads=reads),)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
