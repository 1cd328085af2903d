"""fuse finds attention as models write it, and its projections with norm and rotation."""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.support.arrays import put
from tests.support.fused import assert_fuses, assert_left_alone, counts, fusion, normal, wide

pytestmark = pytest.mark.exhaustive

DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
B, T, S, N, H = 2, 6, 6, 4, 8


def qkv(dtype, *, heads=N, queries=T, keys=S):
    return (
        normal(0, B, queries, N, H, dtype=dtype),
        normal(1, B, keys, heads, H, dtype=dtype),
        normal(2, B, keys, heads, H, dtype=dtype),
    )


def causal(queries=T, keys=S):
    return jnp.tril(jnp.ones((queries, keys), bool))


def bthd(q, k, v, mask=None, number=-1e9):
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(H)
    if mask is not None:
        logits = jnp.where(mask, logits, number)
    p = jax.nn.softmax(wide(logits), axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def bhtd(q, k, v):
    """Attention with heads before positions, and the scale on the queries."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * H**-0.5, k, v))
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-1)
    return (p @ v).transpose(0, 2, 1, 3)


def by_hand(q, k, v):
    """Attention whose softmax subtracts the maximum once; JAX's own would subtract it twice."""
    logits = jnp.einsum("bthd,bshd->bhts", wide(q), wide(k)) * 0.3
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    e = jnp.exp(logits)
    p = (e / e.sum(-1, keepdims=True)).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def shifted_before(q, k, v):
    """Attention of lucidrains' models, whose logits lose their maximum before the softmax."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * H**-0.5, k, v))
    logits = jnp.where(causal(), jnp.einsum("bhid,bhjd->bhij", q, k), -1e10)
    logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    p = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("bhij,bhjd->bhid", p, v).transpose(0, 2, 1, 3)


def merged_heads(q, k, v):
    """Attention with one axis for batch and heads, as in the first Transformers."""
    q, k, v = (x.swapaxes(1, 2).reshape(B * N, -1, H) for x in (q, k, v))
    p = jax.nn.softmax(jnp.matmul(q, k.transpose(0, 2, 1)) / H**0.5)
    return jnp.matmul(p, v).reshape(B, N, -1, H).swapaxes(1, 2)


def capped(q, k, v):
    """Attention with Gemma 2's soft cap."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * 0.35
    logits = 5.0 * jnp.tanh(logits / 5.0)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


def lse(logits):
    return jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def unshifted(logits):
    return jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)


def unshifted_by_logarithm(logits):
    return jnp.exp(logits - jnp.log(jnp.exp(logits).sum(-1))[..., None])


def times_reciprocal(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    return e * (1.0 / e.sum(-1, keepdims=True))


def with_softmax(softmax):
    def attention(q, k, v, mask=None, number=-1e9):
        logits = jnp.einsum("bthd,bshd->bhts", wide(q), wide(k)) * 0.3
        if mask is not None:
            logits = jnp.where(mask, logits, number)
        return jnp.einsum("bhts,bshd->bthd", softmax(logits).astype(q.dtype), v)

    return attention


SPELLINGS = {
    "bthd": bthd,
    "lse": with_softmax(lse),
    "log_softmax": with_softmax(lambda logits: jnp.exp(jax.nn.log_softmax(logits))),
    "unshifted": with_softmax(unshifted),
    "unshifted_by_logarithm": with_softmax(unshifted_by_logarithm),
    "times_reciprocal": with_softmax(times_reciprocal),
    "bhtd": bhtd,
    "by_hand": by_hand,
    "shifted_before": shifted_before,
    "merged_heads": merged_heads,
    "capped": capped,
    "flax": nn.dot_product_attention,
    "jax": jax.nn.dot_product_attention,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", SPELLINGS)
def test_attention_in_its_spellings(attention, dtype):
    assert_fuses(SPELLINGS[attention], *qkv(dtype), into={"dot_product_attention": 1})


def grouped_by_einsum(q, k, v):
    q = q.reshape(B, T, 2, 2, H)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k) * H**-0.5
    logits = jnp.where(causal()[None, None, None], logits, jnp.finfo(logits.dtype).min)
    p = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, H)


def gemma(q, k, v):
    """Attention of grouped heads, whose logits have one axis of heads for the softmax."""
    q = q.reshape(B, T, 2, 2, H) * H**-0.5
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(B, T, N, S)
    logits = jnp.where(causal()[None, :, None, :], logits, -2.3819763e38)
    p = jax.nn.softmax(logits, axis=-1).astype(k.dtype).reshape(B, T, 2, 2, S)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, T, N, H)


def repeated(q, k, v):
    return bthd(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), causal())


def tiled(q, k, v):
    """Attention with keys and values repeated as by einops.repeat."""
    k, v = (jnp.tile(x[:, :, :, None], (1, 1, 1, 2, 1)).reshape(B, S, N, H) for x in (k, v))
    return bthd(q, k, v, causal())


