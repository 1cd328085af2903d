"""Attention over pages, against NumPy in float64 over each sequence's own tokens."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.serving import ragged_stages as module
from jaxfused.runtime import lowering
from tests.support import mosaic_interpreter
from tests.support.arrays import put
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import kernels, lowered

N, K, H, V = 4, 2, 8, 6
PAGES, SIZE = 12, 4
LENGTHS = np.array([11, 4, 0, 9], np.int32)
TABLE = np.array([[7, 2, 11], [5, -1, 99], [-3, 12, 1], [0, 2, 8]], np.int32)
"""Sequences 0 and 3 share page 2; ids past a sequence's end may be anything."""
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pools(seed=0):
    return random(PAGES, SIZE, K, H, seed=seed), random(PAGES, SIZE, K, V, seed=seed + 1)


def truth(query, position, key, value, *, scale=1.0, window=None, cap=None, sinks=None):
    """Returns [N, V] of a query [N, H] at a position among keys and values [S, K, ..]."""
    first = 0 if window is None else max(0, position + 1 - window)
    key, value = (a[first : position + 1].astype(np.float64) for a in (key, value))
    output = np.zeros((N, value.shape[-1]))
    for n in range(N):
        logits = scale * key[:, n // (N // K)] @ query[n].astype(np.float64)
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        weights = np.exp(logits)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
        output[n] = weights @ value[:, n // (N // K)] / total
    return output


def of_sequence(pool, b, length):
    """Returns [length, K, .] of a sequence's pages."""
    ids = TABLE[b, : -(-length // SIZE)]
    return pool[ids].reshape(-1, *pool.shape[2:])[:length]


def expected(query, lengths, k_pages, v_pages, **options):
    """Returns the truth of the last queries [B, T, N, H] of each sequence."""
    output = np.zeros((*query.shape[:-1], V))
    for b, t in np.ndindex(query.shape[:2]):
        position = lengths[b] - query.shape[1] + t
        if position >= 0:
            kept = (of_sequence(pool, b, lengths[b]) for pool in (k_pages, v_pages))
            output[b, t] = truth(query[b, t], position, *kept, **options)
    return output


OPTIONS = [{}, dict(window=3, sinks=SINKS), dict(scale=0.3, cap=1.5)]


def named(options, window="sliding_window", cap="attn_logits_soft_cap", scale="scale"):
    names = dict(window=window, cap=cap, scale=scale, sinks="sinks")
    return {names[name]: value for name, value in options.items()}


@parametrize(
    ("layout", "options", "new"),
    pairwise(["KPSH", "PSKH"], OPTIONS, [None, 3]),
    quick=(0, 1),
)
def test_of_a_batch(layout, options, new):
    query = random(4, *(() if new is None else (new,)), N, H, seed=9)
    given = pools()
    if layout == "KPSH":
        given = tuple(np.ascontiguousarray(p.transpose(2, 0, 1, 3)) for p in given)
    f = jax.jit(lambda *args: jaxfused.paged_attention(*args, layout=layout, **named(options)))
    output = f(query, *given, LENGTHS, TABLE)
    wanted = expected(query if new else query[:, None], LENGTHS, *pools(), **options)
    np.testing.assert_allclose(output, wanted if new else wanted[:, 0], rtol=1e-5, atol=1e-6)


@parametrize("options", [{}, dict(window=3), dict(alibi=True)], quick=(2,))
def test_new_tokens_may_be_a_tree(options):
    """Beside NumPy, where a token of the tree stands behind those that it sees."""
    given = pools()
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32) if "alibi" in options else None
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    query = random(4, 3, N, H, seed=9)
    output = jax.jit(
        lambda *args: jaxfused.paged_attention(
            *args,
            layout="PSKH",
            tree_mask=np.stack([tree] * 4),
            alibi_slopes=slopes,
            sliding_window=options.get("window"),
        )
    )(query, *given, LENGTHS, TABLE)
    for b in (0, 1, 3):
        before = LENGTHS[b] - 3
        for t in range(3):
            seen = [*range(before), *(before + np.flatnonzero(tree[t]))]
            key, value = (of_sequence(pool, b, LENGTHS[b])[np.array(seen)] for pool in given)
            one = query[b, t]
            if slopes is not None:
                # A further feature of queries and keys is the position.
                place = np.broadcast_to(np.arange(len(seen))[:, None, None], (len(seen), K, 1))
                key = np.concatenate([key, place], axis=-1)
                one = np.concatenate([one, slopes[:, None]], axis=-1)
            wanted = truth(one, len(seen) - 1, key, value, window=options.get("window"))
            np.testing.assert_allclose(output[b, t], wanted, rtol=1e-5, atol=1e-6)
    assert not output[2].any()


COUNTS = np.array([5, 1, 0, 3])


def ragged(rows, counts=COUNTS):
    """Returns (queries, cu_q_lens) of a ragged batch with so many rows."""
    return random(rows, N, H, seed=9), np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def expected_ragged(query, cu, lengths, k_pages, v_pages, **options):
    output = np.zeros((query.shape[0], N, V))
    for b, (first, stop) in enumerate(itertools.pairwise(cu)):
        if stop > first:
            one = query[None, first:stop]
            kept = [of_sequence(pool, b, lengths[b]) for pool in (k_pages, v_pages)]
            for t in range(stop - first):
                position = lengths[b] - (stop - first) + t
                if position >= 0:
                    output[first + t] = truth(one[0, t], position, *kept, **options)
    return output


@parametrize(
    ("rows", "options", "tile", "most_bytes"),
    pairwise([9, 14], OPTIONS, [2, 64], [2**28, 1500]),
    quick=(0, 1),
)
def test_of_a_ragged_batch(monkeypatch, rows, options, tile, most_bytes):
    monkeypatch.setattr(module, "_MOST_ROWS", tile)
    monkeypatch.setattr(module, "_MOST_GATHERED", most_bytes)
    query, cu = ragged(rows)
    given = named(options, cap="soft_cap", scale="sm_scale")
    output = jax.jit(lambda *args: jaxfused.ragged_paged_attention(*args, **given))(
        query, pools(), LENGTHS, TABLE, cu
    )
    wanted = expected_ragged(query, cu, LENGTHS, *pools(), **options)
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_keys_and_values_may_be_one_array():
    key, value = pools()[0], random(PAGES, SIZE, K, H, seed=5)
    both = np.stack([key, value], axis=3).reshape(PAGES, SIZE, 2 * K, H)
    query, cu = ragged(9)
    table = (LENGTHS, TABLE, cu)
    one, two = (
        jaxfused.ragged_paged_attention(query, pages, *table, k_scale=0.5, v_scale=3.0)
        for pages in (both, (key, value))
    )
    np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
    halved = jaxfused.ragged_paged_attention(query, (key * 0.5, value * 3), *table)
    np.testing.assert_allclose(one, halved, rtol=1e-5, atol=1e-6)


def test_fewer_sequences_than_rows_of_the_table():
    query, cu = ragged(14)
    cu[3:] = -77  # What follows the last sequence is not read.
    output = jaxfused.ragged_paged_attention(
        query, pools(), LENGTHS, TABLE, cu, put([2], jnp.int32)
    )
    wanted = expected_ragged(query, np.array([0, 5, 6]), LENGTHS[:2], *pools())
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_rows_that_the_batch_does_not_have_are_left_out():
    query, cu = ragged(9)
    output = jaxfused.ragged_paged_attention(query[:8], pools(), LENGTHS, TABLE, cu)
    wanted = expected_ragged(query, cu, LENGTHS, *pools())[:8]
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_pages_of_8_bits():
    query = random(4, N, H, seed=9)
    quantised = [jaxfused.quantize(p, "int8", axis=-1) for p in pools()]
    options = dict(layout="PSKH")
    output = jaxfused.paged_attention(query, *quantised, LENGTHS, TABLE, **options)
    wide = [q.dequantize() for q in quantised]
    wanted = jaxfused.paged_attention(query, *wide, LENGTHS, TABLE, **options)
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_ids_outside_the_pool_are_not_read():
    """A sequence ends before its first page that is not there."""
    k_pages, v_pages = pools()
    table = np.array([[7, 99, 11], [-1, 5, 2]], np.int32)
    lengths, query = np.array([11, 7], np.int32), random(2, N, H, seed=9)
    output = jaxfused.paged_attention(query, k_pages, v_pages, lengths, table, layout="PSKH")
    np.testing.assert_allclose(
        output[0], truth(query[0], SIZE - 1, k_pages[7], v_pages[7]), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(output[1], 0.0)


@parametrize("kind", ["pair PSKH", "pair KPSH", "one"], quick=(1, 2))
def test_tokens_are_appended(kind):
    """What was appended in two steps is attended to as in one sequence each."""
    lengths = LENGTHS + np.array([0, 0, 0, 0], np.int32)
    whole = [random(4, 11, K, H, seed=s) for s in (3, 4)]
    # Each page belongs to one sequence here.
    table = np.array([[7, 2, 11], [5, -1, 99], [-3, 12, 1], [0, 4, 8]], np.int32)
    empty = np.full((PAGES, SIZE, K, H), 100.0, np.float32)
    layout = kind.split()[-1] if kind != "one" else "PSKH"
    if layout == "KPSH":
        empty = empty.transpose(2, 0, 1, 3)
    pages = (empty, empty) if kind != "one" else np.repeat(empty, 2, axis=2)
    pages = jax.tree.map(jnp.asarray, pages)
    append = jax.jit(lambda *args: jaxfused.append_to_pages(*args, layout=layout), donate_argnums=0)
    query = random(4, N, H, seed=9)
    for start, stop in (
        (np.zeros(4, int), lengths - [3, 1, 0, 1]),
        (lengths - [3, 1, 0, 1], lengths),
    ):
        new = [
            np.concatenate([a[b, start[b] : stop[b]] for b in range(4)] + [np.zeros((2, K, H))])
            for a in whole
        ]
        cu = np.concatenate([[0], np.cumsum(stop - start)]).astype(np.int32)
        pages = append(
            pages, *(a.astype(np.float32) for a in new), stop.astype(np.int32), table, cu
        )
    one_each = np.arange(5, dtype=np.int32)
    output = jaxfused.ragged_paged_attention(query, pages, lengths, table, one_each, layout=layout)
    for b in (0, 1, 3):
        wanted = truth(query[b], lengths[b] - 1, *(a[b] for a in whole))
        np.testing.assert_allclose(output[b], wanted, rtol=1e-5, atol=1e-6)
    # Pages of no sequence are as they were.
    unused = [1, 3, 6, 9, 10]
    for pool in jax.tree.leaves(pages):
        pool = pool.transpose(1, 2, 0, 3) if layout == "KPSH" else pool
        np.testing.assert_array_equal(pool[np.array(unused)], 100.0)


def test_a_pool_a_table_and_a_batch_may_be_empty():
    q, pool, starts = random(3, N, H), random(PAGES, SIZE, 2 * K, H), [0, 1, 2, 3]
    new, lengths = q[:, :K], [2, 1, 1]
    attend, append = jaxfused.ragged_paged_attention, jaxfused.append_to_pages
    for pages, table in ((pool[:0], TABLE[:3]), (pool, TABLE[:3, :0])):
        np.testing.assert_array_equal(attend(q, pages, lengths, table, starts), 0)
        np.testing.assert_array_equal(append(pages, new, new, lengths, table, starts), pages)
    for rows in (0, 3):
        written = append(pool, new[:rows], new[:rows], [], TABLE[:0], [0])
        np.testing.assert_array_equal(written, pool)


def test_ids_of_64_bits_are_outside_the_pool():
    k_pages, v_pages = pools()
    q, wide = random(4, N, H), TABLE.astype(np.int64) + 2**32
    output = jaxfused.paged_attention(q, k_pages, v_pages, LENGTHS, wide, layout="PSKH")
    np.testing.assert_array_equal(output, 0)


@pytest.mark.parametrize("layout", ["PSKH", "KPSH"])
def test_tokens_are_quantised_as_they_are_appended(layout):
    """The values and scales are those of jaxfused.quantize, and other tokens stay."""
    key, value = random(4, K, H), random(4, K, V)
    lengths, starts = [11, 4, 0, 8], [0, 2, 3, 3, 4]
    given = [jnp.asarray(p.transpose(2, 0, 1, 3) if layout == "KPSH" else p) for p in pools()]
    wide = jaxfused.append_to_pages(tuple(given), key, value, lengths, TABLE, starts, layout=layout)
    quantised = tuple(jaxfused.quantize(pool, "int8", axis=-1) for pool in given)
    written = jaxfused.append_to_pages(quantised, key, value, lengths, TABLE, starts, layout=layout)
    for pool, expected in zip(written, wide, strict=True):
        expected = jaxfused.quantize(expected, "int8", axis=-1)
        np.testing.assert_array_equal(pool.values, expected.values)
        np.testing.assert_allclose(pool.scale, expected.scale, rtol=1e-6)


@pytest.mark.parametrize("layout", ["PSKH", "KPSH"])
@pytest.mark.parametrize("by_head", [False, True])
def test_tokens_are_quantised_by_scales_that_all_share(layout, by_head):
    key, value = random(4, K, H), random(4, K, V)
    rest = ([11, 4, 0, 8], TABLE, [0, 2, 3, 3, 4])
    given = [jnp.asarray(p.transpose(2, 0, 1, 3) if layout == "KPSH" else p) for p in pools()]
    heads = (K, 1, 1, 1) if layout == "KPSH" else (1, 1, K, 1)
    scale = jnp.linspace(0.02, 0.03, K).reshape(heads) if by_head else jnp.full((1,) * 4, 0.03)

    def quantised(pages):
        return tuple(jaxfused.quantize(pool, "int8", axis=-1, scale=scale) for pool in pages)

    wide = jaxfused.append_to_pages(tuple(given), key, value, *rest, layout=layout)
    written = jaxfused.append_to_pages(quantised(given), key, value, *rest, layout=layout)
    for pool, expected in zip(written, quantised(wide), strict=True):
        np.testing.assert_array_equal(pool.values, expected.values)
        np.testing.assert_array_equal(pool.scale, scale)
    query = random(4, N, H, seed=9)
    output, wanted = (
        jaxfused.paged_attention(query, *pages, LENGTHS, TABLE, layout=layout)
        for pages in (written, [pool.dequantize() for pool in written])
    )
    np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_pages_keep_what_is_appended_or_refuse_it():
    key, value = 1e6 * random(4, K, H), random(4, K, V)
    rest = (key, value, LENGTHS, TABLE, [0, 1, 2, 3, 4])
    integers = tuple(jnp.asarray(pool).astype("int8") for pool in pools())
    message = "key has dtype float32, but the pages have int8, which would cut off its fractions"
    with pytest.raises(ValueError, match=message):
        jaxfused.append_to_pages(integers, *rest)
    float8 = tuple(jnp.zeros(pool.shape, "float8_e4m3fn") for pool in pools())
    written = jaxfused.append_to_pages(float8, *rest)[0][11, 2].astype(np.float32)
    np.testing.assert_array_equal(written, 448 * np.sign(key[0]))


@pytest.mark.parametrize(
    ("pages", "num_seqs", "message"),
    [
        ((*pools(), pools()[0]), None, "kv_pages is a sequence of 3"),
        ((pools()[0], None), None, "v_pages is None"),
        ((pools()[0], pools()[1] > 0), None, "v_pages has dtype bool"),
        (
            jaxfused.quantize(jnp.ones((2, 4, 4, 8)), axis=-1),
            None,
            "kv_pages is one QuantizedArray",
        ),
        (pools(), [1, 2], r"num_seqs has dtype int32 and shape \(2,\)"),
    ],
    ids=["three", "None", "bool", "one", "num_seqs"],
)
def test_refuses_a_ragged_batch(pages, num_seqs, message):
    query, cu = ragged(4, [1] * 4)
    with pytest.raises(ValueError, match=message):
        jaxfused.ragged_paged_attention(query, pages, LENGTHS, TABLE, cu, num_seqs)


@pytest.mark.parametrize("ragged_batch", [False, True])
def test_what_lies_beyond_a_length_does_not_count(ragged_batch):
    """NaN and infinity that other sequences left in a last page, also in gradients."""
    k_pages, v_pages = (pool.copy() for pool in pools())
    for pool in (k_pages, v_pages):
        pool[11, 3], pool[8, 1:] = np.nan, np.inf

    def f(query, k_pages, v_pages):
        if ragged_batch:
            table = (LENGTHS, TABLE, [0, 1, 2, 2, 3])
            return jaxfused.ragged_paged_attention(query, (k_pages, v_pages), *table)
        return jaxfused.paged_attention(query, k_pages, v_pages, LENGTHS, TABLE, layout="PSKH")

    def output_and_gradients(*arrays):
        return f(*arrays), jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2))(*arrays)

    query = random(3 if ragged_batch else 4, N, H, seed=9)
    run = jax.jit(output_and_gradients)
    wanted, actual = run(query, *pools()), run(query, k_pages, v_pages)
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


def test_of_a_batch_without_sequences_or_tokens():
    k_pages, v_pages = pools()
    none = (LENGTHS[:0], TABLE[:0])
    for q, *table in ((random(0, N, H), *none), (random(4, 0, N, H), LENGTHS, TABLE)):
        output = jaxfused.paged_attention(q, k_pages, v_pages, *table, layout="PSKH")
        assert output.shape == (*q.shape[:-1], V)


def test_of_no_rows_and_no_sequences():
    query, cu = ragged(0, [0] * 4)
    assert jaxfused.ragged_paged_attention(query, pools(), LENGTHS, TABLE, cu).shape == (0, N, V)
    query, cu = ragged(3, [])
    none = (LENGTHS[:0], TABLE[:0], cu)
    np.testing.assert_array_equal(jaxfused.ragged_paged_attention(query, pools(), *none), 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=random(3, N, H)), r"q has shape \(3, 1, 4, 8\) with all axes, but there are 4"),
        (dict(layout="KPSH"), "pages in the layout KPSH with 12 heads of 8"),
        (dict(layout="PKSH"), "layout is 'PKSH'; pass 'KPSH' or 'PSKH'"),
        (dict(v_pages=pools()[1][:5]), r"v_pages has shape \(5, 4, 2, 6\)"),
        (dict(k_pages=pools()[0][0]), r"k_pages has shape \(4, 2, 8\), but it has 4 axes"),
        (dict(lengths=LENGTHS.astype(np.float32)), "lengths has dtype float32"),
        (dict(page_indices=TABLE[:3]), r"page_indices \(3, 3\), but there is a length"),
        (dict(sliding_window=0), "sliding_window is 0"),
    ],
    ids=str,
)
def test_refuses(change, message):
    k_pages, v_pages = pools()
    given = dict(
        q=random(4, N, H),
        k_pages=k_pages,
        v_pages=v_pages,
        lengths=LENGTHS,
        page_indices=TABLE,
        layout="PSKH",
    )
    with pytest.raises(ValueError, match=message):
        jaxfused.paged_attention(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize(
    ("chunk", "heads", "key_heads"), [(200, 8, 2), (600, 16, 8)], ids=["one kernel", "two kernels"]
)
@pytest.mark.parametrize("options", [{}, dict(sliding_window=100), dict(sinks=True)], ids=str)
def test_a_ragged_batch_on_a_gpu(page_size, chunk, heads, key_heads, options):
    """Chunks and single tokens in bfloat16, beside XLA in float32 of the same pages."""
    options = options | (dict(sinks=random(heads)) if "sinks" in options else {})
    rng, count = np.random.default_rng(0), 700 // page_size
    lengths = np.array([700, 64, 5, 333], np.int32)
    counts = np.array([chunk, 1, 5, 1])
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = rng.permutation(4 * (count + 1)).reshape(4, -1).astype(np.int32)
    arrays = [
        put(rng.normal(size=shape), jnp.bfloat16)
        for shape in (
            (counts.sum(), heads, 128),
            *[(table.size, page_size, key_heads, 128)] * 2,
        )
    ]
    # Keys beyond a length must not count.
    is_beyond = np.arange(table[0].size * page_size)[None] >= lengths[:, None]
    is_beyond = is_beyond.reshape(*table.shape, page_size, 1, 1)
    query, *kept = arrays
    arrays = [query, *(x.at[table].set(jnp.where(is_beyond, jnp.nan, x[table])) for x in kept)]
    options = dict(options, sm_scale=128**-0.5)

    def f(q, k, v, **more):
        return jaxfused.ragged_paged_attention(q, (k, v), lengths, table, cu, **options, **more)

    wide = [a.astype(jnp.float32) for a in arrays]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(f, implementation="xla"))(*wide)
    output = jax.jit(f)(*arrays)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, rtol=2e-2, atol=2e-2)


