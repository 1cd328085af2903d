"""Attention kernels for few queries, which split the keys over CTAs: lowering, interpreter, GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import split_keys, split_keys_backward
from pallas_kernels.attention.logits import Operands, saved_length
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.split_keys import SplitForwardConfig
from pallas_kernels.attention.split_keys_backward import SplitBackwardConfig
from tests.cases.attention import Case
from tests.ops.attention.test_attention_bwd import (
    assert_close,
    backward_problem,
    logits_of,
)
from tests.ops.attention.test_attention_kernels import DROPOUT_RATE, assert_as_accurate, kernel
from tests.support import mosaic_interpreter
from tests.support.grids import parametrize
from tests.support.lowering import kernels

pytestmark = pytest.mark.exhaustive

FORWARD = ["attention_split_forward", "attention_merge_splits"]
ONE_PART = FORWARD[:1]
"""Kernels of a call with one part, which needs no merge."""
CASES = (
    Case("one query", 1, 5000, heads=8, key_heads=8, head_size=128),
    Case("one query, grouped", 1, 5000, heads=16, key_heads=2, head_size=64),
    Case("several tiles of rows", 33, 2000, heads=8, key_heads=2, head_size=96),
    Case("many queries", 200, 3001, heads=2, key_heads=2, head_size=112),
    Case("one key head", 3, 4001, heads=71, key_heads=1, head_size=64),
    Case("head sizes 72 and 40", 5, 1003, heads=6, head_size=72, value_head_size=40),
    Case("head sizes 80 and 256", 7, 1003, heads=6, head_size=80, value_head_size=256),
    Case("head size 256", 16, 4000, heads=4, head_size=256),
    Case("head size 8", 16, 1000, head_size=8),
    Case("one head, one query", 1, 400, batch=5, heads=1, key_heads=1, head_size=64),
    Case("one head, several queries", 90, 1072, batch=20, heads=1, key_heads=1, head_size=64),
    Case("one head, wide", 7, 300, batch=5, heads=1, key_heads=1, head_size=128),
    Case("two heads of half a copy", 753, 874, batch=1, heads=2, head_size=32, window=(27, 0)),
    Case("four heads of a quarter", 5, 300, batch=2, heads=4, key_heads=2, head_size=16),
    Case("one key", 5, 1, heads=4, head_size=64),
    Case("few keys", 2, 50, heads=14, head_size=96),
    Case("causal", 60, 500, heads=4, head_size=64, is_causal=True),
    Case("window", 50, 900, heads=4, head_size=64, window=(33, 700)),
    Case("lengths", 20, 700, heads=4, query_lengths=(7, 0), key_lengths=(700, 129), head_size=64),
    Case("no keys in one sequence", 3, 3000, heads=4, head_size=64, key_lengths=(0, 65)),
    Case("segments", 50, 600, heads=4, head_size=64, segments=3),
    Case("segments of one query", 1, 600, heads=4, head_size=64, segments=2),
    Case("soft cap and sinks", 6, 500, heads=6, head_size=64, soft_cap=1.5, sinks=True),
    Case("sinks without keys", 2, 500, head_size=64, sinks=True, key_lengths=(0, 0)),
    Case("bias of a head", 3, 301, heads=4, head_size=32, bias=(1, 4, 3, 301)),
    Case("bias of heads alike", 3, 301, heads=4, head_size=32, bias=(2, 1, 3, 301)),
    Case("bias of queries alike", 3, 301, heads=4, head_size=32, bias=(4, 1, 301)),
    Case("bias of a key, mask of a sequence", 4, 290, 4, bias=(290,), mask=(2, 1, 4, 290)),
    Case("new tokens", 16, 5000, 8, 2, 128, is_causal=True, offset="bottom_right"),
    Case("new tokens of two lengths", 4, 900, 8, is_causal=True, offset=(450, 7), head_size=64),
    Case("window at offsets", 9, 903, 4, window=(170, 5), offset=(650, -7), head_size=64),
    Case(
        "everything",
        37,
        603,
        heads=6,
        head_size=64,
        bias=(2, 1, 37, 603),
        mask=(2, 6, 37, 1),
        window=(160, 300),
        query_lengths=(31, 37),
        key_lengths=(603, 297),
        segments=2,
        soft_cap=2.0,
        sinks=True,
    ),
)
CONFIGS = (
    SplitForwardConfig(1),
    SplitForwardConfig(7, stages=1),
    SplitForwardConfig(3, key_block=128, stages=2, ctas_per_multiprocessor=1),
    SplitForwardConfig(96, stages=3, ctas_per_multiprocessor=1),
)


def split(case, dropout_rate=0.0, config=None, multiprocessors=132):
    return kernel(case, dropout_rate, multiprocessors, config, forward=split_keys.forward)


@parametrize("case", CASES, quick=(1, 6, len(CASES) - 1))
def test_lowers(case):
    assert kernels(split(case), *case.arrays(jnp.bfloat16)) in (FORWARD, ONE_PART)


@parametrize("config", CONFIGS, quick=slice(2, 3))
@parametrize("case", [CASES[2], CASES[-1]], quick=(1,))
def test_every_config_lowers(case, config):
    launched = kernels(split(case, DROPOUT_RATE, config), *case.arrays(jnp.float16))
    assert launched == (ONE_PART if config.splits == 1 else FORWARD)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"splits": 0}, "splits"), ({"splits": 97}, "96"), ({"key_block": 96}, "key_block")],
)
def test_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        SplitForwardConfig(**{"splits": 1} | change)


SMALL = dict(batch=1, head_size=32)
INTERPRETED = (
    Case("one query, grouped", 1, 203, heads=16, key_heads=2, **SMALL),
    Case("several tiles of rows", 70, 130, heads=4, **SMALL),
    Case("heads as wide as a copy", 5, 130, heads=4, key_heads=2, head_size=16, batch=2),
    Case("grouped, several queries", 3, 333, 8, 2, 72, 40, batch=1),
    Case("one key head, wide", 2, 197, 35, 1, 80, 136, batch=1),
    Case("fewer keys than parts", 5, 3, heads=4, head_size=64),
    Case("causal", 60, 300, heads=4, is_causal=True, **SMALL),
    Case("window and sinks", 9, 303, heads=4, sinks=True, window=(3, 200), **SMALL),
    Case("lengths", 5, 300, 4, query_lengths=(3, 0), key_lengths=(300, 99), head_size=16),
    Case("segments", 7, 200, heads=4, segments=2, **SMALL),
    Case("soft cap, no keys", 2, 200, soft_cap=2.0, sinks=True, key_lengths=(0, 70)),
    Case("bias and mask", 3, 301, 4, bias=(1, 4, 3, 301), mask=(2, 1, 3, 301), head_size=16),
    Case("bias alike", 3, 130, 4, bias=(1, 1, 3, 1), mask=(2, 4, 1, 130), head_size=16),
    Case("new tokens", 4, 300, 8, is_causal=True, offset="bottom_right", key_lengths=(300, 99)),
    Case("window at offsets", 9, 303, 4, window=(70, 5), offset=(250, -7), head_size=16),
    Case("keys of whole tiles, heads of 40", 3, 304, heads=4, head_size=40, batch=1),
)


@parametrize(
    ("case", "config"),
    [
        *((case, SplitForwardConfig(3)) for case in INTERPRETED),
        *((INTERPRETED[i], CONFIGS[0]) for i in (3, 7, 8, 10, -1)),
        (INTERPRETED[3], CONFIGS[1]),
        (INTERPRETED[3], CONFIGS[2]),
        (INTERPRETED[3], None),
    ],
    quick=(0, 2, 13, len(INTERPRETED) + 4),
)
def test_accurate_in_the_interpreter(interpreted_hopper, monkeypatch, case, config):
    mosaic_interpreter.complete(monkeypatch)
    how = dict(config=config, multiprocessors=1, forward=split_keys.forward)
    assert_as_accurate(case, "float16", **how)


@parametrize("stages", [1, 2, 3], quick=())
def test_without_races_in_the_interpreter(race_detector, monkeypatch, stages):
    """The race detector confuses the accumulators of different CTAs, so there is only one CTA."""
    mosaic_interpreter.complete(monkeypatch)
    case = Case("one CTA", 3, 300, heads=4, key_heads=1, batch=1, head_size=40)
    how = dict(config=SplitForwardConfig(1, stages=stages), forward=split_keys.forward)
    assert_as_accurate(case, "float16", **how)


@parametrize("case", [INTERPRETED[3], INTERPRETED[8]], quick=())
def test_drops_what_the_reference_drops_in_the_interpreter(interpreted_hopper, monkeypatch, case):
    mosaic_interpreter.complete(monkeypatch)
    how = dict(config=CONFIGS[1], multiprocessors=1, forward=split_keys.forward)
    assert_as_accurate(case, "float16", DROPOUT_RATE, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_accurate_as_the_reference(case, dtype):
    assert_as_accurate(case, dtype, forward=split_keys.forward)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("case", [CASES[2], CASES[-1]], ids=str)
def test_every_config(case, config):
    assert_as_accurate(case, "bfloat16", DROPOUT_RATE, config=config, forward=split_keys.forward)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_same_bits_twice(case):
    args = case.arrays(jnp.bfloat16)
    chex.assert_trees_all_equal(*(split(case)(*args) for _ in range(2)))


# --- backward -------------------------------------------------------------------------------------

SHAPES = (
    Shape(2, 1, 5000, 8, 2, 128, 128),
    Shape(1, 16, 3001, 3, 3, 112, 112),
    Shape(2, 64, 1000, 2, 2, 64, 64),
    Shape(1, 5, 1003, 12, 1, 72, 40),
    Shape(1, 2, 1003, 6, 3, 80, 256),
    Shape(1, 16, 999, 2, 2, 256, 256),
    Shape(1, 16, 999, 2, 2, 32, 96),
    Shape(1, 3, 1, 2, 2, 8, 8),
    Shape(1, 33, 999, 6, 2, 128, 128),
    Shape(1, 200, 999, 2, 2, 64, 72),
)


def assert_backward(shape, names, config=None, dtype=jnp.float16, tolerance=2.0**-9):
    args, logits, expected = backward_problem(shape, names.split(), dtype)
    backward = functools.partial(
        split_keys_backward.backward, logits=logits, multiprocessors=132, config=config
    )
    actual = jax.jit(backward)(*args)
    names = ("query", "key", "value", "bias", "sinks")
    for name, a, e in zip(names, actual, expected, strict=True):
        if a is not None:
            # Probabilities and their gradients are rounded to 16 bits.
            assert_close(a, e, tolerance, name)
    return actual


@parametrize("shape", SHAPES, quick=(0, 3))
def test_backward_lowers(shape):
    args = (shape.batch, shape.query_count, shape.key_count)
    batch, queries, keys = args
    arrays = (
        jax.ShapeDtypeStruct((batch, *sizes), jnp.bfloat16)
        for sizes in (
            (queries, shape.heads, shape.head_size),
            (keys, shape.key_heads, shape.head_size),
            (keys, shape.key_heads, shape.value_size),
            (queries, shape.heads, shape.value_size),
        )
    )
    query, key, value, dout = arrays
    lse = jax.ShapeDtypeStruct((batch, shape.heads, saved_length(queries)), jnp.float32)
    logits = logits_of(BlockMask(queries, keys), Operands())
    configs = split_keys_backward.candidates(shape, logits, 132)
    assert len(set(configs)) == len(configs) >= 1
    for config in configs:
        assert config.fits(shape)
        f = functools.partial(
            split_keys_backward.backward, logits=logits, multiprocessors=132, config=config
        )
        launched = kernels(f, query, key, value, Operands(), dout, lse, dout, None)
        if split_keys_backward.is_fused(shape):
            assert launched == ["attention_split_backward"]
        else:
            assert launched == ["attention_split_query_gradient", "attention_key_gradient"]


def test_backward_config_refuses():
    with pytest.raises(ValueError, match="splits"):
        SplitBackwardConfig(0)
    with pytest.raises(ValueError, match="stages"):
        SplitBackwardConfig(1, stages=1)


SMALL_SHAPES = (
    (Shape(1, 1, 203, 8, 2, 32, 32), ""),
    (Shape(1, 5, 203, 6, 2, 72, 40), ""),
    (Shape(1, 16, 130, 2, 2, 80, 136), ""),
    (Shape(1, 64, 130, 1, 1, 64, 64), "causal"),
    (Shape(2, 6, 300, 4, 2, 16, 16), "query_lengths key_lengths sinks"),
    (Shape(1, 7, 300, 4, 2, 16, 16), "window cap"),
    (Shape(1, 7, 200, 4, 2, 16, 16), "query_segments key_segments"),
    (Shape(1, 6, 130, 4, 2, 16, 16), "explicit bias"),
    (Shape(2, 3, 130, 4, 2, 16, 16), "dropout cap sinks"),
    (Shape(1, 3, 5, 4, 2, 16, 16), ""),
    (Shape(1, 40, 130, 4, 2, 16, 16), "causal"),
    (Shape(2, 4, 300, 4, 2, 16, 16), "causal query_offset key_lengths"),
    (Shape(2, 9, 200, 4, 2, 16, 16), "window query_offset"),
    (Shape(2, 70, 130, 2, 2, 72, 16), "query_lengths key_lengths dropout"),
)


@parametrize(
    ("shape", "names", "config"),
    [
        *((*problem, SplitBackwardConfig(2)) for problem in SMALL_SHAPES),
        (*SMALL_SHAPES[1], SplitBackwardConfig(1, stages=3)),
        (*SMALL_SHAPES[1], SplitBackwardConfig(7)),
    ],
    quick=(1, 4),
)
def test_backward_in_the_interpreter(interpreted_hopper, monkeypatch, shape, names, config):
    mosaic_interpreter.complete(monkeypatch)
    assert_backward(shape, names, config)


@parametrize("stages", [2, 3], quick=())
def test_backward_without_races_in_the_interpreter(race_detector, monkeypatch, stages):
    mosaic_interpreter.complete(monkeypatch)
    shape = Shape(1, 3, 450, 2, 1, 40, 72)
    assert_backward(shape, "window", SplitBackwardConfig(1, stages=stages))


@pytest.mark.gpu
@pytest.mark.parametrize("names", ["", *(names for _, names in SMALL_SHAPES if names)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape, names):
    bfloat16 = dict(dtype=jnp.bfloat16, tolerance=2.0**-6)
    chex.assert_trees_all_equal(*(assert_backward(shape, names, **bfloat16) for _ in range(2)))