def repeated_then_moved(q, k, v):
    """Attention by `jnp.matmul`, for which repeated keys are transposed."""
    q, v = q.transpose(0, 2, 1, 3), jnp.repeat(v, 2, axis=2).transpose(0, 2, 1, 3)
    logits = jnp.matmul(q, jnp.repeat(k, 2, axis=2).transpose(0, 2, 3, 1)) * H**-0.5
    p = jax.nn.softmax(jnp.where(causal(), logits, -1e9))
    return jnp.matmul(p, v).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "attention",
    [
        grouped_by_einsum,
        gemma,
        repeated,
        tiled,
        repeated_then_moved,
        partial(jax.nn.dot_product_attention, is_causal=True),
    ],
)
def test_heads_that_share_keys(attention, dtype):
    args = qkv(dtype, heads=2)
    assert_fuses(attention, *args, into={"dot_product_attention": 1})
    report = str(fusion(attention, *args))
    assert "is_causal" in report
    assert f"{B},{S},2,{H}]" in report, report


def heads_first(q, k, v):
    """Attention with heads before positions; keys and values have an axis for the group's queries."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    q = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
    logits = jnp.matmul(q, k[:, :, None].swapaxes(-1, -2)) / H**0.5
    p = jax.nn.softmax(jnp.where(causal(), logits, -1e9), axis=-1)
    y = jnp.matmul(p, v[:, :, None])
    return y.reshape(len(y), N, *y.shape[3:]).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, N])
@pytest.mark.parametrize("batch", [1, B])
def test_matmul_takes_off_axes_of_length_1(batch, heads, dtype):
    args = [x[:batch] for x in qkv(dtype, heads=heads)]
    assert_fuses(heads_first, *args, into={"dot_product_attention": 1})
    assert "is_causal" in str(fusion(heads_first, *args))


def test_values_that_are_narrower_than_the_probabilities_are_widened():
    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(H))
        return jnp.einsum("bhts,bshd->bthd", p, v)

    q, k, v = qkv("float32")
    assert_fuses(f, q, k, v.astype(jnp.bfloat16), into={"dot_product_attention": 1})


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [-1e9, -2.3819763e38, float(jnp.finfo(jnp.float32).min), -np.inf]
)
def test_a_causal_mask_is_known(number):
    f = partial(bthd, mask=causal(), number=number)
    args = qkv("float32")
    assert_fuses(f, *args, into={"dot_product_attention": 1})
    assert "is_causal" in str(fusion(f, *args))


def test_a_window_is_known():
    distance = jnp.arange(T)[:, None] - jnp.arange(S)[None]
    f = partial(bthd, mask=(distance >= 0) & (distance < 3))
    assert_fuses(f, *qkv("float32"), into={"dot_product_attention": 1})
    assert "is_causal, window (2, 0)" in str(fusion(f, *qkv("float32")))


def test_any_other_constant_mask_is_a_mask():
    mask = np.random.default_rng(0).random((T, S)) > 0.4
    mask[:, 0] = True
    f = partial(bthd, mask=put(mask))
    assert_fuses(f, *qkv("float32"), into={"dot_product_attention": 1})


def of_padding(lengths):
    return jnp.arange(S)[None] < jnp.asarray(lengths)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(6, 4), (3, 0)])
def test_queries_without_keys_get_what_they_got(lengths, dtype):
    """Equal logits give equal probabilities, so that the result is the mean of the values."""
    padding = of_padding(lengths)
    args = qkv(dtype)
    f = lambda q, k, v, p=padding: bthd(q, k, v, p[:, None, None, :])  # noqa: E731
    assert_fuses(f, *args, into={"dot_product_attention": 1})

    def of_arguments(q, k, v, padding):
        return bthd(q, k, v, (padding > 0)[:, None, None, :] & causal())

    assert counts(of_arguments, *args, padding) == {"dot_product_attention": 1}
    for mask in (padding, jnp.zeros_like(padding)):
        ours = jax.jit(jaxfused.fuse(of_arguments))(*args, mask)
        plain = jax.jit(of_arguments)(*args, mask)
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(plain, np.float32), atol=0.02, rtol=0.02
        )


def test_flax_masks():
    padding = of_padding((6, 4))

    def f(q, k, v, padding):
        mask = nn.combine_masks(
            nn.make_causal_mask(padding), nn.make_attention_mask(padding, padding)
        )
        return nn.dot_product_attention(q, k, v, mask=mask)

    args = qkv("float32")
    assert counts(f, *args, padding) == {"dot_product_attention": 1}
    ours, plain = jaxfused.fuse(f)(*args, padding), f(*args, padding)
    np.testing.assert_allclose(ours, plain, atol=2e-6)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("lengths", [(6, 4), (6, 0)])
def test_minus_infinity_is_a_mask_and_without_keys_nan(lengths, is_added):
    def f(q, k, v, padding):
        mask = padding[:, None, None, :]
        if not is_added:
            return bthd(q, k, v, mask, -jnp.inf)
        logits = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.where(mask, 0.0, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    args = (*qkv("float32"), of_padding(lengths))
    assert counts(f, *args) == {"dot_product_attention": 1}
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)[0])) + jnp.sum(f(*args)[1])  # noqa: E731
    ours, plain = ((g(*args), jax.grad(loss(g), (0, 1, 2))(*args)) for g in (jaxfused.fuse(f), f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), ours, plain)


@pytest.mark.parametrize("softmax", [lse, unshifted, unshifted_by_logarithm])
@pytest.mark.parametrize("number", [-1e9, -np.inf])
def test_a_softmax_without_maximum_or_division_of_masked_logits(softmax, number):
    f = with_softmax(softmax)
    assert_fuses(
        partial(f, mask=causal(), number=number), *qkv("float32"), into={"dot_product_attention": 1}
    )

    def padded(q, k, v):
        return f(q, k, v, of_padding((6, 0))[:, None, None], number)

    found = fusion(padded, *qkv("float32"))
    if number == -1e9 and softmax is not unshifted:
        assert found.counts() == {} and "no softmax" in str(found)
    else:
        assert found.counts() == {"dot_product_attention": 1}
    ours, plain = (
        (g(*qkv("float32")), *jax.vjp(g, *qkv("float32"))[1](normal(5, B, T, N, H)))
        for g in (jaxfused.fuse(padded), padded)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, plain)


@pytest.mark.parametrize("lengths", [(6, 4), (6, 0)])
def test_softmax_with_where_gives_queries_without_keys_0(lengths):
    def f(q, k, v):
        mask = of_padding(lengths)[:, None, None]
        return with_softmax(partial(jax.nn.softmax, where=mask, axis=-1))(q, k, v)

    assert_fuses(f, *qkv("float32"), into={"dot_product_attention": 1})

    def causal_too(q, k, v):
        mask = of_padding(lengths)[:, None, None]
        return with_softmax(partial(jax.nn.softmax, where=mask))(q, k, v, causal(), -1e9)

    assert_left_alone(causal_too, *qkv("float32"), because="there is another")


def test_exponentials_that_overflow_give_the_softmax():
    q, k, v = (100 * x for x in qkv("float32"))
    f = with_softmax(unshifted)
    assert np.isnan(f(q, k, v)).any()
    with jax.enable_x64(True):
        truth = with_softmax(jax.nn.softmax)(*(np.asarray(x, np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(jaxfused.fuse(f)(q, k, v), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e / (e.sum(-1, keepdims=True) + 1e-6),
        lambda e: e * (2.0 / e.sum(-1, keepdims=True)),
        lambda e: e / e.sum(-2, keepdims=True).swapaxes(-1, -2),
        lambda e: e * causal() / (e * causal()).sum(-1, keepdims=True),
    ],
)
def test_exponentials_over_something_else_are_left_with_a_reason(change):
    f = with_softmax(lambda logits: change(jnp.exp(logits)))
    assert_left_alone(f, *qkv("float32"), because="divided by their sum alone")


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_with_a_bias_are_scaled_together(dtype):
    """Transformer-XL's and Shaw's relative positions are added before the scale."""

    def f(q, k, v, r):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.einsum("bthd,tsd->bhts", q, r)
        logits = jnp.where(causal(), logits / np.sqrt(H + 1), -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    args = (*qkv(dtype), normal(3, T, S, H, dtype=dtype))
    assert_fuses(f, *args, into={"dot_product_attention": 1})


@pytest.mark.parametrize("lengths", [(6, 4), (6, 0)])
def test_logits_are_scaled_after_a_mask(lengths):
    """GPT-J masks first."""

    def f(q, k, v, number=None):
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        number = jnp.finfo(logits.dtype).min if number is None else number
        logits = jnp.where(of_padding(lengths)[:, None, None], logits, number) / np.sqrt(H + 1)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    def added(q, k, v):
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        mask = jnp.where(of_padding(lengths)[:, None, None], 0.0, -1e36)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax((logits + mask) * 0.3), v)

    for g in (f, partial(f, number=-1e9), added):
        assert_fuses(g, *qkv("float32"), into={"dot_product_attention": 1})

    def near(q, k, v):
        logits = jnp.where(causal(), jnp.einsum("bthd,bshd->bhts", q, k), -1e9) * 1e-3
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    assert_left_alone(near, *qkv("float32"), because="may come near")


def cosine(q, k, v, factor, bias):
    """Attention of Swin v2, whose logits are multiplied by a learned number of each head."""
    q, k = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6) for x in (q, k))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * jnp.exp(factor)[:, None, None]
    logits = jnp.where(causal(), logits + bias, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


def by_temperatures(q, k, v, temperature):
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / (1 + temperature**2)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(6.0 * jnp.tanh(logits / 6.0)), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_multiplied_by_an_array(dtype):
    into = {"dot_product_attention": 1}
    factor, bias = normal(3, N, dtype=dtype), normal(4, N, T, S, dtype=dtype)
    assert_fuses(cosine, *qkv(dtype), factor, bias, into=into)
    for shape in ((), (T, 1), (B, 1, 1, 1)):
        assert_fuses(by_temperatures, *qkv(dtype), normal(3, *shape, dtype=dtype), into=into)


def test_an_array_that_cannot_multiply_the_queries_is_left_alone():
    def masked_before(q, k, v, factor):
        logits = jnp.where(causal(), jnp.einsum("bthd,bshd->bhts", q, k), -1e9) * factor
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    def of_wide_logits(q, k, v, factor):
        logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type="float32") * factor
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(q.dtype), v)

    factor, of_keys = normal(3, 1, 1), normal(3, S)
    assert_left_alone(by_temperatures, *qkv("float32"), of_keys, because="from key to key")
    assert_left_alone(masked_before, *qkv("float32"), factor, because="after a mask")
    assert_left_alone(of_wide_logits, *qkv("bfloat16"), factor, because="bfloat16 queries")


@pytest.mark.parametrize("is_shifted", [False, True])
def test_a_last_logit_that_stands_for_no_key_is_a_sink(is_shifted):
    def f(q, k, v, sinks, padding):
        """Attention of gpt-oss."""
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(H)
        logits = jnp.where(causal() & padding[:, None, None, :], logits, -1e9)
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (B, N, T, 1))
        logits = jnp.concatenate([logits, column], axis=-1)
        if is_shifted:
            logits = logits - logits.max(-1, keepdims=True)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits)[..., :-1], v)

    args = (*qkv("float32"), normal(3, N))
    for lengths in ((6, 4), (6, 0)):
        assert_fuses(
            partial(f, padding=of_padding(lengths)), *args, into={"dot_product_attention": 1}
        )

    def by_rows(q, k, v, sinks):
        """The logit differs by the query."""
        logits = jnp.concatenate([jnp.einsum("bthd,bshd->bhts", q, k), sinks], axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits)[..., :-1], v)

    assert_left_alone(by_rows, *qkv("float32"), normal(3, B, N, T, 1), because="more than the head")

    def first(q, k, v, sinks):
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(f_logits(q, k, sinks))[..., 1:], v)

    def f_logits(q, k, sinks):
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (B, N, T, 1))
        return jnp.concatenate([jnp.einsum("bthd,bshd->bhts", q, k), column], axis=-1)

    assert_left_alone(first, *args, because="some keys alone")


@pytest.mark.parametrize("is_added", [False, True])
def test_logits_with_a_bias_are_masked_by_a_number_far_below(is_added):
    """As in T5, where the mask is an argument."""

    def f(q, k, v, table, padding):
        places = jnp.clip(jnp.arange(S)[None] - jnp.arange(T)[:, None] + 4, 0, 7)
        logits = jnp.einsum("bthd,bshd->bhts", q, k) + table[places].transpose(2, 0, 1)[None]
        allowed = padding[:, None, None, :]
        if is_added:
            logits = logits + jnp.where(allowed, 0.0, jnp.finfo(jnp.float32).min)
        else:
            logits = jnp.where(allowed, logits, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    args = (*qkv("float32"), normal(4, 8, N))
    for lengths in ((6, 4), (6, 0)):
        assert counts(f, *args, of_padding(lengths)) == {"dot_product_attention": 1}
        assert_fuses(
            partial(f, padding=of_padding(lengths)), *args, into={"dot_product_attention": 1}
        )


def test_a_bias_of_zeros_and_large_numbers_is_a_mask():
    def f(q, k, v, padding):
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        bias = jax.lax.select(
            padding, jnp.zeros(padding.shape), jnp.full(padding.shape, jnp.finfo(jnp.float32).min)
        )
        p = jax.nn.softmax(logits + bias[:, None, None, :])
        return jnp.einsum("bhts,bshd->bthd", p, v)

    args = qkv("float32")
    found = fusion(f, *args, of_padding((6, 0)))
    assert "mask" in str(found)
    for lengths in ((6, 4), (3, 0)):
        ours, plain = (g(*args, of_padding(lengths)) for g in (jaxfused.fuse(f), f))
        np.testing.assert_allclose(ours, plain, atol=2e-6)


def test_a_bias_is_a_bias():
    def f(q, k, v, bias):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5 + bias[None]
        logits = jnp.where(causal(), logits, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    args = (*qkv("float32"), normal(5, N, T, S))
    assert_fuses(f, *args, into={"dot_product_attention": 1})
    assert "is_causal, bias" in str(fusion(f, *args))


def shifted_windows(q, k, v, bias, mask, first="images"):
    """Attention of windows [images * windows, T, N, H], each window of an image with its own mask."""
    logits = jnp.einsum("bthd,bshd->bhts", q * H**-0.5, k) + bias
    windows, pairs = mask.shape[0], mask.shape[1:]
    if first == "images":
        split, added = (B, windows, N, *pairs), mask[None, :, None]
    else:
        split, added = (windows, B, N, *pairs), mask[:, None, None]
    logits = (logits.reshape(split) + added).reshape(-1, N, *pairs)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(wide(logits), axis=-1).astype(q.dtype), v)


@pytest.mark.parametrize("first", ["images", "windows"])
@pytest.mark.parametrize("number", [-100.0, -1e9])
def test_windows_of_an_image_have_their_own_masks(number, first):
    """As in Swin's shifted windows, whose logits are split into images and windows for the mask."""
    q, k, v = (normal(i, B * 3, T, N, H) for i in range(3))
    regions = np.random.default_rng(0).integers(0, 2, (3, T))
    mask = np.where(regions[:, :, None] == regions[:, None], 0.0, number).astype(np.float32)
    attention = partial(shifted_windows, mask=mask, first=first)
    assert_fuses(attention, q, k, v, normal(3, N, T, T), into={"dot_product_attention": 1})


