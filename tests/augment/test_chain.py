import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxfused import augment
from jaxfused.augment.running import check_squares
from tests.support import eight_devices
from tests.support.grids import parametrize

KEY = jax.random.key(7)


def images(count=4, height=12, width=13, channels=3, dtype=np.uint8):
    levels = np.random.default_rng(0).integers(0, 256, (count, height, width, channels))
    return levels.astype(np.uint8) if dtype == np.uint8 else (levels / 255).astype(dtype)


WARPED = augment.Chain(
    augment.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 10),
    augment.ColorJitter(0.4, 0.4, hue=0.1, order="fixed"),
    augment.Normalize(0.5, 0.25),
    dtype=jnp.bfloat16,
)


@functools.cache
def warped(count=4):
    return np.asarray(jax.jit(WARPED)(KEY, images(count)))


# --- keys and batches -----------------------------------------------------------------------------


def test_an_image_depends_on_its_own_key_and_index_alone():
    run = jax.jit(WARPED)
    halves = [run(KEY, images()[part], np.arange(4)[part]) for part in (np.s_[:2], np.s_[2:])]
    np.testing.assert_array_equal(np.concatenate(halves), warped())
    keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(np.arange(4))
    np.testing.assert_array_equal(jax.jit(jax.vmap(WARPED))(keys, images()), warped())


@pytest.mark.exhaustive
def test_frames_of_a_video_have_the_same_draws():
    one = images(2)
    video = np.stack([one] * 3, 1)
    y = np.asarray(jax.jit(WARPED)(KEY, video))
    np.testing.assert_array_equal(y, np.stack([warped(2)] * 3, 1))


def _of_shards():
    mixing = dict(num_classes=5)
    return augment.Chain(
        augment.RandomResizedCrop(8),
        augment.MixUp(**mixing),
        augment.RandAugment(1),
        augment.GaussianNoise(),
    )


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_shards_have_the_same_bits(kind):
    chain, x = _of_shards(), images(8)
    expected = jax.jit(chain)(KEY, x)
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    axis_type = explicit if kind == "Explicit" else auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    run = jax.jit(chain)
    if kind == "Manual":
        mixing = augment.MixUp(num_classes=5, axis_name="data")
        transforms = [mixing if isinstance(t, augment.MixUp) else t for t in chain.transforms]
        run = jax.shard_map(
            lambda x, i: augment.Chain(*transforms)(KEY, x, i),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        run = functools.partial(lambda f, key, x: f(x, np.arange(8)), jax.jit(run))
    with jax.set_mesh(mesh):
        y = run(KEY, jax.device_put(x, P("data")))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() > 1, reason="this process has the devices itself")
def test_on_eight_devices():
    eight_devices.assert_passes(__file__, "not exhaustive")


# --- geometry -------------------------------------------------------------------------------------


