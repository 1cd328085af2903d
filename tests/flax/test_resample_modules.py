"""Layers that resample images: what nnx and linen compute, from parameters of the same names."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx

X = jax.random.normal(jax.random.key(0), (2, 4, 6, 8))
KEY = jax.random.key(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options", "function"),
    [
        ("Resize", dict(size=(7, 3), method="bicubic"), jaxfused.resize),
        ("Resize", dict(factor=1.5, align_corners=True), jaxfused.resize),
        ("PixelShuffle", dict(factor=2, order="pixel_first"), jaxfused.pixel_shuffle),
        ("PixelUnshuffle", dict(factor=(2, 3)), jaxfused.pixel_unshuffle),
        ("BlurPool", dict(strides=2, filter_size=4, padding_mode="edge"), jaxfused.blur_pool),
    ],
)
def test_layers_without_parameters_are_the_functions(name, options, function):
    for dtype in (None, jnp.bfloat16):
        expected = function(X if dtype is None else X.astype(dtype), **options)
        nnx = getattr(jaxfused.nnx, name)(**options, dtype=dtype)
        linen = getattr(jaxfused.linen, name)(**options, dtype=dtype)
        for y in (nnx(X), linen.apply({}, X)):
            assert y.dtype == expected.dtype
            np.testing.assert_array_equal(y, expected)


def randomly(tree):
    """Returns a tree of the same shapes with other numbers than zeros."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(
        structure, [0.3 * rng.standard_normal(a.shape).astype(np.float32) for a in leaves]
    )


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("DeformConv", (8, 4, 3), dict(strides=2, offset_groups=2, feature_group_count=2)),
        ("CARAFE", (8, 2), dict(kernel_size=3, groups=2, compressed_features=4)),
    ],
)
def test_nnx_and_linen_share_their_parameters(name, sizes, options):
    module = flax.nnx.eval_shape(
        lambda: getattr(jaxfused.nnx, name)(*sizes, **options, rngs=flax.nnx.Rngs(0))
    )
    graphdef, state = flax.nnx.split(module)
    params = randomly(flax.nnx.to_pure_dict(state))
    linen = getattr(jaxfused.linen, name)(*sizes[1:], **options)
    made = jax.eval_shape(linen.init, KEY, X)["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda a: a.shape, made)

    def both(params, x):
        return flax.nnx.merge(graphdef, params)(x), linen.apply({"params": params}, x)

    ours, theirs = jax.jit(both)(params, X)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    if name == "DeformConv":
        predicted = jaxfused.conv(
            X, params["offset"]["kernel"], params["offset"]["bias"], strides=2
        )
        offset, mask = predicted[..., :36], jax.nn.sigmoid(predicted[..., 36:])
        expected = jaxfused.deform_conv(
            X, params["kernel"], offset, mask, params["bias"], strides=2, feature_group_count=2
        )
        np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.exhaustive
def test_they_begin_as_a_convolution_and_as_means():
    layer = jaxfused.nnx.DeformConv(8, 4, 3, rngs=flax.nnx.Rngs(0))
    half = jaxfused.conv(X, 0.5 * layer.kernel[...], layer.bias[...])
    np.testing.assert_allclose(layer(X), half, atol=1e-5)
    ones = jnp.ones((1, 8, 8, 8))
    y = jaxfused.nnx.CARAFE(8, rngs=flax.nnx.Rngs(0))(ones)
    np.testing.assert_allclose(y[:, 4:-4, 4:-4], 1, atol=1e-5)  # weights sum to 1


def test_wrong_images_are_named():
    with pytest.raises(ValueError, match=r"CARAFE: x has shape \(4, 6, 8\)"):
        jaxfused.nnx.CARAFE(8, rngs=flax.nnx.Rngs(0))(X[0])
    with pytest.raises(ValueError, match="pixel_shuffle: x has 8 channels and factor is 3"):
        jaxfused.nnx.PixelShuffle(3)(X)
