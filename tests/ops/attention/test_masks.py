"""Mask objects: what they allow, how they combine, their blocks, and attention with them."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch, masks
from jaxfused.ops.attention.masks.blocks import prepare
from tests.cases.attention import Case
from tests.support.grids import parametrize
from tests.support.lowering import kernels

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
SHAPE = T, S = 200, 264
QUERY, KEY = np.arange(T)[:, None], np.arange(S)[None]


def neighbours(grid, window, dilation, is_causal):
    """NATTEN's rule, token by token and axis by axis."""
    places = list(np.ndindex(*grid))
    allowed = np.zeros((len(places),) * 2, np.bool_)
    for t, query in enumerate(places):
        of_axes = []
        for x, n, w, d, causal in zip(query, grid, window, dilation, is_causal, strict=True):
            same = list(range(x % d, n, d))
            start = min(max(same.index(x) - w // 2, 0), len(same) - w)
            near = same[max(0, same.index(x) - w + 1) : same.index(x) + 1]
            of_axes.append(near if causal else same[start : start + w])
        for s, key in enumerate(places):
            allowed[t, s] = all(x in near for x, near in zip(key, of_axes, strict=True))
    return allowed


RANDOM = np.random.default_rng(0).random(SHAPE) < 0.5
CASES = [
    (masks.FullMask(SHAPE), RANDOM | True),
    (masks.CausalMask(SHAPE), KEY <= QUERY),
    (masks.CausalMask(SHAPE, 64), KEY <= QUERY + 64),
    (masks.CausalMask(SHAPE, offset=-70), KEY <= QUERY - 70),
    (masks.LocalMask(SHAPE, (9, None)), KEY >= QUERY - 9),
    (masks.LocalMask(SHAPE, (None, None)), RANDOM | True),
    (masks.LocalMask(SHAPE, (150, 3), 5), (KEY >= QUERY - 145) & (KEY <= QUERY + 8)),
    (masks.ChunkedCausalMask(SHAPE, 48), (KEY <= QUERY) & (KEY // 48 == QUERY // 48)),
    (
        masks.DilatedMask(SHAPE, (3, 1), 7),
        (KEY >= QUERY - 21) & (KEY <= QUERY + 7) & ((KEY - QUERY) % 7 == 0),
    ),
    (masks.CausalMask(SHAPE, -(2**40)), RANDOM & False),
    (masks.LocalMask(SHAPE, (2**40, 2**40), offset=2**40 + 3), KEY >= QUERY + 3),
    (masks.ChunkedCausalMask(SHAPE, 2**40), KEY <= QUERY),
    (masks.DilatedMask(SHAPE, (2, 1), 2**40, offset=2**40 - 3), KEY == QUERY - 3),
    (masks.RandomBlocksMask(SHAPE, 1, 2**40), RANDOM | True),
    (masks.GlobalMask(SHAPE, 2**40, -(2**40)), RANDOM | True),
    (masks.GlobalMask(SHAPE, 0, 2**40), RANDOM & False),
    (masks.GlobalMask(SHAPE, 3), (KEY < 3) | (QUERY < 3)),
    (masks.GlobalMask(SHAPE, [190, 5]), np.isin(KEY, [5, 190]) | np.isin(QUERY, [5, 190])),
    (masks.GlobalMask(SHAPE, (1, 2), -3), np.isin(KEY, [1, 2]) | np.isin(QUERY, [4, 5])),
    (masks.NumpyMask(RANDOM), RANDOM),
    (
        masks.NeighborhoodMask((7, 9), (5, 2), (1, 3)),
        neighbours((7, 9), (5, 2), (1, 3), (False, False)),
    ),
    (
        masks.NeighborhoodMask((3, 15, 6), 3, is_causal=(True, False, False)),
        neighbours((3, 15, 6), (3, 3, 3), (1, 1, 1), (True, False, False)),
    ),
]


@pytest.mark.parametrize(("mask", "expected"), CASES)
def test_a_mask_allows_what_it_says(mask, expected):
    np.testing.assert_array_equal(np.asarray(mask), np.broadcast_to(expected, mask.shape))
    np.testing.assert_array_equal(mask[3:50:7, 8], np.broadcast_to(expected, mask.shape)[3:50:7, 8])
    traced = jax.jit(lambda q, k: jnp.broadcast_to(mask.allowed(q, k), mask.shape))
    query, key = (np.arange(n, dtype=np.int32) for n in mask.shape)
    np.testing.assert_array_equal(traced(query[:, None], key[None]), np.asarray(mask))


def test_random_blocks():
    mask = masks.RandomBlocksMask(SHAPE, 2, 64, seed=5)
    blocks = np.asarray(mask)[::64, ::64]
    np.testing.assert_array_equal(blocks.sum(axis=1), 2)
    np.testing.assert_array_equal(np.repeat(np.repeat(blocks, 64, 0), 64, 1)[:T, :S], mask)
    again = masks.RandomBlocksMask(SHAPE, 2, 64, seed=5)
    # Drawing again for each row of tiles would take minutes for 65,536 tokens.
    assert mask == again and mask._table is again._table
    assert masks.RandomBlocksMask(SHAPE, 2, 64, seed=6) != mask
    assert masks.RandomBlocksMask(SHAPE, 99).visited_share() == 1.0


COMBINED = [
    (masks.LocalMask(SHAPE, 10) | masks.GlobalMask(SHAPE, 3))
    & ~masks.RandomBlocksMask(SHAPE, 1, 64),
    masks.MultiHeadMask([masks.FullMask(SHAPE), masks.CausalMask(SHAPE)])
    & masks.LocalMask(SHAPE, 9),
    masks.CausalMask(SHAPE, 64)
    | ~masks.MultiHeadMask([masks.LocalMask(SHAPE, n) for n in (3, 70)]),
]


def test_masks_combine_element_by_element():
    local, tokens, blocks, causal = map(
        np.asarray,
        (
            masks.LocalMask(SHAPE, 10),
            masks.GlobalMask(SHAPE, 3),
            masks.RandomBlocksMask(SHAPE, 1, 64),
            masks.CausalMask(SHAPE),
        ),
    )
    near, far = (np.asarray(masks.LocalMask(SHAPE, n)) for n in (3, 70))
    nine = np.asarray(masks.LocalMask(SHAPE, 9))
    shifted = np.asarray(masks.CausalMask(SHAPE, 64))
    np.testing.assert_array_equal(COMBINED[0], (local | tokens) & ~blocks)
    np.testing.assert_array_equal(COMBINED[1], [nine, causal & nine])
    np.testing.assert_array_equal(COMBINED[2], [shifted | ~near, shifted | ~far])
    assert COMBINED[1].shape == (2, T, S)
    np.testing.assert_array_equal(COMBINED[1][1, :5, 2], (causal & nine)[:5, 2])


@pytest.mark.parametrize("mask", [mask for mask, _ in CASES] + COMBINED)
def test_blocks_hold_the_mask(mask):
    """Tiles of queries and keys that do not divide the sequences, put together again."""
    for rows, columns in ((64, 64), (96, 128)):
        whole = np.stack([np.asarray(one) for one in mask.of_heads])
        blocked = prepare(mask.of_heads, rows, columns)
        tiles = np.concatenate([blocked.partial, np.zeros((1, rows, columns), np.bool_)])
        joined = tiles[blocked.kinds].swapaxes(2, 3)
        joined = joined.reshape(len(whole), blocked.kinds.shape[1] * rows, -1)
        np.testing.assert_array_equal(joined[:, : mask.shape[-2], : mask.shape[-1]], whole)
        assert not joined[:, :, mask.shape[-1] :].any()
        assert blocked.partial[0].all()
        assert not any(tile.all() or not tile.any() for tile in blocked.partial[1:])


def test_equal_tiles_are_stored_once():
    mask = masks.CausalMask((8192, 8192)) & masks.LocalMask((8192, 8192), 1024)
    blocked = prepare((mask,), 128, 128)
    assert blocked.partial.shape[0] == 3
    assert prepare((masks.CausalMask((8192, 8192)) & mask.masks[1],), 128, 128) is blocked


def test_a_printed_mask_has_its_share_and_a_picture():
    text = str(masks.CausalMask((512, 512)))
    assert text.splitlines()[:2] == [
        "CausalMask(shape=(512, 512), offset=0)",
        "62.5 % of the blocks of 128 x 128 are visited: 6 full and 4 partial ones of 16",
    ]
    assert text.splitlines()[3] == "█▒" + 30 * "·"
    assert "heads 0, 2" in str(
        masks.MultiHeadMask([COMBINED[0], masks.FullMask(SHAPE), COMBINED[0]])
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.CausalMask((4,)), "shape is"),
        (lambda: masks.CausalMask((4, 4), 0.5), "offset is 0.5"),
        (lambda: masks.LocalMask((4, 4), (1, -1)), "window_size is"),
        (lambda: masks.ChunkedCausalMask((4, 4), 0), "chunk_size is 0"),
        (lambda: masks.DilatedMask((4, 4), 2, 0), "dilation is 0"),
        (lambda: masks.GlobalMask((4, 4), [1, -1]), "tokens is"),
        (lambda: masks.GlobalMask((4, 4), [4]), "there are 4 places"),
        (lambda: masks.RandomBlocksMask((4, 4), 1, 0), "block_size is 0"),
        (lambda: masks.NumpyMask(np.ones((2, 2))), "pass bool"),
        (lambda: masks.NeighborhoodMask((4, 4), 3, 2), "window of at most 2"),
        (lambda: masks.NeighborhoodMask((4, 4), (3, 3, 3)), "each of the 2 axes"),
        (lambda: masks.NeighborhoodMask((4, 4), 3, 1, np.ones((2, 2), bool)), "is_causal is"),
        (lambda: jax.jit(masks.NumpyMask)(np.ones((2, 2), bool)), "array is not known while"),
        (lambda: masks.CausalMask((4, 4)).visited_share(0), "query_block is 0"),
        (lambda: masks.MultiHeadMask([]), "a mask of jaxfused.masks for each head"),
        (lambda: masks.MultiHeadMask(masks.CausalMask((4, 4))), "masks is CausalMask"),
        (lambda: masks.CausalMask((4, 4)) & masks.CausalMask((4, 5)), "masks of one shape"),
    ],
)
def test_bad_masks(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_heads_are_indexed_like_queries():
    heads = [masks.FullMask((4, 6)), masks.CausalMask((4, 6)), masks.LocalMask((4, 6), 1)]
    mask, array = masks.MultiHeadMask(heads), np.stack([np.asarray(head) for head in heads])
    for index in (0, -1, slice(1, 3), [0, 2], np.array([2, 1]), [], ..., (slice(None), 1, [0, 5])):
        np.testing.assert_array_equal(mask[index], array[index])
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        mask[3]
    with pytest.raises(IndexError, match="known then"):
        jax.jit(lambda i: heads[0][i])(1)
    assert masks.CausalMask((0, 0)).visited_share() == 0


def test_own_classes_that_are_no_dataclasses_are_other_masks():
    class Diagonals(masks.AttentionMask):
        def __init__(self, shape, distance):
            super().__init__(shape)
            object.__setattr__(self, "distance", distance)

        def allowed(self, query, key):
            return (query - key) % self.distance == 0

    heads = [Diagonals((6, 6), distance) for distance in (2, 3)]
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 8))
    both = jaxfused.dot_product_attention(q, k, v, mask=masks.MultiHeadMask(heads))
    for n, mask in enumerate(heads):
        one = jaxfused.dot_product_attention(*(x[:, :, n : n + 1] for x in (q, k, v)), mask=mask)
        np.testing.assert_allclose(both[:, :, n : n + 1], one, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="has no method allowed"):
        np.asarray(masks.AttentionMask((4, 4)))


def test_a_mask_is_no_bias():
    query, mask = jnp.ones((1, 4, 1, 8)), masks.CausalMask((4, 4))
    with pytest.raises(ValueError, match=r"bias is CausalMask.*pass mask="):
        jaxfused.dot_product_attention(query, query, query, mask)


def test_masks_are_no_truth_values():
    causal = masks.CausalMask((4, 4))
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(causal)
    with pytest.raises(TypeError, match="NumpyMask"):
        operator.and_(causal, np.ones((4, 4), np.bool_))


# --- attention ------------------------------------------------------------------------------------


def arrays(dtype=jnp.float32, heads=2):
    return Case("", T, S, heads=heads, key_heads=heads // 2).arrays(dtype)[:3]


def with_gradients(mask, **options):
    def f(*args):
        out = jaxfused.dot_product_attention(*args, mask=mask, **options)
        return jnp.sum(out**2), out

    gradients = jax.grad(f, (0, 1, 2), has_aux=True)
    return jax.jit(lambda *args: gradients(*args))


@parametrize("number", range(3), quick=(1,))
def test_attention_is_that_of_the_array(number):
    mask = COMBINED[number]
    lengths = np.array([T, 130], np.int32)
    for options in ({}, dict(is_causal=True, local_window_size=(90, 3), query_seq_lengths=lengths)):
        actual = with_gradients(mask, **options)(*arrays())
        expected = with_gradients(np.asarray(mask), **options)(*arrays())
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_attention_under_transformations():
    mask, (query, key, value) = COMBINED[1], arrays()
    f = jax.jit(jaxfused.dot_product_attention, static_argnames=("mask", "is_causal"))
    expected = f(query, key, value, mask=mask)
    batched = jax.vmap(lambda *args: f(*args, mask=mask))(
        *(a[:, None] for a in (query, key, value))
    )
    np.testing.assert_allclose(batched[:, 0], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(f(query[0], key[0], value[0], mask=mask), expected[0])


def test_wrong_shapes_say_what_is_needed():
    query, key, value = arrays()
    for mask in (masks.CausalMask((S, T)), masks.MultiHeadMask([masks.CausalMask(SHAPE)] * 3)):
        with pytest.raises(ValueError, match="2 heads, 200 queries and 264 keys"):
            jaxfused.dot_product_attention(query, key, value, mask=mask)


def test_kernels_are_launched():
    args = Case("", 320, 320, heads=2).arrays(jnp.bfloat16)[:3]
    f = with_gradients(masks.CausalMask((320, 320)), implementation="pallas")
    with dispatch.assume(H200):
        names = kernels(f, *args)
    assert "attention_forward" in names


@parametrize("library", ["nnx", "linen"], quick=())
def test_modules_take_them(library):
    from flax import nnx

    mask = masks.MultiHeadMask([masks.CausalMask((6, 6)), masks.LocalMask((6, 6), 1)])
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    if library == "nnx":
        layer = jaxfused.nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
        apply = layer
    else:
        layer = jaxfused.linen.MultiHeadDotProductAttention(2)
        variables = layer.init(jax.random.key(1), x)

        def apply(x, **options):
            return layer.apply(variables, x, **options)

    for options in ({}, dict(deterministic=True)):
        actual = apply(x, mask=mask, **options)
        np.testing.assert_array_equal(actual, apply(x, mask=jnp.asarray(mask)[None], **options))
    with pytest.raises(
        ValueError, match=r"mask is <built-in function .* or a mask of jaxfused.masks"
    ):
        apply(x, mask=operator.ge)