@parametrize("angle", [90, 180, 270], quick=[0])
def test_quarter_turns_are_exact(angle):
    x = images(1, 8, 8)
    y = jax.jit(augment.Chain(augment.RandomRotation((angle, angle))))(KEY, x)
    np.testing.assert_array_equal(y[0], np.rot90(x[0], angle // 90))


@pytest.mark.exhaustive
def test_what_a_crop_discards_does_not_come_back():
    crop = augment.RandomResizedCrop(6, scale=(0.1, 0.3))
    chain = augment.Chain(crop, augment.RandomRotation((45, 45), fill=9.0))
    y = np.asarray(jax.jit(chain)(KEY, 100 + 0 * images()))
    assert chain.describe().count("pass") == 1
    assert (y[:, 0, 0] < 40).all() and (y[:, 2:4, 2:4] == 100).all()


@pytest.mark.exhaustive
def test_one_resampling_is_several_in_a_row():
    parts = [augment.RandomHorizontalFlip(), augment.RandomCrop(10, padding=2, fill=7.0)]
    together = augment.Chain(*parts)
    draws = jax.jit(together.sample)(KEY, images())
    y = jax.jit(together.apply)(draws, images())
    step = jax.jit(augment.Chain(parts[0]).apply)(draws[:1], images())
    step = jax.jit(augment.Chain(parts[1]).apply)(draws[1:], step)
    np.testing.assert_array_equal(y, step)


@pytest.mark.exhaustive
def test_a_crop_fits_into_its_image():
    crop = augment.RandomResizedCrop(4)

    def boxes(size):
        keys = jax.random.split(KEY, 1000)
        return np.asarray(jax.vmap(lambda k: crop.values(k, jnp.array(size, jnp.float32)))(keys))

    left, top, width, height = boxes((60, 90)).T
    assert (left >= 0).all() and (top >= 0).all() and (width >= 1).all() and (height >= 1).all()
    assert (left + width <= 90).all() and (top + height <= 60).all()
    share = width * height / (60 * 90)
    assert 0.07 < share.min() < 0.1 and share.max() > 0.85
    np.testing.assert_array_equal(boxes((1000, 10))[0], [0, 493, 10, 13])


@pytest.mark.exhaustive
def test_elastic_displacements_have_their_deviation():
    elastic = augment.ElasticTransform(alpha=50.0, sigma=5.0)
    field = elastic.field(KEY, (160, 160))
    assert abs(float(field[20:-20, 20:-20].std()) - 0.163 * 50 / 5) < 0.3


def test_padding_changes_nothing():
    chain = augment.Chain(
        augment.RandomAffine(20, (0.1, 0.1)),
        augment.ColorJitter(contrast=0.5),
        augment.RandomEqualize(1.0),
        augment.GaussianBlur(5),
    )
    x = images(2, 9, 10)
    padded = np.full((2, 14, 12, 3), 77, np.uint8)
    padded[:, :9, :10] = x
    batch = augment.Batch(padded, sizes=np.array([[9, 10]] * 2))
    y = jax.jit(chain)(KEY, batch)
    np.testing.assert_array_equal(y.images[:, :9, :10], jax.jit(chain)(KEY, x))
    assert not y.images[:, 9:].any() and not y.images[:, :, 10:].any()
    np.testing.assert_array_equal(y.sizes, batch.sizes)


@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_a_smaller_image_is_centred_as_in_torchvision(size):
    row = np.arange(4, dtype=np.uint8)[None, None, :, None]
    y = jax.jit(augment.Chain(augment.CenterCrop((1, size), fill=9.0)))(KEY, row)
    expected = {1: [2], 3: [0, 1, 2], 6: [9, 0, 1, 2, 3, 9], 7: [9, 0, 1, 2, 3, 9, 9]}
    assert y.ravel().tolist() == expected[size]


def test_boxes_that_leave_count_no_longer():
    boxes = np.array([[[0, 0, 2, 2], [6, 6, 9, 9]]], np.float32)
    batch = augment.Batch(images(1, 10, 10), boxes=boxes, valid=np.ones((1, 2), bool))
    y = jax.jit(augment.Chain(augment.CenterCrop(5)))(KEY, batch)
    assert y.valid.tolist() == [[False, True]] and y.visible.shape == (1, 2)
    np.testing.assert_allclose(y.boxes[0, 1], [4, 4, 5, 5])
    np.testing.assert_allclose(y.visible[0, 1], 1 / 9, atol=1e-6)


# --- colour and mixing ----------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_opacity_moves_and_keeps_its_value():
    x = np.concatenate([images(), np.full((4, 12, 13, 1), 200, np.uint8)], -1)
    chain = augment.Chain(
        augment.RandomHorizontalFlip(),
        augment.ColorJitter(0.4, 0.4, 0.4),
        augment.RandomInvert(1.0),
    )
    y = jax.jit(chain)(KEY, x)
    assert (y[..., 3] == 200).all()
    np.testing.assert_array_equal(y[..., :3], jax.jit(chain)(KEY, x[..., :3]))


POINTWISE = (
    augment.ColorJitter(0.4),
    augment.RandomAutocontrast(1.0),
    augment.RandomEqualize(1.0),
    augment.RandomGamma(),
    augment.RandomInvert(1.0),
    augment.RandomPosterize(3, p=1.0),
    augment.RandomSolarize(0.5, p=1.0),
)


@parametrize("transform", POINTWISE, quick=[4])
def test_what_mixes_no_colours_takes_any_number_of_channels(transform):
    x = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 5)).astype(np.uint8)
    chain = jax.jit(augment.Chain(transform))
    y = chain(KEY, x)
    for channel in range(5):
        np.testing.assert_array_equal(y[..., [channel]], chain(KEY, x[..., [channel]]))


