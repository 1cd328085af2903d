"""If XLA runs all stages of a product, its program has no more products and copies than stock's."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from benchmarks.sweep import programs
from benchmarks.sweep.configs import MLP, Linear, QKVProjection
from jaxfused import dispatch
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels, kernels_in, lowered

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)
COUNTED = ("dot", "concatenate", "transpose")


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: H200)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def compiled(f, *args):
    """Returns the counts of operations in the program that XLA compiles for a CPU, before fusion.

    Fusion is off, because it may duplicate operations.
    """
    options = {"xla_disable_hlo_passes": "fusion,ynn-fusion"}
    text = jax.jit(f).lower(*args).compile(compiler_options=options).as_text()
    found = collections.Counter(re.findall(r" = [^=]*?\s([a-z\-]+)\(", text))
    return {name: found[name] for name in COUNTED}


def qkv(rows, width, heads, size, param_dtype="same", **options):
    # No kernel supports these widths of x or of heads.
    options = dict(bias=False, norm=False, rope=False, interleaved=False) | options
    return QKVProjection(*rows, width, *heads, size, "bfloat16", param_dtype, **options)


def linear(rows, width, out, param_dtype="same", *, bias=True, activation=None, residual=False):
    return Linear(*rows, width, out, "bfloat16", param_dtype, bias, activation, residual)


def mlp(rows, *, bias=True, residual=False, save="preactivation", param_dtype="same"):
    # No kernel supports rows of 100 values.
    return MLP("mlp", *rows, 100, 100, "bfloat16", param_dtype, bias, "silu", residual, save)


def gated(rows, *, residual=False, stacked=False, save="preactivation", param_dtype="same"):
    sizes = (100, 100, "bfloat16", param_dtype)
    return MLP("gated_mlp", *rows, *sizes, True, "silu", residual, save, stacked)


CASES = (
    qkv((1, 16), 100, (4, 1), 32),
    qkv((1, 16), 100, (4, 1), 32, "float32", bias=True),
    qkv((3, 7), 60, (2, 2), 16, bias=True),
    qkv((2, 8), 96, (1, 4), 24),
    qkv((1, 40), 60, (3, 1), 64, "float32"),
    linear((1, 100), 60, 60),
    linear((2, 100), 64, 64, bias=False),
    linear((2, 100), 64, 64, "float32", bias=False),
    linear((1, 24), 128, 256, bias=False, residual=True),
    linear((1, 16), 128, 256, "float32", bias=False, activation="silu"),
    linear((1, 96), 120, 200, activation="relu", residual=True),
    mlp((1, 40)),
    mlp((2, 9), bias=False, residual=True),
    mlp((1, 40), save="hidden"),
    mlp((5, 8), param_dtype="float32"),
    mlp((1, 3), bias=False, save="hidden", param_dtype="float32"),
    gated((1, 40)),
    gated((1, 40), stacked=True),
    gated((3, 5), residual=True, save="hidden"),
    gated((2, 30), stacked=True, param_dtype="float32"),
    gated((1, 8), param_dtype="float32"),
)


@parametrize("config", CASES, quick=(1, 6, 17))
def test_xla_is_handed_what_stock_hands_it(config, h200):
    both = programs.of(config)
    args = jax.eval_shape(both.make_inputs, jax.random.key(0))
    for with_gradient in (False, True):
        ours, *stock = (
            both.whole(f, with_gradient) for f in (both.ours, *list(both.stock.values())[:1])
        )
        text = lowered(ours, *args)
        assert not kernels_in(text)
        wanted, found = compiled(stock[0], *args), compiled(ours, *args)
        assert found["dot"] == wanted["dot"]
        assert found["concatenate"] <= wanted["concatenate"]
        assert found["transpose"] <= wanted["transpose"]
        if not config.bias and getattr(config, "activation", None) is None:
            # In other cases sums and activations are float32 here, and in x's dtype in stock layers.
            converts = (text, lowered(stock[0], *args))
            ours_count, stock_count = (text.count("stablehlo.convert") for text in converts)
            assert ours_count <= stock_count


STACKED = (
    gated((3, 7), stacked=True),
    gated((2, 300), stacked=True, save="hidden", param_dtype="float32"),
    qkv((3, 7), 60, (2, 2), 16, bias=True, norm=True, rope=True),
)


@parametrize("config", STACKED, quick=(1,))
def test_cotangents_side_by_side_give_the_gradients(config, monkeypatch):
    """XLA runs all stages, and the weights are one array."""
    both = programs.of(config)
    args = both.make_inputs(jax.random.key(0))
    wanted = jax.jit(both.whole(both.ours, True))(*args)
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: H200)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with dispatch.recorded() as choices:
        found = jax.jit(both.whole(both.ours, True))(*args)
    assert len(choices) > 1 and {c.implementation for c in choices} == {"xla"}
    for ours, plain in zip(found, wanted, strict=True):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        ours, plain = (np.asarray(a, np.float32) for a in (ours, plain))
        np.testing.assert_allclose(ours, plain, rtol=0, atol=2**-6 * np.abs(plain).max())


def test_a_bare_layer_runs_its_weights_gradient_in_a_kernel(h200):
    """The kernel is faster for few columns, and for rows that XLA would pad."""

    def gradients(x, w, dy):
        return jax.vjp(jaxfused.linear, x, w)[1](dy)

    def shapes(rows, width, out):
        sizes = ((rows, width), (width, out), (rows, out))
        return [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]

    with dispatch.recorded() as choices:
        assert kernels(gradients, *shapes(38082, 512, 128)) == ["weight_gradient"]
    assert [(c.stage, c.implementation) for c in choices] == [
        ("linear forward", "xla"),
        ("linear weight gradient", "pallas"),
    ]
    assert kernels(gradients, *shapes(128, 64, 64)) == []


@pytest.mark.parametrize("residual", (False, True))
def test_a_bare_layers_stages_are_the_derivative(h200, monkeypatch, interpreted_hopper, residual):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: H200)
    monkeypatch.setattr(dispatch, "choose", functools.partial(_prefer_pallas, dispatch.choose))
    rng = np.random.default_rng(0)
    x, w, stream, dy = (
        put(rng.integers(-3, 4, size=shape), jnp.bfloat16)
        for shape in ((2, 37, 24), (24, 16), (2, 37, 16), (2, 37, 16))
    )
    operands = (x, w, stream) if residual else (x, w)

    def call(implementation, x, w, stream=None):
        return jaxfused.linear(x, w, residual=stream, implementation=implementation)

    ours, theirs = (jax.vjp(functools.partial(call, i), *operands) for i in (None, "xla"))
    np.testing.assert_array_equal(ours[0], theirs[0])
    for found, wanted in zip(ours[1](dy), theirs[1](dy), strict=True):
        np.testing.assert_array_equal(found, wanted)


def _prefer_pallas(choose, op, implementation, reasons):
    if implementation is None and reasons.get("pallas", "absent") is None:
        return "pallas"
    return choose(op, implementation, reasons)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_layers_of_xla_have_the_rows_of_the_caller(h200, activation):
    """XLA evaluates [M, F] of odd F value by value, but an array of more axes in vectors."""
    x, w = jnp.ones((5, 7, 24), jnp.bfloat16), jnp.ones((24, 9), jnp.bfloat16)
    residual = jnp.ones((5, 7, 9), jnp.bfloat16)

    def layer(x, w, residual):
        return jaxfused.linear(x, w, activation=activation, residual=residual)

    text = lowered(layer, x, w, residual)
    body = text[
        text.index("func.func private @jaxfused_linear_forward(%arg0: tensor<5x7x24xbf16>") :
    ]
    assert "-> tensor<5x7x9xbf16>" in body.splitlines()[0]
    # After relu the sum is in x's dtype, so that one of XLA's products evaluates both.
    added = re.findall(r"stablehlo.add .* : tensor<5x7x9x(\w+)>", body.partition("return")[0])
    assert added[-1] == ("bf16" if activation == "relu" else "f32")
    report = jaxfused.explain(layer, x, w, residual)
    assert [(choice.implementation, count) for choice, count in report.calls] == [("xla", 1)]
