"""Arrays built from their parts: blocks with a smaller last one, and any dtype."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.nnx
from benchmarks.without_gpu.target import H200
from jaxfused import QuantizedArray, dispatch
from jaxfused.ops.quantized.quantized_gated_unit import gated_unit
from jaxfused.runtime.packing import pack_codes, pack_int4, pack_words
from jaxfused.runtime.quantized_array import assembled
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels


def blocks(features, columns, dtype=jnp.float8_e4m3fn, side=128):
    """Returns a checkpoint's weights in square blocks with one scale each, and their float64 values."""
    rng = np.random.default_rng(features)
    values = rng.integers(-7, 8, (columns, features))
    grid = (-(-columns // side), -(-features // side))
    scale = (2.0 ** rng.integers(-3, 4, grid)).astype(np.float32)
    right = values * np.kron(scale, np.ones((side, side)))[:columns, :features]
    w = QuantizedArray(put(values, dtype), put(scale.T), None, -2, "columns", (side, side))
    return w, right.T.astype(np.float64)


SHAPES = ((576, 256), (192, 256), (256, 192), (200, 130), (193, 129), (64, 320))
"""Shapes of weights; the first is DeepSeek-V3's projection to keys."""


@parametrize(("features", "columns"), SHAPES, quick=(0, 3))
def test_products_of_partial_blocks(features, columns):
    w, right = blocks(features, columns)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(70, features)).astype(np.float32)
    x8 = rng.integers(-7, 8, (70, features))
    x_scale = (2.0 ** rng.integers(-3, 4, (70, -(-features // 128)))).astype(np.float32)
    wide_x = x8 * np.repeat(x_scale, 128, axis=1)[:, :features]

    @jax.jit
    def products(x, x8, x_scale, w):
        grouped = QuantizedArray(x8, x_scale, None, -1, group_size=128)
        few, many = (jaxfused.quantized_matmul(rows, w) for rows in (x[:2], x))
        both = jaxfused.quantized_matmul(grouped, w)
        rows = jaxfused.quantized_matmul(QuantizedArray(x8, jnp.ones((70, 1)), None, -1), w)
        return few, many, both, rows, grouped.dequantize(), w.dequantize()

    *results, of_x, of_w = products(x, put(x8, jnp.float8_e4m3fn), x_scale, w)
    np.testing.assert_array_equal(of_w, right)
    np.testing.assert_array_equal(of_x, wide_x)
    for result, rows in zip(results, (x[:2], x, wide_x, x8), strict=True):
        truth = rows.astype(np.float64) @ right
        np.testing.assert_allclose(result, truth, rtol=1e-5, atol=1e-6 * abs(truth).max())


def test_gradients_of_partial_blocks():
    w, right = blocks(192, 130, jnp.int8)
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=size).astype(np.float32) for size in ((5, 192), (5, 130)))

    @jax.jit
    def gradients(scale):
        def loss(x, scale):
            q = QuantizedArray(w.values, scale, None, -2, "columns", (128, 128))
            return jnp.vdot(jaxfused.quantized_matmul(x, q, scale_gradient=True), dy)

        return jax.grad(loss, (0, 1))(x, scale)

    dx, dscale = gradients(w.scale)
    np.testing.assert_allclose(dx, dy @ right.T, rtol=1e-4, atol=1e-3)
    dw = (x.T.astype(np.float64) @ dy) * np.asarray(w.values, np.float64).T
    parts = np.add.reduceat(np.add.reduceat(dw, [0, 128], axis=0), [0, 128], axis=1)
    assert dscale.shape == (2, 2)
    np.testing.assert_allclose(dscale, parts, rtol=1e-4, atol=1e-3)


def test_partial_blocks_of_stacks_images_and_units():
    w, right = blocks(9 * 16, 24, jnp.int8, side=64)
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), w)
    assert (stack.group_size, stack.groups, stack.columns_alike) == ((64, 64), 3, 64)
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stack), [right, right])
    images = np.random.default_rng(1).integers(-5, 6, (2, 5, 5, 16)).astype(np.float32)
    y = jaxfused.quantized_conv(images, w, kernel_size=3)
    q = jaxfused.quantize(images, axis=-1, scale=1.0)
    y8 = jaxfused.quantized_conv(q, w, kernel_size=3)
    truth = jax.lax.conv_general_dilated(
        images,
        put(right.reshape(3, 3, 16, 24)),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(y8, truth, rtol=1e-5, atol=1e-3)


def test_kernels_read_partial_blocks_as_smaller_groups():
    w, _ = blocks(576, 256)
    x = jax.ShapeDtypeStruct((8, 576), jnp.bfloat16)
    with dispatch.assume(H200):
        assert "quantized_linear" in " ".join(
            kernels(lambda x: jaxfused.quantized_matmul(x, w, implementation="pallas"), x)
        )


@pytest.mark.parametrize(
    ("scale", "shape", "axis", "words"),
    [
        (
            (2, 1),
            (192, 8),
            -2,
            "axis -2 192 values have 2 scales: those of 2 groups of 96, .*of 128",
        ),
        ((1, 2), (8, 192), -2, "axis -1 192 values"),
        ((3, 2), (8, 192), -1, None),
        ((3, 2), (3, 192), -1, "pass group_size=96 or group_size=128"),
        ((4, 1), (448, 8), -2, "groups of 112, or of blocks of 128"),
        ((2, 1), (48, 8), -2, "groups of 24, or of blocks of 32"),
        ((5, 1), (576, 8), -2, r"scale has shape \(5, 1\), but .* such as \(128, 128\)"),
    ],
)
def test_scales_that_fit_two_sizes_of_groups(scale, shape, axis, words):
    values, scale = np.ones(shape, np.int8), np.ones(scale, np.float32)
    if words is not None:
        with pytest.raises(ValueError, match=words):
            QuantizedArray(values, scale, None, axis)
        with pytest.raises(ValueError, match=r"scale has shape .*; pass"):
            jaxfused.quantize(jnp.ones(shape), scale=scale, axis=axis)
    for size in (96, 128) if shape[0] == 192 else ():
        q = QuantizedArray(values, scale, None, axis, group_size=size)
        assert q.dequantize().shape == shape


def test_quantize_with_the_scales_of_partial_blocks():
    x = np.random.default_rng(0).normal(size=(192, 130)).astype(np.float32)
    scale = put([[1.0, 0.5], [0.25, 0.125]])
    q = jaxfused.quantize(x, scale=scale, group_size=(128, 128))
    each = np.kron(scale, np.ones((128, 128)))[:192, :130]
    np.testing.assert_array_equal(q.dequantize(), np.round(x / each) * each)
    fake = jaxfused.fake_quantize(x, scale=scale, group_size=(128, 128))
    np.testing.assert_array_equal(fake, q.dequantize())
    # Quantising by groups of 96 records the group size, with which the parts build the same array.
    q = jaxfused.quantize(x, group_size=96)
    again = QuantizedArray(q.values, q.scale, None, -2, q.layout, group_size=q.group_size)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    assert jax.tree.structure(again) == jax.tree.structure(q)


# --- dtypes ---------------------------------------------------------------------------------------

VALUES = {
    "int8": lambda q: put(q, jnp.int8),
    "int4 in bytes": lambda q: pack_int4(put(q, jnp.int8), -2),
    "int4": lambda q: put(q, jnp.int4),
    "float8_e4m3fn": lambda q: put(q, jnp.float8_e4m3fn),
    "float8_e5m2": lambda q: put(np.clip(q, -4, 4), jnp.float8_e5m2),
    "float4_e2m1fn": lambda q: put(np.clip(q, -4, 4), jnp.float4_e2m1fn),
}
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")
ZEROS = (None, "int8", "uint8", "int32", "int4", "float32", "bfloat16")
COMBINATIONS = [
    *((values, scale, None) for values, scale in itertools.product(VALUES, SCALES)),
    *((values, "float32", zero) for values, zero in itertools.product(VALUES, ZEROS[1:])),
    *((values, "float8_e8m0fnu", "float32") for values in VALUES),
]


@parametrize(
    ("values", "scale", "zero"),
    COMBINATIONS,
    quick=[
        i
        for i, case in enumerate(COMBINATIONS)
        if case
        in (
            ("int8", "float8_e8m0fnu", "float32"),
            ("int4", "float32", "uint8"),
            ("float8_e4m3fn", "float32", "int8"),
            ("float4_e2m1fn", "bfloat16", None),
        )
    ],
)
@pytest.mark.parametrize("groups", [1, 4])
def test_every_dtype_gives_the_right_number(values, scale, zero, groups):
    features, columns, rng = 128, 32, np.random.default_rng(0)
    stored = VALUES[values](rng.integers(-7, 8, (features, columns)))
    wide = stored if values != "int4 in bytes" else None
    scales = put(2.0 ** rng.integers(-3, 3, (groups, columns)), jnp.dtype(scale))
    fraction = 0.25 if zero in ("float32", "bfloat16") else 0
    zeros = None
    if zero is not None:
        zeros = put(rng.integers(0, 7, (groups, columns)) + fraction, jnp.dtype(zero))
    w = QuantizedArray(stored, scales, zeros, -2)
    numbers = np.asarray(w.unpacked() if wide is None else wide, np.float64)
    each = features // groups
    right = numbers - (0 if zeros is None else np.repeat(np.asarray(zeros, np.float64), each, 0))
    right = right * np.repeat(np.asarray(scales, np.float64), each, 0)
    x = rng.normal(size=(6, features)).astype(np.float32)
    x8 = rng.integers(-9, 10, (6, features))

    @jax.jit
    def products(x, x8, w):
        rows = [
            QuantizedArray(x8.astype(t), jnp.ones((6, 1)), None, -1)
            for t in ("int8", "float8_e4m3fn")
        ]
        image = QuantizedArray(x8.astype(jnp.int8)[:, None], jnp.ones((1, 1, 1)), None, -1)
        return (
            w.dequantize(),
            *(jaxfused.quantized_matmul(a, w) for a in (x, x[:1], *rows)),
            jaxfused.quantized_conv(image, w, kernel_size=1)[:, 0],
            jaxfused.quantized_conv(x[:, None], w, kernel_size=1)[:, 0],
        )

    of_w, *results = products(x, x8.astype(np.float32), w)
    np.testing.assert_array_equal(of_w, right)
    for result, rows in zip(results, (x, x[:1], x8, x8, x8, x), strict=True):
        truth = rows.astype(np.float64) @ right
        np.testing.assert_allclose(result, truth, rtol=1e-5, atol=1e-5 * abs(truth).max())


def test_dtypes_that_no_kernel_reads_go_to_xla():
    w = jaxfused.quantize(jnp.ones((256, 128)), "int8", layout="columns", symmetric=False)
    words = pack_words(put(np.ones((128, 256)), jnp.int8))
    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    one = jnp.ones((1, 128))
    for array, launched in (
        (w, True),
        (QuantizedArray(w.values, w.scale.astype(jnp.bfloat16), w.zero_point, -2, "columns"), True),
        (QuantizedArray(w.values, w.scale, w.zero_point.astype(jnp.uint8), -2, "columns"), False),
        (
            QuantizedArray(w.values.astype(jnp.float8_e4m3fn), one, w.zero_point, -2, "columns"),
            False,
        ),
        (QuantizedArray(w.values.astype(jnp.int4), one, None, -2, "columns"), False),
        (QuantizedArray(w.values.astype(jnp.float4_e2m1fn), one, None, -2, "columns"), False),
        (QuantizedArray(words, one.astype(jnp.float8_e8m0fnu), None, -2, "columns"), True),
    ):
        with dispatch.assume(H200):
            found = kernels(lambda x, array=array: jaxfused.quantized_matmul(x, array), x)
            assert any("quantized" in name for name in found) == launched, array.values.dtype
            if not launched:
                with pytest.raises(ValueError, match="its kernels read"):
                    jaxfused.quantized_matmul(jnp.ones((8, 256)), array, implementation="pallas")


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-7, 8, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 70, 200])
@pytest.mark.parametrize(("features", "columns"), SHAPES)
def test_products_of_partial_blocks_on_gpu(features, columns, rows):
    """Operands are small integers and powers of two, which every implementation sums exactly."""
    w, right = blocks(features, columns)
    x = integers(1, rows, features)
    scale = 2.0 ** integers(2, rows, -(-features // 128))

    @jax.jit
    def products(x, scale, w):
        grouped = QuantizedArray(x.astype(w.values.dtype), scale, None, -1, group_size=128)
        wide = jaxfused.quantized_matmul(x.astype(jnp.bfloat16), w, out_dtype=jnp.float32)
        return wide, jaxfused.quantized_matmul(grouped, w), w.dequantize()

    wide, both, of_w = products(put(x, jnp.float32), put(scale, jnp.float32), w)
    np.testing.assert_array_equal(of_w, right)
    np.testing.assert_array_equal(wide, (x @ right).astype(np.float32))
    truth = (x * np.repeat(scale, 128, axis=1)[:, :features]) @ right
    np.testing.assert_allclose(both, truth, rtol=1e-6, atol=1e-6 * abs(truth).max())


@pytest.mark.gpu
@pytest.mark.parametrize(("values", "scale", "zero"), COMBINATIONS)
def test_every_dtype_gives_the_right_number_on_gpu(values, scale, zero):
    stored = VALUES[values](integers(0, 128, 32))
    scales = put(2.0 ** (np.arange(32)[None] % 5), jnp.dtype(scale))
    zeros = None if zero is None else put(np.arange(32)[None] % 7, jnp.dtype(zero))
    x = integers(1, 6, 128)

    @jax.jit
    def products(x, w):
        rows = (
            QuantizedArray(x.astype(t), jnp.ones((6, 1)), None, -1)
            for t in ("int8", "float8_e4m3fn")
        )
        narrow = x.astype(jnp.bfloat16)
        return w.dequantize(), *(
            jaxfused.quantized_matmul(a, w, out_dtype=jnp.float32) for a in (narrow, *rows)
        )

    right, *results = products(put(x, jnp.float32), QuantizedArray(stored, scales, zeros, -2))
    numbers = np.asarray(VALUES[values](integers(0, 128, 32)), np.float64)
    if values != "int4 in bytes":
        wide = numbers - (0 if zeros is None else np.asarray(zeros, np.float64))
        np.testing.assert_array_equal(right, wide * np.asarray(scales, np.float64))
    for result in results:
        np.testing.assert_array_equal(
            result, (x @ np.asarray(right, np.float64)).astype(np.float32)
        )


ONES = np.ones((4, 2), np.int8)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (dict(values=ONES.astype(np.uint16)), "values has dtype uint16, not one of int8"),
        (dict(values=put(ONES, jnp.uint4)), "pass them as jnp.int4, with 8 .* zero points"),
        (dict(values=put(ONES, jnp.int2)), "values has dtype int2.*pass them as jnp.int4"),
        (dict(values=put(ONES, jnp.float8_e4m3fnuz)), "float8_e4m3fnuz.*pass jaxfused.quantize"),
        (dict(values=put(ONES, jnp.float8_e8m0fnu)), "float8_e8m0fnu.*pass jaxfused.quantize"),
        (dict(values=put(ONES, jnp.bfloat16)), "values has dtype bfloat16"),
        (dict(scale=np.ones((1, 2), np.uint8)), "dtype uint8.*bitcast_convert_type"),
        (dict(scale=np.ones((1, 2), int)), "dtype int64.*pass floats"),
        (dict(scale=0.5), "scale is a float, but it has to be an array"),
        (
            dict(scale=np.ones((2,), np.float32)),
            r"scale has shape \(2,\), but .* has shape \(4, 2\)",
        ),
        (dict(scale=np.ones((3, 2), np.float32)), r"scale has shape \(3, 2\)"),
        (dict(zero_point=np.ones((1, 2), bool)), "zero_point has dtype bool.*pass integers"),
        (dict(zero_point=np.ones((1, 2), complex)), "zero_point has dtype complex128"),
        (dict(zero_point=3), "zero_point is a int, but it has to be an array"),
        (dict(zero_point=np.ones((4, 2), np.int8)), r"zero_point has shape \(4, 2\)"),
        (dict(axis=0), "axis is 0, but .* counted from the last"),
        (dict(axis=-1.0), "axis has -1.0; pass integers"),
        (dict(group_size=0), "group_size is 0, but it is a positive number"),
        (dict(group_size=(1, 2, 3)), r"group_size is \(1, 2, 3\)"),
        (dict(group_size=1.5), "group_size has 1.5; pass integers"),
        (dict(group_size=3), r"scale has shape \(1, 2\).*group_size 3"),
        (dict(axis=-1, group_size=(2, 2)), r"group_size is \(2, 2\), .* axis -1"),
    ],
    ids=str,
)
def test_parts_are_checked_where_they_are_put_together(parts, words):
    good = dict(values=ONES, scale=np.ones((1, 2), np.float32), zero_point=None, axis=-2)
    with pytest.raises(ValueError, match=f"^QuantizedArray: .*{words}"):
        QuantizedArray(**(good | parts))
    # A transformation may have built such an array.
    if "axis" in parts or "group_size" in parts:
        return
    with pytest.raises(ValueError, match=f"^quantized_matmul: w.*{words}"):
        jaxfused.quantized_matmul(jnp.ones((1, 4)), assembled(**(good | parts), layout="rows"))


