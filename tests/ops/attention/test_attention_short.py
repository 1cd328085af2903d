"""The attention kernels for few keys, without the operator around them."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfused.ops.attention import attention_xla
from jaxfused.ops.attention.mask import Mask
from jaxfused.runtime.dropout import dropout_seeds
from pallas_kernels.attention import short as attention_short
from pallas_kernels.attention.logits import EMPTY_LSE, Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.short_backward import ShortBackwardConfig
from pallas_kernels.attention.short_forward import ShortForwardConfig
from tests.cases.attention import Case
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels_in
from tests.support.lowering import lowered as lowered_program

DROPOUT_WORDS = np.array([3, 2**31 + 5], np.uint32)
DROPOUT_RATE = 0.2

VIT = Case("vit", 197, 197, heads=3, key_heads=3, head_size=64)
LENGTHS = (1, 7, 64, 77, 128, 197, 200, 255, 256)
SHAPES = tuple(
    # Each count of queries once, each count of keys once, and the largest and smallest of both.
    Case(f"{queries} queries, {keys} keys", queries, keys, heads=4, head_size=64)
    for queries, keys in [*zip(LENGTHS, LENGTHS[3:] + LENGTHS[:3], strict=True), (256, 256), (1, 1)]
)
HEADS = (
    Case("head size 8", 100, 70, head_size=8),
    Case("head size 72", 70, 120, head_size=72, key_heads=1),
    Case("head sizes 24 and 40", 130, 150, head_size=24, value_head_size=40),
    Case("head sizes 40 and 128", 65, 100, head_size=40, value_head_size=128),
    Case("head size 128", 100, 128, head_size=128),
    Case("one key head", 197, 77, heads=6, key_heads=1, head_size=64),
    Case("more queries than keys", 700, 77, head_size=64, batch=1),
)
OPTIONS = (
    Case("causal", 197, 197, head_size=64, is_causal=True),
    Case("causal window", 150, 197, head_size=64, is_causal=True, window=40, scale=0.3),
    Case("window", 197, 130, head_size=64, window=(20, 3)),
    Case("causal at offsets", 150, 197, head_size=64, is_causal=True, offset=(47, -80)),
    Case("window at offsets", 70, 197, head_size=64, window=(20, 3), offset=(140, -5)),
    Case("lengths", 150, 130, head_size=64, query_lengths=(70, 0), key_lengths=(130, 65)),
    Case("no keys in one sequence", 80, 130, head_size=64, key_lengths=(0, 4)),
    Case("segments", 150, 197, head_size=64, segments=3),
    Case("segments of one key", 150, 1, head_size=64, segments=2),
    Case("segments of seven keys", 1, 7, head_size=64, segments=2),
    Case("soft cap and sinks", 150, 197, head_size=64, soft_cap=1.5, sinks=True),
    Case("bias of a head", 49, 49, heads=4, head_size=32, bias=(1, 4, 49, 49)),
    Case("bias that entries share", 70, 90, heads=4, head_size=32, batch=70, bias=(1, 4, 70, 90)),
    Case("bias of each logit", 150, 197, heads=4, head_size=64, bias=(2, 4, 150, 197)),
    Case(
        "bias of a query", 70, 90, heads=4, head_size=64, bias=(2, 1, 70, 1), query_lengths=(70, 9)
    ),
    Case("bias of a query and sinks", 70, 90, head_size=64, bias=(70, 1), sinks=True),
    Case("bias of a key, mask of a sequence", 70, 90, heads=4, bias=(90,), mask=(2, 1, 70, 90)),
    Case(
        "everything",
        111,
        203,
        heads=6,
        bias=(2, 1, 111, 203),
        mask=(2, 6, 111, 1),
        is_causal=True,
        window=(60, 3),
        query_lengths=(101, 111),
        key_lengths=(203, 97),
        segments=2,
        soft_cap=2.0,
        sinks=True,
    ),
)
CASES = (VIT, *SHAPES, *HEADS, *OPTIONS)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def mask_of(case: Case) -> Mask:
    options = case.options()
    names = {
        "query_lengths": "query_seq_lengths",
        "key_lengths": "key_value_seq_lengths",
        "query_segments": "query_segment_ids",
        "key_segments": "key_value_segment_ids",
        "explicit": "mask",
    }
    arrays = {ours: put(options[name]) for ours, name in names.items() if name in options}
    if case.offset is not None:
        arrays["query_offset"] = put(case.offsets())
    window = (case.window, case.window) if isinstance(case.window, int) else case.window
    return Mask(is_causal=case.is_causal, window=window, **arrays)


def scale_of(case: Case) -> float:
    return case.head_size**-0.5 if case.scale is None else case.scale


def plain(case: Case, dropout_rate: float = 0.0):
    """Returns the reference as a function of the differentiable arrays; its log-sum-exp is [B, T, N]."""

    def f(query, key, value, bias, sinks):
        if bias is not None:
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
        output, lse = attention_xla.attention(
            query,
            key,
            value,
            bias,
            sinks,
            mask_of(case),
            put(DROPOUT_WORDS) if dropout_rate else None,
            scale=scale_of(case),
            logits_soft_cap=case.soft_cap,
            dropout_rate=dropout_rate,
        )
        if case.query_lengths is not None:
            # The kernels leave sinks of queries beyond their length to the operator.
            within = np.arange(case.queries) < np.array(case.query_lengths)[:, None]
            lse = jnp.where(within[..., None], lse, -jnp.inf)
        return output, jnp.where(lse < -1e30, 0.0, lse).astype(query.dtype)

    return f


def kernels(
    case: Case,
    dropout_rate: float = 0.0,
    multiprocessors: int = 132,
    forward_config: ShortForwardConfig | None = None,
    backward_config: ShortBackwardConfig | None = None,
):
    """Returns the kernels as a function of the differentiable arrays."""
    mask = mask_of(case)
    explicit = mask.explicit
    if explicit is not None:
        explicit = explicit.astype(jnp.int8).reshape((1,) * (4 - explicit.ndim) + explicit.shape)
    block_mask = BlockMask(
        case.queries,
        case.keys,
        mask.is_causal,
        mask.window,
        has_query_offset=mask.query_offset is not None,
        has_query_lengths=mask.query_lengths is not None,
        has_key_lengths=mask.key_lengths is not None,
        has_segments=mask.query_segments is not None,
        has_explicit=explicit is not None,
    )
    logits = Logits(
        scale=scale_of(case),
        mask=block_mask,
        soft_cap=case.soft_cap,
        has_bias=case.bias is not None,
        has_sinks=case.sinks,
        dropout_rate=dropout_rate,
    )
    shared = dict(logits=logits, multiprocessors=multiprocessors)

    seeds = dropout_seeds(put(DROPOUT_WORDS), case.batch, case.heads)

    def operands(bias, sinks):
        return Operands(
            bias=None if bias is None else bias.reshape((1,) * (4 - bias.ndim) + bias.shape),
            sinks=None if sinks is None else sinks.astype(jnp.float32),
            query_lengths=mask.query_lengths,
            key_lengths=mask.key_lengths,
            query_offset=mask.query_offset,
            query_segments=mask.query_segments,
            key_segments=mask.key_segments,
            explicit=explicit,
            dropout_seeds=seeds if dropout_rate else None,
        )

    @jax.custom_vjp
    def f(query, key, value, bias, sinks):
        return f_fwd(query, key, value, bias, sinks)[0]

    def f_fwd(query, key, value, bias, sinks):
        output, lse, *rest = attention_short.forward(
            query, key, value, operands(bias, sinks), config=forward_config, **shared
        )
        shown = lse[..., : case.queries].swapaxes(1, 2)
        shown = jnp.where(shown < -1e30, 0.0, shown).astype(query.dtype)
        return (output, shown), (query, key, value, bias, sinks, output, lse, rest)

    def f_bwd(saved, cotangents):
        query, key, value, bias, sinks, output, lse, rest = saved
        rest = rest[0][:, :, : case.queries, None] if rest else None
        doutput, dlse = cotangents
        dlse = jnp.where(lse[..., : case.queries] < -1e30, 0.0, dlse.swapaxes(1, 2))
        dquery, dkey, dvalue, dbias, dsinks = attention_short.backward(
            query,
            key,
            value,
            operands(bias, sinks)._replace(lse_rest=rest),
            output,
            lse,
            doutput,
            dlse.astype(jnp.float32),
            config=backward_config,
            dbias_dtype=jnp.float32 if bias is None else bias.dtype,
            **shared,
        )
        if bias is not None:
            dbias = dbias.reshape(bias.shape)
        return dquery, dkey, dvalue, dbias, None if sinks is None else dsinks.astype(sinks.dtype)

    f.defvjp(f_fwd, f_bwd)
    return f


def value_and_gradients(f):
    def g(args, cotangents):
        values, vjp = jax.vjp(f, *args)
        return values, vjp(cotangents)

    return jax.jit(g)


def cotangents_of(f, args, seed=5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: put(rng.normal(size=a.shape), a.dtype), jax.eval_shape(f, *args))


def why_unsupported(case: Case, **more):
    shape = dict(
        compute_capability=(9, 0),
        dtype=jnp.dtype(jnp.bfloat16),
        key_count=case.keys,
        head_size=case.head_size,
        value_size=case.value_head_size or case.head_size,
    )
    return attention_short.why_unsupported(**shape | more)


def packed_and_separate(key_heads: int):
    """Returns results of packed and of separate arrays for (packed, dout), under the same names."""
    mask = BlockMask(197, 197)
    shared = dict(logits=Logits(scale=0.125, mask=mask), multiprocessors=132)

    def packed(array, dout):
        out, lse = attention_short.forward_packed(array, Operands(), key_heads=key_heads, **shared)
        gradients = attention_short.backward_packed(
            array, Operands(), out, lse, dout, None, key_heads=key_heads, **shared
        )
        return out, lse, gradients[0]

    def separate(array, dout):
        parts = jnp.split(array, [-2 * key_heads, -key_heads], axis=2)
        out, lse = attention_short.forward(*parts, Operands(), **shared)
        gradients = attention_short.backward(*parts, Operands(), out, lse, dout, None, **shared)
        return out, lse, jnp.concatenate(gradients[:3], axis=2)

    return packed, separate


def assert_lowers(case: Case, dtype, dropout_rate: float = 0.0) -> None:
    f, args = kernels(case, dropout_rate), case.arrays(dtype)
    program = lowered_program(value_and_gradients(f), args, cotangents_of(f, args))
    assert kernels_in(program) == ["attention_short_forward", "attention_short_backward"]


# --- without a GPU --------------------------------------------------------------------------------


# Shapes with keys in one, two and four tiles; VIT fills only a part of its fourth tile.
@parametrize(
    "case",
    (VIT, *SHAPES[:2], *SHAPES[5:9], *HEADS, *OPTIONS),
    quick=(),
)
def test_lowers(case):
    assert why_unsupported(case) is None
    assert_lowers(case, jnp.bfloat16)


@parametrize("case", [VIT, OPTIONS[-1]], quick=())
def test_lowers_with_dropout_in_float16(case):
    assert_lowers(case, jnp.float16, DROPOUT_RATE)


@parametrize(
    ("keys", "size", "is_supported"),
    [(256, 64, True), (256, 72, False), (128, 128, True), (129, 128, False), (64, 136, False)],
    quick=(1, 3, 4),
)
def test_all_that_is_supported_fits(keys, size, is_supported):
    case = Case("limits", 100, keys, head_size=size, batch=1)
    assert (why_unsupported(case) is None) == is_supported
    if is_supported:
        assert_lowers(case, jnp.bfloat16)


@pytest.mark.exhaustive
def test_one_array_lowers():
    packed, _ = packed_and_separate(key_heads=1)
    shapes = [jax.ShapeDtypeStruct((2, 197, n, 64), jnp.bfloat16) for n in (6, 4)]
    program = lowered_program(packed, *shapes)
    assert "stablehlo.slice" not in program and "stablehlo.concatenate" not in program
    assert kernels_in(program) == ["attention_short_forward", "attention_short_backward"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute_capability": (8, 0)}, "Hopper"),
        ({"compute_capability": None}, "Hopper"),
        ({"dtype": jnp.dtype(jnp.float32)}, "bfloat16 or float16, got float32"),
        ({"head_size": 60}, "multiples of 8, got 60 and 64"),
        ({"value_size": 4}, "multiples of 8, got 64 and 4"),
        ({"key_count": 257}, "1 to 256 keys, got 257"),
        ({"key_count": 0}, "1 to 256 keys, got 0"),
        ({"head_size": 128}, "197 keys of head sizes 128 and 64 do not fit"),
    ],
)
def test_says_why_not(change, reason):
    assert reason in why_unsupported(VIT, **change)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [EMPTY_LSE, 0.0, -1e30, 1e30])
def test_what_is_saved_beyond_the_queries_does_not_count(beyond):
    """The entries hold any finite numbers that another implementation's forward left there."""
    case = Case("beyond", 5, 9, heads=1, key_heads=1, head_size=16, batch=1)
    query, key, value, *_ = case.arrays(jnp.float16)
    shared = dict(logits=Logits(scale=0.25, mask=BlockMask(5, 9)), multiprocessors=1)
    out, lse = attention_short.forward(query, key, value, Operands(), **shared)
    assert lse.shape[2] == 64

    def gradients(lse):
        f = functools.partial(attention_short.backward, **shared)
        return f(query, key, value, Operands(), out, lse, out, None)[:3]

    expected = gradients(lse)
    jax.tree.map(np.testing.assert_array_equal, gradients(lse.at[..., 5:].set(beyond)), expected)
    assert all(np.isfinite(x).all() for x in expected)


