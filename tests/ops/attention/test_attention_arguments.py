"""Arguments of dot_product_attention: shapes that broadcast, dtypes, numbers out of range."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.cases.attention import Case
from tests.support import mosaic_interpreter
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize

B, T, S, N, H = 2, 3, 4, 2, 8
LOGITS = (B, N, T, S)
PATTERNS = list(itertools.product((True, False), repeat=4))


def qkv(seed=0, dtype=np.float32, queries=T, keys=S, heads=N, key_heads=N):
    rng = np.random.default_rng(seed)
    shapes = (B, queries, heads, H), (B, keys, key_heads, H), (B, keys, key_heads, H)
    return tuple(jax.device_put(rng.normal(size=shape).astype(dtype)) for shape in shapes)


@parametrize("pattern", PATTERNS, quick=(0, 6, 9, 15))
def test_arrays_broadcast_to_the_logits_as_in_jax(pattern):
    """Bias, mask and scale of every pattern of axes of length 1, with and without the leading ones."""
    rng = np.random.default_rng(1)

    def shaped(wide):
        return tuple(n if whole else 1 for n, whole in zip(LOGITS, wide, strict=True))

    shape = shaped(pattern)
    first = next((i for i, n in enumerate(shape) if n > 1), 4)
    bias, scale = rng.normal(size=shape).astype("f"), rng.normal(size=shape[first:]).astype("f")
    mask = rng.random(shaped([not whole for whole in pattern])) < 0.6
    mask[..., 0] = True

    def results(f, q, k, v, bias, scale):
        def outputs(q, k, v, bias, scale):
            return [f(q, k, v, bias, mask), f(q, k, v, scale=scale)]

        y, vjp = jax.vjp(outputs, q, k, v, bias, scale)
        return y, vjp([jnp.cos(a) for a in y])

    args = (*qkv(), bias, scale)
    ours, theirs = jax.jit(
        lambda *args: [
            results(f, *args)
            for f in (jaxfused.dot_product_attention, jax.nn.dot_product_attention)
        ]
    )(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_scale_of_each_query_head():
    """The heads also differ where several query heads share a key head, which `jax.nn` refuses."""
    q, k, v = qkv(heads=4, key_heads=2)
    scale = np.array([0.1, 1.0, 3.0, -2.0], np.float32)
    by_head = jax.jit(
        lambda *args: jaxfused.dot_product_attention(*args, scale=scale.reshape(4, 1, 1))
    )(q, k, v)
    for n, one in enumerate(scale.tolist()):
        of_head = jax.nn.dot_product_attention(
            q[:, :, n : n + 1],
            k[:, :, n // 2 : n // 2 + 1],
            v[:, :, n // 2 : n // 2 + 1],
            scale=one,
        )
        np.testing.assert_allclose(by_head[:, :, n : n + 1], of_head, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parts_merged_by_the_log_sum_exp_are_as_accurate_as_the_whole(dtype):
    q, k, v = (a.astype(dtype) for a in qkv(keys=512))
    attention = jax.jit(
        lambda *args: jaxfused.dot_product_attention(*args, return_lse=True, scale=0.5)
    )
    wide = [np.asarray(a, np.float32) for a in (q, k, v)]
    truth, lse = attention(*wide)
    parts = [attention(q, *part) for part in zip(np.split(k, 4, 1), np.split(v, 4, 1), strict=True)]
    assert all(part[1].dtype == jnp.float32 for part in parts)
    outputs, sums = (np.stack([np.asarray(part[i], np.float32) for part in parts]) for i in (0, 1))
    weights = np.exp(sums - lse)
    np.testing.assert_allclose(weights.sum(0), 1.0, rtol=1e-5)

    def error(y):
        return np.abs(np.asarray(y, np.float32) - truth).max()

    assert error((weights[..., None] * outputs).sum(0)) < 1.5 * error(attention(q, k, v)[0])


def test_the_residual_is_of_the_dtype_of_jax():
    q, k, v = (a.astype(jnp.bfloat16) for a in qkv())
    results = (
        jax.eval_shape(lambda *args, f=f: f(*args, return_residual=True), q, k, v)
        for f in (jaxfused.dot_product_attention, jax.nn.dot_product_attention)
    )
    ours, theirs = results
    assert jax.tree.map(lambda a: (a.shape, a.dtype), ours) == jax.tree.map(
        lambda a: (a.shape, a.dtype), theirs
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_lengths_beyond_what_there_is(dtype):
    q, k, v = qkv()
    f = jax.jit(
        lambda q_lengths, k_lengths: jaxfused.dot_product_attention(
            q, k, v, query_seq_lengths=q_lengths, key_value_seq_lengths=k_lengths
        )
    )
    ours = f(np.array([100, 1], dtype), np.array([5, 100], dtype))
    np.testing.assert_array_equal(ours, f(np.array([T, 1], dtype), np.array([S, S], dtype)))
    if np.dtype(dtype).kind == "i":
        ours = f(np.array([-1, T], dtype), np.array([S, -100], dtype))
        np.testing.assert_array_equal(ours, 0.0)


def test_windows_beyond_what_there_is():
    q, k, v = qkv()
    for wide in (np.int64(7), (2**40, np.int32(7)), [99, 2**31 - 1]):
        ours = jaxfused.dot_product_attention(q, k, v, local_window_size=wide)
        np.testing.assert_allclose(ours, jaxfused.dot_product_attention(q, k, v), rtol=1e-6)


def test_segment_ids_of_64_bits_that_differ_above_the_32nd():
    with jax.enable_x64(True):
        q, k, v = qkv()
        ids = np.array([[5, 5 + 2**32, -(2**40), 5]] * B)

        def f(ids):
            return jaxfused.dot_product_attention(
                q, k, v, query_segment_ids=ids[:, :T], key_value_segment_ids=ids
            )

        small = np.array([[1, 2, 0, 1]] * B, np.int32)
        np.testing.assert_array_equal(*(jax.jit(f)(each) for each in (ids, small)))


# --- kernels, in Mosaic's interpreter -------------------------------------------------------------


def test_lengths_beyond_what_there_is_do_not_reach_kernels(interpreted_hopper, monkeypatch):
    """A kernel reads keys beyond the last one as zeros. A longer length would count them."""
    mosaic_interpreter.complete(monkeypatch)
    q, k, v = (put(a, jnp.float16) for a in qkv(queries=9, keys=70))

    @jax.jit
    def f(lengths):
        return jaxfused.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="pallas"
        )

    np.testing.assert_array_equal(f(np.array([500, -3])), f(np.array([70, 0])))


CORNERS = [
    Case("one query, many heads of one key head", 1, 70, heads=8, key_heads=1, scale=-0.5),
    Case("more queries than keys", 70, 9, is_causal=True, window=(2, 3), value_head_size=16),
    Case(
        "all masks and a sink",
        33,
        70,
        heads=4,
        sinks=True,
        is_causal=True,
        window=(9, 0),
        query_lengths=(33, 7),
        key_lengths=(70, 3),
        segments=2,
        soft_cap=2.0,
    ),
    Case("equal logits", 17, 70, scale=0.0, bias=(1, 2, 1, 70), mask=(2, 1, 17, 70)),
]


@parametrize("case", CORNERS, quick=(1,))
def test_corners_in_the_interpreter(interpreted_hopper, monkeypatch, case):
    mosaic_interpreter.complete(monkeypatch)

    def by(implementation):
        def f(query, key, value, bias, sinks):
            output, lse = jaxfused.dot_product_attention(
                query,
                key,
                value,
                bias,
                sinks=sinks,
                return_lse=True,
                implementation=implementation,
                **case.options(),
            )
            return output, jnp.where(lse < -1e30, 0.0, lse)

        return f

    args = case.arrays(jnp.float16)
    assert_values_and_gradients(by("pallas"), by("xla"), *args, cotangents=1)