@parametrize("mixing", [augment.MixUp, augment.CutMix], quick=[1])
def test_labels_are_weighted_by_what_is_seen(mixing):
    x = np.stack([np.full((12, 13, 1), level, np.float32) for level in (0, 1)])
    batch = augment.Batch(x, labels=np.array([0, 1]))
    y = jax.jit(augment.Chain(mixing(num_classes=2)))(KEY, batch)
    np.testing.assert_allclose(y.labels[:, 1], np.asarray(y.images).mean((1, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(y.labels.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("transform", [augment.RandAugment(), augment.RandomPerspective()])
def test_draws_are_the_same_where_floats_have_64_bits(transform):
    chain = augment.Chain(transform)
    expected = jax.jit(chain.sample)(KEY, images())
    with jax.enable_x64(True):
        draws = jax.jit(chain.sample)(KEY, images())
    np.testing.assert_array_equal(draws[0].on, expected[0].on)
    assert jnp.abs(draws[0].values - expected[0].values).max() < 1e-4


def test_all_levels_survive_bfloat16():
    x = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    half = augment.Chain(dtype=jnp.bfloat16)(KEY, x)
    np.testing.assert_array_equal(augment.Chain(dtype=jnp.uint8)(KEY, half), x)


def test_gradients():
    chain = augment.Chain(
        augment.RandomAffine(20), augment.ColorJitter(0.2, 0.2, 0.2), augment.Normalize(0.5, 0.5)
    )
    x = 0.4 + 0.2 * images(1, 5, 6, dtype=np.float32)
    draws = jax.jit(chain.sample)(KEY, x)
    check_grads(jax.jit(functools.partial(chain.apply, draws)), (x,), order=1, eps=1e-3)


def test_gamma_of_values_at_0_and_below():
    x = np.zeros((1, 2, 2, 3), np.float32)
    left_out = augment.Chain(augment.RandomGamma((0.5, 0.5), p=0.0))
    dx = jax.jit(jax.grad(lambda x: left_out(KEY, x).sum()))(x)
    np.testing.assert_array_equal(dx, 1)
    y = jax.jit(augment.Chain(augment.RandomGamma((0.5, 0.5))))(KEY, x - 0.25)
    np.testing.assert_array_equal(y, 0)


def test_bare_images_and_empty_batches():
    chain = augment.Chain(augment.RandomResizedCrop(4), dtype=jnp.float32)
    assert jax.eval_shape(chain, KEY, images()[0]).shape == (4, 4, 3)
    assert jax.eval_shape(chain, KEY, images(0)).shape == (0, 4, 4, 3)
    assert jax.jit(chain)(KEY, images(0)).shape == (0, 4, 4, 3)
    none = augment.Batch(images(0), masks=np.zeros((0, 12, 13), np.uint8))
    assert jax.eval_shape(chain, KEY, none).masks.shape == (0, 4, 4)


def test_a_chain_prints_its_options_and_passes():
    assert repr(augment.Chain(augment.RandomInvert(), dtype="bfloat16")) == (
        "Chain(\n  RandomInvert(p=0.5),\n  dtype=bfloat16,\n)"
    )
    assert WARPED.describe() == (
        "pass 1: RandomAffine, ColorJitter, Normalize (one resampling, read twice for statistics)"
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: augment.Chain(3), "3 is no transform"),
        (lambda: augment.Chain([augment.RandomInvert()]), r"one by one: Chain\(\*transforms\)"),
        (lambda: augment.Chain(dtype="bf16"), "dtype is 'bf16', which is no dtype"),
        (lambda: augment.RandomCrop(4, padding=-1), "padding is -1"),
        (lambda: augment.MixUp(num_classes=0), "num_classes is 0"),
        (lambda: augment.Normalize(np.nan, 1.0), "mean is nan, .* pass a finite"),
        (lambda: augment.RandomChoice(augment.RandomInvert(), p=[np.nan]), "a weight for each"),
        (lambda: augment.Chain(dtype=jnp.int32), "dtype is int32"),
        (lambda: augment.Chain(mask_fill="0"), "mask_fill is '0'"),
        (
            lambda: augment.Chain(augment.Normalize(0.5, 0.5), augment.RandomInvert()),
            "RandomInvert takes values of 0 to 1",
        ),
        (
            lambda: augment.ColorJitter(brightness=(0, np.inf)),
            "brightness is inf, .* pass a finite",
        ),
        (lambda: augment.RandomErasing(scale=(0.1, 2)), "scale's larger number is 2.0"),
        (lambda: augment.Chain()(None, np.zeros((1, 2, 2, 3), np.uint8)), "key is None"),
        (lambda: augment.Chain()(jax.random.key(0), None), "images are None"),
        (lambda: augment.RandomRotation(degrees=(5, 1)), r"degrees is \(5.0, 1.0\)"),
        (lambda: augment.RandomAffine(shear=(0, 90)), "between -90 and 90"),
        (lambda: augment.RandomAffine(translate=0.1), "translate is 0.1"),
        (
            lambda: augment.Chain(augment.RandomRotation(5, interpolation="cubic")),
            "RandomRotation has interpolation='cubic', which is not known",
        ),
        (lambda: augment.ColorJitter(hue=0.6), "hue is"),
        (lambda: augment.RandomSolarize(257), "threshold is 257"),
        (lambda: augment.GaussianBlur(4), "kernel_size is 4"),
        (lambda: augment.RandAugment(magnitude=31), "there are 31 bins"),
        (lambda: augment.RandomApply(augment.CenterCrop(3)), "CenterCrop cannot be left out"),
        (lambda: augment.RandomResizedCrop(0), "size is 0"),
        (lambda: augment.Normalize(0.5, 0.0), "std 0.0"),
        (lambda: augment.Normalize([], []), "stds above 0"),
        (lambda: augment.RandomErasing(value=(1, np.nan, 2)), "value is nan"),
        (lambda: augment.MixUp(alpha=np.inf), "alpha is inf"),
        (lambda: augment.RandomApply(augment.RandomInvert(), p=None), "p is None"),
        (lambda: augment.Chain(augment.RandAugment(interpolation="cubic")), "RandAugment or"),
        (lambda: augment.Chain()({}, np.zeros((1, 2, 2, 3), np.uint8)), r"key is \{\}"),
        (
            lambda: augment.Chain()(KEY, {"image": np.zeros((1, 2, 2, 3))}),
            r"a dict with \['image'\]",
        ),
    ],
)
def test_errors_of_options(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("fill", [256, -1, 0.5, 255])
def test_a_mask_is_not_filled_with_what_its_dtype_wraps(fill):
    chain = augment.Chain(augment.RandomAffine(translate=(0.5, 0.5)), mask_fill=fill)
    dtype = jnp.bool_ if fill == 255 else jnp.uint8
    shape = jax.ShapeDtypeStruct((2, 4, 6), dtype)
    batch = augment.Batch(jax.ShapeDtypeStruct((2, 4, 6, 3), jnp.uint8), masks=shape)
    with pytest.raises(
        ValueError, match=rf"mask_fill is .* masks have dtype {dtype.dtype}; pass a whole"
    ):
        jax.eval_shape(chain, KEY, batch)


@pytest.mark.parametrize(
    ("transform", "batch", "message"),
    [
        (augment.RandomInvert(), images()[0, 0], r"images have shape \(13, 3\)"),
        (augment.RandomInvert(), images().astype(np.int32), "dtype int32"),
        (augment.ColorJitter(hue=0.1), images(channels=2), "images have 2 channels"),
        (augment.Normalize([1, 2], 1.0), images(), "mean has 2 numbers"),
        (augment.RandomRotation(5, fill=(1, 2)), images(), "RandomRotation: fill has 2 numbers"),
        (augment.RandAugment(fill=(1, 2)), images(), "TrivialAugmentWide: fill has 2 numbers"),
        (augment.RandomQuarterTurn(), images(), "images are 12 x 13"),
        (
            augment.MixUp(),
            augment.Batch(images(), labels=np.arange(4)),
            "pass num_classes",
        ),
        (augment.MixUp(), augment.Batch(images(), masks=images()[..., 0]), "has masks"),
        (augment.CutMix(), augment.Batch(images(), sizes=np.ones((4, 2))), "put a crop or Resize"),
        (augment.MixUp(axis_name="data"), images(), "no axis 'data' is mapped here"),
        (augment.RandomInvert(), augment.Batch(images(), sizes=np.ones(4)), "sizes have shape"),
    ],
)
def test_errors_of_images(transform, batch, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(augment.Chain(transform), KEY, batch)


def test_errors_of_draws():
    chain, x = augment.Chain(augment.RandomInvert()), images()
    draws = jax.jit(chain.sample)(KEY, x)
    with pytest.raises(ValueError, match=r"draws are those of 1 parts .* chain has 2 parts"):
        augment.Chain(augment.RandomInvert(), augment.RandomGamma()).apply(draws, x)
    with pytest.raises(ValueError, match=r"begin with \[\(4,\)\], .* there are 3 images"):
        chain.apply(draws, x[:3])


def test_errors_of_keys():
    chain = augment.Chain(augment.MixUp())
    with pytest.raises(ValueError, match=r"key has shape \(3,\), but there are 4"):
        chain(jax.random.split(KEY, 3), images())
    with pytest.raises(ValueError, match="MixUp draws once for the whole batch"):
        chain(jax.random.split(KEY, 4), images())
    with pytest.raises(ValueError, match="index is"):
        chain(KEY, images(), np.arange(3))


def test_labels_and_sizes_of_one_byte():
    key, images = jax.random.key(0), np.zeros((2, 1, 1, 3), np.uint8)
    batch = augment.Batch(images, labels=np.array([3, 44], np.uint8))
    weights = jax.jit(augment.Chain(augment.MixUp(num_classes=300)))(key, batch).labels
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    batch = augment.Batch(images, sizes=np.ones((2, 2), np.uint8))
    assert (jax.jit(augment.Chain(augment.Resize(256)))(key, batch).sizes == 256).all()


def _batch(**arrays):
    return augment.Batch(np.zeros((2, 4, 6, 3), np.uint8), **arrays)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_batch(labels=np.array([4, 7])), "MixUp: labels hold 7, but num_classes is 5"),
        (_batch(labels=np.array([-1, 0])), "MixUp: labels hold -1"),
        (_batch(labels=np.array([0.5, 1])), r"MixUp: labels \[B\] have dtype float32"),
        (
            _batch(labels=np.ones((2, 6))),
            r"MixUp: labels have shape \(2, 6\), but num_classes is 5",
        ),
        (_batch(sizes=np.array([[4, 6], [5, 2]])), r"sizes hold \[5, 2\], but images .* \(4, 6\)"),
        (_batch(sizes=np.array([[4, -6], [4, 2]])), r"sizes hold \[4, -6\]"),
        (_batch(boxes=np.ones((2, 3, 4)), valid=np.ones((2, 1))), r"valid has shape \(2, 1\)"),
        (_batch(valid=np.ones((2, 1))), "there are no boxes"),
    ],
)
def test_values_that_do_not_fit_the_images(batch, message):
    with pytest.raises(ValueError, match=message):
        augment.Chain(augment.MixUp(num_classes=5))(KEY, batch)


def test_known_sizes_of_quarter_turns_are_squares():
    batch = augment.Batch(np.zeros((2, 4, 4, 3), np.uint8), sizes=np.array([[4, 4], [4, 2]]))
    turn = augment.RandomQuarterTurn()
    with pytest.raises(ValueError, match="images are 4 x 2, but a quarter turn"):
        augment.Chain(turn)(KEY, batch)
    check_squares((augment.CenterCrop(3), turn), jnp.asarray(batch.sizes))


@pytest.mark.parametrize("size", [(1, 7), (7, 1)])
def test_a_perspective_keeps_a_single_row(size):
    x = images(2, *size, dtype=np.float32)
    y = jax.jit(augment.Chain(augment.RandomPerspective(p=1.0)))(KEY, x)
    np.testing.assert_array_equal(y, x)


def test_traced_sizes_end_at_the_array():
    batch = _batch(sizes=np.array([[4, 6], [9, -1]]))
    sizes = jax.jit(augment.Chain(augment.RandomHorizontalFlip(p=1.0)))(KEY, batch).sizes
    assert sizes.tolist() == [[4, 6], [4, 0]]


def test_boxes_count_by_any_number_but_0():
    batch = augment.Batch(
        np.zeros((1, 4, 4, 3), np.uint8),
        boxes=np.array([[[0, 0, 2, 2]] * 3], np.float32),
        valid=np.array([[0, 1, 2]]),
    )
    result = jax.jit(augment.Chain())(jax.random.key(0), batch)
    np.testing.assert_array_equal(result.valid, [[False, True, True]])
    assert result.valid.dtype == bool
