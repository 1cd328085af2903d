import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.attention import attention_cudnn, attention_stages
from jaxfused.ops.attention.mask import EMPTY_LSE, Mask
from jaxfused.runtime.dropout import keep, keep_probability
from tests.cases.attention import CASES, JAX_CASES, Case
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

EVERYTHING = CASES[-1]


def who_attends(case):
    """Returns the mask [B, N, T, S], computed pair by pair."""
    options = case.options()
    explicit = np.broadcast_to(
        options.get("mask", True), (case.batch, case.heads, case.queries, case.keys)
    )
    allowed = np.array(explicit)
    window = case.window
    left, right = (window, window) if isinstance(window, int) else window or (999, 999)
    for b, _, t, s in np.ndindex(allowed.shape):
        p = t + case.offsets()[b]
        allowed[b, :, t, s] &= (
            (s <= p or not case.is_causal)
            and p - left <= s <= p + right
            and (case.query_lengths is None or t < case.query_lengths[b])
            and (case.key_lengths is None or s < case.key_lengths[b])
            and (
                not case.segments
                or options["query_segment_ids"][b, t] == options["key_value_segment_ids"][b, s]
            )
        )
    return allowed


def plain_attention(case, allowed, kept=None, rate=0.0):
    """Computes attention in plain jax.numpy: repeated heads, a float32 softmax, a sink as a column."""

    def f(query, key, value, bias, sinks):
        dtype = query.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        key, value = (jnp.repeat(a, case.heads // case.key_heads, axis=2) for a in (key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=wide)
        logits *= case.head_size**-0.5 if case.scale is None else case.scale
        if case.soft_cap is not None:
            logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
        logits = logits if bias is None else logits + bias
        logits = jnp.where(allowed, logits, -1e30)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
            logits = jnp.concatenate([logits, column.astype(wide)], axis=-1)
        attends = allowed.any(-1)
        p = jnp.where(attends[..., None], jax.nn.softmax(logits), 0.0)[..., : case.keys]
        if kept is not None:
            p = jnp.where(kept, p, 0.0) / (1.0 - rate)
        output = jnp.einsum("bnts,bsnv->btnv", p.astype(dtype), value)
        lse = jax.nn.logsumexp(logits, axis=-1)
        if sinks is None:
            lse = jnp.where(attends, lse, 0.0)
        return output, lse.swapaxes(1, 2).astype(wide)

    return f


def fused_attention(case, **more):
    options = case.options() | more

    def f(query, key, value, bias, sinks):
        output, lse = jaxfused.dot_product_attention(
            query, key, value, bias, sinks=sinks, return_lse=True, **options
        )
        # Queries without keys have EMPTY_LSE, which would hide errors of the others.
        return output, jnp.where(lse < -1e4, 0.0, lse)

    return f


@parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(CASES[1], "bfloat16"), (CASES[3], "float16"), (EVERYTHING, "bfloat16")],
    quick=slice(None, None, 2),
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    args = case.arrays(jnp.dtype(dtype))
    plain = plain_attention(case, who_attends(case))
    assert_values_and_gradients(fused_attention(case), plain, *args)


@pytest.mark.parametrize("case", JAX_CASES, ids=str)
def test_replaces_jax_nn(case):
    query, key, value, bias, _ = case.arrays(jnp.float32)
    allowed = who_attends(case)
    args = (query, key, value, bias)
    results = [
        jax.jit(lambda *a, f=f: f(*a, **case.options(), return_residual=True))(*args)
        for f in (jaxfused.dot_product_attention, jax.nn.dot_product_attention)
    ]
    (ours, lse), (jax_nn, jax_lse) = results
    attends = allowed.any(-1).swapaxes(1, 2)
    np.testing.assert_allclose(ours[attends], jax_nn[attends], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(ours[~attends], 0.0)
    np.testing.assert_array_equal(lse[~attends], jnp.float32(EMPTY_LSE))
    # JAX's log-sum-exp of such a query is EMPTY_LSE + log(S), the same number in float32.
    np.testing.assert_allclose(lse, jax_lse, rtol=2e-6, atol=2e-6)
    assert lse.dtype == jax_lse.dtype and lse.shape == jax_lse.shape


def test_has_the_signature_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(jaxfused.dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_bfloat16_that_was_transposed_runs_on_a_cpu(key_heads):
    """XLA's CPU backend lacks a product of 16 bits into float32 with operands in this order."""

    def heads_first(query, key):
        query, key = (x.transpose(0, 2, 1, 3) for x in (query, key.swapaxes(2, 3)))
        return jaxfused.dot_product_attention(query, key, key, is_causal=True)

    query = jnp.ones((2, 4, 5, 8), jnp.bfloat16)
    key = jnp.ones((2, key_heads, 8, 5), jnp.bfloat16)
    y, vjp = jax.vjp(jax.jit(heads_first), query, key)
    np.testing.assert_array_equal(np.asarray(y, float), 1.0)
    jax.block_until_ready(vjp(y))


def test_without_batch():
    q, k, v = np.random.default_rng(0).normal(size=(3, 5, 4, 8)).astype(np.float32)
    options = {"key_value_seq_lengths": put([3]), "is_causal": True, "return_residual": True}
    segments = put([0, 0, 1, 1, 1])
    options |= {"query_segment_ids": segments, "key_value_segment_ids": segments}
    bias = np.random.default_rng(1).normal(size=(4, 5, 5)).astype(np.float32)
    f = jax.jit(lambda *args: jaxfused.dot_product_attention(*args, **options))
    output, lse = f(q, k, v, bias)
    assert output.shape == (5, 4, 8) and lse.shape == (5, 4)
    batched = f(q[None], k[None], v[None], bias[None])
    np.testing.assert_array_equal(output, batched[0][0])
    np.testing.assert_array_equal(lse, batched[1][0])


def test_the_gradient_of_the_residual_is_that_of_jax():
    """The residual gets no gradient, else replacing JAX's function would silently change gradients."""
    qkv = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 8)).astype(np.float32)

    def gradient(function, **options):
        def of_both(q, k, v):
            output, lse = function(q, k, v, **options)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(lse))

        return jax.jit(jax.grad(of_both, argnums=(0, 1)))(*qkv)

    ours = gradient(jaxfused.dot_product_attention, return_residual=True)
    theirs = gradient(jax.nn.dot_product_attention, return_residual=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)
    with_lse = gradient(jaxfused.dot_product_attention, return_lse=True)
    assert not np.allclose(with_lse[0], theirs[0], atol=1e-2)


