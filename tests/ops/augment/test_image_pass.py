import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfused import augment
from jaxfused.ops.augment import image_pass_cuda, resample_xla
from jaxfused.ops.augment.image_pass_xla import Blur, Pass
from jaxfused.ops.augment.resample_xla import repeatable_pixels
from jaxfused.ops.augment.steps_xla import Op
from tests.support.grids import parametrize
from tests.support.lowering import kernels

KEY = jax.random.key(3)
NORMALIZE = augment.Normalize(0.5, 0.25)
JITTER = augment.ColorJitter(0.4, 0.4, 0.4, 0.1)

CHAINS = {
    "affine": (augment.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, fill=90.0), JITTER, NORMALIZE),
    "crop": (augment.RandomResizedCrop(17), augment.RandomHorizontalFlip(), JITTER),
    "small crop": (augment.RandomResizedCrop((5, 9), scale=(0.9, 1.0)),),
    "bicubic": (augment.RandomResizedCrop(12, interpolation="bicubic"),),
    "turned crop": (augment.RandomResizedCrop(12), augment.RandomRotation(40.0)),
    "nearest": (augment.RandomRotation(40.0, interpolation="nearest"),),
    "padded crop": (augment.RandomCrop((16, 40), padding=3, fill=7.0),),
    "perspective": (augment.RandomPerspective(p=1.0), augment.RandomInvert()),
    "extremes": (augment.RandomRotation(20.0), augment.RandomAutocontrast(0.7)),
    "equalized": (augment.RandomHorizontalFlip(), augment.RandomEqualize(0.7)),
    "policy": (augment.RandAugment(3, 15, interpolation="bilinear"),),
    "blurred crop": (augment.RandomResizedCrop(40), JITTER, augment.GaussianBlur(5)),
    "blurred": (augment.GaussianBlur((9, 1), p=0.6), augment.RandomInvert(), augment.Cutout(7)),
    "sharpened": (augment.RandomAffine(20), augment.RandomAdjustSharpness((0.0, 3.0), p=0.7)),
    "levels": (
        augment.RandomPosterize(3),
        augment.RandomSolarize(100),
        augment.RandomGamma(),
        augment.RandomGrayscale(0.5),
        augment.Cutout(9),
    ),
}


def images(channels=3, height=21, width=37, dtype="uint8"):
    levels = np.random.default_rng(0).integers(0, 256, (3, height, width, channels))
    levels = levels.astype(np.uint8)
    return levels if dtype == "uint8" else jnp.asarray(levels / np.float32(255), dtype)


def both(transforms, x, **options):
    """Returns the results of the kernels and of XLA for the same draws."""

    def run(implementation):
        return augment.Chain(*transforms, implementation=implementation, **options)

    draws = jax.jit(run("xla").sample)(KEY, x)
    return [np.asarray(jax.jit(run(name).apply)(draws, x)) for name in ("cuda", "xla")]