H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)


IN_PLACE = ["attention_paged_forward", "attention_merge_parts"]


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@parametrize("page_size", [128, 24], quick=(0,))
@parametrize("ragged", [False, True], quick=(0,))
def test_kernels_attend_to_the_pages_on_a_gpu(ragged, page_size):
    """Pages that do not fill the kernel's blocks of keys are copied."""
    pools = (shape(512, page_size, 8, 128),) * 2
    table = (shape(8, dtype=jnp.int32), shape(8, 64, dtype=jnp.int32))

    def of_batch(q, k, v, *table):
        return jaxfused.paged_attention(q, k, v, *table, layout="PSKH")

    with dispatch.assume(H200):
        if ragged:
            starts = shape(9, dtype=jnp.int32)
            args = (shape(519, 32, 128), pools, *table, starts)
            launched = kernels(jaxfused.ragged_paged_attention, *args)
        else:
            launched = kernels(of_batch, shape(8, 32, 128), *pools, *table)
    expected = [*IN_PLACE, "attention_chunks_forward"] if ragged else IN_PLACE
    assert (launched == expected) == (page_size == 128)
    assert launched


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["batch", "chunks", "one pool", "8 bits"])
def test_pages_are_read_in_place(monkeypatch, kind):
    """The kernel in Mosaic's interpreter, beside a copy of the pages; a gradient lowers."""
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    mosaic_interpreter.upcast_integers(monkeypatch)
    lengths = np.array([90, 5, 0], np.int32)
    table = np.random.default_rng(0).permutation(18).reshape(3, 6).astype(np.int32)
    table[1, 3] = 77  # Past its end.
    q, k, v = (put(random(*s, seed=i), jnp.bfloat16) for i, s in enumerate(
        [(3 if kind in ("batch", "8 bits") else 9, N, 32), *[(18, 16, K, 32)] * 2]
    ))  # fmt: skip
    cu = np.array([0, 6, 8, 8], np.int32)

    if kind == "8 bits":
        k, v = (jaxfused.quantize(jnp.repeat(x, 2, axis=1), "int8", axis=-1) for x in (k, v))

    def f(q, k, v, implementation="pallas"):
        if kind == "8 bits":
            options = dict(layout="PSKH", scale=0.2, implementation=implementation)
            return jaxfused.paged_attention(q, k, v, lengths, table, **options)
        if kind == "batch":
            options = dict(layout="PSKH", scale=0.2, sinks=SINKS, implementation=implementation)
            return jaxfused.paged_attention(q, k, v, lengths, table, **options)
        pages = (k, v) if kind == "chunks" else jnp.stack([k, v], 3).reshape(18, 16, -1, 32)
        options = dict(sm_scale=0.2, sliding_window=50, implementation=implementation)
        return jaxfused.ragged_paged_attention(q, pages, lengths, table, cu, **options)

    def loss(*args):
        return jnp.sum(f(*args).astype(jnp.float32) ** 2)

    wanted = jax.jit(lambda *a: f(*a, "xla"))(q, k, v)
    with dispatch.assume(H200), plgpu.force_gpu_interpret_mode():
        monkeypatch.setattr(lowering, "KERNELS_RUN_EVERYWHERE", True)
        output = f(q, k, v)
    np.testing.assert_allclose(
        np.asarray(output, np.float32), np.asarray(wanted, np.float32), atol=1e-2, rtol=1e-2
    )
    if kind == "8 bits":
        return
    with dispatch.assume(H200):
        assert IN_PLACE[0] in lowered(jax.grad(loss, (0, 1, 2)), q, k, v)