@parametrize("slots", [(1, 2), (1, 3), (2, 2), (2, 3)], quick=())
def test_several_heads_of_a_cta_in_the_interpreter(race_detector, monkeypatch, slots):
    """Memory and barriers are reused, and no arrival is left when the CTA ends."""
    mosaic_interpreter.complete(monkeypatch)
    case = Case("three heads", 20, 9, heads=3, key_heads=3, head_size=8, batch=1)
    f = kernels(case, 0.0, 1, None, ShortBackwardConfig(1, 1, *slots))
    assert_values_and_gradients(f, plain(case), *case.arrays(jnp.bfloat16))


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_is_as_accurate_as_the_reference(case, dtype):
    args = case.arrays(jnp.dtype(dtype))
    assert_values_and_gradients(kernels(case), plain(case), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [VIT, OPTIONS[-1]], ids=str)
def test_drops_what_the_reference_drops(case):
    args = case.arrays(jnp.bfloat16)
    assert_values_and_gradients(kernels(case, DROPOUT_RATE), plain(case, DROPOUT_RATE), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [VIT, SHAPES[0], SHAPES[-2], HEADS[-2], OPTIONS[-1]], ids=str)
def test_gives_the_same_bits_twice_and_in_every_config(case):
    """There may be more heads than workers, so that the memory of an SM is reused."""
    args = [None if a is None else put(a) for a in case.arrays(jnp.bfloat16)]
    f = kernels(case)
    cotangents = cotangents_of(f, args)
    expected = value_and_gradients(f)(args, cotangents)
    tiles = -(-case.keys // 64)
    # (workers, tiles of queries per worker, stages of keys, stages of queries)
    numbers = ((1, 1, 1, 2), (1, 2, 2, 2), (1, 4, 1, 3), (2, 1, 2, 3), (2, 2, 1, 2))
    configs: list[tuple[Any, Any]] = [(None, None)]
    for workers, count, *slots in numbers:
        backward_config = ShortBackwardConfig(min(2, tiles), -(-tiles // 2), *slots)
        if backward_config.fits(case.head_size, case.value_head_size or case.head_size):
            configs.append((ShortForwardConfig(workers, count, 1), backward_config))
    for forward_config, backward_config in configs:
        again = value_and_gradients(kernels(case, 0.0, 1, forward_config, backward_config))
        chex.assert_trees_all_equal(again(args, cotangents), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [1, 4])
def test_one_array_gives_the_same_bits(key_heads):
    rng = np.random.default_rng(2)
    array, dout = (
        put(rng.normal(size=(2, 197, n, 64)), jnp.bfloat16) for n in (4 + 2 * key_heads, 4)
    )
    results = (jax.jit(f)(array, dout) for f in packed_and_separate(key_heads))
    chex.assert_trees_all_equal(*results)


@pytest.mark.gpu
def test_sequences_do_not_touch_each_other():
    """The memory beyond a sequence's end belongs to the next sequence."""
    case = Case("neighbours", 197, 197, head_size=64, batch=3)
    args = case.arrays(jnp.bfloat16)
    f = kernels(case)
    cotangents = cotangents_of(f, args)
    run = value_and_gradients(f)
    expected = run(args, cotangents)
    poisoned = tuple(None if a is None else a.at[::2].set(jnp.nan) for a in args)
    middle = functools.partial(jax.tree.map, lambda a: a[1])
    chex.assert_trees_all_equal(middle(run(poisoned, cotangents)), middle(expected))
