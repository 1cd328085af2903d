"""KVCache: the numbers of whole sequences, what is written where, and that nothing is copied."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import KVCache
from tests.cases.attention import Case
from tests.support.arrays import put
from tests.support.grids import parametrize

B, N, K, H, V = 2, 4, 2, 8, 6


def tokens(count, batch=B, dtype=jnp.float32):
    """Returns query, key and value of so many tokens."""
    case = Case("", count, count, N, K, H, V, batch)
    return case.arrays(dtype)[:3]


def zeros(length, **options):
    sizes = dict(batch=B, length=length, key_heads=K, head_size=H, value_size=V)
    return KVCache.zeros(**{**sizes, "dtype": jnp.float32, **options})


def whole(query, key, value, window=None, **options):
    if window is not None:
        options["local_window_size"] = (window - 1, 0)
    return jax.jit(lambda *args: jaxfused.dot_product_attention(*args, is_causal=True, **options))(
        query, key, value
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnames="window")
def step(cache, query, key, value, counts=None, window=None, **options):
    cache = cache.append(key, value, counts=counts, **options)
    more = {} if window is None else {"local_window_size": (window - 1, 0)}
    attended = cache.attend(query, counts=counts, **more, **options)
    return cache.advance(query.shape[1] if counts is None else counts), attended


def steps(cache, arrays, sizes, **options):
    """Feeds tokens in steps of these sizes, and returns the cache and all outputs in order."""
    outputs, start = [], 0
    for size in sizes:
        new = (a[:, start : start + size] for a in arrays)
        cache, attended = step(cache, *new, **options)
        outputs.append(attended)
        start += size
    return cache, jnp.concatenate(outputs, axis=1)


@parametrize(
    ("dtype", "near"),
    [("float32", 2e-6), ("bfloat16", 2e-2), ("float8_e4m3fn", 0.15), ("int8", 3e-2)],
    quick=(2,),
)
def test_steps_give_the_rows_of_the_whole(dtype, near):
    arrays = tokens(14)
    cache, output = steps(zeros(16, dtype=dtype), arrays, (5, 1, 1, 4, 3))
    np.testing.assert_allclose(output, whole(*arrays), rtol=near, atol=near)
    np.testing.assert_array_equal(cache.lengths, 14)
    assert cache.dtype == dtype and cache.capacity == 16


@parametrize("sizes", [(1,) * 17, (3, 1, 3, 2, 3, 3, 2)], quick=(1,))
@parametrize("extra", [0, 2, 5], quick=(1,))
def test_a_ring_keeps_a_window(sizes, extra):
    window, arrays = 5, tokens(17)
    if max(sizes) > extra + 1:
        sizes = (1,) * 17
    cache = zeros(window + extra, window=window)
    _, output = steps(cache, arrays, sizes)
    np.testing.assert_allclose(output, whole(*arrays, window), rtol=2e-6, atol=2e-6)


def test_a_ring_takes_a_prompt_longer_than_itself():
    window, arrays = 4, tokens(11)
    cache = jax.jit(lambda c, k, v: c.append(k, v).advance(10))(
        zeros(window, window=window), *(a[:, :10] for a in arrays[1:])
    )
    _, output = step(cache, *(a[:, 10:] for a in arrays))
    np.testing.assert_allclose(output, whole(*arrays, window)[:, 10:], rtol=2e-6, atol=2e-6)


def test_a_window_of_a_whole_cache():
    arrays = tokens(9)
    _, output = steps(zeros(9), arrays, (4, 1, 4), window=3)
    np.testing.assert_allclose(output, whole(*arrays, 3), rtol=2e-6, atol=2e-6)


@parametrize("window", [None, 6], quick=(1,))
def test_sequences_of_different_lengths(window):
    """Prompts are padded on the right, and then sequences go on from where each of them ends."""
    lengths, arrays = np.array([3, 7]), tokens(12)
    cache = zeros(12, window=window)
    cache, first = step(cache, *(a[:, :7] for a in arrays), counts=put(lengths))
    np.testing.assert_array_equal(cache.lengths, lengths)
    np.testing.assert_array_equal(first[0, 3:], 0.0)
    rows = lengths[:, None] + np.arange(2)
    new = (jnp.take_along_axis(a, rows[..., None, None], axis=1) for a in arrays)
    _, second = step(cache, *new)
    expected = np.asarray(whole(*arrays, window))
    np.testing.assert_allclose(first[1], expected[1, :7], rtol=2e-6, atol=2e-6)
    for b in range(B):
        np.testing.assert_allclose(second[b], expected[b, rows[b]], rtol=2e-6, atol=2e-6)


@parametrize("window", [None, 5], quick=(0,))
def test_prompts_padded_on_the_left(window):
    starts, arrays = np.array([3, 0]), tokens(10)
    cache = zeros(9 if window else 10, window=window, starts=put(starts))
    np.testing.assert_array_equal(cache.positions(2), [[-3, -2], [0, 1]])
    _, output = steps(cache, arrays, (5, 1, 1, 3))
    alone = whole(*(a[:1, 3:] for a in arrays), window)
    np.testing.assert_allclose(output[:1, 3:], alone, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(output[0, :3], 0.0)
    np.testing.assert_allclose(output[1], whole(*arrays, window)[1], rtol=2e-6, atol=2e-6)


def test_sequences_by_their_index():
    """A batch of two steps forward in a cache of five sequences."""
    arrays, index = tokens(6), put([4, 1])
    cache = dataclasses.replace(
        zeros(8, batch=5), lengths=put([7, 0, 7, 7, 0]), key=jnp.ones((5, 8, K, H))
    )

    @jax.jit
    def f(cache, query, key, value):
        cache = cache.append(key, value, batch_index=index)
        attended = cache.attend(query, batch_index=index)
        return cache.advance(query.shape[1], batch_index=index), attended

    after, first = f(cache, *(a[:, :4] for a in arrays))
    after, second = f(after, *(a[:, 4:] for a in arrays))
    output = jnp.concatenate([first, second], axis=1)
    np.testing.assert_allclose(output, whole(*arrays), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(after.lengths, [7, 6, 7, 7, 6])
    others = np.array([0, 2, 3])
    np.testing.assert_array_equal(after.key[others], cache.key[others])


def test_what_does_not_fit_is_dropped():
    _, key, value = tokens(6)
    cache = dataclasses.replace(zeros(5), lengths=put([3, 0]))
    after = cache.append(key, value)
    np.testing.assert_array_equal(after.key[0, :3], 0.0)
    np.testing.assert_array_equal(after.key[0, 3:], key[0, :2])
    np.testing.assert_array_equal(after.value[1], value[1, :5])


def test_layers_may_share_a_cache_and_caches_may_be_stacked():
    arrays = tokens(4)
    cache = zeros(6, layers=3)
    cache = cache.append(*arrays[1:], layer=1)
    shared = [cache.attend(arrays[0], layer=1) for _ in range(2)]
    chex.assert_trees_all_equal(*shared)
    np.testing.assert_allclose(shared[0], whole(*arrays), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(cache.key[np.array([0, 2])], 0.0)


@parametrize("dtype", ["int8", "float8_e4m3fn"], quick=(0,))
def test_scales_of_each_head(dtype):
    arrays = tokens(7)
    most = 127 if dtype == "int8" else 448
    scales = [np.abs(a).max(axis=(0, 1, 3)) / most for a in arrays[1:]]
    cache = zeros(
        7, layers=2, dtype=dtype, key_scale=np.stack([scales[0]] * 2), value_scale=[scales[1]] * 2
    )
    _, output = step(cache, *arrays, layer=1)
    np.testing.assert_allclose(output, whole(*arrays), rtol=0.15, atol=0.15)


def decode(cache, x, layers):
    """A model's step: every layer appends and attends."""
    size, value_size = cache.key.shape[-1], cache.value.shape[-1]

    def layer(carry, i):
        cache, x = carry
        new = x[:, :, :K]
        cache = cache.append(new, new[..., :value_size], layer=i)
        attended = cache.attend(x, layer=i)
        return (cache, jnp.pad(attended, ((0, 0),) * 3 + ((0, size - value_size),))), None

    (cache, x), _ = jax.lax.scan(layer, (cache, x), jnp.arange(layers))
    return cache.advance(x.shape[1]), x


