"""Attention kernel for heads of 257 to 512 columns: lowering, interpreter, the operator, GPU."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxfused
from pallas_kernels.attention import wide_heads
from pallas_kernels.attention.logits import Logits
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.wide_heads import WideForwardConfig
from tests.cases.attention import Case
from tests.ops.attention.test_attention_kernels import DROPOUT_RATE, assert_as_accurate, kernel
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.lowering import kernels

WIDE, MERGE = "attention_wide_forward", "attention_merge_splits"
MLA = dict(head_size=576, value_head_size=512, key_heads=1)
CASES = (
    Case("causal", 300, 400, heads=4, head_size=512, is_causal=True),
    Case("many queries of a key head", 130, 400, heads=6, head_size=512, is_causal=True),
    Case("decode", 2, 4096, 8, 1, 512, is_causal=True, offset=(4000, 2), key_lengths=(4002, 4)),
    Case("latent heads", 1, 5000, heads=64, **MLA),
    Case("latent heads, several tokens", 3, 1001, heads=33, **MLA),
    Case("head size 320", 77, 203, heads=4, head_size=320, window=(100, 3), sinks=True),
    Case("head sizes 264 and 496", 77, 203, head_size=264, value_head_size=496, segments=2),
    Case("head sizes 64 and 512", 5, 301, heads=6, head_size=64, value_head_size=512),
    Case("head sizes 384 and 64", 100, 301, heads=6, head_size=384, value_head_size=64),
    Case("no keys in one sequence", 3, 700, 4, head_size=512, key_lengths=(0, 65), sinks=True),
    Case(
        "everything",
        111,
        403,
        heads=6,
        key_heads=2,
        head_size=392,
        bias=(2, 1, 111, 403),
        mask=(2, 6, 111, 1),
        is_causal=True,
        window=(160, 3),
        query_lengths=(101, 111),
        key_lengths=(403, 197),
        segments=2,
        soft_cap=2.0,
        sinks=True,
        offset=(280, 7),
    ),
)
CONFIGS = (WideForwardConfig(1), WideForwardConfig(7), WideForwardConfig(96))


def wide(case, dropout_rate=0.0, config=None, multiprocessors=132):
    return kernel(case, dropout_rate, multiprocessors, config, forward=wide_heads.forward)


@parametrize("case", CASES, quick=(6,))
def test_lowers(case):
    assert kernels(wide(case), *case.arrays(jnp.bfloat16))[:1] == [WIDE]


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-1]], ids=str)
def test_every_config_lowers(case, config):
    launched = kernels(wide(case, DROPOUT_RATE, config), *case.arrays(jnp.float16))
    assert launched == ([WIDE] if config.splits == 1 else [WIDE, MERGE])


SIZES = [(320, 320), (352, 352), (384, 384), (448, 256), (512, 512), (576, 512), (8, 512)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", [(1, 8192), (64, 77), (4096, 4096)], ids=str)
def test_every_candidate_fits(sizes, counts):
    shape = Shape(2, *counts, 8, 2, *sizes)
    logits = Logits(1.0, BlockMask(*counts, is_causal=True))
    candidates = wide_heads.candidates(shape, logits, 132)
    assert candidates and all(config.fits(shape) for config in candidates)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"splits": 0}, "splits"), ({"stages": 0}, "stages"), ({"key_block": 96}, "key_block")],
)
def test_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        WideForwardConfig(**{"splits": 1} | change)


SMALL = dict(batch=1, head_size=272)
INTERPRETED = (
    Case("one query, grouped", 1, 203, heads=6, key_heads=2, **SMALL),
    Case("several tiles of rows", 40, 70, heads=4, key_heads=2, **SMALL),
    Case("one head of a group", 70, 130, heads=4, key_heads=2, is_causal=True, **SMALL),
    Case("latent heads", 2, 129, 5, batch=1, **MLA),
    Case("whole tiles", 64, 128, 1, 1, 512, batch=1),
    Case("fewer keys than parts", 5, 3, heads=2, **SMALL),
    Case("lengths", 5, 200, 2, query_lengths=(3, 0), key_lengths=(200, 99), head_size=264),
    Case("no keys", 2, 200, 2, soft_cap=2.0, sinks=True, key_lengths=(0, 70), head_size=264),
    Case("new tokens", 4, 200, 4, is_causal=True, offset=(196, 9), head_size=264),
    Case("bias and mask", 3, 131, 2, bias=(1, 2, 3, 131), mask=(3, 131), **SMALL),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "config"),
    [
        *((case, WideForwardConfig(2)) for case in INTERPRETED),
        *((INTERPRETED[i], None) for i in (1, 2, 3)),
    ],
    ids=str,
)
def test_accurate_in_the_interpreter(interpreted_hopper, monkeypatch, case, config):
    mosaic_interpreter.complete(monkeypatch)
    assert_as_accurate(
        case, "float16", config=config, multiprocessors=1, forward=wide_heads.forward
    )


ONE_CTA = (
    Case("one head", 60, 200, 1, 1, 264, batch=1, is_causal=True, key_lengths=(150,)),
    Case("whole tiles", 64, 192, 1, 1, 512, batch=1),
)


@parametrize(
    ("case", "config"),
    [
        (ONE_CTA[0], WideForwardConfig(1)),
        (ONE_CTA[0], WideForwardConfig(1, stages=2)),
        (ONE_CTA[0], WideForwardConfig(1, key_block=128)),
        (ONE_CTA[1], WideForwardConfig(1)),
    ],
    quick=(0,),
)
def test_without_races_in_the_interpreter(race_detector, monkeypatch, case, config):
    """A single CTA: the interpreter gives accumulators of several CTAs the same memory."""
    mosaic_interpreter.complete(monkeypatch)
    assert_as_accurate(
        case, "float16", config=config, multiprocessors=1, forward=wide_heads.forward
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_is_as_accurate_as_the_reference(case, dtype):
    assert_as_accurate(case, dtype, forward=wide_heads.forward)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-1]], ids=str)
def test_every_config(case, config):
    how = dict(config=config, multiprocessors=5, forward=wide_heads.forward)
    assert_as_accurate(case, "bfloat16", DROPOUT_RATE, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-1]], ids=str)
def test_same_bits_twice(case):
    args = case.arrays(jnp.bfloat16)
    chex.assert_trees_all_equal(*(wide(case)(*args) for _ in range(2)))


# --- the operator ---------------------------------------------------------------------------------


def operator(case, implementation, **options):
    """Returns the operator as a function of (query, key, value)."""
    options = {**case.options(), **options, "implementation": implementation}
    return lambda *qkv: jaxfused.dot_product_attention(*qkv, **options)


def launched(head_sizes, implementation, gradients=False, queries=3, **options):
    """Returns the kernels that the operator launches."""
    case = Case("", queries, 500, 4, 1, *head_sizes, is_causal=True, offset="bottom_right")
    f = operator(case, implementation, **options)
    if gradients:
        f = jax.grad(lambda *qkv: jnp.sum(operator(case, implementation)(*qkv) ** 2), (0, 1, 2))
    return kernels(f, *case.arrays(jnp.bfloat16)[:3])


@pytest.mark.parametrize("gradients", [False, True])
@parametrize("head_sizes", [(512, 512), (576, 512), (320, 64)], quick=(0,))
def test_the_operator_launches_the_kernel_for_few_queries_or_by_name(hopper, head_sizes, gradients):
    """The gradient is XLA's, and so is all of a call with more queries that names no kernel."""
    assert launched(head_sizes, "pallas", gradients) == [WIDE, MERGE]
    assert launched(head_sizes, None, gradients) == [WIDE, MERGE]
    assert launched(head_sizes, None, gradients, queries=17) == []


@pytest.mark.parametrize(
    ("head_sizes", "options", "message"),
    [
        ((584, 512), {}, "queries must be multiples of 8 up to 576, got 584"),
        ((512, 520), {}, "values must be multiples of 8 up to 512, got 520"),
        ((512, 512), dict(score_mod=lambda score, b, h, q, k: jnp.sin(score)), "up to 256"),
    ],
)
def test_the_operator_refuses(hopper, head_sizes, options, message):
    with pytest.raises(ValueError, match=message):
        launched(head_sizes, "pallas", **options)


@pytest.mark.exhaustive
def test_values_and_gradients_in_the_interpreter(interpreted_hopper, monkeypatch):
    mosaic_interpreter.complete(monkeypatch)
    case = Case("", 3, 100, 2, 1, 264, is_causal=True, offset="bottom_right", key_lengths=(100, 9))
    both = operator(case, "pallas"), operator(case, "xla")
    assert_values_and_gradients(*both, *case.arrays(jnp.float16)[:3], cotangents=1)
