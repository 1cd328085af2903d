import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from benchmarks.without_gpu.target import H200
from jaxfused import dispatch
from jaxfused.runtime.activation import activate
from jaxfused.runtime.quantized_array import QuantizedArray
from tests.cases.quantized_matmul import CASES
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.transforms import assert_transforms


def plain_matmul(x, w, bias, residual, activation):
    """Computes the product with dequantised weights, with all arithmetic in x's dtype."""
    y = x @ w.astype(x.dtype)
    y = activate(activation, y if bias is None else y + bias)
    return y if residual is None else y + residual


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES]
    + [(CASES[i], dtype) for i, dtype in enumerate(("float16", "float16", "bfloat16"))]
    + [(CASES[4], "bfloat16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    args, w = case.arguments(jnp.dtype(dtype))
    dequantized = w.dequantize()

    def ours(x, bias, residual):
        return jaxfused.quantized_matmul(x, w, bias, activation=case.activation, residual=residual)

    def plain(x, bias, residual):
        return plain_matmul(x, dequantized, bias, residual, case.activation)

    assert_values_and_gradients(ours, plain, *args)
    assert jax.eval_shape(ours, *args).dtype == dtype


@pytest.mark.parametrize("x_dtype", ["int8", "float8_e5m2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantized_inputs(case, x_dtype):
    (x, bias, residual), w = case.arguments(jnp.float32)

    @jax.jit
    def f(x, w, bias, residual):
        q = jaxfused.quantize_rows(x, x_dtype)
        y = jaxfused.quantized_matmul(q, w, bias, activation=case.activation, residual=residual)
        return y, q.dequantize(), w.dequantize()

    y, *factors = f(x, w, bias, residual)
    truth = np.matmul(*(np.asarray(a, np.float64) for a in factors))
    truth = truth if bias is None else truth + bias
    with jax.enable_x64(True):
        truth = np.asarray(activate(case.activation, put(truth)))
    truth = truth if residual is None else truth + residual
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, truth, atol=2e-6)


def assert_integer_product_is_exact(rows, features, out_features):
    rng = np.random.default_rng(0)
    sizes = ((rows, features), (features, out_features))
    a, b = (rng.choice([-127, -126, 126, 127], size) for size in sizes)
    # The first sum is the largest possible one.
    a[0], b[:, 0] = 127, 127
    scales = np.ones((rows, 1), np.float32), np.ones((1, out_features), np.float32)
    x, w = (
        QuantizedArray(jnp.asarray(values, jnp.int8), jnp.asarray(scale), None, axis)
        for values, scale, axis in zip((a, b), scales, (-1, -2), strict=True)
    )
    expected = (a.astype(np.int64) @ b).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(jaxfused.quantized_matmul)(x, w), expected)


SIZES_OF_INTEGER_PRODUCTS = (
    (1, 2049, 7),
    (2, 17, 3),
    (3, 1024, 5),
    (5, 2 * 1021, 33),
    (7, 1153, 6),
    (16, 1025, 16),
    (300, 40, 5000),
)
"""One row; one part of the sums, or several; too many parts or too large ones, which are padded."""


@pytest.mark.parametrize("sizes", SIZES_OF_INTEGER_PRODUCTS, ids=str)
def test_integer_products_are_exact(sizes):
    assert_integer_product_is_exact(*sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES_OF_INTEGER_PRODUCTS, (33, 4096, 4096)], ids=str)
def test_integer_products_are_exact_on_gpu(sizes):
    assert_integer_product_is_exact(*sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("sizes", [(5, 17, 3), (3, 8, 5), (1, 9, 7), (2, 130, 66), (33, 64, 48)])
def test_products_of_any_size_on_gpu(sizes, dtype):
    rows, features, out_features = sizes
    rng = np.random.default_rng(0)
    # Small integers, which are exact in every dtype and have the same sum in any order.
    x, w = (
        rng.integers(-2, 3, size).astype(np.float32)
        for size in ((rows, features), (features, out_features))
    )

    @jax.jit
    def f(x, w):
        return jaxfused.quantized_matmul(
            jaxfused.quantize(x, dtype, axis=-1, scale=0.5),
            jaxfused.quantize(w, dtype, scale=0.5),
        )

    np.testing.assert_array_equal(f(x / 2, w / 2), x @ w / 4)


@pytest.mark.parametrize("device", [None, H200])
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("sizes", [(70, 2048, 0), (0, 2040, 24), (0, 256, 128)])
def test_nothing_to_multiply(sizes, per_tensor, device):
    rows, features, out_features = sizes
    x, w = jnp.ones((rows, features), jnp.bfloat16), jnp.ones((features, out_features))
    w = jaxfused.quantize(w, per_tensor=per_tensor, layout="columns")

    def products(x, w):
        rounded = jaxfused.quantize_rows(x)
        return jaxfused.quantized_matmul(x, w), jaxfused.quantized_matmul(rounded, w)

    with contextlib.nullcontext() if device is None else dispatch.assume(device):
        for y in jax.eval_shape(products, x, w):
            assert y.shape == (rows, out_features)


def test_zero_points_of_both_sides():
    rng = np.random.default_rng(0)

    @jax.jit
    def f(x, w):
        x = jaxfused.quantize(x, axis=-1, symmetric=False)
        w = jaxfused.quantize(w, "int4", symmetric=False)
        wide, product = x.dequantize(), jaxfused.quantized_matmul(x, w)
        return wide, w.dequantize(), product, jaxfused.quantized_matmul(wide, w)

    *factors, product, by_dequantizing = f(
        rng.normal(0.5, size=(3, 8)), rng.normal(-0.5, size=(8, 5))
    )
    expected = np.matmul(*(np.asarray(a, np.float64) for a in factors))
    np.testing.assert_allclose(product, expected, atol=1e-5)
    np.testing.assert_allclose(by_dequantizing, expected, atol=1e-5)


def test_integer_sums_are_exact_and_do_not_wrap_around():
    features = 131072 - 1024
    x = jaxfused.quantize(jnp.full((1, features), 127.0), axis=-1, scale=1.0)
    w = jaxfused.quantize(jnp.full((features, 1), 127.0), scale=1.0)
    y = jaxfused.quantized_matmul(x, w)
    assert y.item() == np.float32(features * 127 * 127)
    # In float32 the sum of 2**24 and many ones is 2**24.
    x = jaxfused.quantize(jnp.ones((1, 2048)).at[0, :1024].set(127.0), axis=-1, scale=1.0)
    w = jaxfused.quantize(jnp.ones((2048, 1)).at[:1024].set(127.0), scale=1.0)
    assert jaxfused.quantized_matmul(x, w).item() == 1024 * (127 * 127 + 1)


def test_float8_inputs_may_be_large():
    x = jaxfused.quantize(jnp.full((1, 64), 448.0), "float8_e4m3fn", axis=-1, scale=1.0)
    w = jaxfused.quantize(jnp.full((64, 1), 57344.0), "float8_e5m2", scale=1.0)
    assert jaxfused.quantized_matmul(x, w).item() == 64 * 448 * 57344


def test_quantized_product_multiplies_integers():
    x, w = jaxfused.quantize_rows(jnp.ones((16, 32))), jaxfused.quantize(jnp.ones((32, 48)))
    text = str(jax.make_jaxpr(jaxfused.quantized_matmul)(x, w))
    assert "dot_general" in text
    assert "preferred_element_type=int32" in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_backward_keeps_the_weights_quantized(dtype):
    w = jaxfused.quantize(jnp.ones((64, 48)), "int4", group_size=32)
    x = jnp.ones((2, 64), dtype)
    _, vjp = jax.vjp(lambda x: jaxfused.quantized_matmul(x, w, activation="silu"), x)
    kept = {(a.shape, jnp.dtype(a.dtype)) for a in jax.tree.leaves(vjp)}
    assert kept == {
        ((32, 48), jnp.dtype(jnp.uint8)),
        ((2, 48), jnp.dtype(jnp.float32)),
        ((2, 48), jnp.dtype(dtype)),
    }


@pytest.mark.parametrize("number_format", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_small_gradients_of_float16(number_format):
    """Products of gradients and scales are below the range of float16."""
    rng = np.random.default_rng(0)
    w = jaxfused.quantize(jnp.asarray(rng.normal(0, 0.02, (24, 40)), jnp.float32), number_format)
    x, dy = (jnp.asarray(rng.normal(0, 1e-3, (3, size)), jnp.float16) for size in (24, 40))
    _, vjp = jax.vjp(lambda x: jaxfused.quantized_matmul(x, w), x)
    expected = np.asarray(dy, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    np.testing.assert_allclose(vjp(dy)[0], expected, rtol=1e-3, atol=2e-7)


def test_weights_are_frozen():
    def loss(x, w):
        return jaxfused.quantized_matmul(x, w).sum()

    w = jaxfused.quantize(jnp.ones((4, 3)))
    dx, dw = jax.grad(loss, argnums=(0, 1), allow_int=True)(jnp.ones((2, 4)), w)
    np.testing.assert_allclose(dx, jnp.full((2, 4), 3.0), rtol=1e-6)
    np.testing.assert_array_equal(dw.scale, jnp.zeros((1, 3)))


def test_out_dtype():
    x, w = jnp.ones((2, 4), jnp.bfloat16), jaxfused.quantize(jnp.ones((4, 3)))
    q = jaxfused.quantize_rows(x)
    residual = jnp.ones((2, 3), jnp.float16)
    assert jaxfused.quantized_matmul(x, w).dtype == jnp.bfloat16
    assert jaxfused.quantized_matmul(q, w).dtype == jnp.float32
    for inputs in (x, q):
        assert jaxfused.quantized_matmul(inputs, w, residual=residual).dtype == jnp.float16
        y = jaxfused.quantized_matmul(inputs, w, residual=residual, out_dtype=jnp.bfloat16)
        assert y.dtype == jnp.bfloat16


def test_nan_stays_in_its_row():
    x = jnp.ones((3, 4)).at[1, 2].set(jnp.nan)
    w = jaxfused.quantize(jnp.ones((4, 2)))
    expected = [[False] * 2, [True] * 2, [False] * 2]
    for inputs in (x, jaxfused.quantize_rows(x), jaxfused.quantize_rows(x, "float8_e4m3fn")):
        np.testing.assert_array_equal(np.isnan(jaxfused.quantized_matmul(inputs, w)), expected)


def test_transforms():
    args, w = CASES[1].arguments(jnp.float32)
    assert_transforms(
        lambda x, bias, residual: jaxfused.quantized_matmul(
            x, w, bias, activation="gelu_tanh", residual=residual
        ),
        *args,
    )


def test_scan_over_stacked_layers():
    w = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3.0
    layers = jaxfused.quantize(w, "int4", symmetric=False)
    x = jax.random.normal(jax.random.key(1), (2, 8))

    def loss(x):
        step = lambda x, w: (jaxfused.quantized_matmul(x, w, activation="silu"), None)  # noqa: E731
        return jax.lax.scan(step, x, layers)[0].sum()

    def unrolled(x):
        for layer in layers.dequantize():
            x = jax.nn.silu(x @ layer)
        return x.sum()

    value, dx = jax.jit(jax.value_and_grad(loss))(x)
    expected, expected_dx = jax.jit(jax.value_and_grad(unrolled))(x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-6)


def test_derivatives_of_both_orders():
    with jax.enable_x64(True):
        args, w = CASES[1].arguments(jnp.float64)
        check_grads(
            jax.jit(
                lambda x, bias, residual: jaxfused.quantized_matmul(
                    x, w, bias, activation="silu", residual=residual
                )
            ),
            args,
            order=2,
            modes="rev",
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": jnp.ones((4, 6))}, r"w is a .*pass jaxfused.quantize\(w\)"),
        (
            lambda: {"w": jaxfused.quantize(jnp.ones((4, 6)), axis=-1)},
            "w was quantised along axis -1",
        ),
        (
            lambda: {"x": jaxfused.quantize(jnp.ones((2, 4)))},
            r"x was quantised .*quantize_rows\(x\)",
        ),
        (
            lambda: {"x": jaxfused.quantize_rows(jnp.ones((2, 3)))},
            r"w has shape \(4, 6\), but x has 3",
        ),
        ({"x": jnp.ones(())}, r"x has shape \(\)"),
        ({"x": jnp.ones((2, 4), int)}, "x has dtype int32"),
        (lambda: {"w": jaxfused.quantize(jnp.ones((2, 4, 6)))}, r"w has shape \(2, 4, 6\)"),
        ({"bias": jnp.ones(4)}, r"bias has shape \(4,\)"),
        ({"bias": jnp.ones(6, int)}, "bias has dtype int32"),
        ({"residual": jnp.ones((2, 4))}, r"residual has shape \(2, 4\).*\(2, 6\)"),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"out_dtype": jnp.int8}, "out_dtype is int8, but the result is of floating-point numbers"),
        ({"implementation": "cuda"}, r"pass jaxfused.quantize\(w, layout='columns'\)"),
        ({"implementation": "pallas"}, r"pass jaxfused.quantize\(w, layout='columns'\)"),
    ],
)
def test_errors(change, message):
    # The test quantises the arrays, because every pytest process imports this file.
    change = change() if callable(change) else change
    arguments = {
        "x": jnp.ones((2, 4)),
        "w": jaxfused.quantize(jnp.ones((4, 6)), layout="rows"),
    } | change
    with pytest.raises(ValueError, match=f"quantized_matmul: .*{message}"):
        jaxfused.quantized_matmul(**arguments)


def test_refuses_sums_that_int32_cannot_hold():
    def shape(features, symmetric):
        x = jax.eval_shape(
            lambda x: jaxfused.quantize(x, axis=-1, symmetric=symmetric), jnp.ones((1, features))
        )
        w = jax.eval_shape(jaxfused.quantize, jnp.ones((features, 1)))
        return jax.eval_shape(jaxfused.quantized_matmul, x, w).shape

    assert shape(131071, True) == (1, 1)
    assert shape(65793, False) == (1, 1)
    for features, symmetric in ((131072, True), (65794, False)):
        with pytest.raises(ValueError, match=f"w has {features} input features"):
            shape(features, symmetric)
