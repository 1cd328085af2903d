"""Attention kernels for any number of keys: blocks of the mask, the schedule, the forward."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.ops.attention import attention_xla
from jaxfused.ops.attention.mask import EMPTY_LSE, Mask
from jaxfused.runtime.dropout import dropout_seeds
from pallas_kernels.attention import forward as attention_fwd
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.logits import (
    Logits,
    Operands,
    saved_length,
)
from pallas_kernels.attention.mask import BlockMask, Blocks, Extent, segment_blocks
from pallas_kernels.attention.tiles import QueryTiles, schedule_of
from tests.cases.attention import Case
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels, kernels_in, lowered
from tests.support.tolerances import assert_accurate

# --- the mask in blocks ---------------------------------------------------------------------------

MASKS = [
    dict(is_causal=is_causal, window=window, lengths=lengths)
    for is_causal, window, lengths in itertools.product(
        (False, True), (None, (0, 0), (5, 0), (3, 9), (40, 1)), (None, (17, 30), (0, 4), (31, 1))
    )
] + [
    dict(is_causal=is_causal, window=window, lengths=lengths, offset=offset)
    for (is_causal, window), lengths, offset in itertools.product(
        ((True, None), (True, (5, 0)), (False, (3, 9))), (None, (17, 30)), (-33, -6, 3, 22, 60)
    )
]
COUNTS = [(31, 31), (31, 9), (9, 31), (1, 1)]


def allowed_pairs(query_count, key_count, change, extent):
    is_causal, window, lengths = change["is_causal"], change["window"], extent[:2]
    p, s = np.arange(query_count)[:, None] + extent.query_offset, np.arange(key_count)[None]
    left, right = window or (99, 99)
    right = min(right, 0) if is_causal else right
    return (
        (p - left <= s)
        & (s <= p + right)
        & (p - extent.query_offset < lengths[0])
        & (s < lengths[1])
    )


def block_mask_of(change, counts):
    """Draws (a mask, an extent within `counts`)."""
    lengths = change["lengths"]
    mask = BlockMask(
        *counts,
        change["is_causal"],
        change["window"],
        has_query_offset="offset" in change,
        has_query_lengths=lengths is not None,
        has_key_lengths=lengths is not None,
    )
    most = np.minimum(lengths or counts, counts).tolist()
    return mask, Extent(*most, change.get("offset", 0))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("change", MASKS, ids=str)
def test_blocks_are_empty_partial_or_full(change, counts):
    mask, extent = block_mask_of(change, counts)
    allowed = allowed_pairs(*counts, change, extent)
    for transposed, (rows, columns) in itertools.product((False, True), ((4, 8), (8, 4), (8, 8))):
        of, pairs = (mask.query_blocks, allowed.T) if transposed else (mask.key_blocks, allowed)
        for first in range(0, pairs.shape[0], rows):
            start, full_start, full_stop, stop = of((first, first + rows), columns, extent)
            assert start <= full_start <= full_stop <= stop
            mine = pairs[first : first + rows]
            assert not mine[:, : start * columns].any() and not mine[:, stop * columns :].any()
            if full_start == full_stop:
                continue
            # Queries beyond their length are not masked. Keys beyond theirs are, also beyond the array.
            if transposed:
                assert first + rows <= extent.key_length
                mine = mine[:, : extent.query_length]
            else:
                assert full_stop * columns <= extent.key_length
                mine = mine[: extent.query_length - first]
            assert mine[:, full_start * columns : full_stop * columns].all()


@pytest.mark.parametrize("change", MASKS[::5], ids=str)
def test_blocks_are_the_same_when_traced(change):
    mask, extent = block_mask_of(change, COUNTS[1])
    for of, first in itertools.product((mask.key_blocks, mask.query_blocks), (0, 4, 8, 28)):
        given = of((first, first + 4), 8, extent)
        numbers = Extent(*map(jnp.int32, extent))
        traced = of((jnp.int32(first), jnp.int32(first + 4)), 8, numbers)
        assert tuple(map(int, traced)) == given


@pytest.mark.parametrize("change", MASKS, ids=str)
def test_kernels_may_leave_masking_out(change):
    """`is_always_full` and `right_partial_blocks` are right about where a kernel may skip masking."""
    for counts, (rows, columns) in itertools.product(COUNTS, ((4, 8), (8, 4), (8, 8), (8, 6))):
        mask, extent = block_mask_of(change, counts)
        for first in range(0, extent.query_length, rows):
            blocks = mask.key_blocks((first, first + rows), columns, extent)
            if mask.is_always_full(rows, columns):
                assert (blocks.full_start, blocks.full_stop) == (blocks.start, blocks.stop)
            at_right_end = blocks.stop - max(blocks.full_stop, blocks.start)
            assert at_right_end <= mask.right_partial_blocks(rows, columns)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_blocks_of_segments(is_sorted):
    rng = np.random.default_rng(0)
    queries, keys, rows, columns = 50, 37, 4, 8
    q, k = rng.integers(4, size=(3, queries)), rng.integers(4, size=(3, keys))
    q[1], k[2] = 2, 7
    if is_sorted:
        q, k = np.sort(q), np.sort(k)
    table = np.asarray(jax.jit(segment_blocks, static_argnums=(2, 3))(q, k, rows, columns))
    mask = BlockMask(queries, keys, has_segments=True)
    visited, needed = 0, 0
    for b, i in np.ndindex(table.shape[:2]):
        same = q[b, i * rows : (i + 1) * rows, None] == k[b][None]
        within = Blocks(*table[b, i].tolist())
        key_blocks = mask.key_blocks((i * rows, (i + 1) * rows), columns, mask.extent, within)
        start, full_start, full_stop, stop = key_blocks
        assert start <= full_start <= full_stop <= stop
        assert not same[:, : start * columns].any() and not same[:, stop * columns :].any()
        assert same[:, full_start * columns : full_stop * columns].all()
        visited += stop - start
        needed += sum(same[:, j : j + columns].any() for j in range(0, keys, columns))
    assert visited >= needed
    if is_sorted:
        assert visited == needed


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_tile_has_one_cta_and_all_have_as_much_to_do(is_causal):
    table = QueryTiles(BlockMask(4000, 4000, is_causal), 16, 128, 128).planned(4, 8, 132)
    numbers = [tuple(row[1 : 1 + row[0]]) for row in table]
    assert sorted(itertools.chain(*numbers)) == list(range(64 * 32))
    work = [sum(n % 32 + 2 if is_causal else 33 for n in row) for row in numbers]
    assert max(work) <= 1.04 * np.mean(work)


@pytest.mark.parametrize(("batch", "heads"), [(4, 16), (3, 25)])
def test_documents_are_shared_out_evenly(batch, heads):
    """What a tile visits is known on the device alone."""
    lengths = np.random.default_rng(0).integers(1, 20, (batch, 40))
    visits = np.concatenate([np.arange(n) for n in lengths.ravel()])[: batch * 40] + 1
    visits = visits.astype(np.int32).reshape(batch, 40)
    table = np.asarray(jax.jit(schedule_of, static_argnums=(1, 2))(visits, heads, 132))
    numbers = [tuple(row[1 : 1 + row[0]]) for row in table]
    assert sorted(itertools.chain(*numbers)) == list(range(batch * heads * 40))
    work = [sum(visits[n // 40 // heads, n % 40] for n in row) for row in numbers]
    assert max(work) <= 1.06 * np.mean(work) + 1


@pytest.mark.parametrize("tiles", [1, 7, 150])
def test_few_tiles_are_ordered_as_a_sort_orders_many(tiles, monkeypatch):
    visits = np.random.default_rng(0).integers(0, 9, (3, tiles)).astype(np.int32)
    counted = schedule_of(visits, 5, 132)
    monkeypatch.setattr("pallas_kernels.attention.tiles._COUNTED_TILES", 0)
    by_sort = schedule_of(visits, 5, 132)
    np.testing.assert_array_equal(counted, by_sort)
    assert counted.dtype == by_sort.dtype


# --- forward --------------------------------------------------------------------------------------

CASES = (
    Case("long", 1100, 900, head_size=128),
    Case("causal, grouped", 1000, 1000, heads=6, head_size=64, is_causal=True),
    Case("causal, more queries", 700, 300, head_size=128, is_causal=True),
    Case("causal, more keys", 300, 700, head_size=64, is_causal=True),
    Case("head size 256", 500, 500, head_size=256, is_causal=True),
    Case("head size 8", 300, 400, head_size=8),
    Case("head sizes 72 and 40", 300, 400, head_size=72, value_head_size=40),
    Case("head sizes 40 and 136", 300, 400, head_size=40, value_head_size=136),
    Case("one query", 1, 1000, head_size=64),
    Case("one key", 1000, 1, head_size=64),
    Case("window", 700, 600, head_size=64, window=(100, 33)),
    Case("window beyond the keys", 700, 300, head_size=64, window=(100, 0), bias=(700, 300)),
    Case("causal window", 700, 700, head_size=64, window=130, is_causal=True, scale=-0.3),
    Case("lengths", 500, 700, head_size=64, query_lengths=(300, 0), key_lengths=(700, 129)),
    Case("no keys in one sequence", 300, 300, head_size=64, key_lengths=(0, 300)),
    Case("segments", 500, 600, head_size=64, segments=3),
    Case("segments of one query", 1, 600, head_size=64, segments=2),
    Case("segments of one key", 500, 1, head_size=64, segments=2),
    Case("soft cap and sinks", 300, 500, head_size=64, soft_cap=1.5, sinks=True),
    Case("bias of a head", 300, 301, heads=4, head_size=32, bias=(1, 4, 300, 301)),
    Case("bias of a key, mask of a sequence", 270, 290, bias=(290,), mask=(2, 1, 270, 290)),
    Case(
        "everything",
        411,
        603,
        heads=6,
        head_size=64,
        bias=(2, 1, 411, 603),
        mask=(2, 6, 411, 1),
        is_causal=True,
        window=(160, 3),
        query_lengths=(401, 411),
        key_lengths=(603, 297),
        segments=2,
        soft_cap=2.0,
        sinks=True,
    ),
)
CONFIGS = (
    ForwardConfig(takes_turns=True),
    ForwardConfig(consumers=1, key_block=64, separate_output=False),
    ForwardConfig(consumers=3, key_block=64, stages=3, separate_output=False, heads_together=5),
    ForwardConfig(key_block=112, stages=2, separate_output=False),
)
DROPOUT_WORDS = np.array([3, 2**31 + 5], np.uint32)
DROPOUT_RATE = 0.2
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def matrix(array):
    return (
        None if array is None else jnp.asarray(array).reshape((1,) * (4 - array.ndim) + array.shape)
    )


def scale_of(case):
    return case.head_size**-0.5 if case.scale is None else case.scale


def window_of(case):
    return (case.window, case.window) if isinstance(case.window, int) else case.window


def kernel(case, dropout_rate=0.0, multiprocessors=132, config=None, forward=attention_fwd.forward):
    """Returns a forward kernel as a function of (query, key, value, bias, sinks)."""
    options = case.options()
    explicit = matrix(options.get("mask"))

    def i32(name):
        return None if options.get(name) is None else put(options[name], jnp.int32)

    operands = Operands(
        query_lengths=i32("query_seq_lengths"),
        key_lengths=i32("key_value_seq_lengths"),
        query_offset=None if case.offset is None else put(case.offsets()),
        query_segments=i32("query_segment_ids"),
        key_segments=i32("key_value_segment_ids"),
        explicit=None if explicit is None else explicit.astype(jnp.int8),
        dropout_seeds=dropout_seeds(put(DROPOUT_WORDS), case.batch, case.heads)
        if dropout_rate
        else None,
    )
    logits = Logits(
        scale=scale_of(case),
        mask=BlockMask(
            case.queries,
            case.keys,
            case.is_causal,
            window_of(case),
            has_query_offset=case.offset is not None,
            has_query_lengths=case.query_lengths is not None,
            has_key_lengths=case.key_lengths is not None,
            has_segments=case.segments > 0,
            has_explicit=explicit is not None,
        ),
        soft_cap=case.soft_cap,
        has_bias=case.bias is not None,
        has_sinks=case.sinks,
        dropout_rate=dropout_rate,
    )

    def f(query, key, value, bias, sinks):
        arrays = operands._replace(
            bias=matrix(bias), sinks=None if sinks is None else sinks.astype(jnp.float32)
        )
        options = dict(logits=logits, multiprocessors=multiprocessors, config=config)
        return forward(query, key, value, arrays, **options)[:2]

    return jax.jit(f)


def plain(case, dropout_rate=0.0):
    """Returns the reference as a function of (query, key, value, bias, sinks)."""
    options = case.options()
    explicit = matrix(options.get("mask"))

    def f(query, key, value, bias, sinks):
        output, lse = attention_xla.attention(
            query,
            key,
            value,
            matrix(bias),
            sinks,
            Mask(
                case.is_causal,
                window_of(case),
                *(
                    None if options.get(name) is None else put(options[name])
                    for name in (
                        "query_seq_lengths",
                        "key_value_seq_lengths",
                        "query_segment_ids",
                        "key_value_segment_ids",
                    )
                ),
                explicit,
                None if case.offset is None else put(case.offsets()),
            ),
            put(DROPOUT_WORDS) if dropout_rate else None,
            scale=scale_of(case),
            logits_soft_cap=case.soft_cap,
            dropout_rate=dropout_rate,
        )
        return output, lse.swapaxes(1, 2)

    return jax.jit(f)


# Head sizes 128 and an odd one, and one case with every option.
@parametrize("case", CASES, quick=(0, 10, len(CASES) - 1))
def test_lowers(case):
    assert kernels(kernel(case), *case.arrays(jnp.bfloat16)) == ["attention_forward"]


@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("queries", [1, 64, 65, 300])
def test_the_length_of_what_is_saved_does_not_depend_on_the_config(queries, config):
    case = Case("lengths", queries, 300, head_size=64)
    shapes = jax.eval_shape(kernel(case, config=config), *case.arrays(jnp.bfloat16))
    assert shapes[1].shape == (case.batch, case.heads, -(-queries // 64) * 64)


@parametrize("config", CONFIGS, quick=(1, 2))
@parametrize("case", [CASES[0], CASES[1], CASES[-1]], quick=(1,))
def test_every_config_lowers(case, config):
    f = kernel(case, DROPOUT_RATE, config=config)
    assert kernels(f, *case.arrays(jnp.float16)) == ["attention_forward"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"consumers": 4}, "consumers"), ({"key_block": 100}, "key_block"), ({"stages": 1}, "stages")],
)
def test_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**change)


def assert_as_accurate(case, dtype, dropout_rate=0.0, **how):
    args = case.arrays(jnp.dtype(dtype))
    output, lse = kernel(case, dropout_rate, **how)(*args)
    low, low_lse = plain(case, dropout_rate)(*args)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), args)
        truth, true_lse = jax.tree.map(np.asarray, plain(case, dropout_rate)(*wide))
    assert_accurate("output", output, low, truth)
    empty = true_lse < -1e30
    assert lse.shape[2] == saved_length(case.queries)
    assert np.isfinite(lse[..., case.queries :]).all()
    lse = np.array(lse[..., : case.queries])
    if case.query_lengths is not None:
        empty |= np.arange(case.queries) >= np.array(case.query_lengths)[:, None, None]
    np.testing.assert_array_equal(lse[empty], np.float32(EMPTY_LSE))
    lses = (np.where(empty, 0, a) for a in (lse, low_lse, true_lse))
    assert_accurate("lse", *lses)


SMALL = dict(heads=1, key_heads=1, batch=1, head_size=32)


INTERPRETED = (
    Case("causal, odd sizes", 250, 200, is_causal=True, **SMALL),
    Case("window", 250, 330, window=(90, 20), sinks=True, **SMALL),
    Case(
        "lengths and bias",
        250,
        200,
        query_lengths=(60,),
        key_lengths=(99,),
        bias=(250, 200),
        **SMALL,
    ),
    Case("segments", 250, 200, segments=2, **SMALL),
    Case("segments of one key", 70, 1, segments=2, **SMALL),
    Case("many documents", 600, 600, segments=3, is_causal=True, **SMALL),
    Case("a chunk after a prefix", 140, 330, is_causal=True, offset=(187,), **SMALL),
    Case("window before and after the keys", 250, 150, window=(40, 9), offset=(-70,), **SMALL),
)
# The third consumer has no rows in the second tile, and no bias or mask to load.
BEYOND = Case("consumer without rows", 320, 128, bias=(320, 128), mask=(320, 128), **SMALL)
RAGGED = (
    Case("head size 72", 65, 203, is_causal=True, **SMALL | dict(head_size=72, batch=2)),
    Case("head size 80", 203, 65, **SMALL | dict(head_size=80)),
    Case("head sizes 96 and 112", 197, 130, **SMALL | dict(head_size=96, value_head_size=112)),
    Case("head sizes 40 and 128", 5, 197, **SMALL | dict(head_size=40, value_head_size=128)),
    Case("head size 200", 1, 65, **SMALL | dict(head_size=200)),
)


@parametrize(
    ("case", "config"),
    [
        # Each mask with warpgroups that take turns, and each without, in one of two other configs.
        *((case, CONFIGS[0]) for case in INTERPRETED),
        *((case, CONFIGS[1]) for case in INTERPRETED[::2]),
        *((case, CONFIGS[2]) for case in INTERPRETED[1::2]),
        (INTERPRETED[4], CONFIGS[1]),
        (BEYOND, CONFIGS[2]),
        *((case, None) for case in RAGGED),
        (RAGGED[2], CONFIGS[3]),
    ],
    quick=(6, 11, 15),
)
def test_accurate_without_races_in_the_interpreter(race_detector, monkeypatch, case, config):
    """One CTA has several tiles, so that memory and barriers are reused."""
    mosaic_interpreter.complete(monkeypatch)
    assert_as_accurate(case, "float16", config=config, multiprocessors=1)


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_is_as_accurate_as_the_reference(case, dtype):
    assert_as_accurate(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_drops_what_the_reference_drops(case):
    assert_as_accurate(case, "bfloat16", DROPOUT_RATE)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[-1]], ids=str)
def test_every_config(case, config):
    assert_as_accurate(case, "bfloat16", config=config, multiprocessors=5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[-1]], ids=str)
def test_same_bits_twice(case):
    args = case.arrays(jnp.bfloat16)
    chex.assert_trees_all_equal(*(kernel(case)(*args) for _ in range(2)))


# --- the operator: forward and gradient -----------------------------------------------------------


def random_case(seed):
    """Draws a shape and options, and whether there is dropout."""
    rng = np.random.default_rng(seed)

    def maybe(value, otherwise=None):
        return value if rng.random() < 0.35 else otherwise

    batch, key_heads = (int(n) for n in rng.integers(1, 4, 2))
    heads = key_heads * int(rng.integers(1, 4))
    queries, keys = (int(n) for n in rng.integers(1, 700, 2))
    head_size = 8 * int(rng.integers(1, 17))
    whole = (batch, heads, queries, keys)

    def broadcast():
        return tuple(int(n) if rng.random() < 0.7 else 1 for n in whole)

    def lengths(count):
        return tuple(int(n) for n in rng.integers(0, count + 1, batch))

    case = Case(
        f"random {seed}",
        queries,
        keys,
        heads,
        key_heads,
        head_size,
        maybe(8 * int(rng.integers(1, 17))),
        batch,
        bias=maybe(broadcast()),
        mask=maybe(broadcast()),
        is_causal=maybe(True, False),
        window=maybe(tuple(int(n) for n in rng.integers(0, 300, 2))),
        offset=maybe(tuple(int(n) for n in rng.integers(-300, 700, batch))),
        query_lengths=maybe(lengths(queries)),
        key_lengths=maybe(lengths(keys)),
        segments=maybe(3, 0),
        soft_cap=maybe(2.0),
        sinks=maybe(True, False),
    )
    return case, maybe(True, False)


RANDOM_SEEDS = range(24)


def operator(case, implementation, **more):
    """Returns a function for dot_product_attention and its log-sum-exp, with EMPTY_LSE replaced by 0."""
    options = case.options()

    def f(query, key, value, bias, sinks):
        output, lse = jaxfused.dot_product_attention(
            query,
            key,
            value,
            bias,
            sinks=sinks,
            return_lse=True,
            implementation=implementation,
            **options,
            **more,
        )
        # In float16, EMPTY_LSE is -inf, as is -1e30.
        return output, jnp.where(lse.astype(jnp.float32) < -1e30, 0.0, lse)

    return f


def dropout(has_dropout):
    if not has_dropout:
        return {}
    return {"dropout_rate": DROPOUT_RATE, "dropout_key": jax.random.key(4)}


def gradients(f, args):
    def total(args):
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in f(*args))

    return jax.grad(total)(args)


@parametrize("seed", RANDOM_SEEDS[::6], quick=(0,))
def test_the_gradient_of_random_cases_lowers(hopper, seed):
    case, has_dropout = random_case(seed)
    f = operator(case, "pallas", **dropout(has_dropout))
    launched = kernels(lambda *args: gradients(f, args), *case.arrays(jnp.bfloat16))
    forwards = (
        {"attention_forward"},
        {"attention_short_forward"},
        {"attention_split_forward", "attention_merge_splits"},
        {"attention_split_forward"},
    )
    backwards = (
        {"attention_query_gradient", "attention_key_gradient"},
        {"attention_short_backward"},
        {"attention_split_backward"},
        {"attention_split_query_gradient", "attention_key_gradient"},
    )
    allowed = [forward | backward for forward in forwards for backward in backwards]
    assert set(launched) - {"attention_bias_gradient"} in allowed


@parametrize(
    ("bias", "has_own_kernel"),
    [((2, 2, 320, 640), False), ((1, 2, 320, 640), True), ((2, 2, 1, 640), True)],
    quick=(1,),
)
def test_only_a_bias_that_is_shared_has_a_kernel_for_its_gradient(hopper, bias, has_own_kernel):
    case = Case("bias", 320, 640, head_size=64, bias=bias)
    args = case.arrays(jnp.bfloat16)
    program = lowered(lambda *args: gradients(operator(case, "pallas"), args), *args)
    assert ("attention_bias_gradient" in kernels_in(program)) == has_own_kernel
    # A gradient that needs no sum over devices is rounded as it is written.
    assert ("x640xf32>" in program) == has_own_kernel


@parametrize(
    "case",
    [
        Case("of each query", 40, 260, bias=(1, 2, 40, 1), query_lengths=(40, 31), head_size=16),
        Case("and sinks", 40, 260, bias=(2, 2, 1, 1), sinks=True, is_causal=True, head_size=16),
    ],
    quick=(),
)
def test_the_gradient_of_a_bias_alike_for_all_keys(interpreted_hopper, monkeypatch, case):
    """The gradient of such a bias is 0 without a sink and without a use of the log-sum-exp."""
    mosaic_interpreter.complete(monkeypatch)

    def output(implementation):
        f = operator(case, implementation)
        return lambda *args: f(*args)[0]

    args = case.arrays(jnp.float16)
    assert_values_and_gradients(output("pallas"), output("xla"), *args, cotangents=1)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [197, 512])
@pytest.mark.parametrize("bias", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_the_gradient_of_a_bias_for_each_query_and_key(bias, length):
    case = Case("bias", length, length, head_size=64, bias=(*bias, length, length))
    ours, theirs = operator(case, "pallas"), operator(case, "xla")
    assert_values_and_gradients(ours, theirs, *case.arrays(jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_random_cases_are_as_accurate_as_the_reference(seed):
    case, has_dropout = random_case(seed)
    dtype = jnp.dtype(("bfloat16", "float16")[seed % 2])
    ours = operator(case, "pallas", **dropout(has_dropout))
    assert_values_and_gradients(
        ours, operator(case, "xla", **dropout(has_dropout)), *case.arrays(dtype)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", RANDOM_SEEDS[:4])
def test_gradients_of_random_cases_have_the_same_bits_twice(seed):
    case, has_dropout = random_case(seed)
    f = operator(case, "pallas", **dropout(has_dropout))
    run = jax.jit(lambda args: gradients(f, args))
    args = case.arrays(jnp.bfloat16)
    chex.assert_trees_all_equal(run(args), run(args))