def test_what_is_subtracted_is_a_bias():
    def f(q, k, v, padding):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) - 1e9 * (1.0 - padding[:, None, None])
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    def g(q, k, v):
        return f(q, k, v, of_padding((6, 4)).astype(q.dtype))

    args = (*qkv("float32"), jnp.ones((B, S)))
    assert counts(f, *args) == {"dot_product_attention": 1}
    assert_fuses(g, *qkv("float32"), into={"dot_product_attention": 1})


# --- what is left alone ---------------------------------------------------------------------------


def test_probabilities_that_are_returned_are_left_alone():
    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", p, v), p

    assert_left_alone(f, *qkv("float32"), because="an intermediate result is used by")


def test_active_dropout_keeps_its_bits():
    def f(q, k, v):
        return nn.dot_product_attention(
            q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.5, deterministic=False
        )

    assert_left_alone(f, *qkv("float32"), because="as by dropout")


def test_dropout_that_drops_nothing_is_looked_through():
    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        p = jnp.where(jnp.ones(p.shape, bool), p / 1.0, 0.0)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    assert counts(f, *qkv("float32")) == {"dot_product_attention": 1}


@pytest.mark.parametrize("number", [-100.0, 0.0])
def test_a_number_that_logits_may_come_near_is_no_mask(number):
    f = partial(bthd, mask=causal(), number=number)
    assert_left_alone(f, *qkv("float32"), because="others may come near")


