"""Lists of blocks: their entries, their bits, what cuts them short, and the kernels that read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import masks
from jaxfused.ops.attention.masks.pattern import Pattern
from pallas_kernels.attention.attention import backward_candidates, forward_candidates
from pallas_kernels.attention.backward_dkv import shared_tiles
from pallas_kernels.attention.block_lists import as_explicit, block_lists
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.own_lists import own_lists
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.tiles import KeyTiles, QueryTiles
from tests.cases import attention_tiles as tiles
from tests.cases.attention import Case
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.tolerances import assert_accurate

SHAPE = T, S = 250, 330
LOCAL = masks.LocalMask(SHAPE, (60, 20)) | masks.GlobalMask(SHAPE, 3)
SPARSE = LOCAL & ~masks.RandomBlocksMask(SHAPE, 1, 64)
HEADS = masks.MultiHeadMask([masks.CausalMask(SHAPE, 70), SPARSE])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128), (96, 112)], ids=str)
def test_lists_and_bits_are_the_mask(blocks, transposed):
    pattern, _ = Pattern.of(HEADS)
    rows, columns = blocks[::-1] if transposed else blocks
    lists = block_lists(pattern, *blocks, transposed=transposed)
    for mask, counts, entries in zip(pattern.masks, lists.counts, lists.entries, strict=True):
        whole = np.asarray(mask).T if transposed else np.asarray(mask)
        built = np.zeros((len(counts) * rows, -(-whole.shape[1] // columns) * columns), np.bool_)
        for tile, (count, listed) in enumerate(zip(counts, entries, strict=True)):
            assert (np.diff(listed[:count, 0]) > 0).all()
            for block, number in listed[:count]:
                words = lists.bits[number]
                c = np.arange(columns)
                bits = (words[c // 32].T >> (c % 32).astype(np.uint32)) & 1
                row, column = tile * rows, block * columns
                built[row : row + rows, column : column + columns] = bits
            assert listed[-1, 1] == len(lists.bits) - 1
        np.testing.assert_array_equal(built[: whole.shape[0], : whole.shape[1]], whole)
    assert not lists.bits[-1].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "parts, columns, shares", [(2, 128, 1), (1, 64, 4), (2, 64, 2), (3, 112, 1)], ids=str
)
def test_own_lists_and_bits_are_the_mask(parts, columns, shares, transposed):
    """Each consumer's range has all blocks that its rows reach, and shares together the whole list."""
    shape = (700, 650)
    near = masks.LocalMask(shape, 8) | masks.GlobalMask(shape, 3)
    pattern, _ = Pattern.of(masks.MultiHeadMask([near, near & ~masks.DilatedMask(shape, 9, 3)]))
    rows = 64 * parts
    blocks = (columns, rows) if transposed else (rows, columns)
    lists = own_lists(pattern, *blocks, parts, transposed=transposed, shares=shares, least=1)
    assert bool(lists.split) == (shares > 1)
    _, ranges, entries, bits = lists.tables
    column = np.arange(columns)
    for mask, of_mask, listed in zip(pattern.masks, ranges[0], entries, strict=True):
        whole = np.asarray(mask).T if transposed else np.asarray(mask)
        tiles = -(-whole.shape[0] // rows)
        built = np.zeros((tiles * rows, -(-whole.shape[1] // columns) * columns), np.bool_)
        for start, stop, *own, tile, _ in of_mask:
            for part, (first, end) in enumerate(zip(own[::2], own[1::2], strict=True)):
                assert start <= first < end <= stop
                for entry in listed[tile, first:end]:
                    words = bits[entry[1 + part]][:, column % 8]
                    row, place = tile * rows + 64 * part, entry[0] * columns
                    allowed = (words >> (column // 8).astype(np.uint32)) & 1
                    built[row : row + 64, place : place + columns] |= allowed.astype(bool)
        np.testing.assert_array_equal(built[: whole.shape[0], : whole.shape[1]], whole)


def tables_of(tiles, **operands):
    return tiles.tables(Operands(**operands))


def test_lengths_cut_lists_short():
    pattern, _ = Pattern.of(LOCAL)
    mask = BlockMask(T, S, pattern=pattern, has_key_lengths=True)
    tables = tables_of(QueryTiles(mask, 1, 64, 64), key_lengths=jnp.array([330, 100, 0]))
    ranges, entries = np.asarray(tables.ranges), np.asarray(tables.entries)
    for length, of_length in zip((330, 100, 0), ranges[:, 0], strict=True):
        for tile, (start, stop) in enumerate(of_length):
            blocks, numbers = entries[0, tile, start:stop].T
            if length:
                assert (blocks * 64 < length).all() and len(blocks)
            else:  # A tile visits at least one block, here a forbidden one.
                assert numbers.tolist() == [len(tables.bits) - 1]


def test_costs_follow_the_lists():
    pattern, _ = Pattern.of(masks.LocalMask((1024, 1024), 0) | masks.GlobalMask((1024, 1024), 1))
    tiles = QueryTiles(BlockMask(1024, 1024, pattern=pattern), 1, 128, 128)
    assert tiles.lists.costs(128) == [1024] + 7 * [256]
    keys = KeyTiles(BlockMask(1024, 1024, pattern=pattern), 1, 1, 128, 64)
    assert keys.costs == (1024 + 128, *7 * [3 * 64 + 128])


def test_long_lists_are_divided_and_come_first():
    """One head's global tokens alone take as long as a GPU's SMs need for all heads."""
    shape = (4096, 4096)
    window = masks.LocalMask(shape, 128) | masks.GlobalMask(shape, 64)
    sizes = Shape(1, *shape, 16, 16, 128, 128)
    for mask, is_own in ((window, True), (masks.CausalMask(shape), False)):
        logits = Logits(1.0, BlockMask(*shape, pattern=Pattern.of(mask)[0]))
        forward = forward_candidates(sizes, jnp.bfloat16, logits=logits, multiprocessors=132)[0]
        backward = backward_candidates(sizes, jnp.bfloat16, logits=logits, multiprocessors=132)[0]
        queries, keys = backward.queries, backward.keys
        assert [c.own_lists for c in (forward, queries, keys)] == 3 * [is_own]
        if is_own:
            blocks = (forward.query_block, forward.key_block, forward.consumers)
            every = QueryTiles(logits.mask, 16, *blocks, forward.shares)
            of_keys = shared_tiles(sizes, logits, keys, 132)
            for tiles_, costs in ((every, every.own.costs), (of_keys, of_keys.own.costs)):
                assert tiles_.starts_of_shared == [0]
                assert 4 * max(costs) * 132 <= 1.2 * 16 * sum(costs)


def test_a_pattern_becomes_an_explicit_mask():
    pattern, heads = Pattern.of(HEADS)
    logits = Logits(scale=1.0, mask=BlockMask(T, S, pattern=pattern))
    logits, operands = as_explicit(logits, Operands(pattern_heads=heads))
    assert logits.mask == BlockMask(T, S, has_explicit=True)
    np.testing.assert_array_equal(operands.explicit[0], np.asarray(HEADS).astype(np.int8))


QUERIES = np.sort(np.random.default_rng(0).integers(0, 4, (1, S)), axis=1)
CASES = {
    "a pattern": (SPARSE, {}, *tiles.DEFAULT),
    "heads": (HEADS, {}, *tiles.TURNS),
    "lengths": (
        SPARSE,
        dict(query_seq_lengths=np.array([100]), key_value_seq_lengths=np.array([77])),
        *tiles.ONE_CONSUMER,
    ),
    "segments": (
        SPARSE,
        dict(query_segment_ids=QUERIES[:, :T], key_value_segment_ids=QUERIES),
        *tiles.WIDE,
    ),
    "an offset and a bias": (
        SPARSE,
        dict(bias=(1, 1, 1, S), query_offset=np.array([30]), is_causal=True),
        *tiles.SPLIT_ROLES,
    ),
    "a bias of every element": (SPARSE, dict(bias=(1, 1, T, S)), *tiles.DEFAULT),
    "no keys": (masks.LocalMask(SHAPE, (20, 0), 300), {}, *tiles.DEFAULT),
    "own lists": (HEADS, {}, *tiles.with_own_lists(tiles.DEFAULT)),
    "own lists of narrow blocks": (
        masks.LocalMask(SHAPE, 8) | masks.GlobalMask(SHAPE, 3),
        {},
        *tiles.with_own_lists(tiles.TURNS, key_block=64, stages=4),
    ),
    "own lists in shares": (
        masks.LocalMask((500, 520), 0) | masks.GlobalMask((500, 520), 3),
        {},
        *tiles.with_own_lists(tiles.NARROW, shares=3),
    ),
    "own lists and blocks of many queries": (SPARSE, {}, *tiles.with_own_lists(tiles.WIDE)),
    "own lists without keys": (
        masks.LocalMask(SHAPE, (20, 0), 300),
        {},
        *tiles.with_own_lists(tiles.DEFAULT),
    ),
    "own lists, limited": (
        SPARSE,
        dict(key_value_seq_lengths=np.array([77])),
        *tiles.with_own_lists(tiles.DEFAULT, shares=2),
    ),
}


@parametrize("name", CASES, quick=())
def test_accurate_without_races_in_the_interpreter(race_detector, monkeypatch, name):
    """One CTA has several tiles, so that memory and barriers are reused."""
    mosaic_interpreter.complete(monkeypatch)
    mask, options, *configs = CASES[name]
    random = np.random.default_rng(1)
    shape = mask.shape[-2:]
    query, key, value, dout = tiles.draws(random, *shape, len(mask.of_heads), 32)
    options = dict(options)
    bias = options.pop("bias", None)
    bias = None if bias is None else random.normal(size=bias).astype(np.float32)

    def plain(query, key, value, bias):
        return jaxfused.dot_product_attention(
            query, key, value, bias, mask=np.asarray(mask), implementation="xla", **options
        )

    def gradients(dtype, *arrays):
        arrays = [None if a is None else np.asarray(a, dtype) for a in arrays]
        out, vjp = jax.vjp(plain, *arrays[:-1])
        return out, *vjp(jnp.asarray(arrays[-1], out.dtype))

    low = gradients(np.float16, query, key, value, bias, dout)
    with jax.enable_x64(True):
        truth = jax.tree.map(np.asarray, gradients(np.float64, query, key, value, bias, dout))
    pattern, pattern_heads = Pattern.of(mask)
    is_causal = options.pop("is_causal", False)
    names = dict(
        query_seq_lengths="query_lengths",
        key_value_seq_lengths="key_lengths",
        query_segment_ids="query_segments",
        key_value_segment_ids="key_segments",
        query_offset="query_offset",
    )
    given = {names[name]: jnp.asarray(array, jnp.int32) for name, array in options.items()}
    operands = Operands(pattern_heads=pattern_heads, bias=bias, **given)
    logits = Logits(
        scale=32**-0.5,
        mask=BlockMask(
            *(*shape, is_causal),
            pattern=pattern,
            has_query_offset="query_offset" in given,
            has_query_lengths="query_lengths" in given,
            has_key_lengths="key_lengths" in given,
            has_segments="key_segments" in given,
        ),
        has_bias=bias is not None,
    )
    actual = tiles.in_kernels(configs, query, key, value, dout, operands, logits)
    for what, a, b, t in zip(
        ("output", "dquery", "dkey", "dvalue", "dbias"), actual, low, truth, strict=False
    ):
        if t is not None:
            assert_accurate(what, a.astype(b.dtype), b, t)


LONG = (777, 777)
WINDOW = masks.LocalMask(LONG, (130, 70)) | masks.GlobalMask(LONG, 64)
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 5, (2, 777)), axis=1)
ON_A_GPU = [
    (WINDOW, 128, {}),
    (WINDOW | masks.RandomBlocksMask(LONG, 1, 64), 72, {}),
    (masks.MultiHeadMask([masks.CausalMask(LONG), WINDOW]), 64, {}),
    (masks.NumpyMask(np.random.default_rng(0).random(LONG) < 0.3), 256, {}),
    (
        masks.CausalMask(LONG),
        128,
        dict(query_segment_ids=DOCUMENTS, key_value_segment_ids=DOCUMENTS),
    ),
    (WINDOW, 128, dict(key_value_seq_lengths=np.array([777, 300]))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ON_A_GPU)))
def test_is_as_accurate_as_the_reference(number):
    mask, size, options = ON_A_GPU[number]
    args = Case("", *LONG, heads=2, key_heads=1, head_size=size).arrays(jnp.bfloat16)[:3]

    def attend(mask, implementation):
        def f(query, key, value):
            return jaxfused.dot_product_attention(
                query, key, value, mask=mask, implementation=implementation, **options
            )

        return f

    plain = attend(np.asarray(mask), "xla")
    assert_values_and_gradients(attend(mask, "pallas"), plain, *args, cotangents=2)