def test_xla_saves_that_queries_beyond_the_length_attend_to_nothing():
    """The sink of such a query is not saved: a backward kernel recognises it by EMPTY_LSE alone."""
    query, key = np.ones((2, 5, 1, 2, 8), np.float32), np.ones((2, 3, 1, 8), np.float32)
    sinks, lengths = np.full((1, 2), -7.0, np.float32), np.array([2, 0], np.int32)
    arrays = attention_stages.Arrays(query, key, key, sinks=sinks, query_lengths=lengths)
    forward = attention_stages.Forward(attention_stages.Options(False, None, 1.0, None, 0.0))
    _, lse = forward.run("xla", dispatch.Device("cpu", "", None, 0), *arrays.operands())
    assert (lse[0, :, :, :2] > 8).all()
    chex.assert_trees_all_equal(lse[0, :, :, 2:5], np.full((1, 2, 3), EMPTY_LSE, np.float32))
    chex.assert_trees_all_equal(lse[1, :, :, :5], np.full((1, 2, 5), EMPTY_LSE, np.float32))


def test_integers_are_as_in_jax():
    q, k, v = np.random.default_rng(0).integers(-40, 40, size=(3, 2, 5, 2, 8))
    ours, theirs = (
        f(q, k, v, is_causal=True)
        for f in (jaxfused.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert np.any(theirs != 0)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_empty(queries, keys):
    query, key = jnp.ones((2, queries, 2, 4)), jnp.ones((2, keys, 2, 4))
    output, vjp = jax.vjp(jaxfused.dot_product_attention, query, key, key)
    np.testing.assert_array_equal(output, jnp.zeros((2, queries, 2, 4)))
    for gradient in vjp(jnp.ones_like(output)):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(gradient))


def test_infinite_bias_is_a_mask():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8)).astype(np.float32)
    bias = jnp.zeros((4, 4)).at[1, :3].set(-jnp.inf).at[2].set(-jnp.inf)

    @jax.jit
    def f(*args):
        output, vjp = jax.vjp(jaxfused.dot_product_attention, *args)
        return output, vjp(output)

    output, gradients = f(q, k, v, bias)
    np.testing.assert_allclose(output[:, 1], v[:, 3], rtol=1e-6)
    np.testing.assert_array_equal(output[:, 2], 0.0)
    chex.assert_tree_all_finite(gradients)