def test_a_precision_that_the_operator_lacks_is_left_alone():
    def f(q, k, v):
        logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    assert_left_alone(f, *qkv("float32"), because="precision")


def test_a_softmax_over_queries_is_another_operator():
    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-2)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    assert_left_alone(f, *qkv("float32"))


def with_logits(change):
    """Returns an attention whose logits are changed before its softmax."""

    def f(q, k, v):
        p = jax.nn.softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) / 3))
        return jnp.einsum("bhts,bshd->bthd", p, v)

    return f


@pytest.mark.parametrize(
    "change",
    [
        lambda x: 5.0 * jnp.tanh((x + 2.0) / 5.0),
        lambda x: 5.0 * jnp.tanh(x / 5.0 - 0.3),
        lambda x: 2.0 * jnp.tanh(jnp.tanh(x / 5.0)),
        lambda x: jnp.where(causal(), x - 2e9, -1e9),
    ],
)
def test_a_number_that_is_added_matters_to_what_follows(change):
    for dtype in ("float32", "bfloat16"):
        assert_left_alone(with_logits(change), *qkv(dtype))


def test_a_number_that_is_added_last_changes_no_probability():
    f = with_logits(lambda x: 5.0 * jnp.tanh(x / 5.0) + 2.0)
    assert_fuses(f, *qkv("float32"), into={"dot_product_attention": 1})