def generate(cache, x, layers):
    def body(carry):
        i, cache, x = carry
        return i + 1, *decode(cache, x, layers)

    return jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, cache, x))[1:]


@parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"], quick=(3,))
@parametrize("f", [decode, generate], quick=(1,), ids=lambda f: f.__name__)
def test_nothing_copies_the_cache(f, dtype):
    layers = 3
    cache = zeros(64, layers=layers, dtype=dtype)
    query = jnp.ones((B, 1, N, H), jnp.bfloat16)
    compiled = jax.jit(f, static_argnums=2, donate_argnums=0).lower(cache, query, layers).compile()
    kept = [a for a in jax.tree.leaves(cache) if a.ndim > 1]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(a.nbytes for a in kept)
    shapes = {",".join(map(str, a.shape)) for a in kept}
    made = re.findall(
        r"^ *(?:ROOT )?%(\S+) = \w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text(), re.M
    )
    writes = [name for name, shape, kind in made if shape in shapes and kind == "fusion"]
    assert writes and all("scatter" in name or "update" in name for name in writes), writes
    assert not [name for name, shape, kind in made if shape in shapes and "copy" in kind]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("f", [decode, generate], ids=lambda f: f.__name__)
def test_nothing_copies_the_cache_on_a_gpu(f, dtype):
    """The program has no copy of the cache's shape, and the result lies where the cache was."""
    cache = zeros(1024, layers=3, dtype=dtype, head_size=64, value_size=64)
    query = jnp.ones((B, 1, N, 64), jnp.bfloat16)

    def widest(cache, x):
        return f(cache, x, 3)

    step = jax.jit(widest, donate_argnums=0)
    compiled = step.lower(cache, query).compile()
    kept = [a for a in jax.tree.leaves(cache) if a.ndim > 1]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(a.nbytes for a in kept)
    shapes = "|".join({",".join(map(str, a.shape)) for a in kept})
    assert not re.findall(rf"= \w+\[(?:{shapes})\]\S* copy", compiled.as_text())
    place = cache.key.unsafe_buffer_pointer()
    after, output = compiled(cache, query)
    assert after.key.unsafe_buffer_pointer() == place
    assert np.isfinite(np.asarray(output, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "options", [{}, dict(window=100), dict(starts=np.array([3, 0], np.int32))], ids=str
)
def test_steps_on_a_gpu(dtype, options):
    arrays = Case("", 300, 300, 8, 2, 128).arrays(jnp.bfloat16)[:3]
    length = 120 if "window" in options else 300
    sizes = dict(batch=B, length=length, key_heads=2, head_size=128)
    cache = KVCache.zeros(**sizes, dtype=dtype, **options)
    _, output = steps(cache, arrays, (*[20] * 14, *[1] * 4, 16))
    wide = [np.asarray(a, np.float32) for a in arrays]
    expected = whole(*wide, options.get("window"))
    first = 3 if "starts" in options else 0
    near = {"bfloat16": 2e-2, "int8": 5e-2, "float8_e4m3fn": 0.15}[dtype]
    output = np.asarray(output, np.float32)
    np.testing.assert_allclose(output[1], expected[1], rtol=near, atol=near)
    alone = whole(*(a[:1, first:] for a in wide), options.get("window"))
    np.testing.assert_allclose(output[:1, first:], alone, rtol=near, atol=near)


def test_under_vmap_the_numbers_are_those_of_each():
    arrays = [jnp.stack([a, a[::-1]]) for a in tokens(5)]
    caches = jax.tree.map(lambda a: jnp.stack([a] * 2), zeros(6, dtype="int8"))
    after, output = jax.jit(jax.vmap(step.__wrapped__))(caches, *arrays)
    for i in range(2):
        one, expected = step(zeros(6, dtype="int8"), *(a[i] for a in arrays))
        np.testing.assert_allclose(output[i], expected, rtol=2e-6, atol=2e-6)
        chex.assert_trees_all_close(jax.tree.map(lambda a, i=i: a[i], after), one)


@parametrize("options", [{}, dict(window=3), dict(dtype="int8", layers=2)], quick=(1,), ids=str)
def test_strict_modes(options):
    """Nothing is promoted implicitly, also where JAX has 64 bits."""
    arrays = tokens(1)
    cache = zeros(6, starts=np.zeros(B, np.int32), **options)
    layer = dict(layer=1) if "layers" in options else {}
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        cache, _ = step(cache, *arrays, counts=jnp.ones(B, jnp.int32), **layer)
        cache, output = step(cache, *arrays, **layer)
    assert output.dtype == jnp.float32 and cache.lengths.dtype == jnp.int32
    np.testing.assert_array_equal(cache.lengths, 2)


def test_a_cache_of_numpys_arrays_and_lists_is_one_of_jaxs():
    query, key, value = tokens(2)
    cache = zeros(4).append(key, value).advance(2)
    read = dataclasses.replace(jax.device_get(cache), lengths=[2, 1])
    wanted = dataclasses.replace(cache, lengths=jnp.array([2, 1]))
    steps = (c.append(key, value).attend(query) for c in (read, wanted))
    np.testing.assert_array_equal(*steps)
    assert read.advance(1).positions(1).tolist() == [[3], [2]]


def test_sequences_are_given_by_a_list_too():
    _, key, value = tokens(1, batch=1)
    cache = zeros(4).append(key, value, batch_index=[1]).advance([1], batch_index=[1])
    assert cache.lengths.tolist() == [0, 1]
    np.testing.assert_array_equal(cache.key[1, 0], key[0, 0])


def test_a_sequence_may_come_again_without_tokens():
    _, key, value = tokens(1)
    counts = np.array([1, 0])
    cache = zeros(4).append(key, value, counts=counts, batch_index=[1, 1])
    np.testing.assert_array_equal(cache.key[1, 0], key[0, 0])


@pytest.mark.parametrize("window", [None, 4])
def test_what_lies_beyond_a_length_does_not_count(window):
    """NaN that rejected tokens left, in a cache and in a ring, also in gradients."""
    query, key, value = tokens(3)
    cache = zeros(8, window=window).append(key, value).advance(np.array([3, 2]))

    def f(cache, query):
        return cache.attend(query), jax.grad(lambda q: jnp.sum(cache.attend(q) ** 2))(query)

    is_kept = jnp.arange(8)[None] < cache.lengths[:, None] + 1
    # The new token, and what lies beyond it.
    kept = (jnp.where(is_kept[..., None, None], x, jnp.nan) for x in (cache.key, cache.value))
    stale = dataclasses.replace(cache, **dict(zip(("key", "value"), kept, strict=True)))
    wanted, actual = (jax.jit(f)(c, query[:, :1]) for c in (cache, stale))
    assert np.all(np.isfinite(wanted[0]))
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
"""Of four new tokens, two continue the first, and the last continues the third."""
PATHS = {1: [0, 1], 3: [0, 2, 3]}
"""New tokens up to two of them."""
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


@parametrize("options", [{}, dict(local_window_size=(3, 0)), dict(alibi_slopes=SLOPES)], quick=(2,))
def test_new_tokens_may_be_a_tree(options):
    """Each path through the tree gives what its tokens give in a row."""
    arrays = tokens(9)
    cache, _ = steps(zeros(12), [a[:, :5] for a in arrays], (5,))

    @jax.jit
    def attended(cache, query, key, value, tree_mask=None):
        return cache.append(key, value).attend(query, tree_mask=tree_mask, **options)

    new = [a[:, 5:] for a in arrays]
    tree = attended(cache, *new, tree_mask=np.stack([TREE, TREE]))
    for last, path in PATHS.items():
        alone = attended(cache, *(a[:, np.array(path)] for a in new))
        np.testing.assert_allclose(tree[:, last], alone[:, -1], rtol=1e-5, atol=1e-6)


def test_alibi_is_a_bias_by_distance():
    query, key, value = tokens(7)
    place = np.arange(7)
    bias = SLOPES[:, None, None] * (place[None] - place[:, None])
    expected = jaxfused.dot_product_attention(query, key, value, bias[None], is_causal=True)
    attend = jax.jit(lambda cache, q, k, v: cache.append(k, v).attend(q, alibi_slopes=SLOPES))
    found = attend(zeros(9), query, key, value)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zeros(4, window=5), "window is 5, but there are 4 places"),
        (lambda: zeros(0), "length is 0"),
        (lambda: zeros(4, dtype="int32"), "dtype is int32, but keys and values are kept in"),
        (lambda: zeros(4, dtype="fp8"), "dtype is 'fp8', which is no dtype"),
        (lambda: zeros(4).attend(tokens(1)[0] > 0), "query has dtype bool"),
        (
            lambda: zeros(4).append(*tokens(1)[1:], implementation="triton"),
            "KVCache.append: implementation must be None or one of .* 'triton' was passed",
        ),
        (lambda: zeros(4, key_scale=np.ones(K)), "given together, to a dtype of 8 bits"),
        (lambda: zeros(4, starts=np.zeros(3)), r"starts has shape \(3,\)"),
        (
            lambda: zeros(4).append(*tokens(2)[1:], layer=0),
            "layer is 0, but the cache has no stack",
        ),
        (lambda: zeros(4, layers=2).attend(tokens(2)[0]), "layer is None, but the cache has 2"),
        (lambda: zeros(4).append(*tokens(2)[:2]), r"append: key has shape \(2, 2, 4, 8\)"),
        (lambda: zeros(4).append(*tokens(2, batch=3)[1:]), r"lengths has shape \(2,\)"),
        (lambda: zeros(4, window=4).attend(tokens(2)[0]), "a length of at least 5"),
        (
            lambda: zeros(4, window=4).attend(tokens(1)[0], local_window_size=2),
            "has a window of its own",
        ),
        (lambda: zeros(4).attend(tokens(1)[0], counts=np.ones(3, int)), r"counts has shape \(3,\)"),
        (lambda: zeros(4).attend(tokens(1)[0], counts=np.ones(2)), "counts has dtype float32"),
        (lambda: zeros(4).advance(1.5), "counts has dtype float32"),
        (lambda: zeros(4).advance(np.ones((2, 1), int)), r"counts has shape \(2, 1\)"),
        (lambda: zeros(4, starts=[0.5, 1.0]), "starts has dtype float32"),
        (lambda: zeros(4, layers=2).attend(tokens(1)[0], layer=2), "layer is 2.*from 0 to 1"),
        (lambda: zeros(4, layers=2).append(*tokens(1)[1:], layer=True), "layer is True"),
        (lambda: zeros(4).advance(1, batch_index=[1.0]), "batch_index has dtype float32"),
        (
            lambda: zeros(8, window=3).attend(tokens(2)[0], alibi_slopes=SLOPES),
            "a ring's places are in no order; make the cache without window",
        ),
        (
            lambda: zeros(8).attend(tokens(2)[0], tree_mask=TREE),
            r"tree_mask has shape \(4, 4\), but query has 2 new tokens of 2 sequences",
        ),
        (
            lambda: zeros(4).append(*tokens(1)[1:], batch_index=[1, -1]),
            r"batch_index is \[1, -1\], with tokens of sequence 1 more than once",
        ),
        (lambda: zeros(4).attend(tokens(1)[0], batch_index=[0, 2]), "the cache has 2 sequences"),
        (lambda: zeros(4).append(None, tokens(1)[2]), "KVCache: key is None"),
        (lambda: zeros(4).positions(2.5), "positions: tokens is 2.5.* pass an int"),
        (
            lambda: dataclasses.replace(zeros(4), lengths=jnp.ones(2)).advance(1),
            "lengths has dtype float32",
        ),
        (
            lambda: zeros(4, dtype="int8", key_scale=-np.ones(K), value_scale=np.ones(K)),
            "key_scale is .* pass positive",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
