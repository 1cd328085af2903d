"""Biases that lower all logits of a query so far that float32 has no digits for the log of the sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import masks
from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.merge_splits import merge, only_part
from pallas_kernels.attention.shape import Shape
from tests.support import mosaic_interpreter
from tests.support.grids import parametrize

LOWEST = float(jnp.finfo(jnp.float32).min)
LOW = [-1e5, -1e9, LOWEST / 2, LOWEST]
NAMES = ("output", "lse", "query", "key", "value", "bias")


def truth(query, key, value, bias, dout):
    """Returns output, log-sum-exp and gradients in float64, from float32's logits.

    Their rounding belongs to the function: at -1e9 it leaves a query equal weights for all its keys.
    """
    products = np.einsum("btnh,bsnh->bnts", *(x.astype(np.float32) for x in (query, key)))
    logits = (products / np.float32(8) + bias).astype(np.float64)
    query, key, value, dout = (x.astype(np.float64) for x in (query, key, value, dout))
    maximum = logits.max(-1, keepdims=True)
    p = np.exp(logits - maximum)
    total = p.sum(-1, keepdims=True)
    p /= total
    dp = np.einsum("btnv,bsnv->bnts", dout, value)
    dlogits = p * (dp - (p * dp).sum(-1, keepdims=True))
    return (
        np.einsum("bnts,bsnv->btnv", p, value),
        (maximum + np.log(total))[..., 0].swapaxes(1, 2),
        np.einsum("bnts,bsnh->btnh", dlogits, key) / 8,
        np.einsum("bnts,btnh->bsnh", dlogits, query) / 8,
        np.einsum("bnts,btnv->bsnv", p, dout),
        dlogits,
    )


def arrays(low, queries, keys, heads=1):
    """Returns float16 operands and cotangent; of the bias, row 1 is `low`, and row 2 but for 5 keys."""
    random = np.random.default_rng(0)
    shapes = ((1, queries, heads), (1, keys, 1), (1, keys, 1), (1, queries, heads))
    *args, dout = (np.float16(random.normal(size=(*shape, 64))) for shape in shapes)
    bias = random.normal(size=(1, heads, queries, keys)).astype(np.float32)
    bias[:, :, 1:2] = low
    bias[:, :, 2:3, 5:] = low
    return *args, bias, dout


@functools.partial(jax.jit, static_argnums=(0, 1))
def results(attend, dtype, query, key, value, bias, dout):
    """Returns output, log-sum-exp and gradients of an attention that returns the first two."""
    (output, lse), vjp = jax.vjp(attend, *(x.astype(dtype) for x in (query, key, value)), bias)
    return output, lse, *vjp((dout.astype(dtype), jnp.ones_like(lse)))[:4]


def assert_close(actual, expected):
    for name, mine, right in zip(NAMES, actual, expected, strict=True):
        right = np.float64(right)
        # Log-sum-exps of low and of other rows have scales of their own.
        scale = np.maximum(abs(right), 1) if name == "lse" else abs(right).max() or 1.0
        error = (abs(np.float64(mine) - right) / scale).max()
        assert error < 2.0**-8, (name, error)


def assert_right(implementation, low, queries, keys):
    *args, dout = arrays(low, queries, keys)

    def attend(*args):
        output, lse = jaxfused.dot_product_attention(
            *args, implementation=implementation, return_lse=True
        )
        # Its cotangents have a test of their own: `truth` has none.
        return output, jax.lax.stop_gradient(lse)

    assert_close(results(attend, jnp.float16, *args, dout), truth(*args, dout))


SIZES = [(3, 300), (70, 80), (130, 300)]
"""Queries and keys of the kernels that split keys, for few keys, and for any number of them."""


@parametrize(
    ("low", "queries", "keys"),
    [(low, *sizes) for sizes in SIZES for low in LOW],
    quick=(1, 6, 11),
)
def test_a_row_of_low_biases(interpreted_hopper, monkeypatch, low, queries, keys):
    mosaic_interpreter.complete(monkeypatch)
    assert_right("pallas", low, queries, keys)


@parametrize("keys", [300, 40, 80], quick=(1,))
def test_biases_of_a_single_query(interpreted_hopper, monkeypatch, keys):
    """The saved rest of its log-sum-exp, of one number, is no value that all queries share."""
    mosaic_interpreter.complete(monkeypatch)
    assert_right("pallas", LOW[0], 1, keys)


@pytest.mark.parametrize("low", LOW)
def test_a_row_of_low_biases_in_xla(low):
    assert_right("xla", low, 3, 40)


OPTIONS = {
    "causal": dict(is_causal=True),
    "cap": dict(logits_soft_cap=3.0),
    "dropout": dict(dropout_rate=0.3, dropout_key=jax.random.key(1)),
    "sinks": dict(sinks=np.float32([0.5, -1e9])),
    "lengths": dict(key_value_seq_lengths=np.int32([37]), query_seq_lengths=np.int32([2])),
    "segments": dict(
        query_segment_ids=np.arange(130)[None] // 2, key_value_segment_ids=np.arange(300)[None] % 2
    ),
    "score": dict(
        score_mod=lambda score, b, h, q, k: jnp.where(
            q == 1, score - 1e9, 20 * jnp.tanh(score / 20)
        )
    ),
    "mask": dict(mask=masks.LocalMask((130, 300), (9, 300)) | masks.GlobalMask((130, 300), 3)),
}


def assert_as_xla(implementation, name, queries, keys):
    """Compares with XLA in float32, with two query heads of a key head and gradients of log-sum-exps."""
    options = dict(OPTIONS[name])
    for side, count in (("query", queries), ("key_value", keys)):
        if name == "segments":
            options[f"{side}_segment_ids"] = options[f"{side}_segment_ids"][:, :count]
    *args, dout = arrays(LOWEST / 2 if name == "cap" else -1e9, queries, keys, 2)

    def attend(implementation, *args):
        args = args[:3] if name == "score" else args
        return jaxfused.dot_product_attention(
            *args, implementation=implementation, return_lse=True, **options
        )

    actual, expected = (
        results(functools.partial(attend, which), dtype, *args, dout)
        for which, dtype in ((implementation, jnp.float16), ("xla", jnp.float32))
    )
    assert_close(actual, expected)


@parametrize(
    ("name", "queries", "keys"),
    [(name, 130, 300) for name in OPTIONS]
    + [(name, *sizes) for name in ("sinks", "lengths") for sizes in SIZES[:2]],
    quick=(6,),
)
def test_low_biases_with_options(interpreted_hopper, monkeypatch, name, queries, keys):
    mosaic_interpreter.complete(monkeypatch)
    assert_as_xla("pallas", name, queries, keys)


@pytest.mark.parametrize("sinks", [None, [0.5, -2e9, -np.inf, 3.0]])
def test_a_single_part_of_keys_is_finished_as_the_merge_does(
    interpreted_hopper, monkeypatch, sinks
):
    mosaic_interpreter.complete(monkeypatch)
    random = np.random.default_rng(0)
    shape = Shape(2, 5, 40, 4, 2, 64, 64)
    outs = random.normal(size=(4, 1, 10, 64)).astype(np.float32)
    lses = random.normal(size=(4, 2, 64)).astype(np.float32)
    # A rest is what rounding takes.
    lses[:, 0, ::2], lses[:, 1, 1::2] = -1e9, 0.0
    outs[:, :, 3], lses[:, 0, 3], lses[:, 1, 3] = 0.0, LOWEST, -np.inf
    operands = Operands(
        sinks=None if sinks is None else jnp.float32(sinks), query_lengths=jnp.int32([5, 3])
    )
    logits = Logits(1.0, BlockMask(5, 40, has_query_lengths=True), has_bias=True)
    given = (outs, lses, operands, shape, jnp.float32, logits)
    for mine, right in zip(only_part(*given), merge(*given), strict=True):
        # Log-sum-exps and rests are padded to 64 queries, with any numbers.
        mine, right = (x if x.ndim == 4 else x[:, :, :5] for x in (mine, right))
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
def test_a_row_of_low_biases_on_a_gpu(implementation, low, queries, keys):
    assert_right(implementation, low, queries, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", ["pallas", "cuda"])
def test_low_biases_with_options_on_a_gpu(implementation, name):
    if implementation == "cuda" and name in ("score", "mask"):
        pytest.skip("functions and mask objects are Pallas's")
    assert_as_xla(implementation, name, 130, 300)