@pytest.mark.parametrize(
    "change",
    [
        lambda x, m: x + jnp.where(m, 0.0, -1e9),
        lambda x, m: jnp.where(m, x, -1e30) + jnp.where(causal(), 0.0, -1e30),
        lambda x, m: jnp.where(m, x, -1e30) + jnp.arange(6.0) / 6,
        lambda x, m: 2.0 * jnp.tanh(x) + jnp.where(m, 0.0, -1e30),
        lambda x, m: jnp.where(causal(), jnp.where(m, x, -1e9) + 5.0, -1e9),
    ],
)
def test_what_a_query_without_keys_gets_is_not_told_by_the_mask_alone(change):
    padding = of_padding((3, 0))[:, None, None]
    with jax.enable_x64(True):
        f = with_logits(lambda x: change(x, padding))
        assert_left_alone(f, *qkv("float64"), because="a query may have no key")


@pytest.mark.parametrize("heads", [2, N])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_that_is_added_leaves_logits_their_gradient(dtype, heads):
    """Adding -1e30 hides a query's logits, but their gradient still reaches the product."""
    padding = of_padding((3, 0))[:, None, None]

    def f(q, k, v):
        k, v = (jnp.repeat(x, N // heads, axis=2) for x in (k, v))
        return with_logits(lambda x: x + jnp.where(padding, 0.0, -1e30).astype(x.dtype))(q, k, v)

    assert_fuses(f, *qkv(dtype, heads=heads), into={"dot_product_attention": 1})
    with jax.enable_x64(True):
        args = qkv("float64", heads=heads)
        ours, plain = (
            jax.grad(lambda *args: (g(*args)[1] ** 2).sum(), (0, 1, 2))(*args)  # noqa: B023
            for g in (jaxfused.fuse(f), f)
        )
        assert float(jnp.abs(plain[0]).max()) > 0.01
        chex.assert_trees_all_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_number_that_float16_has_not_is_minus_infinity():
    def f(q, k, v, padding):
        x = jnp.einsum("bthd,bshd->bhts", q, k)
        number = jax.lax.convert_element_type(jnp.full((), -1e9), x.dtype)
        p = jax.nn.softmax(jnp.where(padding[:, None, None], x, number))
        return jnp.einsum("bhts,bshd->bthd", p, v)

    args = (*qkv("float16"), of_padding((3, 0)))
    assert counts(f, *args) == {"dot_product_attention": 1}
    ours, plain = (np.isnan(g(*args)) for g in (jaxfused.fuse(f), f))
    assert plain[1].all() and not plain[0].any()
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("part", ["maximum", "sum"])
def test_the_parts_of_a_softmax_stand_at_their_rows(part):
    """There are as many queries as keys, so a transposed row statistic would still broadcast."""

    def f(q, k, v):
        x = jnp.einsum("bthd,bshd->bhts", q, k)
        most = x.max(-1, keepdims=True)
        e = jnp.exp(x - (most.swapaxes(-1, -2) if part == "maximum" else most))
        total = e.sum(-1, keepdims=True)
        p = e / (total.swapaxes(-1, -2) if part == "sum" else total)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    assert counts(f, *qkv("float32")) == {}


def test_blocks_of_a_constant_mask_are_counted_from_below_zero():
    """A division of a negative integer, which XLA rounds towards zero."""
    rows, columns = jnp.arange(T)[:, None], jnp.arange(S)[None]
    f = partial(bthd, mask=(rows - 3 - columns) // 2 <= 0)
    assert_fuses(lambda *args: f(*args), *qkv("float32"), into={"dot_product_attention": 1})

    def g(q, k, v):
        # The mask is traced, so that `fuse` reads its operations and not its values.
        rows, columns = jnp.arange(T)[:, None], jnp.arange(S)[None]
        return bthd(q, k, v, (rows - 3 - columns) // 2 <= -1)

    assert_fuses(g, *qkv("float32"), into={"dot_product_attention": 1})


# --- projections ----------------------------------------------------------------------------------


def projections(dtype, *, heads=2):
    keys = [normal(i, 32, n, H, scale=0.2) for i, n in ((1, N), (2, heads), (3, heads))]
    return normal(0, B, T, 32, dtype=dtype), *keys


def half_rotation(x, cos, sin):
    x1, x2 = jnp.split(wide(x), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def rotate_half(x, cos, sin):
    """Rotates as Hugging Face does, by tables for both halves."""
    cos, sin = (jnp.concatenate([t, t], -1) for t in (cos, sin))
    x1, x2 = jnp.split(x, 2, axis=-1)
    return (wide(x) * cos + wide(jnp.concatenate([-x2, x1], -1)) * sin).astype(x.dtype)


def tables(x, features=H):
    frequencies = 10000.0 ** (-jnp.arange(0, features, 2) / features).astype(x.dtype)
    angles = jnp.arange(T, dtype=x.dtype)[:, None] * frequencies
    return jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]


def rms(x, scale):
    y = wide(x)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def self_attention(x, wq, wk, wv, rotation=None, scales=None):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w.astype(x.dtype)) for w in (wq, wk, wv))
    if scales is not None:
        q, k = rms(q, scales[0]), rms(k, scales[1])
    if rotation is not None:
        q, k = (rotation(y, *tables(wide(x))) for y in (q, k))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotation", [None, half_rotation, rotate_half])
@pytest.mark.parametrize("has_norm", [False, True])
def test_projections_with_norm_and_rotation_are_one_product(has_norm, rotation, dtype):
    def f(*args, scales=None):
        return self_attention(*args, rotation=rotation, scales=scales)

    args = projections(dtype)
    into = {"dot_product_attention": 1, "qkv_projection": 1}
    if has_norm:
        scales = normal(7, 2, H) * 0.2 + 1
        assert_fuses(lambda s, *args: f(*args, scales=s), scales, *args, into=into)
    else:
        assert_fuses(f, *args, into=into)


def test_projections_to_features_that_are_then_cut_into_heads():
    def f(x, wq, wk, wv, bq, bv):
        q, k, v = x @ wq + bq, x @ wk, x @ wv + bv
        q, k, v = (y.reshape(B, T, N, H).transpose(0, 2, 1, 3) for y in (q, k, v))
        p = jax.nn.softmax(q @ k.swapaxes(2, 3) / H**0.5, axis=-1)
        return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, N * H)

    weights = [normal(i, 32, N * H, scale=0.2) for i in (1, 2, 3)]
    args = (normal(0, B, T, 32), *weights, normal(4, N * H), normal(5, N * H))
    assert_fuses(f, *args, into={"dot_product_attention": 1, "qkv_projection": 1})


def test_biases_of_features_and_a_query_that_is_scaled_before_it_is_cut():
    def f(x, wq, wk, wv, bq, bk, bv):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in (wq, wk, wv))
        q, k, v = ((y.reshape(B, T, -1) + b) for y, b in ((q, bq), (k, bk), (v, bv)))
        q, k, v = (y.reshape(B, T, N, H) for y in (q * H**-0.5, k, v))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)

    biases = [normal(i, N * H) for i in (4, 5, 6)]
    args = (*projections("float32", heads=N), *biases)
    assert_fuses(f, *args, into={"dot_product_attention": 1, "qkv_projection": 1})