def test_trees_of_other_things_are_no_arrays():
    q = jaxfused.quantize(jnp.ones((4, 2)), layout="rows")
    names = jax.tree.map(lambda leaf: str(leaf.dtype), q)
    assert (names.values, names.scale) == ("int8", "float32")
    axes = QuantizedArray(0, None, None, -2)
    y = jax.vmap(lambda q: q.dequantize(), in_axes=(axes,))(
        assembled(q.values[None], q.scale, None, -2, "rows")
    )
    np.testing.assert_array_equal(y, jnp.ones((1, 4, 2)))
    assert jax.eval_shape(lambda q: q, q).shape == (4, 2)


def test_parts_of_numpy_and_of_flax():
    values = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
    scale = np.full((1, 8), 0.5, np.float32)
    right = 0.5 * values.astype(np.float32)
    x = np.eye(8, dtype=np.float32)
    for w in (
        QuantizedArray(values, scale, None, -2),
        QuantizedArray(values.T.copy().T, scale[:, ::-1], None, np.int64(-2)),
        QuantizedArray(jaxfused.nnx.quantized_linear.Frozen(put(values)), scale, None, -2),
        jax.device_get(QuantizedArray(put(values), put(scale), None, -2)),
    ):
        np.testing.assert_array_equal(w.dequantize(), right)
        np.testing.assert_array_equal(jaxfused.quantized_matmul(x, w), right)