def test_scale_may_be_learned():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8)).astype(np.float32)

    def f(scale, q):
        return jaxfused.dot_product_attention(q, k, v, scale=scale).sum()

    gradient = jax.grad(f)(jnp.float32(0.5), q)
    expected = jax.jvp(lambda s: f(1.0, s * q), (0.5,), (1.0,))[1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_backward_keeps_nothing_of_size_t_times_s(dtype):
    case = Case("", 32, 48)
    query, key, value, *_ = case.arrays(dtype)
    _, vjp = jax.vjp(
        lambda *a: jaxfused.dot_product_attention(*a, is_causal=True, implementation="xla"),
        query,
        key,
        value,
    )
    kept = sum(a.nbytes for a in jax.tree.leaves(vjp))
    assert kept <= query.nbytes + key.nbytes + value.nbytes + 64


def test_transforms():
    case = Case("", 4, 5, heads=4, bias=(1, 4, 4, 5), mask=(2, 1, 4, 5), sinks=True, soft_cap=3.0)
    assert_transforms(
        fused_attention(case, dropout_rate=0.25, dropout_key=jax.random.key(3)),
        *case.arrays(jnp.float32),
    )


def test_derivatives_of_both_orders_and_modes():
    case = Case(
        "", 2, 3, 2, 1, head_size=2, bias=(2, 3), mask=(2, 1, 2, 3), sinks=True, soft_cap=2.0
    )
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: np.asarray(a, np.float64), case.arrays(jnp.float32))
        f = jax.jit(fused_attention(case))
        check_grads(f, args, order=1, modes=["fwd"])
        check_grads(f, args, order=2, modes=["rev"])