def test_what_keeps_three_products_apart_is_named():
    def scaled_before_rotation(x, cos, sin):
        return half_rotation(x * 0.5, cos, sin)

    def one_for_keys_and_values(x, wq, wk, _):
        q, k = (jnp.einsum("btd,dnh->btnh", x, w) for w in (wq, wk))
        return jax.nn.dot_product_attention(q, k, k)

    turned = partial(self_attention, rotation=scaled_before_rotation)
    for f, why in ((turned, "mul at line"), (one_for_keys_and_values, "are one product")):
        found = fusion(f, *projections("float32"))
        assert found.counts() == {"dot_product_attention": 1} and why in str(found), str(found)


def test_projections_of_two_arrays_stay_apart():
    def f(x, y, wq, wk, wv):
        q = jnp.einsum("btd,dnh->btnh", x, wq)
        k, v = (jnp.einsum("btd,dnh->btnh", y, w) for w in (wk, wv))
        return jax.nn.dot_product_attention(q, k, v)

    x, *weights = projections("float32")
    assert_fuses(f, x, x[::-1], *weights, into={"dot_product_attention": 1})


def with_rotation(q, k, v):
    q, k = (half_rotation(y, *tables(wide(y))) for y in (q, k))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def gemma_qkv(x, w, b):
    return with_rotation(*jnp.einsum("BTD,SNDH->SBTNH", x, w))


