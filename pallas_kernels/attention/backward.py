"""Backward of attention on Hopper for any number of keys, and the preparation of all backwards.

backward_dq and backward_dkv together compute seven matrix products for each pair of a query block and a
key block. A single kernel would compute five, but its CTAs would have to wait for each other so that dQ
is added up in one fixed order, and would depend on the order in which the hardware starts CTAs, which
CUDA does not guarantee. In a trial where CTAs waited for each other, a step was much slower.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import backward_dkv, backward_dq
from pallas_kernels.attention.backward_bias import BIAS_GRADIENT_TILE, bias_gradient
from pallas_kernels.attention.backward_dkv import key_gradients
from pallas_kernels.attention.backward_dq import QueryGradientConfig, query_gradient
from pallas_kernels.attention.backward_rows import row_gradients, row_statistics
from pallas_kernels.attention.block_lists import as_explicit
from pallas_kernels.attention.key_gradient_config import KeyGradientConfig
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.memory import ceil_to
from pallas_kernels.attention.shape import Shape


@dataclass(frozen=True)
class BackwardConfig:
    """Configs of the two backward kernels."""

    queries: QueryGradientConfig
    keys: KeyGradientConfig


def candidates(shape: Shape, logits: Logits, multiprocessors: int) -> tuple[BackwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first.

    The kernels run one after the other, so the best config of one does not depend on the other's: each
    candidate differs from the guess in the config of one kernel.
    """
    queries = backward_dq.candidates(shape, logits, multiprocessors)
    keys = backward_dkv.candidates(shape, logits, multiprocessors)
    return (
        *(BackwardConfig(queries[0], config) for config in keys),
        *(BackwardConfig(config, keys[0]) for config in queries[1:]),
    )


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
    config: BackwardConfig | None = None,
    dbias_dtype: Any = jnp.float32,
) -> tuple[jax.Array | None, ...]:
    """Returns (dquery, dkey, dvalue, dbias, dsinks, *dreads), given the results of the forward.

    query is [B, T, N, H], key [B, S, K, H], value [B, S, K, V]; lse [B, N, R] in float32 is the natural
    logarithm, with R = saved_length(T). dbias is summed in float32 and rounded once to `dbias_dtype`,
    dsinks is float32, and each is None without its operand. dreads, in float32, are the gradients of
    what `logits.score` reads, or None for those that have none.
    """
    shape = Shape.of(query, key, value)
    config = config or candidates(shape, logits, multiprocessors)[0]
    blocks = (config.queries.query_block, config.keys.query_block)
    lse2, delta, dbias, dsinks = prepare(
        operands, out, lse, dout, dlse, logits, blocks=blocks, dbias_dtype=dbias_dtype
    )
    arrays = (query, key, value, operands, lse2, delta, dout)
    written = None
    if operands.bias is not None and dbias is None:
        if operands.bias.shape == shape.logits:
            written = dbias_dtype
        else:
            of_bias, explicit = as_explicit(logits, operands)
            rest = (lse2, delta, dout)
            dbias = bias_gradient(
                *(query, key, value, explicit, *rest),
                logits=of_bias,
                dtype=dbias_dtype,
            )
    options = dict(logits=logits, multiprocessors=multiprocessors)
    shapes = _shapes_of_reads(logits, operands)
    of_rows = tuple(number for number, read in shapes.items() if read[3] == 1)
    dquery, dlogits, sums = query_gradient(
        *arrays,
        **options,
        config=config.queries,
        dlogits_dtype=written,
        reads=of_rows if shapes else None,
    )
    dkey, dvalue = key_gradients(*arrays, **options, config=config.keys)
    dreads: dict[int, jax.Array] = {}
    if shapes:
        # delta [B, N, T] is computed from the output, which is rounded to 16 bits. Its error would be
        # multiplied into the gradients of score_mod's arrays, so delta is replaced by `exact`, which
        # the kernel of dQ has computed as float32 sums of P dP over the keys.
        exact = sums[0] if dlse is None else sums[0] - dlse
        error = delta[:, :, : shape.query_count] - exact
        for i, number in enumerate(of_rows):
            of_logits, of_probabilities = sums[1 + 2 * i : 3 + 2 * i]
            dreads[number] = _summed(of_logits + error * of_probabilities, shapes[number])
        exact = delta.at[:, :, : shape.query_count].set(exact)
    for number in shapes.keys() - dreads.keys():
        of_read, explicit = as_explicit(logits, operands)
        dreads[number] = bias_gradient(
            *(query, key, value, explicit, lse2, exact, dout),
            logits=of_read,
            bias_shape=shapes[number],
            read=number,
        )
    wanted = () if logits.score is None else logits.score.wanted
    numbers = iter(sorted(dreads))
    return (
        *(dquery, dkey, dvalue, dbias if written is None else dlogits, dsinks),
        *(dreads[next(numbers)] if is_wanted else None for is_wanted in wanted),
        *[None] * (len(operands.reads) - len(wanted)),
    )


def _shapes_of_reads(logits: Logits, operands: Operands) -> dict[int, tuple[int, ...]]:
    """Returns {number: shape} of the arrays that `logits.score` reads and that get gradients.

    They are numbered from 1, and are [B or 1, N or 1, T or 1, S or 1].
    """
    if logits.score is None:
        return {}
    reads = logits.score_reads(operands)
    wanted = [r for r, is_wanted in zip(reads, logits.score.wanted, strict=True) if is_wanted]
    return {i + 1: read.shape for i, read in enumerate(wanted)}


def _summed(sums: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums [B, N, T] over the axes in which `shape` [B or 1, N or 1, T or 1, 1] has length 1."""
    shared = tuple(axis for axis in range(3) if shape[axis] == 1)
    return jnp.sum(sums, axis=shared, keepdims=True)[..., None]


def prepare(
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    logits: Logits,
    *,
    blocks: tuple[int, ...] = (),
    dbias_dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (lse in the logits' base, delta, dbias, dsinks) of out, dout [B, T, N, V], lse [B, N, R].

    lse and delta are [B, N, T padded to a multiple of each of `blocks`], as kernels read them in whole
    blocks of queries. dbias is None without a bias, and for a bias that differs between keys, whose
    gradient a kernel computes.
    """
    lse2, delta = row_statistics(out, lse, dout, dlse, logits)
    dbias, dsinks = row_gradients(operands, lse2, delta, dlse, logits)
    length = max(ceil_to(delta.shape[2], block) for block in (BIAS_GRADIENT_TILE[0], *blocks))
    fill = ((0, 0), (0, 0), (0, length - delta.shape[2]))
    lse2, delta = jnp.pad(lse2, fill, constant_values=jnp.inf), jnp.pad(delta, fill)
    return lse2, delta, None if dbias is None else dbias.astype(dbias_dtype), dsinks
