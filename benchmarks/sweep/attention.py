"""Attention for the sweep: jaxfused, jax.nn, Flax, cuDNN, and the truth a few heads at a time.

Operands are q, k, v, and where a case has them, the bias, the number of valid keys of each sequence,
and the segment ids, which are those of queries and keys alike.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.fuzz.attention import attention
from benchmarks.run.case import Function
from benchmarks.sweep.configs import Attention
from benchmarks.sweep.program_parts import Programs, of_problem

STOCK_LOGITS_BYTES = 5 * 2**30
"""Most bytes of stock's float32 logits; XLA holds up to four such arrays for a gradient."""

_TRUTH_LOGITS = 2**27
"""Most logits that the float32 truth holds in an array; it computes some heads at a time."""


def programs(config: Attention) -> Programs:
    problem = attention(
        dict(
            batch=config.batch,
            queries=config.queries,
            keys=config.keys,
            key_heads=config.key_heads,
            group=config.group,
            head_size=config.head_size,
            value_head_size=config.head_size,
            dtype=config.dtype,
            is_causal=config.causal,
            window=_window(config),
            segments=config.segments,
            same_segments=True,
            key_lengths=config.lengths,
            fewest_keys=1 + config.keys // 4,
            bias="bnts" if config.bias_batch > 1 else "1nts" if config.bias_batch else None,
            bias_dtype=config.dtype,
        )
    )
    stock: dict[str, Function] = {}
    if stock_fits(config):
        stock["jax.nn"] = partial(of_jax, config, implementation="xla")
        if config.group == 1:
            stock["flax"] = partial(of_flax, config)
    return of_problem(
        problem,
        stock,
        peers={"cudnn": partial(of_jax, config, implementation="cudnn")},
        reference=partial(in_pieces, config),
        # If one key has all the weight, the gradients of q and k are differences of numbers that differ
        # only by the output's rounding to 16 bits; errors relative to these terms are allowed.
        terms=(
            0.0,
            config.keys**-0.5,
            (config.queries * config.group) ** 0.5 / config.keys,
            0.0,
            *[1.0] * (config.bias_batch > 0),
        ),
    )


def stock_fits(config: Attention) -> bool:
    """Returns whether stock XLA, which holds all logits, stays within 24 GiB."""
    return 4 * config.logits() <= STOCK_LOGITS_BYTES


def _split(config: Attention, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns (q, k, v, bias, lengths, segments), with None for absent operands."""
    q, k, v, *rest = operands
    present = (config.bias_batch > 0, config.lengths, config.segments > 0)
    return q, k, v, *(rest.pop(0) if there else None for there in present)


def _window(config: Attention) -> tuple[int, int] | None:
    return (config.window, 0) if config.window else None


def of_jax(config: Attention, *operands: Any, implementation: Any) -> jax.Array:
    """Calls jax.nn.dot_product_attention, with segments as a mask."""
    q, k, v, bias, lengths, segments = _split(config, operands)
    mask = None if segments is None else _same_segment(segments)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        is_causal=config.causal,
        local_window_size=_window(config),
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )


def of_flax(config: Attention, *operands: Any) -> jax.Array:
    """Calls flax.linen.dot_product_attention, with all restrictions of keys in one mask."""
    q, k, v, bias, lengths, segments = _split(config, operands)
    mask = None if segments is None else _same_segment(segments)
    columns = jnp.arange(config.keys)[None, None, None]
    rows = jnp.arange(config.queries)[None, None, :, None]
    if config.causal:
        mask = nn.combine_masks(mask, rows >= columns, dtype=bool)
    if config.window:
        mask = nn.combine_masks(mask, rows - columns <= config.window, dtype=bool)
    if lengths is not None:
        mask = nn.combine_masks(mask, columns < lengths[:, None, None, None], dtype=bool)
    return nn.dot_product_attention(q, k, v, bias, mask)


def _same_segment(segments: jax.Array) -> jax.Array:
    return segments[:, None, :, None] == segments[:, None, None, :]


def in_pieces(config: Attention, *operands: Any) -> jax.Array:
    """Runs jax.nn's attention over some key heads and batch entries at a time; recomputes the logits.

    In float32 the result is the truth; in the case's dtype it is the low-precision reference, in less
    memory than stock needs.
    """
    q, k, v, bias, lengths, segments = _split(config, operands)
    batch, key_heads, group = config.batch, config.key_heads, config.group

    @jax.checkpoint
    def one(piece: tuple[Any, ...]) -> jax.Array:
        index, q, k, v = piece
        example, head = index // key_heads, index % key_heads
        rest: list[Any] = []
        if bias is not None:
            example_bias = bias[example if config.bias_batch > 1 else 0]
            rest.append(jax.lax.dynamic_slice_in_dim(example_bias, head * group, group)[None])
        rest += [a[example][None] for a in (lengths, segments) if a is not None]
        return of_jax(config, q[None], k[None], v[None], *rest, implementation="xla")[0]

    def by_key_head(x: jax.Array, heads_each: int) -> jax.Array:
        x = x.reshape(batch, -1, key_heads, heads_each, x.shape[-1])
        return x.transpose(0, 2, 1, 3, 4).reshape(batch * key_heads, -1, *x.shape[3:])

    at_a_time = max(1, _TRUTH_LOGITS // (group * config.queries * config.keys))
    output = jax.lax.map(
        one,
        (
            jnp.arange(batch * key_heads),
            by_key_head(q, group),
            by_key_head(k, 1),
            by_key_head(v, 1),
        ),
        batch_size=min(at_a_time, batch * key_heads),
    )
    output = output.reshape(batch, key_heads, config.queries, group, q.shape[-1])
    return output.transpose(0, 2, 1, 3, 4).reshape(q.shape)