def gemma_kv(x, w, b):
    q = jnp.einsum("BTD,NDH->BTNH", x, w[0])
    return with_rotation(q, *jnp.einsum("BSD,CKDH->CBSKH", x, w[1:, :2]))


def columns_of(w):
    return w.transpose(2, 0, 1, 3).reshape(32, 3 * N * H)


def gpt_2(x, w, b):
    parts = jnp.split(x @ columns_of(w) + b, 3, axis=-1)
    return with_rotation(*(y.reshape(B, T, N, H) for y in parts))


def in_another_order(x, w, b):
    k, v, q = (y.reshape(B, T, N, H) for y in jnp.split(x @ columns_of(w) + b, 3, axis=-1))
    return with_rotation(q, k, v)


def nano_gpt(x, w, b):
    y = (x @ columns_of(w)).reshape(B, T, 3, N, H) + b.reshape(3, N, H)
    return with_rotation(y[:, :, 0], y[:, :, 1], y[:, :, 2])


def timm(x, w, b):
    """Self-attention as in timm, with heads before positions."""
    q, k, v = (x @ columns_of(w) + b).reshape(B, T, 3, N, H).transpose(2, 0, 3, 1, 4)
    cos, sin = (table.swapaxes(1, 2) for table in tables(wide(x)))
    q, k = (half_rotation(y, cos, sin) for y in (q, k))
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.3)
    return (p @ v).swapaxes(1, 2)


def neox(x, w, b):
    """Self-attention as in GPT-NeoX, with each head's query, key and value concatenated."""
    return with_rotation(*jnp.split((x @ columns_of(w) + b).reshape(B, T, N, 3 * H), 3, -1))


def transposed(x, w, b):
    """The same as timm's with three products."""
    bias = b.reshape(3, 1, N * H)
    w = w.transpose(0, 2, 1, 3).reshape(3, 32, N * H)
    q, k, v = ((x @ w[i] + bias[i]).reshape(B, T, N, H).swapaxes(1, 2) for i in range(3))
    cos, sin = (table.swapaxes(1, 2) for table in tables(wide(x)))
    q, k = (half_rotation(y, cos, sin) for y in (q, k))
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.3)
    return (p @ v).swapaxes(1, 2)


STACKED = {
    gemma_qkv: "heads 4 and 4, one matrix, rope",
    gemma_kv: "heads 4 and 2, rope",
    gpt_2: "one matrix, bias, rope",
    in_another_order: "heads 4 and 4, bias, rope",
    nano_gpt: "one matrix, bias, rope",
    timm: "one matrix, bias, rope",
    transposed: "heads 4 and 4, bias, rope",
    neox: "heads 4 and 4, bias, rope",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", STACKED)
def test_queries_keys_and_values_of_one_product(f, dtype):
    args = (
        normal(0, B, T, 32, dtype=dtype),
        normal(1, 3, N, 32, H, dtype=dtype, scale=0.2),
        normal(2, 3 * N * H, dtype=dtype),
    )
    assert_fuses(f, *args, into={"dot_product_attention": 1, "qkv_projection": 1})
    assert STACKED[f] in str(fusion(f, *args))


def test_a_part_of_a_product_that_is_used_elsewhere():
    def f(x, w):
        q, k, v, more = jnp.split(x @ w, 4, axis=-1)
        q, k, v = (y.reshape(B, T, N, H) for y in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v).reshape(B, T, -1) * more

    args = (normal(0, B, T, 32), normal(1, 32, 4 * N * H, scale=0.2))
    assert_fuses(f, *args, into={"dot_product_attention": 1})


def test_projections_whose_neighbours_are_rotated():
    f = partial(self_attention, rotation=gpt_j)
    into = {"dot_product_attention": 1, "qkv_projection": 1}
    assert_fuses(f, *projections("float32"), into=into)


# --- rotations ------------------------------------------------------------------------------------


def every_two(x):
    return jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)


