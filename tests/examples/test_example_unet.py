"""examples/unet: the model, tiles, short trainings on real nuclei, folders, bad input."""

import argparse
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from examples import quantization
from examples.errors import ExampleError
from examples.runs import Run
from examples.unet import dataset, predict, quantize, train
from examples.unet.image_files import open_image, write_rows
from examples.unet.model import UNet
from examples.unet.tiles import axis_tiles, predict_rows
from tests.support.run_metrics import metrics

# --- model ----------------------------------------------------------------------------------------


def plain_logits(params, images, *, groups):
    """The U-Net of the paper, with group norm and SiLU, using the parameters of a `UNet`."""

    def layer(x, p):
        x = jax.lax.conv_general_dilated(
            x, p["conv"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        split = x.reshape(*x.shape[:3], groups, -1)
        mean = split.mean((1, 2, 4), keepdims=True)
        variance = split.var((1, 2, 4), keepdims=True)
        x = ((split - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape)
        return jax.nn.silu(x * p["norm"]["scale"] + p["norm"]["bias"])

    def block(x, p):
        return layer(layer(x, p["first"]), p["second"])

    def halved(x):
        return jnp.maximum(
            jnp.maximum(x[:, ::2, ::2], x[:, 1::2, ::2]),
            jnp.maximum(x[:, ::2, 1::2], x[:, 1::2, 1::2]),
        )

    def doubled(x, p):
        y = jnp.zeros((len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[-1] // 2))
        for i in range(2):
            for j in range(2):
                # As in JAX, the weights are flipped.
                y = y.at[:, i::2, j::2].set(x @ p["kernel"][1 - i, 1 - j] + p["bias"])
        return y

    seen = [block(images, params["down"][0])]
    for level in range(1, len(params["down"])):
        seen.append(block(halved(seen[-1]), params["down"][level]))
    x = seen.pop()
    for level in reversed(range(len(seen))):
        x = jnp.concatenate([seen[level], doubled(x, params["enlarge"][level])], axis=-1)
        x = block(x, params["up"][level])
    return (x @ params["head"]["kernel"] + params["head"]["bias"])[..., 0]


def random_model(**options):
    """Returns a model's structure, and parameters made by NumPy, so that nothing has to be compiled."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: UNet(**options, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(path, p):
        assert p.dtype == np.float32
        centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return (centre + 0.2 * rng.standard_normal(p.shape)).astype(np.float32)

    return graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params))


def test_model_is_the_papers():
    graphdef, params = random_model(base=4, levels=3, groups=2, channels=3)
    images = np.random.default_rng(1).standard_normal((2, 16, 24, 3), np.float32)
    logits, expected = jax.jit(
        lambda p: (nnx.merge(graphdef, p)(images), plain_logits(p, images, groups=2))
    )(params)
    assert logits.shape == (2, 16, 24) and np.ptp(expected) > 0.5
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_papers_size_has_its_channels():
    model = nnx.eval_shape(lambda: UNet(base=64, levels=5, groups=32, channels=1, rngs=nnx.Rngs(0)))
    assert [block.second.conv.out_features for block in model.down] == [64, 128, 256, 512, 1024]
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    # The paper's 3 x 3 kernels and 2 x 2 up-convolutions, with 2 parameters a channel for the norms.
    kernels = [(1, 64), (64, 128), (128, 256), (256, 512), (512, 1024)]
    kernels += [(2 * width, width) for width in (512, 256, 128, 64)]
    blocks = sum(9 * (i * o + o * o) + 4 * o for i, o in kernels)
    ups = sum(4 * 2 * width * width + width for width in (512, 256, 128, 64))
    assert count == blocks + ups + 64 + 1


def test_bfloat16_computes_close_to_float32():
    images = np.random.default_rng(1).uniform(-1, 1, (2, 16, 16, 1)).astype(np.float32)
    logits = []
    for dtype in (jnp.float32, jnp.bfloat16):
        graphdef, params = random_model(base=4, levels=2, groups=2, channels=1, dtype=dtype)
        logits.append(jax.jit(nnx.merge(graphdef, params))(images.astype(dtype)))
        assert logits[-1].dtype == jnp.float32
    full, half = logits
    assert 1e-5 < np.abs(half - full).max() / np.abs(full).max() < 0.1


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "tile", "overlap"),
    [(1, 8, 4), (8, 8, 4), (9, 8, 4), (100, 8, 4), (101, 16, 5), (64, 16, 0), (30, 16, 8)],
)
def test_tiles_cover_an_axis_with_weights_that_sum_to_one(length, tile, overlap):
    total = np.zeros(length)
    for start, weights in axis_tiles(length, tile, overlap):
        assert start >= 0 and start + len(weights) <= length
        assert (weights > 0).all()
        total[start : start + len(weights)] += weights
    np.testing.assert_allclose(total, 1, rtol=1e-6)


def test_weights_are_smooth_and_small_where_a_tile_knows_least():
    _, weights = axis_tiles(100, 16, 8)[1]
    assert weights[0] < 0.01 and weights[-1] < 0.01 and weights[7:9].min() > 0.98
    assert np.abs(np.diff(weights)).max() < 0.2


def tiled(image, function, *, tile, overlap, batch_size=3):
    """Returns the rows of `predict_rows` as one array, and checks the arguments of `function`."""

    def checked(tiles):
        assert tiles.shape == (batch_size, tile, tile, image.shape[2]) and tiles.dtype == np.uint8
        return function(tiles)

    rows = list(predict_rows(image, checked, tile=tile, overlap=overlap, batch_size=batch_size))
    assert {block.dtype for block in rows} == {np.dtype(np.float32)}
    return np.concatenate(rows)


def blurred(tiles):
    """Returns the mean over 5 x 5 pixels, with zeros outside, like a convolution within a tile."""
    padded = np.pad(tiles[..., 0] / np.float32(255), ((0, 0), (2, 2), (2, 2)))
    return np.lib.stride_tricks.sliding_window_view(padded, (5, 5), (1, 2)).mean((-1, -2))


@pytest.mark.parametrize(
    ("height", "width"), [(100, 77), (32, 32), (33, 31), (5, 90), (3, 4), (1, 1)]
)
def test_tiled_equals_whole_where_a_pixel_depends_on_itself(height, width):
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)

    def function(tiles):
        return tiles.mean(axis=-1) / 255

    result = tiled(image, function, tile=32, overlap=12)
    np.testing.assert_allclose(result, function(image), rtol=1e-6, atol=1e-6)


def test_tiled_equals_whole_where_a_pixel_depends_on_its_surroundings():
    image = np.random.default_rng(0).integers(0, 256, (150, 131, 1), np.uint8)
    whole = blurred(image[None])[0]
    blended = np.abs(tiled(image, blurred, tile=64, overlap=32) - whole).max()
    butted = np.abs(tiled(image, blurred, tile=64, overlap=0) - whole).max()
    assert blended < 0.02 < 0.2 < butted


def test_an_image_larger_than_memory_is_read_and_written_where_it_lies(tmp_path):
    side = 6000
    image = np.lib.format.open_memmap(tmp_path / "in.npy", "w+", np.uint8, (side, side))
    image[::100] = 200
    image[:, ::100] = 100
    del image
    tracemalloc.start()
    rows = predict_rows(
        open_image(tmp_path / "in.npy", channels=1),
        lambda tiles: tiles[..., 0] / np.float32(255),
        tile=128,
        overlap=16,
        batch_size=8,
    )
    blocks = (np.round(block * 255).astype(np.uint8) for block in rows)
    write_rows(tmp_path / "out.npy", (side, side), blocks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < side * side / 2
    given, written = (np.load(tmp_path / name, mmap_mode="r") for name in ("in.npy", "out.npy"))
    assert np.array_equal(given, written)


# --- training on the nuclei -----------------------------------------------------------------------

SHORT = ["--base", "8", "--levels", "2", "--crops", "80", "--epochs", "4"]
SHORT += ["--checkpoint-every", "2"]


@pytest.fixture(scope="module")
def short_run(made_once):
    return made_once("nuclei", lambda out: train.main([*SHORT, "--out", str(out)]))


@pytest.fixture
def small_run(tmp_path_factory):
    """A run of two steps, for tests that do not need a trained network."""
    out = tmp_path_factory.mktemp("small") / "run"
    flags = ["--base", "4", "--levels", "2", "--groups", "2", "--crops", "8", "--batch-size", "4"]
    train.main([*flags, "--epochs", "1", "--warmup-epochs", "0", "--out", str(out)])
    return out


def result(run):
    return json.loads((run / "metrics.json").read_text())


def held_out():
    options = dict(batch_size=8, seed=0, crop=64, crops=8, turn=True, held_out=0.25)
    return dataset.nuclei(**options).held_out(0)


def model_of(run_directory):
    """Returns a function from whole images or tiles, uint8 [N, H, W, 1], to probabilities."""
    run = Run.load(run_directory)
    flags = argparse.Namespace(**run.config["flags"])
    graphdef, params = train.create(flags, channels=1, size=flags.crop)
    params = run.restore(dict(params=params))["params"]
    function = train.make_predict(graphdef, dtype=flags.dtype)
    return lambda tiles: np.asarray(function(params, tiles))


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_short_training_learns_and_draws_its_pictures(short_run):
    losses = [r["loss"] for r in metrics(short_run) if "loss" in r]
    assert len(losses) == 4 * (80 // 8)
    # A network that learns nothing keeps its first loss, about 1.5.
    assert np.mean(losses[-10:]) < 0.65 * losses[0]
    dice, iou = result(short_run)["test_dice"], result(short_run)["test_iou"]
    assert dice > 0.8  # predicting foreground everywhere would give 0.29
    assert iou == pytest.approx(dice / (2 - dice))
    for name in ("curve.png", "predictions.png"):
        with Image.open(short_run / name) as image:
            assert image.width > 1000 and len(image.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.exhaustive
@pytest.mark.long
def test_same_seed_same_result_also_when_interrupted(short_run, tmp_path, monkeypatch):
    """Data order, augmentation, optimizer and schedule continue; a directory may be relative."""
    make_train_step = train.training.make_train_step

    class PowerCut(Exception):
        pass

    def failing(*args, **kwargs):
        train_step = make_train_step(*args, **kwargs)

        def step_or_fail(state, batch, step):
            if step == 25:
                raise PowerCut
            return train_step(state, batch, step)

        return step_or_fail

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(train.training, "make_train_step", failing)
        train.main([*SHORT, "--out", "run"])
    train.main(["--resume", "--out", "run"])
    assert metrics(tmp_path / "run") == metrics(short_run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags", [[], ["--calibrate", "2", "--input-percentile", "99.99"]], ids=str
)
def test_fewer_bits_find_the_nuclei_too(short_run, flags, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "_SECONDS", 0.01)
    quantize.main([str(short_run), *flags])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in lines if line[0] in quantization.RULES and line[2] == "MB"}
    assert list(rows) == list(quantization.RULES)
    size, dice = ({name: float(row[i]) for name, row in rows.items()} for i in (1, 3))
    assert dice["float"] == pytest.approx(result(short_run)["test_dice"], abs=6e-5)
    assert abs(dice["int8"] - dice["float"]) < 0.02
    assert size["int8"] < 0.4 * size["float"]
    layers = [line[0] for line in lines if "gptq," in line or "gptq" in line]
    assert ("down/0/first/conv" in layers) == bool(flags)


def test_a_run_of_another_example_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(flags={}, channels=1, data="")))
    with pytest.raises(ExampleError, match=r"must be one of examples\.unet\.train"):
        quantize.main([str(tmp_path)])


@pytest.mark.exhaustive
def test_seams_do_not_show(short_run):
    """Group norms see one tile only, so tiled and whole predictions differ, but not at the seams."""
    image, mask, function = held_out()["image"], held_out()["mask"], model_of(short_run)
    whole = function(image[None])[0]
    blended, butted = (
        tiled(image, function, tile=64, overlap=overlap, batch_size=8) for overlap in (32, 0)
    )

    def step_over_seams(probabilities, stride):
        """Returns the jump between rows at the start of a tile, divided by the jump elsewhere."""
        steps = np.abs(np.diff(probabilities, axis=0)).mean(axis=1)
        return steps[stride - 1 :: stride].mean() / steps.mean()

    assert step_over_seams(butted, 64) > 2 > 1.2 > step_over_seams(blended, 32)
    assert np.abs(blended - whole).mean() < np.abs(butted - whole).mean() < 0.1
    dice, whole_dice = (train.scores([(p >= 0.5, mask)])["test_dice"] for p in (blended, whole))
    assert dice > whole_dice - 0.02


@pytest.mark.exhaustive
def test_predict_is_as_good_as_the_evaluation(short_run, tmp_path, capsys):
    image, mask = held_out()["image"], held_out()["mask"]
    Image.fromarray(image[..., 0]).save(tmp_path / "in.png")
    np.save(tmp_path / "in.npy", image[..., 0])

    def run(source, target, *more):
        paths = [str(tmp_path / source), str(tmp_path / target)]
        predict.main([*paths, "--checkpoint", str(short_run), *more])
        if target.endswith(".npy"):
            return np.load(tmp_path / target)
        with Image.open(tmp_path / target) as written:
            assert written.mode == "L"
            return np.asarray(written)

    written = run("in.png", "out.png")
    assert f"{written.mean() / 255:.1%} foreground in 128 x 512 pixels" in capsys.readouterr().out
    expected = {name: result(short_run)[name] for name in ("test_dice", "test_iou")}
    assert train.scores([(written, mask)]) == expected
    np.testing.assert_array_equal(run("in.npy", "out.npy"), written)
    sure = run("in.png", "sure.npy", "--probability")
    assert len(np.unique(sure)) > 100
    certain = np.abs(sure.astype(int) - 127.5) > 1
    np.testing.assert_array_equal((sure > 127)[certain], (written > 0)[certain])
    assert len(list(tmp_path.iterdir())) == 5  # no partial files


def test_the_right_quarter_is_held_out():
    options = dict(batch_size=8, seed=0, crop=64, crops=8, turn=True, held_out=0.25)
    data = dataset.nuclei(**options)
    with Image.open(dataset._NUCLEI / "image.png") as file:
        image = np.asarray(file)
    with Image.open(dataset._NUCLEI / "labels.png") as file:
        labels = np.asarray(file)
    np.testing.assert_array_equal(data.train_batch.read(0)[0][..., 0], image[:, :384])
    np.testing.assert_array_equal(data.train_batch.read(0)[1], labels[:, :384] > 0)
    np.testing.assert_array_equal(data.held_out(0)["image"][..., 0], image[:, 384:])
    np.testing.assert_array_equal(data.held_out(0)["mask"], labels[:, 384:] > 0)


def test_scores_are_the_definitions():
    prediction, truth = np.array([[1, 1, 0, 0]]), np.array([[1, 0, 1, 0]])
    assert train.scores([(prediction, truth)]) == dict(test_dice=1 / 2, test_iou=1 / 3)
    # Scores are over all pixels together, not the mean over images.
    pairs = [(prediction, truth), (truth, truth), (truth * 0, truth * 0)]
    assert train.scores(pairs) == dict(test_dice=6 / 8, test_iou=3 / 5)
    assert train.scores([(truth * 0, truth * 0)]) == dict(test_dice=1.0, test_iou=1.0)


# --- augmentation ---------------------------------------------------------------------------------


def test_crops_come_from_everywhere_and_keep_image_and_mask_together():
    mask = np.arange(20 * 30, dtype=np.int32).reshape(20, 30)
    rng = np.random.default_rng(0)
    corners = set()
    for _ in range(500):
        image, cropped = dataset.random_crop(mask[..., None], mask, 16, rng)
        np.testing.assert_array_equal(image[..., 0], cropped)
        assert cropped.shape == (16, 16) and (np.diff(cropped, axis=1) == 1).all()
        corners.add(divmod(int(cropped[0, 0]), 30))
    assert {top for top, _ in corners} == set(range(5))
    assert {left for _, left in corners} == set(range(15))
    small, _ = dataset.random_crop(mask[:3, :, None], mask[:3], 16, rng)
    assert small.shape == (16, 16, 1) and (small[3] == small[2]).all()  # mirrored at the edge


def test_crops_are_laid_in_eight_ways():
    mask = np.arange(9).reshape(3, 3)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        image, turned = dataset.turned(mask[..., None], mask, rng)
        np.testing.assert_array_equal(image[..., 0], turned)
        seen.add(turned.tobytes())
    assert len(seen) == 8


def test_light_changes_keep_the_order_of_grey_values():
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None, None], (1, 200, 1))
    rng = np.random.default_rng(0)
    means = []
    for _ in range(20):
        rows = dataset.relit(ramp, rng).mean(axis=(1, 2))
        assert (np.diff(rows) > -1).all()
        means.append(rows.mean())
    assert max(means) - min(means) > 40


# --- folders --------------------------------------------------------------------------------------

FOLDER = ["--base", "4", "--levels", "2", "--groups", "2", "--crop", "16", "--batch-size", "4"]
FOLDER += ["--epochs", "2", "--warmup-epochs", "1", "--held-out", "0.2", "--evaluate-every", "1"]


@pytest.fixture
def folder(tmp_path):
    """Writes ten colour images of unequal sizes, one in a subfolder, and masks with labels over 255."""
    rng = np.random.default_rng(0)
    root = tmp_path / "data"
    for i in range(10):
        name = f"plate/{i}" if i == 3 else str(i)
        shape = (20 + i, 40 - 3 * i)
        labels = (rng.random(shape) < 0.3) * rng.integers(1, 60_000, shape)
        image = (labels[..., None] > 0) * 150 + rng.integers(0, 50, (*shape, 3))
        for kind, array in (("images", image.astype(np.uint8)), ("masks", labels)):
            path = root / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            suffix = ".bmp" if kind == "images" else ".png"
            if kind == "masks":
                array = array.astype(np.uint16)
            Image.fromarray(array).save(path.with_suffix(suffix))
    return root


def load_folder(root):
    options = dict(batch_size=4, seed=0, crop=16, crops=2, turn=False, held_out=0.2)
    return dataset.folder(root, **options)


def test_a_folder_is_read_in_pairs(folder):
    data = load_folder(folder)
    assert (data.channels, data.train_size, data.held_out.images) == (3, 16, 2)
    pairs = [data.train_batch.read(i) for i in range(8)]
    pairs += [(b["image"], b["mask"]) for b in map(data.held_out, range(2))]
    assert sorted(mask.shape[0] for _, mask in pairs) == list(range(20, 30))
    for image, mask in pairs:
        assert image.dtype == mask.dtype == np.uint8
        np.testing.assert_array_equal(image.min(axis=-1) >= 150, mask)
    batch = data.train_batch(0)
    assert batch["image"].shape == (4, 16, 16, 3) and batch["mask"].shape == (4, 16, 16)


@pytest.mark.exhaustive
def test_a_folder_trains_with_a_worker_to_the_numbers_without(folder, tmp_path, capsys):
    for workers in ("1", "0"):
        out = str(tmp_path / workers)
        train.main(["--data", str(folder), *FOLDER, "--workers", workers, "--out", out])
    assert metrics(tmp_path / "1") == metrics(tmp_path / "0")
    assert len([r for r in metrics(tmp_path / "1") if "loss" in r]) == 2 * (8 // 4)

    # A model for colour images accepts a grey array.
    np.save(tmp_path / "grey.npy", np.zeros((10, 50), np.uint8))
    paths = [str(tmp_path / "grey.npy"), str(tmp_path / "out.png")]
    predict.main([*paths, "--checkpoint", str(tmp_path / "1")])
    assert "50 x 10 pixels" in capsys.readouterr().out

    # A resumed run warns if its data has changed.
    for kind, suffix in (("images", "bmp"), ("masks", "png")):
        (folder / kind / f"0.{suffix}").rename(folder / kind / f"new.{suffix}")
    train.main(["--data", str(folder), "--resume", "--out", str(tmp_path / "1")])
    assert "note: images were added, removed or renamed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "background", "foreground"),
    [
        ("1", 0, 1),
        ("L", 0, 7),
        ("P", 0, 3),
        ("RGB", (0, 0, 0), (0, 0, 9)),
        ("LA", (0, 255), (4, 255)),
    ],
)
def test_masks_of_any_kind_are_foreground_where_they_are_not_0(
    folder, mode, background, foreground
):
    data = load_folder(folder)
    path = folder / "masks/0.png"
    with Image.open(path) as image:
        size = image.size
    mask = Image.new(mode, size, background)
    if mode == "P":
        mask.putpalette([255, 255, 255] * 3 + [0, 0, 0])  # colours do not count, indices do
    mask.paste(foreground, (2, 3, 6, 8))
    mask.save(path)
    _, read = dataset._read_pair([(folder / "images/0.bmp", path)], "RGB", 0)
    assert read[3:8, 2:6].all() and read.sum() == 20
    assert data.train_size == 16


# --- bad input ------------------------------------------------------------------------------------


def test_bad_folders_are_named(folder, tmp_path):
    def refused(message):
        with pytest.raises(ExampleError, match=message):
            load_folder(folder)

    image, mask = folder / "images/0.bmp", folder / "masks/0.png"
    mask.rename(tmp_path / "away.png")
    refused(r"but .*images/0\.bmp has no partner in .*masks; add .*masks/0\.png")
    (tmp_path / "away.png").rename(mask)
    image.rename(tmp_path / "away.bmp")
    refused(r"but .*masks/0\.png has no partner in .*images; add .*images/0\.png")
    (tmp_path / "away.bmp").rename(image)
    Image.new("L", (4, 4)).save(folder / "masks/0.bmp")
    refused(r"must differ in more than the suffix, but .*0\.bmp and .*0\.png do not")
    (folder / "masks/0.bmp").unlink()
    load_folder(folder)
    with Image.open(mask) as labels:
        labels.convert("RGB").save(mask.with_suffix(".webp"), lossless=True)
    mask.rename(tmp_path / "mask.png")
    load_folder(folder)
    Image.open(tmp_path / "mask.png").convert("RGB").save(mask.with_suffix(".webp"))
    refused(r"stored without loss, but .*0\.webp is not")
    mask.with_suffix(".webp").rename(mask.with_suffix(".jpg"))
    refused(r"stored without loss, but .*0\.jpg is not")
    (folder / "masks").rename(folder / "labels")
    refused(r"with images/ and masks/ in it, but .*masks is missing")
    with pytest.raises(ExampleError, match=r"two images or more.* but .*images has 0"):
        for kind in ("images", "masks"):
            (tmp_path / "empty" / kind).mkdir(parents=True)
        load_folder(tmp_path / "empty")


@pytest.mark.exhaustive
def test_a_bad_mask_stops_with_its_path_and_keeps_the_checkpoint(folder, tmp_path):
    argv = ["--data", str(folder), *FOLDER, "--workers", "0", "--out", str(tmp_path / "run")]
    bad = load_folder(folder).train_batch.read.args[0][0][1]
    content = bad.read_bytes()
    Image.new("L", (5, 6)).save(bad)
    message = rf"must have the size of its image, but .*{bad.name} has 5 x 6 .*--resume"
    with pytest.raises(ExampleError, match=message):
        train.main(argv)
    bad.write_bytes(content[:60])
    with pytest.raises(ExampleError, match=rf"{bad.name} is not \(.*--resume"):
        train.main(["--resume", "--out", str(tmp_path / "run")])
    bad.write_bytes(content)
    train.main(["--resume", "--out", str(tmp_path / "run")])
    assert (tmp_path / "run/metrics.json").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--groups", "5"], "there are 5 groups and 12 channels"),
        (
            ["--crop", "66"],
            "halve an image 2 times, but it has 66 x 66 pixels; pass multiples of 4",
        ),
        (["--batch-size", "500"], "--batch-size is 500 and there are 128 training images"),
        (["--data", "/nowhere"], "/nowhere/images is missing"),
        (["--resume"], r"config\.json cannot be read"),
    ],
)
def test_impossible_requests_leave_nothing(tmp_path, argv, message):
    with pytest.raises(ExampleError, match=message):
        train.main([*argv, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_predict_refuses_what_it_cannot_read_or_write(small_run, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "in.png")
    for name, array in (("float", np.zeros((8, 8))), ("colour", np.zeros((8, 8, 3), np.uint8))):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"flags": {"pool": "mean"}, "channels": 1}')
    before = sorted(tmp_path.iterdir())

    def refused(message, source="in.png", target="out.png", checkpoint=small_run, more=()):
        paths = [str(tmp_path / source), str(tmp_path / target)]
        with pytest.raises(ExampleError, match=message):
            predict.main([*paths, "--checkpoint", str(checkpoint), *more])
        assert sorted(tmp_path.iterdir()) == before

    refused(r"gone\.png is not", source="gone.png")
    refused(r"gone\.npy is not", source="gone.npy")
    refused(r"broken\.npy is not", source="broken.npy")
    refused(r"float\.npy has float64 \[8, 8, 1\]", source="float.npy")
    refused(r"colour\.npy has uint8 \[8, 8, 3\]", source="colour.npy")
    refused(r"written as \.npy or \.png, but OUT is .*out\.jpg", target="out.jpg")
    refused(r"in\.png is both", target="in.png")
    refused(r"nowhere is missing", target="nowhere/out.png")
    refused(r"config\.json cannot be read", checkpoint=tmp_path)
    refused(r"must be one of examples\.unet\.train", checkpoint=tmp_path / "other")
    refused(r"--overlap is 33 and tiles have 64", more=["--overlap", "33"])
    refused(r"it has 65 x 65 pixels; pass multiples of 2", more=["--tile", "65"])


def test_a_failed_prediction_leaves_no_file(tmp_path):
    def blocks():
        yield np.zeros((2, 4), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path / "out.png", (4, 4), blocks())
    assert list(tmp_path.iterdir()) == []
