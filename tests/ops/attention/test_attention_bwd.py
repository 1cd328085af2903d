"""Backward kernels of attention: their schedule, lowering, the interpreter, and on a GPU."""

import functools
import itertools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfused.ops.attention import attention_xla
from jaxfused.ops.attention.mask import Mask
from jaxfused.runtime.dropout import dropout_seeds
from pallas_kernels.attention import attention, backward_dkv, backward_dq
from pallas_kernels.attention import backward as attention_bwd
from pallas_kernels.attention import forward as attention_fwd
from pallas_kernels.attention.backward import BackwardConfig
from pallas_kernels.attention.backward_bias import bias_gradient
from pallas_kernels.attention.backward_dkv import shared_tiles
from pallas_kernels.attention.backward_dq import QueryGradientConfig
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.key_gradient_config import KeyGradientConfig
from pallas_kernels.attention.logits import (
    EMPTY_LSE,
    Logits,
    Operands,
    saved_length,
)
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.split_keys import SplitForwardConfig
from pallas_kernels.attention.split_keys_backward import SplitBackwardConfig
from pallas_kernels.attention.tiles import KeyTiles
from tests.cases.normal import normal
from tests.support import mosaic_interpreter
from tests.support.arrays import put
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import kernels, lowered


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_tile_of_keys_has_one_cta_and_all_have_as_much_to_do(is_causal):
    tiles = KeyTiles(BlockMask(4000, 4000, is_causal), 8, 2, 128, 64)
    table = tiles.planned(8, 4, 132)
    numbers = [tuple(row[1 : 1 + row[0]]) for row in table]
    assert sorted(itertools.chain(*numbers)) == list(range(8 * 8 * tiles.count))
    work = [sum(63 - 2 * (n % tiles.count) if is_causal else 63 for n in row) for row in numbers]
    assert max(work) <= 1.04 * np.mean(work)


