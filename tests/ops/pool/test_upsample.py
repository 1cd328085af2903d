import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.pool import upsample_cuda
from tests.cases.normal import normal
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive

SHAPES = ((2, 5, 7, 8), (1, 1, 1, 3), (2, 1, 4, 5), (1, 6, 2, 16))


def plain_upsample(x):
    """Computes bilinear upsampling by 2 as the docstring states it, in x's dtype."""
    for axis in (1, 2):
        first, last = (jax.lax.slice_in_dim(x, i, i + 1, axis=axis) for i in (0, x.shape[axis] - 1))
        before = jnp.concatenate([first, jax.lax.slice_in_dim(x, 0, -1, axis=axis)], axis)
        after = jnp.concatenate([jax.lax.slice_in_dim(x, 1, None, axis=axis), last], axis)
        pair = jnp.stack([before / 4 + x * 0.75, x * 0.75 + after / 4], axis + 1)
        x = pair.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return x


def ours(implementation=None):
    return lambda x: jaxfused.upsample(x, implementation=implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_as_accurate_as_jax_numpy(shape, dtype):
    x = normal(np.random.default_rng(0), dtype, *shape)
    assert_values_and_gradients(ours(), plain_upsample, x, cotangents=2)


@pytest.mark.parametrize(
    ("shape", "factor", "method"),
    [
        ((2, 5, 3), 3, "bilinear"),
        ((1, 3, 4, 2), (1, 4), "nearest"),
        ((1, 2, 3, 2, 2), 2, "bilinear"),
    ],
)
def test_other_factors_are_jax_image_resize(shape, factor, method):
    x = normal(np.random.default_rng(0), "float32", *shape)
    factors = (factor,) * (x.ndim - 2) if isinstance(factor, int) else factor
    size = (shape[0], *(n * f for n, f in zip(shape[1:-1], factors, strict=True)), shape[-1])
    np.testing.assert_allclose(
        jaxfused.upsample(x, factor, method=method), jax.image.resize(x, size, method), atol=1e-5
    )


def test_sizes_and_corners_are_those_of_resize():
    x = normal(np.random.default_rng(0), "float32", 1, 7, 7, 4)
    for ours, options in (
        (dict(factor=2, align_corners=True), dict(factor=2, align_corners=True)),
        (dict(size=(12, 9)), dict(size=(12, 9))),
        (dict(size=9, method="nearest"), dict(size=9, method="nearest")),
    ):
        np.testing.assert_array_equal(jaxfused.upsample(x, **ours), jaxfused.resize(x, **options))


def test_derivatives():
    check_grads(ours(), (jax.random.normal(jax.random.key(0), (1, 3, 4, 2)),), order=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 3))), r"x has shape \(2, 3\), but it needs a batch axis"),
        (dict(x=jnp.ones((2, 4, 4, 1), jnp.int32)), "x has dtype int32"),
        (dict(factor=0), "factor is 0, but x has 2 spatial axes"),
        (dict(factor=(2, 2, 2)), r"factor is \(2, 2, 2\)"),
        (dict(factor=1.5), "factor is 1.5"),
        (dict(method="cubic"), "method='cubic' is not known"),
        (dict(size=0), "size is 0, but x has 2 spatial axes"),
        (dict(method="nearest", align_corners=True), "align_corners=True goes with"),
        (dict(implementation="cuda", size=5), "it upsamples by a factor between centres"),
        (dict(implementation="cuda"), "it needs an NVIDIA GPU"),
        (dict(implementation="cuda", factor=3), r"bilinearly by \(2, 2\), .* factor \(3, 3\)"),
        (dict(implementation="pallas"), "there is no Pallas kernel of upsample"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"upsample: .*{message}"):
        jaxfused.upsample(**(dict(x=jnp.ones((2, 4, 4, 1))) | change))


# --- kernels --------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(with_library, monkeypatch):
    def gradient(dy):
        images, height, width, channels = dy.shape
        x = jax.ShapeDtypeStruct((images, height // 2, width // 2, channels), dy.dtype)
        return jax.linear_transpose(plain_upsample, x)(dy)[0]

    monkeypatch.setattr(upsample_cuda, "upsample", plain_upsample)
    monkeypatch.setattr(upsample_cuda, "gradient", gradient)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_way_to_the_kernels(shape, stand_ins):
    x = normal(np.random.default_rng(0), "float32", *shape)
    assert_values_and_gradients(ours("cuda"), plain_upsample, x, cotangents=2)


def test_transforms_of_the_way_to_the_kernels(stand_ins):
    assert_transforms(ours("cuda"), jax.random.normal(jax.random.key(0), (2, 3, 4, 2)))


def test_empty_batches_go_to_xla(with_library):
    x = jnp.ones((0, 4, 4, 2))
    dx = jax.grad(lambda x: jaxfused.upsample(x).sum())(x)
    assert jaxfused.upsample(x).shape == (0, 8, 8, 2) and dx.shape == x.shape


def test_one_kernel_each_way(with_library):
    x = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.bfloat16)

    def f(x):
        return jnp.sin(jaxfused.upsample(x).astype(jnp.float32)).sum()

    assert kernels(f, x) == ["jaxfused_upsample"]
    assert kernels(jax.grad(f), x) == ["jaxfused_upsample"] * 2
    assert kernels(lambda x: jaxfused.upsample(x, 4), x) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(7, 0)), "this GPU has 7.0"),
        (dict(dtype=jnp.float64), "x has dtype float64"),
        (dict(shape=(2**20, 64, 64, 1)), "at most 2147482624 values"),
    ],
)
def test_limits(with_library, change, reason):
    good = dict(compute_capability=(8, 0), shape=(2, 4, 4, 3), dtype=jnp.bfloat16)
    assert upsample_cuda.why_unsupported(**good) is None
    assert reason in upsample_cuda.why_unsupported(**good | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 64, 64, 128), (1, 33, 47, 70)], ids=str)
def test_kernels_are_as_accurate_as_jax_numpy(shape, dtype):
    x = normal(np.random.default_rng(0), dtype, *shape)
    assert_values_and_gradients(ours("cuda"), plain_upsample, x, cotangents=2)
