"""Where queries stand among the keys: arguments, decoding from a cache, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from tests.cases.attention import Case
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
attend = functools.partial(jaxfused.dot_product_attention, is_causal=True)


def arrays(queries, keys, dtype=jnp.float32, **sizes):
    return Case("", queries, keys, **sizes).arrays(dtype)[:3]


@parametrize("window", [None, (3, 0)], quick=(1,))
@parametrize("new", [1, 4, 16], quick=(1,))
def test_new_tokens_give_the_last_rows_of_the_whole(new, window):
    """The cache has places beyond the tokens, and sequences end at different ones."""
    query, key, value = arrays(40, 40, heads=6)
    lengths = np.array([23, 40])
    whole = jax.jit(functools.partial(attend, local_window_size=window))(query, key, value)
    last = [slice(n - new, n) for n in lengths]
    new_queries = jnp.stack([query[b, s] for b, s in enumerate(last)])
    for offset in ("bottom_right", put(lengths - new)):
        f = functools.partial(attend, local_window_size=window, query_offset=offset)
        actual = jax.jit(f)(new_queries, key, value, key_value_seq_lengths=put(lengths))
        expected = jnp.stack([whole[b, s] for b, s in enumerate(last)])
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("offset", "same"),
    [
        (0, None),
        (np.int64(4), 4),
        ([4, 4], 4),
        (np.array([2**40, 4]), np.array([9, 4])),
        (np.array([-(2**40), 4]), np.array([-5, 4])),
        (np.array([2**31, 4], np.uint32), np.array([9, 4])),
        (np.array([9, 4], np.uint8), np.array([9, 4])),
        (10**30, 9),
        (-(10**30), -5),
    ],
    ids=str,
)
def test_offsets_of_every_size(offset, same):
    query, key, value = arrays(5, 9)
    expected = attend(query, key, value, query_offset=same)
    np.testing.assert_array_equal(attend(query, key, value, query_offset=offset), expected)
    with jax.enable_x64(True):
        of_64_bits = jnp.asarray(offset) if isinstance(offset, np.ndarray) else offset
        actual = attend(query, key, value, query_offset=of_64_bits)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", [int, lambda n: np.array([n] * 2), lambda n: np.int64(n)])
def test_windows_and_offsets_beyond_32_bits(kind):
    """A query at 2**33 + t with 2**33 - 2 keys to its left sees keys from 2 + t on."""
    query, key, value = arrays(5, 9)
    far = functools.partial(jaxfused.dot_product_attention, query, key, value)
    first = np.arange(9) >= np.arange(5)[:, None] + 2
    actual = far(query_offset=kind(2**33), local_window_size=(2**33 - 2, 0))
    np.testing.assert_array_equal(actual, far(mask=jnp.asarray(first)))
    last = np.arange(9) <= np.arange(5)[:, None] + 2
    actual = far(query_offset=kind(-(2**33)), local_window_size=(0, 2**33 + 2))
    np.testing.assert_array_equal(actual, far(mask=jnp.asarray(last)))
    edge = far(query_offset=jnp.full(2, 2**31 - 1), local_window_size=(2**31 - 3, 0))
    np.testing.assert_array_equal(edge, far(mask=jnp.asarray(first)))


def test_numpys_lengths_and_segments_of_64_bits_do_not_wrap():
    query, key, value = arrays(4, 4)
    f = functools.partial(jaxfused.dot_product_attention, query, key, value)
    np.testing.assert_array_equal(f(key_value_seq_lengths=np.array([2**32, 2**40])), f())
    wide = np.array([[0, 2**32, 2**33, 2**33]] * 2)
    names = "query_segment_ids", "key_value_segment_ids"
    apart = f(**dict.fromkeys(names, put(np.array([[0, 1, 2, 2]] * 2))))
    np.testing.assert_array_equal(f(**dict.fromkeys(names, wide)), apart)


def test_queries_before_all_keys_give_zero_and_zero_gradients():
    query, key, value = arrays(4, 9)

    def loss(*args):
        return jnp.sum(attend(*args, query_offset=-3) ** 2)

    output = attend(query, key, value, query_offset=-3)
    np.testing.assert_array_equal(output[:, :3], 0.0)
    np.testing.assert_allclose(output[:, 3], jnp.repeat(value[:, 0], 1, axis=1), rtol=1e-6)
    dquery = jax.grad(loss)(query, key, value)
    np.testing.assert_array_equal(dquery, 0.0)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (True, "query_offset is True, but it says at which key"),
        (1.5, "query_offset is 1.5"),
        ("top_left", "query_offset is 'top_left', but it says at which key"),
        (jnp.ones(2), "query_offset has dtype float32, but it holds integers"),
        (jnp.arange(3), r"query_offset has shape \(3,\)"),
    ],
    ids=str,
)
def test_refuses(offset, message):
    query, key, value = arrays(4, 9)
    with pytest.raises(ValueError, match=message):
        attend(query, key, value, query_offset=offset)
    with pytest.raises(ValueError, match=message):
        attend(query, key, value, query_offset=offset, mask_mod=lambda b, h, q, k: k <= q)


def test_without_causality_or_window_offsets_say_nothing():
    query, key, value = arrays(4, 9)
    f = functools.partial(jaxfused.dot_product_attention, query, key, value)
    np.testing.assert_array_equal(f(query_offset=7), f())


def test_cudnn_has_no_offsets():
    query, key, value = arrays(32, 64, jnp.bfloat16, head_size=64)
    with (
        dispatch.assume(H200),
        pytest.raises(ValueError, match=r"cuDNN's attention does not have query_offset"),
    ):
        attend(query, key, value, query_offset=7, implementation="cudnn")


def test_transforms():
    query, key, value = arrays(3, 7)
    offsets = put([4, 1])
    f = functools.partial(attend, query_offset=offsets, local_window_size=(3, 0))
    assert_transforms(lambda q, k, v: f(q, k, v), query, key, value)


def test_vmap_over_offsets():
    query, key, value = arrays(3, 7)
    offsets = put([[4, 1], [0, -2]])
    f = jax.jit(lambda offset: attend(query, key, value, query_offset=offset))
    with dispatch.assume(dispatch.Device("cpu", "", None, 0)):
        actual = jax.jit(jax.vmap(f))(offsets)
    np.testing.assert_allclose(actual, jnp.stack([f(o) for o in offsets]), rtol=1e-6, atol=1e-7)


@parametrize(
    ("queries", "keys", "launched"),
    [
        (1, 8192, ["attention_split_forward", "attention_merge_splits"]),
        (16, 32768, ["attention_split_forward", "attention_merge_splits"]),
        (512, 4096, ["attention_forward"]),
    ],
    quick=(0,),
)
def test_the_same_kernels_run_as_without_offsets(queries, keys, launched):
    query, key, value = (
        jax.ShapeDtypeStruct((4, n, heads, 128), jnp.bfloat16)
        for n, heads in ((queries, 32), (keys, 8), (keys, 8))
    )
    offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
    with dispatch.assume(H200):
        found = kernels(
            lambda q, k, v, o: attend(q, k, v, query_offset=o), query, key, value, offsets
        )
    assert found == launched