def test_tiles_of_keys_are_balanced_by_lengths():
    lengths = np.array([1024, 900, 64, 0], np.int32)
    tiles = KeyTiles(BlockMask(1024, 1024, has_key_lengths=True), 8, 2, 128, 64)
    operands = Operands(key_lengths=lengths)
    table = np.asarray(tiles.schedule(4, 1, 8, operands, tiles.tables(operands)))
    numbers = [tuple(row[1 : 1 + row[0]]) for row in table]
    assert sorted(itertools.chain(*numbers)) == list(range(4 * 8 * tiles.count))
    visits = [16 * (n % tiles.count * 128 < lengths[n // (8 * tiles.count)]) for n in range(256)]
    work = [sum(visits[n] for n in row) for row in numbers]
    assert max(work) <= 1.1 * np.mean(work)


def logits_of(mask, operands, *, soft_cap=None, dropout_rate=0.0):
    return Logits(
        scale=0.1,
        mask=mask,
        soft_cap=soft_cap,
        has_bias=operands.bias is not None,
        has_sinks=operands.sinks is not None,
        dropout_rate=dropout_rate,
    )


@parametrize(
    ("head_size", "value_size", "dtype"),
    [
        (8, 8, "bfloat16"),
        (16, 128, "float16"),
        (40, 24, "bfloat16"),
        (64, 64, "float16"),
        (72, 128, "bfloat16"),
        (128, 128, "bfloat16"),
        (128, 40, "float16"),
        (256, 256, "bfloat16"),
        (64, 192, "float16"),
    ],
    quick=(2,),
)
def test_default_configs_lower(head_size, value_size, dtype):
    mask = BlockMask(197, 333, is_causal=True)
    _lower(mask, Operands(), logits_of(mask, Operands()), head_size, value_size, dtype)


MANY = KeyGradientConfig(query_block=128)
LATE = KeyGradientConfig(query_block=96, tile_stages=1, multiplies_early=False)
EARLY = KeyGradientConfig(query_block=96, tile_stages=1)
KEPT = KeyGradientConfig(keeps_keys=True)
KEPT_AND_LATE = KeyGradientConfig(keeps_keys=True, multiplies_early=False)


@parametrize(
    ("size", "query_config", "key_config"),
    [
        (64, QueryGradientConfig(3, 64), KeyGradientConfig(3, 64)),
        (64, QueryGradientConfig(1, 256), KeyGradientConfig(1, 128)),
        (
            128,
            QueryGradientConfig(3, 64, 3, 3, separate_output=False),
            KeyGradientConfig(2, 64, 3, 3),
        ),
        (128, QueryGradientConfig(), LATE),
        (72, QueryGradientConfig(), KEPT),
        (72, QueryGradientConfig(), MANY),
        (128, QueryGradientConfig(), EARLY),
        (128, QueryGradientConfig(), KEPT_AND_LATE),
        (
            256,
            QueryGradientConfig(2, 64, 1, 2, separate_output=False),
            KeyGradientConfig(2, 64, 2, 2, splits_roles=True, tile_stages=1),
        ),
    ],
    quick=(),
)
def test_other_configs_lower(size, query_config, key_config):
    mask = BlockMask(500, 700, is_causal=True)
    logits = logits_of(mask, Operands())
    config = BackwardConfig(query_config, key_config)
    _lower(mask, Operands(), logits, size, size, jnp.bfloat16, config)


@pytest.mark.parametrize("head_size", [16, 64])
def test_narrow_keys_are_not_kept_in_registers(head_size):
    """There ptxas reuses the registers of K, which neither the interpreter nor the lowering shows."""
    mask = BlockMask(500, 700)
    logits = logits_of(mask, Operands())
    shape = Shape(1, 500, 700, 4, 2, head_size, 128)
    keys = [c.keys for c in attention_bwd.candidates(shape, logits, 132)]
    assert keys and not any(config.keeps_keys for config in keys)
    config = BackwardConfig(QueryGradientConfig(), KEPT_AND_LATE)
    with pytest.raises(ValueError, match="keeps_keys needs heads of more than 64"):
        _lower(mask, Operands(), logits, head_size, 128, jnp.bfloat16, config)


@pytest.mark.exhaustive
@parametrize(
    ("queries", "keys", "head_size", "value_size"),
    [(197, 333, 72, 80), (1, 301, 128, 64)],
    quick=(0,),
)
def test_matrices_are_not_copied_to_fit(queries, keys, head_size, value_size):
    """No matrix is padded for any length or head size, only the statistics of queries."""
    query, key, value, dout = (
        jax.ShapeDtypeStruct((2, *sizes), jnp.bfloat16)
        for sizes in (
            (queries, 4, head_size),
            (keys, 2, head_size),
            (keys, 2, value_size),
            (queries, 4, value_size),
        )
    )
    options = dict(logits=logits_of(BlockMask(queries, keys), Operands()), multiprocessors=132)

    def f(query, key, value, dout):
        arrays = (query, key, value, Operands())
        out, lse = attention_fwd.forward(*arrays, **options)
        return attention_bwd.backward(*arrays, out, lse, dout, None, **options)[:3]

    program = lowered(f, query, key, value, dout).splitlines()
    moved = [line for line in program if "stablehlo.pad" in line or "stablehlo.slice" in line]
    assert not [line for line in moved if "bf16" in line]


@parametrize(
    ("queries", "keys", "head_size"),
    # The last shape has few keys, which other kernels take.
    [(512, 512, 64), (256, 320, 64), (512, 448, 128), (320, 832, 256), (192, 192, 64)],
    quick=(0,),
)
def test_bias_and_mask_are_not_padded_where_multiples_of_64_meet(queries, keys, head_size):
    """Padding would copy the bias, and then its gradient."""
    batch, heads = 4, 64
    shape = (batch, heads, queries, keys)
    query, key = (
        jax.ShapeDtypeStruct((batch, count, heads, head_size), jnp.bfloat16)
        for count in (queries, keys)
    )
    operands = Operands(
        bias=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        explicit=jax.ShapeDtypeStruct(shape, jnp.int8),
    )
    mask = BlockMask(queries, keys, has_explicit=True)
    options = dict(logits=logits_of(mask, operands), multiprocessors=132)

    def forward(query, key, operands):
        return attention.forward(query, key, key, operands, **options)

    def gradients(query, key, operands, out, lse):
        saved = (out, lse, out, None)
        operands = operands._replace(lse_rest=lse[:, :, :queries, None])
        return attention.backward(
            query, key, key, operands, *saved, dbias_dtype=jnp.bfloat16, **options
        )

    lse = jax.ShapeDtypeStruct((batch, heads, saved_length(queries)), jnp.float32)
    programs = [lowered(forward, query, key, operands)]
    if keys > 256:
        programs.append(lowered(gradients, query, key, operands, query, lse))
    lines = "\n".join(programs).splitlines()
    moved = [line for line in lines if "stablehlo.pad" in line or "stablehlo.slice" in line]
    assert not [line for line in moved if "bf16" in line or "i8" in line]


@parametrize("head_size", [64, 128, 256], quick=())
def test_every_option_lowers(head_size):
    mask = BlockMask(197, 333, True, (90, 20), True, True, True, True)
    shape = jax.ShapeDtypeStruct
    operands = Operands(
        bias=shape((1, 4, 1, 333), jnp.float32),
        sinks=shape((4,), jnp.float32),
        query_lengths=shape((2,), jnp.int32),
        key_lengths=shape((2,), jnp.int32),
        query_segments=shape((2, 197), jnp.int32),
        key_segments=shape((2, 333), jnp.int32),
        explicit=shape((2, 1, 197, 333), jnp.int8),
        dropout_seeds=shape((2, 2, 4), jnp.uint32),
    )
    logits = logits_of(mask, operands, soft_cap=5.0, dropout_rate=0.1)
    _lower(mask, operands, logits, head_size, head_size, jnp.bfloat16)


def _lower(mask, operands, logits, head_size, value_size, dtype, config=None):
    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    queries, keys, heads, key_heads = mask.query_count, mask.key_count, 4, 2
    rows = shape(2, heads, queries, dtype=jnp.float32)
    if operands.bias is not None:
        operands = operands._replace(lse_rest=shape(*rows.shape, 1, dtype=jnp.float32))
    f = functools.partial(attention_bwd.backward, logits=logits, multiprocessors=132, config=config)
    launched = kernels(
        f,
        shape(2, queries, heads, head_size),
        shape(2, keys, key_heads, head_size),
        shape(2, keys, key_heads, value_size),
        operands,
        shape(2, queries, heads, value_size),
        rows,
        shape(2, queries, heads, value_size),
        rows,
    )
    bias = {"attention_bias_gradient"} if operands.bias is not None else set()
    assert set(launched) - bias == {"attention_query_gradient", "attention_key_gradient"}


def problem(batch, queries, keys, heads, key_heads, head_size, value_size, dtype):
    draw = functools.partial(normal, np.random.default_rng(0), dtype)
    return (
        draw(batch, queries, heads, head_size),
        draw(batch, keys, key_heads, head_size),
        draw(batch, keys, key_heads, value_size),
        draw(batch, queries, heads, value_size),
    )


def truth(query, key, value, dout, bias, sinks, mask, words, logits):
    """Returns out, lse [B, N, T] and the gradients of the float32 reference on the rounded inputs."""

    # One jitted program: compiling operation by operation took a quarter of the interpreter's tests.
    @jax.jit
    def results(arrays, dout, mask):
        def f(*arrays):
            out, lse = attention_xla.attention(
                *arrays,
                mask,
                words,
                scale=logits.scale,
                logits_soft_cap=logits.soft_cap,
                dropout_rate=logits.dropout_rate,
            )
            return out, lse.swapaxes(1, 2)

        (out, lse), vjp = jax.vjp(f, *arrays)
        return out, lse, vjp((dout, jnp.zeros_like(lse)))

    *wide, dout = (np.asarray(x, np.float32) for x in (query, key, value, dout))
    with jax.default_matmul_precision("highest"):
        return results((*wide, bias, sinks), dout, mask)


def distance(actual, expected):
    """Returns the relative error in the Euclidean norm."""
    difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
    return np.linalg.norm(difference) / np.linalg.norm(np.asarray(expected, np.float64))


def assert_close(actual, expected, tolerance, name):
    """Asserts that the error's norm is at most `tolerance` times max(the truth's norm, 1)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= tolerance * max(np.linalg.norm(expected), 1), name


@parametrize(
    ("shape", "is_causal", "soft_cap", "dtype"),
    [
        ((1, 2, 100, 130), True, None, "bfloat16"),
        ((2, 1, 1, 130), False, 3.0, "float32"),
        ((1, 1, 100, 130), True, None, "float32"),
        ((2, 1, 1, 130), True, None, "float16"),
    ],
    quick=(1,),
)
def test_bias_gradient(interpreted_hopper, monkeypatch, shape, is_causal, soft_cap, dtype):
    mosaic_interpreter.complete(monkeypatch)
    query, key, value, dout = problem(2, 100, 130, 2, 1, 64, 32, jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(1), shape)
    logits = logits_of(BlockMask(100, 130, is_causal), Operands(bias=bias), soft_cap=soft_cap)
    out, lse, gradients = truth(query, key, value, dout, bias, None, Mask(is_causal), None, logits)
    delta = jnp.einsum("btnv,btnv->bnt", out, dout.astype(jnp.float32))
    fill = ((0, 0), (0, 0), (0, 28))
    actual = bias_gradient(
        query,
        key,
        value,
        Operands(bias=bias),
        jnp.pad(lse, fill, constant_values=jnp.inf),
        jnp.pad(delta, fill),
        dout,
        logits=logits,
        dtype=jnp.dtype(dtype),
    )
    assert actual.dtype == dtype
    # Only exp2 and the final rounding lose accuracy.
    assert distance(actual, gradients[3]) < 1e-5 + jnp.finfo(dtype).eps / 2


def every_option(names, shape):
    """Returns (mask, operands, words) for the reference and the kernels, with the named options.

    The bias is shared by the batch entries, unless "own" is among the names.
    """
    batch, queries, keys, heads = shape
    rng = np.random.default_rng(7)
    words = put(rng.integers(2**32, size=2), jnp.uint32) if "dropout" in names else None
    options = dict(
        bias=rng.normal(size=(batch if "own" in names else 1, heads, queries, keys)).astype(
            np.float32
        ),
        sinks=rng.normal(size=heads).astype(np.float32),
        # The last batch entry has no keys.
        query_lengths=np.arange(1, batch + 1, dtype=np.int32) * (queries // 2),
        key_lengths=np.arange(batch, dtype=np.int32)[::-1] * (keys // 2),
        query_segments=np.sort(rng.integers(4, size=(batch, queries), dtype=np.int32)),
        key_segments=np.sort(rng.integers(5, size=(batch, keys), dtype=np.int32)),
        explicit=rng.random((1, heads, queries, keys)) < 0.7,
        # Queries stand at the end of the keys, and before as well as among them.
        query_offset=np.array([keys - queries, -7], np.int32)[-batch:],
    )
    operands = Operands(**{name: put(options[name]) for name in options if name in names})
    mask = Mask(
        "causal" in names,
        (90, 20) if "window" in names else None,
        operands.query_lengths,
        operands.key_lengths,
        operands.query_segments,
        operands.key_segments,
        operands.explicit,
        operands.query_offset,
    )
    if operands.explicit is not None:
        operands = operands._replace(explicit=operands.explicit.astype(jnp.int8))
    if words is not None:
        operands = operands._replace(dropout_seeds=dropout_seeds(words, batch, heads))
    return mask, operands, words


def block_mask(mask, queries, keys):
    return BlockMask(
        queries,
        keys,
        mask.is_causal,
        mask.window,
        has_query_offset=mask.query_offset is not None,
        has_query_lengths=mask.query_lengths is not None,
        has_key_lengths=mask.key_lengths is not None,
        has_segments=mask.query_segments is not None,
        has_explicit=mask.explicit is not None,
    )


def backward_problem(shape, names, dtype=jnp.float16):
    """Returns (the arguments of a backward, its logits, the expected gradients)."""
    counts = (shape.query_count, shape.key_count)
    sizes = (shape.heads, shape.key_heads, shape.head_size, shape.value_size)
    query, key, value, dout = problem(shape.batch, *counts, *sizes, dtype)
    mask, operands, words = every_option(names, (shape.batch, *counts, shape.heads))
    logits = logits_of(
        block_mask(mask, *counts),
        operands,
        soft_cap=2.0 if "cap" in names else None,
        dropout_rate=0.3 if words is not None else 0.0,
    )
    out, lse, expected = truth(
        query, key, value, dout, operands.bias, operands.sinks, mask, words, logits
    )
    if mask.query_lengths is not None:
        # The forward writes EMPTY_LSE there, with or without sinks.
        within = np.arange(counts[0]) < np.asarray(mask.query_lengths)[:, None, None]
        lse = np.where(within, lse, np.float32(EMPTY_LSE))
    operands = _with_rest(operands, lse)
    missing = saved_length(counts[0]) - counts[0]
    lse = np.pad(lse, ((0, 0), (0, 0), (0, missing)))
    args = (query, key, value, operands, np.asarray(out, dtype), lse, dout, None)
    return args, logits, expected


def _with_rest(operands, lse):
    """Returns the operands with what a forward with a bias saves of a log-sum-exp of small logits."""
    if operands.bias is None:
        return operands
    return operands._replace(lse_rest=np.zeros((*lse.shape, 1), np.float32))


# Both ways to split the work, both kernels with padding, and options that affect every tile.
@parametrize(
    ("counts", "sizes", "names", "config"),
    [
        ((140, 200), (64, 64), "causal", None),
        ((200, 140), (128, 128), "causal", None),
        ((70, 270), (128, 128), "window", None),
        ((70, 270), (64, 64), "causal key_lengths query_offset", None),
        ((140, 130), (64, 64), "window query_offset own bias", None),
        ((130, 200), (64, 40), "query_lengths key_lengths", None),
        ((70, 200), (128, 128), "query_lengths key_lengths causal sinks", None),
        ((70, 200), (64, 64), "query_segments key_segments", None),
        ((100, 200), (128, 128), "explicit", None),
        ((100, 130), (40, 24), "bias causal dropout", None),
        ((70, 100), (256, 200), "causal dropout cap", None),
        ((70, 130), (256, 256), "key_lengths window", None),
        ((1, 300), (64, 64), "", None),
        ((70, 1), (64, 64), "sinks", None),
        ((1, 1), (256, 256), "causal sinks", None),
        (
            (70, 270),
            (64, 64),
            "causal",
            BackwardConfig(QueryGradientConfig(3, 64), KeyGradientConfig(3, 64)),
        ),
        (
            (200, 140),
            (64, 64),
            "",
            BackwardConfig(
                QueryGradientConfig(2, 64, 3, 1, False), KeyGradientConfig(tile_stages=1)
            ),
        ),
        ((197, 203), (72, 72), "causal", None),
        ((203, 65), (80, 112), "", None),
        ((5, 203), (96, 72), "key_lengths sinks", None),
        ((136, 200), (80, 80), "bias", None),
        (
            (70, 192),
            (64, 64),
            "bias explicit",
            BackwardConfig(QueryGradientConfig(3, 64), KeyGradientConfig(2, 64)),
        ),
        ((65, 130), (136, 72), "bias causal cap", None),
        ((200, 136), (128, 128), "causal", BackwardConfig(QueryGradientConfig(), LATE)),
        ((203, 141), (72, 72), "dropout", BackwardConfig(QueryGradientConfig(), LATE)),
        ((203, 141), (128, 128), "", BackwardConfig(QueryGradientConfig(), EARLY)),
        ((200, 136), (128, 128), "causal", BackwardConfig(QueryGradientConfig(), KEPT)),
        ((203, 141), (80, 80), "causal cap", BackwardConfig(QueryGradientConfig(), KEPT_AND_LATE)),
    ],
    quick=(0, 3, 14),
)
def test_accurate_without_races_in_the_interpreter(
    race_detector, monkeypatch, counts, sizes, names, config
):
    """One CTA has several tiles, some of them without visits, so that its barriers are reused."""
    mosaic_interpreter.complete(monkeypatch)
    shape = Shape(2 if "key_lengths" in names else 1, *counts, 2, 1, *sizes)
    args, logits, expected = backward_problem(shape, names.split())
    backward = functools.partial(
        attention_bwd.backward, logits=logits, multiprocessors=1, config=config
    )
    actual = jax.jit(backward)(*args)
    for name, a, e in zip(("query", "key", "value"), actual, expected, strict=False):
        # Probabilities and their gradients are rounded to float16, by 2^-12 at most.
        assert_close(a, e, 2.0**-9, name)


# Blocks that some or all rows do not visit, a consumer without rows, and each width of a key block.
@parametrize(
    ("counts", "names", "dtype", "config"),
    [
        ((100, 77), "", "float32", None),
        ((197, 197), "cap", "bfloat16", None),
        ((128, 256), "", "bfloat16", None),
        ((64, 256), "dropout", "bfloat16", QueryGradientConfig(2, 64)),
        ((70, 330), "causal", "bfloat16", None),
        ((197, 150), "window cap dropout", "float32", QueryGradientConfig(3, 64)),
        ((70, 270), "query_lengths key_lengths", "bfloat16", QueryGradientConfig(1, 128)),
        ((130, 270), "query_segments key_segments sinks", "bfloat16", None),
        ((65, 200), "explicit", "bfloat16", None),
    ],
    quick=(4,),
)
def test_the_gradient_of_a_bias_of_its_own_for_each_logit(
    race_detector, monkeypatch, counts, names, dtype, config
):
    """The kernel of the queries' gradient writes the bias gradient, zeros included."""
    mosaic_interpreter.complete(monkeypatch)
    names = [*names.split(), "own", "bias"]
    batch, heads, key_heads = 2 if "key_lengths" in names else 1, 2, 1
    query, key, value, dout = problem(batch, *counts, heads, key_heads, 64, 40, jnp.bfloat16)
    mask, operands, words = every_option(names, (batch, *counts, heads))
    operands = operands._replace(bias=operands.bias.astype(dtype))
    logits = logits_of(
        block_mask(mask, *counts),
        operands,
        soft_cap=2.0 if "cap" in names else None,
        dropout_rate=0.3 if words is not None else 0.0,
    )
    given = (query, key, value, dout, operands.bias.astype(jnp.float32), operands.sinks, mask)
    out, lse, expected = truth(*given, words, logits)
    if mask.query_lengths is not None:
        within = np.arange(counts[0]) < np.asarray(mask.query_lengths)[:, None, None]
        lse = np.where(within, lse, np.float32(EMPTY_LSE))
    if config is None:
        shape = Shape.of(query, key, value)
        config = backward_dq.default_config(shape, logits, multiprocessors=1)

    @jax.jit
    def gradients(operands, out, lse):
        saved = (out, lse, dout, None, logits)
        lse2, delta, _, _ = attention_bwd.prepare(operands, *saved, blocks=(config.query_block,))
        return backward_dq.query_gradient(
            *(query, key, value, operands, lse2, delta, dout),
            logits=logits,
            multiprocessors=1,
            config=config,
            dlogits_dtype=jnp.dtype(dtype),
        )

    dquery, dlogits, _ = gradients(operands, out, lse)
    assert dlogits.dtype == dtype
    assert_close(dquery, expected[0], 2.0**-7, "query")
    # Only the result is rounded.
    assert_close(dlogits, expected[3], 1e-5 + jnp.finfo(dtype).eps / 2, "bias")


SHARES = [
    # (heads, key heads), head sizes, (shares of a group, shares of the queries)
    ((6, 2), (64, 40), (3, 1)),
    ((6, 2), (256, 256), (3, 1)),
    ((2, 2), (64, 64), (1, 2)),
    ((4, 2), (64, 40), (2, 4)),
    ((2, 1), (256, 256), (1, 3)),
]


@pytest.mark.exhaustive
@parametrize(("heads", "sizes", "shares"), SHARES, quick=(2,))
def test_shares_of_a_tile_add_up(interpreted_hopper, monkeypatch, heads, sizes, shares):
    """If few tiles of keys leave CTAs idle, shares of their visits become tiles of their own.

    Causal tiles differ in their visits, and one of 3 blocks leaves nothing to the fourth share.
    """
    mosaic_interpreter.complete(monkeypatch)
    counts = (170, 140)
    query, key, value, dout = problem(1, *counts, *heads, *sizes, jnp.float16)
    mask, operands, _ = every_option(["causal", "bias"], (1, *counts, heads[0]))
    logits = logits_of(block_mask(mask, *counts), operands)

    def shared(*arguments):
        tiles = shared_tiles(*arguments)
        of_group, of_queries = shares
        whole = tiles.group * tiles.group_shares
        return replace(
            tiles, group=whole // of_group, group_shares=of_group, query_shares=of_queries
        )

    monkeypatch.setattr(backward_dkv, "shared_tiles", shared)
    given = (query, key, value, dout, operands.bias, None, mask, None, logits)
    out, lse, expected = truth(*given)
    backward = functools.partial(attention_bwd.backward, logits=logits, multiprocessors=132)
    saved = (_with_rest(operands, lse), np.asarray(out, query.dtype), lse, dout, None)
    actual = jax.jit(backward)(query, key, value, *saved)
    for name, a, e in zip(("query", "key", "value"), actual, expected, strict=False):
        assert_close(a, e, 2.0**-9, name)


@pytest.mark.parametrize(
    ("sizes", "causal", "is_shared"),
    [
        ((1, 8192, 8192, 4, 1, 128, 128), True, True),
        ((1, 4096, 4096, 4, 4, 128, 128), True, True),
        ((8, 4096, 4096, 32, 8, 128, 128), True, False),
    ],
)
def test_tiles_are_shared_where_multiprocessors_idle(sizes, causal, is_shared):
    shape = Shape(*sizes)
    logits = Logits(1.0, BlockMask(shape.query_count, shape.key_count, causal))
    config = backward_dkv.default_config(shape, logits, 132)
    tiles = shared_tiles(shape, logits, config, 132)
    assert (tiles.shares > 1) == is_shared
    assert tiles.group * tiles.group_shares == shape.group
    if is_shared:
        whole = KeyTiles(logits.mask, shape.key_heads, shape.group, tiles.rows, tiles.query_block)
        together = config.heads_together
        longest = [t.longest(shape.batch, together, 132) for t in (whole, tiles)]
        assert longest[1] <= 0.6 * longest[0]


def assert_gradients(counts, sizes, names, dtype=jnp.bfloat16, bias_dtype="float32"):
    batch, heads, key_heads = 2, 4, 2
    query, key, value, dout = problem(batch, *counts, heads, key_heads, *sizes, dtype)
    mask, operands, words = every_option(names, (batch, *counts, heads))
    wide_bias = None
    if operands.bias is not None:
        operands = operands._replace(bias=operands.bias.astype(bias_dtype))
        wide_bias = operands.bias.astype(jnp.float32)
    logits = logits_of(
        block_mask(mask, *counts),
        operands,
        soft_cap=2.0 if "cap" in names else None,
        dropout_rate=0.3 if words is not None else 0.0,
    )
    given = (query, key, value, dout, wide_bias, operands.sinks, mask, words, logits)
    _, _, expected = truth(*given)

    @jax.jit
    def f(query, key, value, operands, dout):
        options = dict(logits=logits, multiprocessors=132)
        arrays = (query, key, value, operands)
        out, lse, *rest = attention_fwd.forward(*arrays, **options)
        if rest:
            operands = operands._replace(lse_rest=rest[0][:, :, : counts[0], None])
            arrays = (query, key, value, operands)
        saved = (out, lse, dout, None)
        return attention_bwd.backward(*arrays, *saved, **options, dbias_dtype=bias_dtype)

    actual = f(query, key, value, operands, dout)
    chex.assert_trees_all_equal(actual, f(query, key, value, operands, dout))
    for name, a, e in zip(
        ("query", "key", "value", "bias", "sinks"), actual, expected, strict=True
    ):
        if e is None:
            continue
        # Probabilities and their gradients are rounded to bfloat16, by 2^-9 at most.
        assert_close(a, e, 2.0**-7, name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names",
    [
        "",
        "causal",
        "window",
        "query_lengths key_lengths",
        "key_lengths window sinks",
        "causal query_offset bias",
        "window query_offset key_lengths",
        "query_segments key_segments causal",
        "explicit bias",
        "causal dropout cap sinks bias",
        "own bias",
        "query_lengths key_lengths cap own bias",
    ],
)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (40, 24), (200, 64)], ids=str)
def test_gradients(sizes, names):
    assert_gradients((500, 700), sizes, names.split())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [(1, 300), (300, 1), (1, 1), (5, 3), (64, 128), (300, 64), (2000, 2100)]
)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_gradients_of_any_number_of_queries_and_keys(counts, size):
    assert_gradients(counts, (size, size), ["causal"], dtype=jnp.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("names", ["", "causal", "cap dropout", "query_segments key_segments"])
@pytest.mark.parametrize("counts", [(512, 512), (197, 197), (320, 576)], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_gradients_of_a_bias_of_its_own_for_each_logit(counts, size, names):
    assert_gradients(counts, (size, size), [*names.split(), "own", "bias"], bias_dtype="bfloat16")


# --- configs --------------------------------------------------------------------------------------

SIZES = (8, 40, 64, 72, 80, 96, 128, 136, 192, 256)


@parametrize(
    ("head_size", "value_size", "soft_cap", "counts"),
    pairwise(SIZES, SIZES, [None, 3.0], [(1, 1), (197, 197), (4096, 4095), (8192, 8192)]),
    quick=range(0, 100, 6),
)
def test_candidates_are_legal_and_differ(counts, head_size, value_size, soft_cap):
    shape = Shape(2, *counts, 4, 2, head_size, value_size)
    logits = logits_of(BlockMask(*counts, is_causal=True), Operands(), soft_cap=soft_cap)
    options = dict(logits=logits, multiprocessors=132)
    forward = attention.forward_candidates(shape, jnp.bfloat16, **options)
    backward = attention.backward_candidates(shape, jnp.bfloat16, **options)
    for configs in (forward, backward):
        assert len(set(configs)) == len(configs) >= 1
    splits = [
        c for c in (*forward, *backward) if isinstance(c, SplitForwardConfig | SplitBackwardConfig)
    ]
    assert splits and all(config.fits(shape) for config in splits)
    longs = [config for config in forward if isinstance(config, ForwardConfig)]
    longs += [
        part
        for config in backward
        if isinstance(config, BackwardConfig)
        for part in (config.queries, config.keys)
    ]
    assert longs and all(config.fits(shape) for config in longs)


@parametrize("head_size", [64, 80, 128, 256], quick=())
def test_each_second_candidate_lowers(head_size):
    shape = Shape(2, 1001, 1030, 4, 2, head_size, head_size)
    logits = logits_of(BlockMask(1001, 1030, is_causal=True), Operands())
    query, key, dout = (
        jax.ShapeDtypeStruct((2, *sizes, head_size), jnp.bfloat16)
        for sizes in ((1001, 4), (1030, 2), (1001, 4))
    )
    options = dict(logits=logits, multiprocessors=132)
    for config in attention.forward_candidates(shape, jnp.bfloat16, **options)[::2]:
        f = functools.partial(attention.forward, **options, config=config)
        expected = ["attention_forward"]
        if isinstance(config, SplitForwardConfig):
            expected = ["attention_split_forward", "attention_merge_splits"][: config.splits]
        assert kernels(f, query, key, key, Operands()) == expected
    lse = jax.ShapeDtypeStruct((2, 4, saved_length(1001)), jnp.float32)
    for config in attention.backward_candidates(shape, jnp.bfloat16, **options)[::2]:
        f = functools.partial(attention.backward, **options, config=config)
        launched = kernels(f, query, key, key, Operands(), dout, lse, dout, None)
        of_queries = "attention_query_gradient"
        if isinstance(config, SplitBackwardConfig):
            of_queries = "attention_split_query_gradient"
        assert launched == [of_queries, "attention_key_gradient"]