def by_strides(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def by_pairs(x, cos, sin):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def gpt_j(x, cos, sin):
    return x * cos.repeat(2, 3) + every_two(x) * sin.repeat(2, 3)


def easy_lm(x, cos, sin):
    """Rotates pairs as complex numbers."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    y = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * (cos + 1j * sin)
    return jnp.stack((jnp.real(y), jnp.imag(y)), axis=-1).reshape(x.shape)


def wan(x, cos, sin):
    """Rotates by the real and imaginary parts of complex tables."""
    turns = jnp.exp(1j * jnp.arctan2(sin, cos))
    return by_pairs(x, jnp.real(turns), jnp.imag(turns))


def maxtext_pairs(x, cos, sin):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    cos, sin = cos[..., None], sin[..., None]
    return (pairs * cos + jnp.flip(pairs, -1) * sin * jnp.asarray([-1.0, 1.0])).reshape(x.shape)


def maxtext_shifts(x, cos, sin):
    left, right = jnp.roll(x, -1, -1), jnp.roll(x, 1, -1)
    odd = jnp.tile(jnp.mod(jnp.arange(x.shape[-1]), 2), (*x.shape[:-1], 1))
    sin = jnp.stack([-sin, sin], -1).reshape(*sin.shape[:-1], -1)
    return x * jnp.repeat(cos, 2, -1) + jax.lax.select(odd, right, left) * sin


def flux_turns(cos, sin):
    """Returns a 2 x 2 matrix for each pair, for positions on several axes of an image."""
    turns = jnp.stack([cos, -sin, sin, cos], -1)
    turns = jnp.concatenate([turns[..., :1, :], turns[..., 1:, :]], axis=-2)
    return turns.reshape(*cos.shape, 2, 2)


def flux(x, turns):
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    y = turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]
    return y.reshape(x.shape)


NEIGHBOURS = (by_strides, by_pairs, gpt_j, easy_lm, wan, maxtext_pairs, maxtext_shifts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", NEIGHBOURS)
def test_a_rotation_of_neighbours(rotate, dtype):
    def f(x):
        return rotate(wide(x), *tables(wide(x))).astype(x.dtype)

    x = normal(0, B, T, N, H, dtype=dtype)
    assert_fuses(f, x, into={"rope": 1})
    assert "rope(interleaved)" in str(fusion(f, x))


def test_a_rotation_of_heads_before_positions():
    def f(q, k):
        cos, sin = (table.swapaxes(1, 2) for table in tables(q))
        turns = flux_turns(cos, sin)
        return flux(q, turns), flux(k, turns)

    assert_fuses(f, normal(0, B, N, T, H), normal(1, B, N, T, H), into={"rope": 2})


@pytest.mark.parametrize("rotate", [half_rotation, rotate_half, gpt_j])
def test_a_rotation_of_a_part_of_the_features(rotate):
    def f(x):
        rotated = rotate(x[..., : H // 2], *tables(x, H // 2))
        return jnp.concatenate([rotated, x[..., H // 2 :]], -1)

    x = normal(0, B, T, N, H)
    assert_fuses(f, x, into={"rope": 1})
    assert f"{H // 2} features" in str(fusion(f, x))


@pytest.mark.parametrize(
    "rotate",
    [
        # The two members of a pair have different tables.
        lambda x, cos, sin: x * jnp.concatenate([cos, cos], -1) + every_two(x) * sin.repeat(2, 3),
        # Both members of a pair turn in the same direction.
        lambda x, cos, sin: x * cos.repeat(2, 3) + jnp.abs(every_two(x)) * sin.repeat(2, 3),
        # The input has interleaved pairs, and the output halves.
        lambda x, cos, sin: jnp.concatenate(
            [x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin], -1
        ),
    ],
)
def test_what_is_no_rotation_of_neighbours(rotate):
    x = normal(0, B, T, N, H)
    assert counts(lambda x: rotate(x, *tables(x)), x) == {}


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_turn_that_is_scaled_is_none(factor):
    x = normal(0, B, T, N, H)
    f = lambda x: gpt_j(x, *(t * s for t, s in zip(tables(x), (1.0, factor), strict=True)))  # noqa: E731
    g = lambda x: x * tables(x)[0].repeat(2, 3) + factor * every_two(x) * tables(x)[1].repeat(2, 3)  # noqa: E731
    assert counts(g, x) == {}
    np.testing.assert_allclose(jaxfused.fuse(f)(x), f(x), atol=1e-6)