# --- mask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_rows_of_the_interval_bound_a_block(case):
    window = (case.window,) * 2 if isinstance(case.window, int) else case.window
    lengths = None if case.key_lengths is None else put(case.key_lengths)
    mask = Mask(is_causal=case.is_causal, window=window, key_lengths=lengths)
    start, stop = np.broadcast_arrays(
        *jax.jit(lambda: mask.key_interval(jnp.arange(case.queries), case.keys))(),
        np.empty((case.batch, 1)),
    )[:2]
    allowed = np.broadcast_to(
        jax.jit(lambda: mask.allowed(case.queries, case.keys))(),
        (case.batch, 1, case.queries, case.keys),
    )
    key = np.arange(case.keys)
    for first, last in ((0, 2), (1, case.queries - 1)):
        for b in range(case.batch):
            block = allowed[b, 0, first : last + 1]
            outside = (key < start[b, first]) | (key >= stop[b, last])
            inside = (key >= start[b, last]) & (key < stop[b, first])
            assert not block[:, outside].any() and block[:, inside].all()


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_keeps_what_its_documentation_says():
    def murmur(x, tweak=0):
        x ^= x >> 16
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x ^= (x >> 13) ^ tweak
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    words = (0x12345678, 0x9ABCDEF0)
    shape, rate = (2, 3, 4, 5), 0.3
    kept = keep(put(words, jnp.uint32), shape, rate)
    for b, n, t, s in np.ndindex(shape):
        u, v = (
            murmur((murmur(word ^ (b * 3 + n)) + 0x9E3779B9 & 0xFFFFFFFF) ^ t) for word in words
        )
        x = murmur(u ^ s // 2, v)
        half = x & 0xFFFF if s % 2 == 0 else x >> 16
        assert kept[b, n, t, s] == (half >= round(rate * 65536))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_even_and_uncorrelated(rate):
    shape = (4, 8, 128, 128)
    kept = np.asarray(keep(jax.random.bits(jax.random.key(5), (2,), jnp.uint32), shape, rate))
    p = keep_probability(rate)
    assert abs(p - (1.0 - rate)) <= 0.5 / 65536

    def assert_mean(hits, mean):
        deviation = (mean * (1.0 - mean) / hits.size) ** 0.5
        assert abs(hits.mean() - mean) < 4.5 * deviation

    assert_mean(kept, p)
    for part in (
        kept[..., ::2],
        kept[..., 1::2],
        kept[..., 0],
        kept[..., 0, :],
        kept[0],
        kept[:, 0],
    ):
        assert_mean(part, p)
    for axis in range(4):
        for distance in (1, 2, 3):
            ahead = np.take(kept, range(distance, shape[axis]), axis)
            behind = np.take(kept, range(shape[axis] - distance), axis)
            assert_mean(ahead & behind, p * p)
    # Sums over rows and columns have the variance of independent draws.
    for axis in (2, 3):
        sums = kept.sum(axis)
        assert 0.9 < sums.var() / (128 * p * (1.0 - p)) < 1.1
    other = np.asarray(keep(jax.random.bits(jax.random.key(6), (2,), jnp.uint32), shape, rate))
    assert_mean(kept & other, p * p)


def test_dropout_divides_by_what_it_keeps():
    case = Case("", 6, 7, heads=4, sinks=True)
    key, rate = jax.random.key(2), 0.25
    kept = keep(jax.random.bits(key, (2,), jnp.uint32), (2, 4, 6, 7), rate)
    plain = plain_attention(case, np.ones((2, 4, 6, 7), bool), kept, rate)
    ours = fused_attention(case, dropout_rate=rate, dropout_key=key)
    assert_values_and_gradients(ours, plain, *case.arrays(jnp.float32))


# --- implementations and errors -------------------------------------------------------------------

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)


def cudnn(length=192, keys=None, head_size=64, value_size=None, dtype=jnp.bfloat16, **options):
    """Returns why cuDNN cannot take a call on the assumed device, as the error states it."""
    query = jnp.ones((1, length, 2, head_size), dtype)
    key = jnp.ones((1, keys or length, 2, head_size), dtype)
    value = jnp.ones((*key.shape[:3], value_size or head_size), dtype)
    call = functools.partial(jaxfused.dot_product_attention, implementation="cudnn", **options)
    try:
        jax.eval_shape(call, query, key, value)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("device", "change", "reason"),
    [
        (dispatch.Device("cpu", "cpu", None, 0), {}, "needs an NVIDIA GPU"),
        (dispatch.Device("gpu", "Tesla T4", (7, 5), 40), {}, "capability 8.0"),
        (dispatch.Device("gpu", "L4", (8, 9), 58), {"head_size": 256}, "up to 128, not 256"),
        (H200, {"dtype": jnp.float32}, "not float32"),
        (H200, {"head_size": 60}, "multiple of 8"),
        (H200, {"value_size": 32}, "one head size"),
        (H200, {"length": 198, "keys": 192}, "multiples of 32, not 198 queries and 192 keys"),
        (H200, {"local_window_size": (5, 5)}, "no window to the right"),
        (H200, {"local_window_size": (5, 0), "length": 224, "keys": 192}, "fewer keys"),
        (
            H200,
            {"local_window_size": (5, 0), "key_value_seq_lengths": jnp.ones(1, int)},
            "fewer keys",
        ),
        (H200, {"length": 0, "keys": 32}, "must be queries and keys"),
        (H200, {"logits_soft_cap": 5.0}, "does not have logits_soft_cap"),
        (H200, {"return_lse": True}, "not its gradient"),
    ],
)
def test_limits_of_cudnn(device, change, reason):
    with dispatch.assume(device):
        assert reason in cudnn(**change)