def test_gradients_of_scales_need_signs_and_fractions():
    w = QuantizedArray(ONES, put(np.ones((1, 2)), jnp.float8_e8m0fnu), None, -2)
    with pytest.raises(ValueError, match=re.escape("pass w with scale.astype(jnp.float32)")):
        jaxfused.quantized_matmul(jnp.ones((1, 4)), w, scale_gradient=True)


def test_zero_points_that_are_given_do_not_wrap_around():
    x = jnp.ones((4, 2))
    with pytest.raises(
        ValueError, match="zero_point has the value 200, but int8 is of -128 to 127"
    ):
        jaxfused.quantize(x, scale=1.0, zero_point=200)
    with pytest.raises(ValueError, match="zero_point has the value 9, but int4 is of -8 to 7"):
        jaxfused.quantize(x, "int4", scale=1.0, zero_point=9)
    zeros = put([[200, 3]])
    y = jax.jit(lambda z: jaxfused.quantize(x, scale=1.0 + 0 * z, zero_point=z).dequantize())(zeros)
    np.testing.assert_array_equal(np.isnan(y), [[True, False]] * 4)
    with pytest.raises(ValueError, match=r"scale has dtype uint8.*bitcast_convert_type"):
        jaxfused.quantize(x, scale=jnp.full((1, 2), 127, jnp.uint8))


