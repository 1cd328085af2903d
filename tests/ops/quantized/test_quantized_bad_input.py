"""Quantised operators with inconsistent arrays, bad scales, zeros and saturation."""

import functools
from dataclasses import fields, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.runtime.quantized_array import assembled
from tests.flax.test_modules import normal
from tests.support.arrays import put


# The tests that need these arrays make them, because every pytest process imports this file.
@functools.cache
def int4():
    options = dict(group_size=64, symmetric=False, layout="rows")
    return jaxfused.quantize(normal(0, 256, 8), "int4", **options)


@functools.cache
def columns():
    return jaxfused.quantize(normal(0, 256, 8), "int4", group_size=64)


@functools.cache
def int8():
    return jaxfused.quantize(normal(0, 256, 8), layout="rows")


@pytest.mark.parametrize(
    ("whole", "change", "message"),
    [
        (
            int4,
            lambda w: dict(scale=w.scale[:3]),
            r"w.scale has shape \(3, 8\), but w has shape \(256",
        ),
        (int4, lambda w: dict(scale=w.scale[:, :7]), r"w.scale has shape \(4, 7\)"),
        (int4, lambda w: dict(scale=w.scale[0]), r"w.scale has shape \(8,\)"),
        (
            int4,
            lambda w: dict(scale=w.scale[:0], zero_point=w.zero_point[:0]),
            r"w.scale has shape \(0, 8\)",
        ),
        (
            int4,
            lambda w: dict(zero_point=w.zero_point[:2]),
            r"w.zero_point has shape \(2, 8\), but w.scale",
        ),
        (
            int4,
            lambda w: dict(values=w.values.astype(jnp.int16)),
            "w.values has dtype int16, not one of int8",
        ),
        (
            int4,
            lambda w: dict(values=w.values.astype(jnp.int32)),
            "layout 'rows' and values of int32",
        ),
        (
            int4,
            lambda w: dict(layout="columns"),
            "whose int4 are int32; pass what jaxfused.quantize returns",
        ),
        (int4, lambda w: dict(layout="tiles"), "layout 'tiles' and values of uint8"),
        (int4, lambda w: dict(axis=0), "w.axis is 0, but .* counted from the last"),
        (int4, lambda w: dict(axis=-3), "w.axis is -3"),
        (columns, lambda w: dict(axis=-1), "layout 'columns', axis -1"),
        (
            columns,
            lambda w: dict(values=w.values[:, :20]),
            "20 words of int4 in a row.* blocks of 16",
        ),
        (int8, lambda w: dict(values=w.values[:250]), r"x has 256 features"),
        (
            int8,
            lambda w: dict(values=w.values[..., None]),
            r"w.scale has shape \(1, 8\), but w has shape",
        ),
    ],
)
def test_parts_that_do_not_belong_together(whole, change, message):
    w = unchecked(whole(), **change(whole()))
    with pytest.raises(ValueError, match=f"quantized_matmul: .*{message}|{message}"):
        jaxfused.quantized_matmul(normal(1, 3, 256), w)


def unchecked(array, **change):
    """Returns the array with other parts, built without its constructor, as transformations do."""
    parts = {field.name: getattr(array, field.name) for field in fields(array)}
    return assembled(**(parts | change))


def test_parts_of_a_quantised_x_and_of_a_convolution():
    x = jaxfused.quantize_rows(normal(1, 3, 256))
    with pytest.raises(ValueError, match=r"x.scale has shape \(3,\)"):
        jaxfused.quantized_matmul(unchecked(x, scale=x.scale[:, 0]), int8())
    images = jaxfused.quantize(normal(1, 2, 5, 5, 16), axis=-1, per_tensor=True)
    w = jaxfused.quantize(normal(0, 144, 8))
    with pytest.raises(ValueError, match=r"w.scale has shape \(5, 8\)"):
        jaxfused.quantized_conv(images, unchecked(w, scale=jnp.ones((5, 8))), kernel_size=3)
    with pytest.raises(ValueError, match=r"x.scale has shape \(1, 1, 3, 1\)"):
        jaxfused.quantized_conv(unchecked(images, scale=jnp.ones((1, 1, 3, 1))), w, kernel_size=3)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