@pytest.mark.parametrize(
    "fitting",
    [
        {},
        {"head_size": 256},
        {"bias": jnp.ones((1, 1, 32, 96)), "length": 32, "keys": 96},
        {"local_window_size": (5, 0)},
        {"local_window_size": (5, 5), "is_causal": True},
    ],
)
def test_what_cudnn_is_asked_to_do(fitting, monkeypatch):
    monkeypatch.setattr(attention_cudnn, "attend", lambda query, key, value, *others: query)
    with dispatch.assume(H200):
        assert cudnn(**fitting) is None


def test_what_runs_without_kernels_of_ours_is_explained(monkeypatch):
    """One call runs in cuDNN, one with an array as scale in XLA; neither is a stage of a `Runner`."""
    monkeypatch.setattr(attention_cudnn, "attend", lambda query, key, value, *others: query)
    x = jax.ShapeDtypeStruct((1, 192, 2, 64), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    by_cudnn = functools.partial(jaxfused.dot_product_attention, implementation="cudnn")
    with dispatch.assume(H200):
        named = jaxfused.explain(by_cudnn, x, x, x)
        scaled = jaxfused.explain(
            lambda q, scale: jaxfused.dot_product_attention(q, q, q, scale=scale), x, scale
        )
    assert "dot_product_attention runs on 'cudnn' (as named)" in str(named)
    assert "dot_product_attention runs on 'xla'" in str(scaled)
    assert "not 'pallas': scale must be a Python float" in str(scaled)


CUDNN_CASES = [
    Case("no multiple of a block", 96, 96, head_size=64),
    Case("grouped, causal", 64, 96, heads=8, head_size=64, is_causal=True),
    Case("bias", 64, 64, head_size=64, bias=(1, 2, 64, 64)),
    Case("bias and mask", 64, 64, head_size=64, bias=(1, 2, 64, 64), mask=(2, 2, 64, 64)),
    Case("mask of queries", 64, 32, head_size=64, mask=(2, 1, 64, 1)),
    Case("lengths", 64, 64, head_size=64, query_lengths=(64, 9), key_lengths=(0, 17)),
    Case("bias and lengths", 64, 64, head_size=64, bias=(1, 2, 64, 64), key_lengths=(0, 17)),
    Case("window", 64, 64, head_size=64, window=(7, 0)),
]


def cudnn_and_plain(case, lowest=None):
    """Returns (cuDNN's, plain) attention. If `lowest` is given, the bias masks query 3 with it."""
    options = case.options()
    hidden = np.zeros((case.queries, case.keys), bool)
    hidden[3] = lowest is not None

    def with_hidden(bias):
        return bias if bias is None else jnp.where(hidden, lowest or 0.0, bias)

    def ours(query, key, value, bias, sinks):
        return jaxfused.dot_product_attention(
            query, key, value, with_hidden(bias), **options, implementation="cudnn"
        )

    def plain(query, key, value, bias, sinks):
        allowed = who_attends(case) & ~(hidden & (bias is not None))
        return plain_attention(case, allowed)(query, key, value, bias, sinks)[0]

    return ours, plain


def softmax_of_infinite_logits(query, key, value, bias, mask, **options):
    """Replaces cuDNN; a query without keys gets NaN in its values and gradients."""
    assert options["implementation"] == "cudnn"
    left, right = options["local_window_size"] or (None, None)
    allowed = Mask(
        is_causal=options["is_causal"],
        window=None if left is None else (left, right),
        query_lengths=options.get("query_seq_lengths"),
        key_lengths=options["key_value_seq_lengths"],
        explicit=mask,
    ).allowed(query.shape[1], key.shape[1])
    key, value = (jnp.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    logits = options["scale"] * logits if bias is None else options["scale"] * logits + bias
    weights = jax.nn.softmax(jnp.where(allowed, logits, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


@pytest.mark.parametrize(
    ("case", "lowest"),
    [(case, None) for case in CUDNN_CASES[1:]]
    + [(CUDNN_CASES[2], -np.inf), (CUDNN_CASES[3], np.finfo(np.float32).min)],
    ids=str,
)
def test_cudnn_meets_no_query_without_keys(monkeypatch, case, lowest):
    monkeypatch.setattr(attention_cudnn, "jax_dot_product_attention", softmax_of_infinite_logits)
    ours, plain = cudnn_and_plain(case, lowest)
    with dispatch.assume(H200):
        assert_values_and_gradients(ours, plain, *case.arrays(jnp.bfloat16), cotangents=1)


@pytest.mark.gpu
@pytest.mark.parametrize("lowest", [None, -np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("case", CUDNN_CASES, ids=str)
def test_cudnn(case, lowest):
    assert_values_and_gradients(*cudnn_and_plain(case, lowest), *case.arrays(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": jnp.ones((4, 8))}, r"query has shape \(4, 8\)"),
        ({"query": jnp.ones((2, 4, 3, 8))}, "query has 3 heads and key 2"),
        ({"query": jnp.ones((2, 4, 2, 8), bool)}, "query has dtype bool"),
        ({"key": jnp.ones((2, 5, 2, 8), jnp.bfloat16)}, "key has dtype bfloat16"),
        ({"key": jnp.ones((2, 5, 2, 9))}, r"key has shape \(2, 5, 2, 9\)"),
        ({"value": jnp.ones((2, 6, 2, 8))}, r"value has shape \(2, 6, 2, 8\).*\(2, 5, 2, 8\)"),
        ({"bias": jnp.ones((3, 5))}, r"bias has shape \(3, 5\).*\(2, 2, 4, 5\)"),
        ({"mask": jnp.ones((4, 5))}, "mask has dtype float32"),
        ({"mask": jnp.ones((1, 2, 2, 4, 5), bool)}, "mask has shape"),
        ({"query_seq_lengths": jnp.ones(2)}, "query_seq_lengths has dtype float32"),
        ({"key_value_seq_lengths": jnp.ones(3, int)}, r"shape \(3,\).*\(2,\)"),
        ({"query_segment_ids": jnp.ones((2, 4), int)}, "pass both or none"),
        ({"local_window_size": (-1, 2)}, r"local_window_size is \(-1, 2\)"),
        ({"sinks": jnp.ones(3)}, r"sinks has shape \(3,\)"),
        ({"local_window_size": 2.0}, "local_window_size is 2.0"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size is \(1, 2, 3\)"),
        ({"local_window_size": (float("nan"), 1)}, "local_window_size is nan"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": jnp.ones((3, 1, 1))}, r"scale has shape \(3, 1, 1\).*\(2, 2, 4, 5\)"),
        ({"scale": np.ones((2,))}, r"scale has shape \(2,\).*\(2, 2, 4, 5\)"),
        ({"scale": jnp.ones((), bool)}, "scale has dtype bool"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0.*None for no cap"),
        ({"logits_soft_cap": -30.0}, "logits_soft_cap is -30.0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap is nan"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap is inf"),
        ({"dropout_rate": 1.0}, "dropout_rate must be in the range .*, but it is 1.0"),
        ({"dropout_rate": -0.5}, "but it is -0.5"),
        ({"dropout_rate": float("nan")}, "but it is nan"),
        ({"return_lse": True, "return_residual": True}, "pass one of them"),
        ({"dropout_rate": 0.1}, "dropout_key is None"),
        ({"dropout_rate": 0.1, "dropout_key": 3}, "dropout_key is 3, but it is one key"),
        ({"implementation": "pallas"}, "implementation='pallas' cannot run here"),
        ({"implementation": "cudnn"}, "implementation='cudnn' cannot run here"),
    ],
)
def test_errors(change, message):
    key = jnp.ones((2, 5, 2, 8))
    args = {"query": jnp.ones((2, 4, 2, 8)), "key": key, "value": key} | change
    with pytest.raises(ValueError, match=f"dot_product_attention: .*{message}"):
        jaxfused.dot_product_attention(**args)