@pytest.mark.parametrize("layer", ["gated unit", "norm"])
def test_partial_blocks_in_layers(layer):
    gate, of_gate = blocks(192, 96)
    up, of_up = blocks(192, 96)
    x = np.random.default_rng(0).normal(size=(5, 192)).astype(np.float32)
    if layer == "gated unit":
        h = gated_unit(x, gate, up, None, None, activation="relu", implementation=None)
        truth = np.maximum(x @ of_gate, 0) * (x @ of_up)
    else:
        q = jaxfused.rms_norm(jnp.asarray(x), quantize_rows="int8")
        h = jaxfused.quantized_matmul(q, gate)
        truth = np.asarray(q.dequantize(), np.float64) @ of_gate
    np.testing.assert_allclose(h, truth, rtol=1e-4, atol=1e-3)


# --- codebooks and offsets ------------------------------------------------------------------------


def coded(name, layout, features=96, columns=40, groups=6, dtype=jnp.uint8, offset=True):
    """Returns weights in codes with all that an array may have, and their float64 values."""
    rng, book = np.random.default_rng(3), jaxfused.quantization.CODEBOOKS[name]
    bits = len(book).bit_length() - 1
    codes = rng.integers(0, len(book), (features, columns)).astype(np.uint8)
    shape = (groups, columns)
    scale = (2.0 ** rng.integers(-3, 4, shape)).astype(np.float32)
    zeros, offsets = (rng.integers(-8, 9, shape).astype(np.float32) / 16 for _ in range(2))
    stored = codes.T if layout == "columns" else codes
    if dtype == jnp.uint8:
        stored = pack_codes(put(stored), -1 if layout == "columns" else -2, bits)
    w = QuantizedArray(
        put(stored, dtype),
        put(scale),
        put(zeros),
        -2,
        layout,
        offset=put(offsets) if offset else None,
        codebook=book,
    )
    numbers = np.asarray(book, np.float32)[codes]
    of_rows = [np.repeat(part, features // groups, 0) for part in (zeros, scale, offsets)]
    right = (numbers - of_rows[0]) * of_rows[1] + (of_rows[2] if offset else 0)
    return w, right.astype(np.float64)


CODED = [
    *itertools.product(("nf4", "fp4", "e2m1", "ternary"), ("rows", "columns"), (1, 6)),
    ("e2m1", "columns", 3),
]


@parametrize(("name", "layout", "groups"), CODED, quick=(1, 12, 16))
@pytest.mark.parametrize("offset", [True, False])
def test_products_and_gradients_of_codes(name, layout, groups, offset):
    w, right = coded(name, layout, groups=groups, offset=offset)
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=size).astype(np.float32) for size in ((70, 96), (70, 40)))
    x8 = rng.integers(-7, 8, (6, 96))

    @jax.jit
    def results(x, x8, dy, w):
        def product(x, scale):
            q = replace(w, scale=scale)
            return jaxfused.quantized_matmul(x, q, scale_gradient=True)

        y, vjp = jax.vjp(product, x, w.scale)
        rows = [
            QuantizedArray(x8.astype(t), jnp.ones((6, 1)), None, -1)
            for t in (jnp.int8, "float8_e4m3fn")
        ]
        image = QuantizedArray(x8.astype(jnp.int8)[:, None], jnp.ones((1, 1, 1)), None, -1)
        return (
            w.dequantize(),
            (
                y,
                jaxfused.quantized_matmul(x[:2], w),
                *(jaxfused.quantized_matmul(a, w) for a in rows),
            ),
            jaxfused.quantized_conv(image, w, kernel_size=1)[:, 0],
            vjp(dy),
        )

    of_w, products, convolved, (dx, dscale) = results(x, put(x8, jnp.float32), dy, w)
    np.testing.assert_allclose(of_w, right, rtol=1e-6, atol=1e-6)
    for result, rows in zip((*products, convolved), (x, x[:2], x8, x8, x8), strict=True):
        truth = rows.astype(np.float64) @ right
        np.testing.assert_allclose(result, truth, rtol=1e-5, atol=1e-5 * abs(truth).max())
    np.testing.assert_allclose(dx, dy @ right.T, rtol=1e-4, atol=1e-3)
    plain = replace(w, scale=jnp.ones_like(w.scale), offset=None).dequantize()
    parts = ((x.T.astype(np.float64) @ dy) * plain).reshape(groups, -1, 40).sum(1)
    np.testing.assert_allclose(dscale, parts, rtol=1e-4, atol=1e-3)