@parametrize("kind", ["plain", "one pool, window, sinks"], quick=(1,))
def test_single_tokens_and_chunks_are_two_kernels(monkeypatch, kind):
    """In Mosaic's interpreter, beside a copy of the pages; a gradient lowers."""
    mosaic_interpreter.prepare(monkeypatch)
    mosaic_interpreter.complete(monkeypatch)
    # Sequences without new tokens, of one, of more; a page outside the pool; one beyond num_seqs.
    counts, lengths = np.array([1, 40, 0, 1, 45, 4]), np.array([70, 60, 9, 1, 45, 4], np.int32)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.random.default_rng(0).permutation(36).reshape(6, 6).astype(np.int32)
    table[4, 2] = 36
    q, k, v = (
        put(random(*s, seed=i), jnp.bfloat16)
        for i, s in enumerate([(95, N, 64), *[(36, 16, K, 64)] * 2])
    )
    more = {} if kind == "plain" else dict(sinks=SINKS, sliding_window=30)

    def f(q, k, v, implementation=None):
        pages = (k, v) if kind == "plain" else jnp.stack([k, v], 3).reshape(36, 16, -1, 64)
        return jaxfused.ragged_paged_attention(
            *(q, pages, lengths, table, cu, np.array([5])),
            sm_scale=0.2,
            implementation=implementation,
            **more,
        ).astype(jnp.float32)

    small = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 2)
    expected = jax.jit(lambda *a: f(*a, "xla"))(q, k, v)
    with dispatch.assume(small), plgpu.force_gpu_interpret_mode():
        monkeypatch.setattr(lowering, "KERNELS_RUN_EVERYWHERE", True)
        output = f(q, k, v, "pallas")
    np.testing.assert_allclose(output, expected, atol=1e-2, rtol=1e-2)
    if kind != "plain":
        return
    with dispatch.assume(small):
        text = lowered(jax.grad(lambda *a: jnp.sum(f(*a, "pallas") ** 2), (0, 1, 2)), q, k, v)
    assert "attention_chunks_forward" in text and IN_PLACE[0] in text