def assert_near(actual, expected):
    """Asserts that values are equal up to float32's rounding of positions, and ties of levels."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype == np.uint8:
        difference = np.abs(actual.astype(np.int32) - expected)
        assert difference.max() <= 1 and (difference > 0).mean() < 0.01
    else:
        ulp = float(jnp.finfo(actual.dtype).eps)
        actual, expected = (a.astype(np.float32) for a in (actual, expected))
        np.testing.assert_allclose(actual, expected, rtol=ulp, atol=max(ulp, 5e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_kernels_compute_what_xla_does(name):
    assert_near(*both(CHAINS[name], images()))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32"])
def test_dtypes_and_channels(dtype, channels):
    transforms = (augment.RandomAffine(30), JITTER)
    assert_near(*both(transforms, images(channels, dtype=dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_normalized_results(dtype):
    transforms = (augment.RandomResizedCrop(32), NORMALIZE)
    assert_near(*both(transforms, images(), dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["affine", "turned crop", "blurred crop", "blurred", "levels"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_images_whose_rows_are_whole_words(name, dtype):
    assert_near(*both(CHAINS[name], images(height=24, width=40), dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_statistics_and_blurs_of_other_channels(channels):
    transforms = (
        augment.RandomAutocontrast(0.4),
        augment.GaussianBlur(3),
        augment.RandomEqualize(0.6),
    )
    assert_near(*both((*transforms, augment.RandomAdjustSharpness(2.0)), images(channels)))


@pytest.mark.gpu
def test_tiles_that_depend_on_more_than_shared_memory_holds():
    levels = np.arange(9 * 9 * 3).reshape(1, 9, 9, 3).astype(np.uint8)
    x = levels.repeat(60, 1).repeat(60, 2)
    shrunk = (augment.RandomAffine(0, scale=(0.05, 0.1)),)
    assert_near(*both(shrunk, x))
    assert_near(*both((augment.Resize((7, 9)), augment.GaussianBlur(3)), x))


@pytest.mark.gpu
def test_same_bits_again():
    chain = augment.Chain(
        augment.RandAugment(), JITTER, augment.GaussianBlur(5), implementation="cuda"
    )
    first, again = (np.asarray(jax.jit(chain)(KEY, images())) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    alone = jax.jit(lambda x: chain(jax.random.fold_in(KEY, 1)[None], x))(images()[1:2])
    np.testing.assert_array_equal(first[1:2], alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "colours", [(augment.ColorJitter(contrast=0.5),), (augment.GaussianBlur(5),)]
)
def test_images_of_their_own_sizes(colours):
    x = augment.Batch(images(), sizes=np.array([[21, 37], [10, 20], [15, 9]]))
    transforms = (augment.RandomAffine(30), *colours)

    def run(implementation):
        return jax.jit(augment.Chain(*transforms, implementation=implementation))(KEY, x).images

    assert_near(np.asarray(run("cuda")), np.asarray(run("xla")))


@pytest.mark.gpu
def test_vmap_over_images_with_their_own_keys():
    chain = augment.Chain(augment.RandomAffine(30), JITTER, implementation="cuda")
    keys = jax.random.split(KEY, 3)
    mapped = jax.jit(jax.vmap(chain))(keys, images())
    np.testing.assert_array_equal(mapped, jax.jit(chain)(keys, images()))


@pytest.mark.gpu
def test_gradients_of_kernels():
    x = images(dtype="float32")

    def gradient(implementation):
        chain = augment.Chain(augment.RandomAffine(30), JITTER, implementation=implementation)
        return jax.jit(jax.grad(lambda x: jnp.sin(chain(KEY, x)).sum()))(x)

    np.testing.assert_allclose(gradient("cuda"), gradient("xla"), atol=1e-4)


def test_a_repeatable_gradient_is_that_of_a_gather():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7, 3)), jnp.float32)
    places = np.random.default_rng(1).uniform(-2, 9, (2, 40, 30)).round()
    places[:, 20:] = 1  # pixels that many positions read
    dy = jnp.asarray(np.random.default_rng(2).lognormal(0, 4, (40, 30, 3)), jnp.float32)

    def gradient(f, dtype):
        read = functools.partial(f, column=jnp.asarray(places[0]), row=jnp.asarray(places[1]))
        return jax.vjp(read, x.astype(dtype))[1](dy.astype(dtype))[0]

    found = gradient(lambda x, column, row: repeatable_pixels(x, column, row), jnp.float32)
    with jax.enable_x64(True):
        truth = np.asarray(gradient(resample_xla._pixels, jnp.float64))
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-7 * float(dy.max()))
    zero = jax.vjp(lambda x: repeatable_pixels(x, places[0], places[1]), x)[1](0 * dy)[0]
    np.testing.assert_array_equal(zero, 0)


def test_one_kernel_and_one_more_for_a_mean(with_library):
    def launched(*transforms):
        chain = augment.Chain(*transforms, dtype=jnp.bfloat16)
        x = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.uint8)
        return kernels(functools.partial(chain, KEY), x)

    assert launched(*CHAINS["crop"][:2], NORMALIZE) == ["jaxfused_image_pass"]
    assert launched(*CHAINS["affine"]) == ["jaxfused_image_statistics", "jaxfused_image_pass"]
    assert launched(*CHAINS["crop"], augment.GaussianBlur(5), NORMALIZE)[1:] == [
        "jaxfused_image_pass"
    ]
    assert launched(augment.GaussianBlur(5)) == ["jaxfused_image_pass"]
    assert launched(augment.GaussianBlur(35)) == []
    layers = 2 * ["jaxfused_image_statistics", "jaxfused_image_pass"]
    assert launched(augment.RandAugment(), NORMALIZE) == layers
    assert launched(augment.ElasticTransform()) == []


PASS = Pass(None, ((Op.BRIGHTNESS,),), np.dtype("uint8"))


def blurred(reach, *behind):
    blur = Blur(reach, sharpens=False, is_ragged=False, steps=((Op.IDENTITY, *behind),))
    return dataclasses.replace(PASS, blur=blur)


@parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(7, 0)), "this GPU has 7.0"),
        (dict(dtype=jnp.float64), "x has dtype float64"),
        (dict(shape=(2, 4, 4, 2)), "these have 2"),
        (dict(shape=(2, 2**21, 4, 3)), "too large"),
        (dict(spec=blurred((17, 0))), "at most 33 weights, and this one 35"),
        (dict(spec=blurred((1, 1), Op.CONTRAST)), "no statistics of blurred images"),
        (dict(spec=blurred((1, 1)), dtype=jnp.float32), "it blurs uint8 images"),
        (dict(spec=Pass(None, ((Op.INVERT,),) * 17, np.dtype("uint8"))), "at most 16 steps"),
        (dict(spec=Pass(None, (), np.dtype("float64"))), "and not float64"),
    ],
    quick=slice(None),
)
def test_limits(with_library, change, reason):
    good = dict(compute_capability=(8, 0), shape=(2, 4, 4, 3), dtype=jnp.uint8, spec=PASS)
    assert image_pass_cuda.why_unsupported(**good) is None
    assert reason in image_pass_cuda.why_unsupported(**good | change)


def test_a_named_implementation_that_cannot_run_says_why(with_library):
    chain = augment.Chain(augment.ElasticTransform(), implementation="cuda")
    with pytest.raises(ValueError, match="without an elastic deformation"):
        jax.eval_shape(chain, KEY, images())
    chain = augment.Chain(augment.RandomInvert(), implementation="pallas")
    with pytest.raises(ValueError, match="an address for each pixel"):
        jax.eval_shape(chain, KEY, images())