def test_codes_under_transformations():
    w, right = coded("nf4", "columns")
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), w)
    x = np.random.default_rng(0).normal(size=(2, 3, 96)).astype(np.float32)
    truth = x.astype(np.float64) @ right
    both = jax.vmap(jaxfused.quantized_matmul)(x, stack)
    _, scanned = jax.lax.scan(lambda c, xw: (c, jaxfused.quantized_matmul(*xw)), 0, (x, stack))
    for result in (both, scanned):
        np.testing.assert_allclose(result, truth, rtol=1e-4, atol=1e-3)
    assert stack.shape == (2, 96, 40) and (stack.groups, stack.packed, stack.dtype) == (
        6,
        2,
        "uint4",
    )


def test_codes_one_an_element_and_an_odd_number_of_them():
    for name, dtype in (("nf4", jnp.uint4), ("fp4", jnp.uint4)):
        w, right = coded(name, "rows", 9, 5, 3, dtype, offset=False)
        np.testing.assert_array_equal(w.dequantize(), right)
        y = jaxfused.quantized_matmul(jnp.eye(9), w)
        np.testing.assert_allclose(y, right, rtol=1e-6)


def test_no_kernel_reads_codes_and_offsets():
    q = jaxfused.quantize(jnp.ones((256, 128)), "int8", layout="columns")
    codes, _ = coded("nf4", "columns", 256, 128, 4, offset=False)
    for w, words in (
        (replace(q, offset=q.scale), "no offsets"),
        (codes, "no zero points of codes"),
        (
            replace(codes, zero_point=None, layout="rows", values=codes.values.T),
            "weights whose col",
        ),
    ):
        with dispatch.assume(H200), pytest.raises(ValueError, match=f"its kernels read {words}"):
            jaxfused.quantized_matmul(jnp.ones((8, 256)), w, implementation="pallas")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (dict(codebook=(1.0, 2.0)), r"codebook is \(1.0, 2.0\).*16 or 4 .*CODEBOOKS: nf4, fp4"),
        (dict(codebook="nf4"), "codebook is 'nf4'"),
        (dict(codebook=[np.nan] * 4), "codebook is .*finite"),
        (
            dict(codebook=range(16), values=ONES),
            "values has dtype int8, not one of uint8, uint4; pack 2",
        ),
        (dict(codebook=range(4), values=ONES), "not one of uint8; pack 4 codes into a byte"),
        (dict(offset=np.ones((1, 2), int)), "offset has dtype int64.*as zero_point"),
        (dict(offset=np.ones((2, 2), np.float32)), r"offset has shape \(2, 2\)"),
        (dict(offset=0.5), "offset is a float, but it has to be an array"),
        (
            dict(scale=np.ones((3, 2), np.float32), codebook=range(4)),
            r"the array has shape \(16, 2\)",
        ),
    ],
    ids=str,
)
def test_codebooks_and_offsets_are_checked(parts, words):
    good = dict(
        values=np.ones((4, 2), np.uint8),
        scale=np.ones((1, 2), np.float32),
        zero_point=None,
        axis=-2,
    )
    with pytest.raises(ValueError, match=f"^QuantizedArray: .*{words}"):
        QuantizedArray(**(good | parts))


def test_group_scales_that_explicit_axes_split():
    w, right = coded("e2m1", "columns")
    mesh = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = (jax.P(None, "m"), *(jax.P("m", None),) * 3)
        parts = jax.tree.map(jax.device_put, jax.tree.leaves(w), list(specs))
        split = jax.tree.unflatten(jax.tree.structure(w), parts)
        np.testing.assert_allclose(jax.jit(lambda w: w.dequantize())(split), right, atol=1e-6)