def test_scales_that_nothing_can_be_divided_by(bad, dtype):
    x, scale = normal(0, 4, 3), put([[1.0, bad, 1.0]])
    for function in (jaxfused.quantize, jaxfused.fake_quantize):
        with pytest.raises(ValueError, match=rf"scale has the value {bad!r}.*positive, finite"):
            function(x, dtype, scale=scale)
    # If the scale is traced, only the column with the bad scale is NaN.
    y = jax.jit(lambda scale: jaxfused.quantize(x, dtype, scale=scale).dequantize())(scale)
    np.testing.assert_array_equal(np.isnan(y), [[False, True, False]] * 4)


def test_nan_scales_make_their_group_nan():
    w = replace(int4(), scale=int4().scale.at[1, 2].set(jnp.nan))
    dequantised = w.dequantize()
    assert np.isnan(dequantised[64:128, 2]).all()
    assert np.isnan(dequantised).sum() == 64
    for rows in (3, 100):
        y = jaxfused.quantized_matmul(normal(1, rows, 256), w)
        np.testing.assert_array_equal(np.isnan(y), np.tile(np.arange(8) == 2, (rows, 1)))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_and_columns_of_zeros(dtype):
    x = normal(1, 5, 256).at[2].set(0.0)
    w = normal(0, 256, 8).at[:, 3].set(0.0)
    q, rows = jaxfused.quantize(w, dtype), jaxfused.quantize_rows(x, dtype)
    y = jaxfused.quantized_matmul(rows, q)
    chex.assert_tree_all_finite((q.scale, rows.scale, y))
    np.testing.assert_array_equal(y[2], jnp.zeros(8))
    np.testing.assert_array_equal(y[:, 3], jnp.zeros(5))
    images = x.reshape(5, 4, 4, 16).at[0].set(0.0)
    scale = jnp.maximum(jnp.abs(images).max(axis=(1, 2, 3), keepdims=True) / 127, 1e-30)
    y = jaxfused.quantized_conv(
        jaxfused.quantize(images, axis=-1, scale=scale), jaxfused.quantize(w[:144]), kernel_size=3
    )
    chex.assert_tree_all_finite(y)
    np.testing.assert_array_equal(y[0], jnp.zeros((4, 4, 8)))


def test_the_largest_sums_do_not_wrap_around():
    features = 4096
    x = jaxfused.quantize(jnp.full((2, features), -128.0), axis=-1, scale=1.0, zero_point=127)
    w = jaxfused.quantize(jnp.full((features, 3), -128.0), scale=1.0, zero_point=127)
    y = jaxfused.quantized_matmul(x, w)
    np.testing.assert_array_equal(y, np.full((2, 3), np.float32(128.0 * 128.0 * features)))
    x = replace(x, values=jnp.tile(x.values, (1, 16)))
    w = replace(w, values=jnp.tile(w.values, (1, 16)))
    with pytest.raises(ValueError, match="may not fit into int32"):
        jaxfused.quantized_matmul(x, w)


def test_groups_that_do_not_divide():
    for function in (jaxfused.quantize, jaxfused.fake_quantize):
        with pytest.raises(
            ValueError, match=r"group_size is 96, .* divide the 256 values .*; pass"
        ):
            function(normal(0, 256, 8), "int4", group_size=96)
    rules = [jaxfused.QuantizationRule("", "int4", group_size=96)]
    with pytest.raises(ValueError, match=r"layer 'up' does not fit .* group_size is 96"):
        jaxfused.quantize_params({"up": {"kernel": normal(0, 256, 8)}}, rules)
