"""quantize to NF4, MXFP4 and NVFP4: nearest entries, scales, layouts, refusals, models, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfused
import jaxfused.nnx
from jaxfused.ops.quantize.quantize_codes import CODE_FORMATS
from tests.support.grids import parametrize


def weights(shape=(128, 24)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@parametrize("layout", ["rows", "columns"], quick=(1,))
@pytest.mark.parametrize("name", list(CODE_FORMATS))
def test_each_number_is_the_nearest_of_its_group(name, layout):
    x = weights()
    q = jaxfused.quantize(x, name, layout=layout)
    size = CODE_FORMATS[name].group_size
    assert q.shape == x.shape and q.scale.shape == (128 // size, 24)
    scale = np.repeat(np.asarray(q.scale, np.float64), size, 0)
    choices = scale[..., None] * np.array(CODE_FORMATS[name].codebook)
    nearest = np.abs(choices - np.asarray(x)[..., None]).min(-1)
    actual = np.abs(np.asarray(q.dequantize(), np.float64) - x)
    np.testing.assert_allclose(actual, nearest, rtol=1e-5, atol=1e-6)


def test_scales_of_each_format():
    x = weights().at[:, 0].set(0.0).at[:32, 1].set(7.0).at[:32, 2].set(6.9)
    scales = {n: np.asarray(jaxfused.quantize(x, n).scale, np.float32) for n in CODE_FORMATS}
    largest = np.abs(np.asarray(x)).reshape(2, 64, 24).max(1)
    np.testing.assert_array_equal(scales["nf4"][:, 1:], largest[:, 1:])
    # As in compressed-tensors, a largest magnitude of 7 takes the next power.
    assert (scales["mxfp4"][0, 1], scales["mxfp4"][0, 2]) == (2.0, 1.0)
    whole = np.abs(np.asarray(x)).max() / (6 * 448)
    ratio = jnp.asarray(scales["nvfp4"] / whole)
    exact = ratio.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_allclose(ratio, exact, rtol=1e-6)
    for name in CODE_FORMATS:
        y = jaxfused.quantize(x, name).dequantize()
        assert not y[:, 0].any() and jnp.isfinite(y).all()


@parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], quick=(0, 2))
@pytest.mark.parametrize("name", list(CODE_FORMATS))
def test_the_largest_numbers_of_a_dtype_stay_finite(name, dtype):
    x = jnp.full((64, 2), jnp.finfo(dtype).max)
    y = jaxfused.quantize(x, name).dequantize(dtype)
    # Of MXFP4 the largest is 6 scales, whose next power of two would be infinite for 4.
    expected = 0.75 if name == "mxfp4" else 1.0
    np.testing.assert_allclose(np.asarray(y / x, np.float32), expected, rtol=1e-2)


@pytest.mark.parametrize("shape", [(0, 8), (64, 0), (0, 0), (0, 64, 8), (2, 64, 0)])
@parametrize("name", ["int4", *CODE_FORMATS], quick=(0, 3))
def test_empty_arrays(name, shape):
    q = jaxfused.quantize(jnp.zeros(shape), name)
    assert q.shape == q.dequantize().shape == shape
    y = jaxfused.quantized_matmul(jnp.ones((3, shape[-2])), q) if q.ndim == 2 else None
    assert y is None or (y.shape == (3, shape[-1]) and not y.any())
    if name == "int4":
        q = jaxfused.quantize(jnp.zeros(shape), name, group_size=32)
        assert q.shape == q.dequantize().shape == shape


@pytest.mark.parametrize("name", list(CODE_FORMATS))
def test_what_is_not_finite_makes_its_group_nan(name):
    x = weights().at[3, 4].set(jnp.inf).at[70, 5].set(jnp.nan)
    y = jaxfused.quantize(x, name).dequantize()
    size = CODE_FORMATS[name].group_size
    expected = np.zeros(x.shape, bool)
    expected[:size, 4] = expected[70 // size * size : 70 // size * size + size, 5] = True
    np.testing.assert_array_equal(jnp.isnan(y), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(dtype="mxfp4", group_size=64),
            "'mxfp4' has groups of 32, but group_size is 64.*leave group_size out",
        ),
        (
            dict(dtype="nf4", group_size=48),
            "groups of 48, but group_size is 48 .*divides them, or pad x",
        ),
        (dict(dtype="nf4", scale=1.0), "chooses its scales.*leave"),
        (dict(dtype="nvfp4", symmetric=False), "chooses its scales.*leave"),
        (dict(dtype="nf5"), "'nf5' is not known; pass one of 'int8', .*'nf4'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=f"quantize: .*{message}"):
        jaxfused.quantize(weights(), **options)


def test_gradients_pass_through_a_perceptron_of_nf4():
    model = jaxfused.nnx.MLP(64, 128, rngs=nnx.Rngs(0))
    quantized = jaxfused.quantize_params(model, "nf4")
    kernel, plain = quantized.up.kernel.array, model.up.kernel[...]
    assert kernel.dtype == "uint4" and kernel.scale.dtype == jnp.float32
    assert float(jnp.abs(kernel.dequantize() - plain).max()) < 0.2 * float(jnp.abs(plain).max())
    for layer in (model.up, model.down):
        name = "up" if layer is model.up else "down"
        layer.kernel[...] = getattr(quantized, name).kernel.array.dequantize()
    x = weights((3, 64))
    found, expected = (jax.grad(lambda x, m=m: m(x).sum())(x) for m in (quantized, model))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
