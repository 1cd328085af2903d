"""examples/vit: the model against plain Flax, short trainings on real digits, folders, bad input."""

import argparse
import json
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import jaxfused
from examples import runs, training
from examples.errors import ExampleError
from examples.runs import Run
from examples.vit import data as vit_data
from examples.vit import predict, train
from examples.vit.model import MODELS, VisionTransformer, ViTSize, patchify
from tests.conftest import DIGITS_FLAGS
from tests.support.grids import parametrize
from tests.support.run_metrics import metrics

# --- model ----------------------------------------------------------------------------------------


class PlainBlock(nnx.Module):
    """A block as in the paper's figure, built from Flax's own layers."""

    def __init__(self, size, rngs):
        width, heads = size.width, size.heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, size.hidden, rngs=rngs)
        self.down = nnx.Linear(size.hidden, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


def plain_logits(params, size, images, pool):
    """Computes a `VisionTransformer`'s function with `PlainBlock`s, one after the other."""
    x = patchify(images, size.patch) @ params["embed"]["kernel"] + params["embed"]["bias"]
    if pool == "token":
        x = jnp.concatenate([jnp.tile(params["class_token"], (len(x), 1, 1)), x], axis=1)
    x = x + params["positions"]
    for i in range(size.depth):
        given = params["blocks"][i]
        structure = nnx.graphdef(nnx.eval_shape(lambda: PlainBlock(size, nnx.Rngs(0))))
        head = (size.heads, size.width // size.heads)
        kernels = given["qkv"]["kernel"].reshape(size.width, 3, *head)
        biases = given["qkv"]["bias"].reshape(3, *head)
        block = nnx.merge(
            structure,
            {
                **{name: given[name] for name in ("norm1", "norm2")},
                **given["mlp"],
                "attention": {
                    **{
                        name: {"kernel": kernels[:, j], "bias": biases[j]}
                        for j, name in enumerate(("query", "key", "value"))
                    },
                    "out": {
                        "kernel": given["project"]["kernel"].reshape(*head, size.width),
                        "bias": given["project"]["bias"],
                    },
                },
            },
        )
        x = block(x)
    structure = nnx.graphdef(nnx.eval_shape(lambda: nnx.LayerNorm(size.width, rngs=nnx.Rngs(0))))
    x = nnx.merge(structure, params["norm"])(x)
    features = x[:, 0] if pool == "token" else x.mean(axis=1)
    return features @ params["head"]["kernel"] + params["head"]["bias"]


SMALL = ViTSize(patch=2, depth=3, width=12, heads=3, hidden=20)


def small(seed=0, **options):
    """Returns a small model whose parameters are all random, including the head, which starts at 0."""
    model = VisionTransformer(
        SMALL, image_size=6, channels=2, classes=5, rngs=nnx.Rngs(seed), **options
    )
    rng = np.random.default_rng(seed)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(
        lambda p: p + 0.3 * rng.standard_normal(p.shape, np.float32), nnx.to_pure_dict(params)
    )
    return nnx.merge(graphdef, params), params


IMAGES = np.random.default_rng(1).uniform(-1, 1, (4, 6, 6, 2)).astype(np.float32)


@parametrize("pool", ["token", "mean"], quick=(0,))
def test_model_is_the_papers(pool):
    model, params = small(pool=pool)
    expected = jax.jit(lambda: plain_logits(params, SMALL, IMAGES, pool))()
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(
        nnx.jit(VisionTransformer.__call__)(model, IMAGES), expected, rtol=2e-5, atol=2e-5
    )


def test_patches_go_row_by_row():
    image = jnp.arange(4 * 6).reshape(1, 4, 6, 1)
    assert patchify(image, 2)[0].tolist() == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
        [12, 13, 18, 19],
        [14, 15, 20, 21],
        [16, 17, 22, 23],
    ]


@parametrize(
    ("name", "parameters"),
    # Counts of timm, at 224 pixels and 1,000 classes.
    [
        ("vit-ti16", 5_717_416),
        ("vit-s16", 22_050_664),
        ("vit-s32", 22_878_952),
        ("vit-b16", 86_567_656),
        ("vit-b32", 88_224_232),
        ("vit-l16", 304_326_632),
        ("vit-l32", 306_535_400),
        ("vit-h14", 632_045_800),
    ],
    quick=(0, 2, 7),
)
def test_standard_sizes_have_the_parameters_of_their_papers(name, parameters):
    shape = dict(image_size=224, channels=3, classes=1000)
    model = nnx.eval_shape(lambda: VisionTransformer(MODELS[name], **shape, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(leaf.size for leaf in leaves) == parameters


def test_randomness_comes_with_a_key_only():
    plain, _ = small()
    model, _ = small(dropout=0.3, drop_path=0.3)
    np.testing.assert_array_equal(model(IMAGES), plain(IMAGES))
    one, again, other = (model(IMAGES, key=jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3 and np.abs(one - model(IMAGES)).max() > 1e-3
    np.testing.assert_array_equal(plain(IMAGES, key=jax.random.key(1)), plain(IMAGES))


def test_stochastic_depth_keeps_the_expectation_of_a_branch():
    model, _ = small(drop_path=0.4)
    block = model.blocks[1]
    branch = jnp.ones((20_000, 1, 3))
    dropped = block._drop(branch, jax.random.key(0), jnp.float32(0.4))
    assert set(np.unique(dropped.round(4))) == {0, np.float32(1.6667)}
    assert (dropped == dropped[:, :, :1]).all()  # an image keeps or drops its whole branch
    assert abs(float(dropped.mean()) - 1) < 0.02


def test_bfloat16_computes_close_to_float32_and_keeps_float32_parameters():
    model, _ = small()
    half, half_params = small(dtype=jnp.bfloat16)
    assert {p.dtype for p in jax.tree.leaves(half_params)} == {np.dtype(np.float32)}
    logits, half_logits = model(IMAGES), half(IMAGES.astype(jnp.bfloat16))
    assert half_logits.dtype == jnp.float32
    error = np.abs(half_logits - logits).max() / np.abs(logits).max()
    assert 1e-5 < error < 0.05  # near enough for the same model, and too far for float32


def in_a_loop(params):
    """Returns parameters for the model whose blocks run in a loop."""
    blocks = [params["blocks"][i] for i in range(SMALL.depth)]
    return params | {"blocks": jax.tree.map(lambda *p: jnp.stack(p), *blocks)}


def test_blocks_in_a_loop_are_the_same_network_from_the_same_seed():
    one_by_one, params = small(drop_path=0.3)
    loop = VisionTransformer(
        SMALL, image_size=6, channels=2, classes=5, drop_path=0.3, unroll=1, rngs=nnx.Rngs(0)
    )
    apart = VisionTransformer(
        SMALL, image_size=6, channels=2, classes=5, drop_path=0.3, rngs=nnx.Rngs(0)
    )
    initial, apart = (nnx.to_pure_dict(nnx.state(model)) for model in (loop, apart))
    chex.assert_trees_all_equal(initial, in_a_loop(apart))
    loop = nnx.merge(nnx.graphdef(loop), in_a_loop(params))
    for key in (None, jax.random.key(3)):
        expected = one_by_one(IMAGES, key=key)
        np.testing.assert_allclose(loop(IMAGES, key=key), expected, rtol=2e-5, atol=2e-5)


def test_a_step_puts_no_gradients_together_and_copies_no_parameter():
    model, params = small()
    graphdef = nnx.graphdef(model)
    optimizer = jaxfused.optim.adamw(1e-3)

    def step(state, images):
        params, opt_state = state
        loss_of = lambda params: jnp.sum(nnx.merge(graphdef, params)(images) ** 2)  # noqa: E731
        gradients = jax.grad(loss_of)(params)
        return optimizer.step(gradients, opt_state, params, max_norm=1.0)

    state = (params, optimizer.init(params))
    traced = jax.jit(step, donate_argnums=0).trace(state, IMAGES)
    blocks = {p.shape for p in jax.tree.leaves(params["blocks"]) if p.ndim > 1}
    compiled = traced.lower().compile()
    made = re.findall(
        r"= \w+\[([\d,]*)\]\S* (copy|concatenate|dynamic-update-slice)\(", compiled.as_text()
    )
    sizes = {tuple(map(int, shape.split(","))) for shape, _ in made if shape}
    assert not {size for size in sizes if size[-2:] in blocks}
    # Each array of the state is updated in place.
    assert compiled.as_text().count("may-alias") >= len(jax.tree.leaves(state))


# --- training on the digits -----------------------------------------------------------------------


def assert_learnt(run, *, epochs):
    losses = [r["loss"] for r in metrics(run) if "loss" in r]
    assert len(losses) == epochs * (1078 // 32)
    assert abs(losses[0] - np.log(10)) < 1e-3  # the head starts at zero, so all classes are equal
    assert np.mean(losses[-20:]) < 0.75 * losses[0]
    result = json.loads((run / "metrics.json").read_text())
    assert result["test_accuracy"] > 0.5
    assert result["images_per_second"] > 0


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_short_training_learns(digits_run):
    assert_learnt(digits_run, epochs=3)


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_training_with_the_default_optimizer_learns(tmp_path):
    flags = ["--epochs", "12", "--warmup-epochs", "1", "--held-out", "0.4"]
    train.main([*flags, "--out", str(tmp_path / "run")])
    assert_learnt(tmp_path / "run", epochs=12)


@pytest.mark.exhaustive
def test_a_training_draws_its_pictures(digits_run):
    for name in ("curve.png", "predictions.png"):
        with Image.open(digits_run / name) as image:
            assert image.width > 1000 and len(image.convert("RGB").getcolors(1 << 24)) > 50


# examples/training.py resumes runs, for the U-Net too, whose interruption `make test-all` tests.
@pytest.mark.exhaustive
def test_same_seed_same_result_also_when_interrupted(digits_run, tmp_path, monkeypatch):
    """Data order, augmentation, dropout keys, optimizer and schedule continue where they were."""
    make_train_step = train.make_train_step

    class PowerCut(Exception):
        pass

    def failing(*args, **kwargs):
        train_step = make_train_step(*args, **kwargs)

        def step_or_fail(state, batch, step):
            if step == 50:
                raise PowerCut
            return train_step(state, batch, step)

        return step_or_fail

    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(train, "make_train_step", failing)
        train.main([*DIGITS_FLAGS, "--out", str(out)])
    train.main(["--resume", "--out", str(out)])
    assert metrics(out) == metrics(digits_run)

    with pytest.raises(ExampleError, match="was started with --model vit-digits and now got"):
        train.main(["--resume", "--out", str(out), "--model", "vit-ti16"])
    with pytest.raises(ExampleError, match="holds a run; pass --resume"):
        train.main([*DIGITS_FLAGS, "--out", str(out)])


@pytest.mark.exhaustive
def test_predict_is_as_good_as_the_evaluation(digits_run, tmp_path, capsys):
    digits = vit_data.digits(batch_size=8, seed=0, image_size=8, held_out=0.4)
    labels = digits.held_out.labels
    paths = [str(tmp_path / f"{i}.png") for i in range(len(labels))]
    for i, path in enumerate(paths):
        Image.fromarray(digits.held_out.image(i)[..., 0]).save(path)
    predict.main([str(digits_run), *paths])
    lines = capsys.readouterr().out.splitlines()
    guesses = [int(line.split()[1]) for line in lines]
    result = json.loads((digits_run / "metrics.json").read_text())
    # Batches differ in size, so a picture between two digits may be classified either way.
    assert abs(np.sum(guesses == labels) - result["test_accuracy"] * len(labels)) <= 1.01

    Image.fromarray(255 - digits.held_out.image(0)[..., 0]).save(tmp_path / "dark.png")
    predict.main([str(digits_run), "--invert", str(tmp_path / "dark.png")])
    assert capsys.readouterr().out.split()[1:] == lines[0].split()[1:]


def saved_as_a_stack(run, out):
    """Writes a run's checkpoint in the old form, with all blocks as one stack; returns its step."""
    run = Run.load(run)
    flags = argparse.Namespace(**run.config["flags"])
    _, params = train.create_vit(flags, channels=1, classes=10)
    optimizer = training.make_optimizer(flags, epoch_steps=1)
    state = run.restore(dict(params=params, opt_state=optimizer.init(params)))

    def stacked(tree):
        layers = {}
        for name, array in runs._flat(tree).items():
            layers.setdefault(re.sub(r"\bblocks\.\d+\.", "blocks.", name), []).append(array)
        return {n: jnp.stack(a) if "blocks." in n else a[0] for n, a in layers.items()}

    old = Run.start(out, run.config)
    with old.finished_writes():
        old.save(run.latest_step, {name: stacked(tree) for name, tree in state.items()})


@pytest.mark.exhaustive
def test_predict_reads_a_run_whose_blocks_were_a_stack(digits_run, tmp_path, capsys):
    saved_as_a_stack(digits_run, tmp_path / "old")
    digits = vit_data.digits(batch_size=8, seed=0, image_size=8, held_out=0.4)
    Image.fromarray(digits.held_out.image(0)[..., 0]).save(tmp_path / "digit.png")
    said = []
    for run in (digits_run, tmp_path / "old"):
        predict.main([str(run), str(tmp_path / "digit.png")])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


@pytest.mark.exhaustive
def test_a_run_whose_blocks_were_a_stack_resumes_to_the_same_numbers(digits_run, tmp_path):
    before = min((digits_run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    saved_as_a_stack(before, tmp_path / "old")
    train.main(["--resume", "--out", str(tmp_path / "old")])
    results = [
        json.loads((run / "metrics.json").read_text()) for run in (digits_run, tmp_path / "old")
    ]
    for result in results:
        del result["images_per_second"]
    assert results[0] == results[1]


def test_digits_are_split_alike_whatever_the_seed():
    one, two = (
        vit_data.digits(batch_size=8, seed=seed, image_size=8, held_out=0.2) for seed in (0, 1)
    )
    np.testing.assert_array_equal(one.held_out.labels, two.held_out.labels)
    counts = np.bincount(one.held_out.labels)
    assert one.train_size + len(one.held_out.labels) == 1797
    assert counts.min() >= 34 and counts.max() <= 37  # stratified: 174 to 183 of each digit
    assert (one.train_batch(3)["image"] == one.train_batch(3)["image"]).all()
    assert (one.train_batch(3)["image"] != two.train_batch(3)["image"]).any()


def test_split_holds_out_distinct_images_and_some_of_each_class():
    labels = np.array([0] * 10 + [1] * 2 + [2] * 50)
    train_indices, test_indices = vit_data.split(labels, 0.2)
    assert sorted([*train_indices, *test_indices]) == list(range(62))
    assert np.bincount(labels[test_indices]).tolist() == [2, 1, 10]


def test_jitter_moves_digits_a_little_and_invents_no_brightness():
    digits = vit_data.digits(batch_size=8, seed=0, image_size=8, held_out=0.2)
    images = np.stack([digits.held_out.image(i) for i in range(100)])
    moved = vit_data.jitter(images, np.random.default_rng(0))
    assert moved.dtype == np.uint8 and moved.shape == images.shape
    assert (moved != images).any(axis=(1, 2, 3)).all()
    assert moved.max() <= images.max()
    correlation = np.corrcoef(images.ravel(), moved.ravel())[0, 1]
    assert correlation > 0.8


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digit_folder(tmp_path_factory):
    """Writes DIR/CLASS/*.png with 20 images each of zeros, ones and twos."""
    root = tmp_path_factory.mktemp("folder")
    digits = vit_data.digits(batch_size=8, seed=0, image_size=16, held_out=0.5)
    for label, name in enumerate(("zero", "one", "two")):
        (root / name).mkdir()
        for i in np.flatnonzero(digits.held_out.labels == label)[:20]:
            Image.fromarray(digits.held_out.image(i)[..., 0]).save(root / name / f"{i}.png")
    return root


def load_folder(root, **changed):
    options = dict(batch_size=4, seed=0, image_size=8, held_out=0.2, least_crop=0.5, flip=True)
    return vit_data.folder(root, **{**options, **changed})


FOLDER = ["--model", "vit-digits", "--image-size", "8", "--batch-size", "16", "--epochs", "3"]
FOLDER += ["--warmup-epochs", "1", "--held-out", "0.2", "--no-flip"]


@pytest.mark.exhaustive
def test_a_folder_trains_with_a_worker_to_the_numbers_without(digit_folder, tmp_path, capsys):
    for workers in ("1", "0"):
        out = str(tmp_path / workers)
        train.main(["--data", str(digit_folder), *FOLDER, "--workers", workers, "--out", out])
    assert metrics(tmp_path / "1") == metrics(tmp_path / "0")
    assert len([r for r in metrics(tmp_path / "1") if "loss" in r]) == 3 * (48 // 16)

    capsys.readouterr()
    predict.main([str(tmp_path / "1"), str(next((digit_folder / "one").iterdir()))])
    assert {"zero", "one", "two"} <= set(capsys.readouterr().out.split())

    # A resumed run keeps its classes.
    for name in ("three", "four"):
        (tmp_path / "other" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), i).save(tmp_path / "other" / name / f"{i}.png")
    before = sorted((tmp_path / "1").rglob("*"))
    with pytest.raises(ExampleError, match=r"trained on 3 \(one, two, zero\) and the data has 2"):
        train.main(["--data", str(tmp_path / "other"), "--resume", "--out", str(tmp_path / "1")])
    assert sorted((tmp_path / "1").rglob("*")) == before


def test_a_folder_with_train_and_val_is_taken_as_split(digit_folder, tmp_path):
    (tmp_path / "train").symlink_to(digit_folder)
    (tmp_path / "val").symlink_to(digit_folder)
    data = load_folder(tmp_path)
    assert data.train_size == 60 and len(data.held_out.labels) == 60
    assert data.classes == ("one", "two", "zero")
    held_out = load_folder(digit_folder)
    assert held_out.train_size == 48 and np.bincount(held_out.held_out.labels).tolist() == [4, 4, 4]
    assert data.fingerprint != held_out.fingerprint


def test_crops_stay_inside_and_reach_the_whole_image():
    rng = np.random.default_rng(0)
    boxes = np.array([vit_data.random_crop(40, 20, 0.25, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 40 and bottom.max() <= 20
    areas = (right - left) * (bottom - top) / 800
    assert areas.min() > 0.2 and areas.max() > 0.6
    assert left.min() < 1 and right.max() > 39


def test_a_crop_of_everything_without_flip_is_the_image(digit_folder):
    data = load_folder(digit_folder, least_crop=1 - 1e-9, flip=False, image_size=16)
    image = vit_data.centre_crop(Image.open(next((digit_folder / "one").iterdir())), 16)
    np.testing.assert_array_equal(
        image, np.asarray(Image.open(next((digit_folder / "one").iterdir())))
    )
    assert data.train_batch(0)["image"].shape == (4, 16, 16, 3)


def test_half_of_the_images_are_mirrored(tmp_path):
    ramp = np.tile(np.arange(0, 256, 16, dtype=np.uint8), (16, 1))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(50):
            Image.fromarray(ramp).save(tmp_path / name / f"{i}.png")
    images = load_folder(tmp_path, batch_size=80).train_batch(0)["image"].astype(int)
    mirrored = images[:, 4, 0, 0] > images[:, 4, -1, 0]
    assert 20 < mirrored.sum() < 60


# --- bad input ------------------------------------------------------------------------------------


def test_bad_folders_are_named(digit_folder, tmp_path):
    with pytest.raises(ExampleError, match=r"must name a folder, but .*none is missing"):
        load_folder(tmp_path / "none")
    with pytest.raises(ExampleError, match=r"two classes or more, but .* has 0 subfolders"):
        load_folder(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").touch()
    with pytest.raises(ExampleError, match=r"every class needs images, but .*/a has none"):
        load_folder(tmp_path)
    for name in ("a", "b"):
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    with pytest.raises(ExampleError, match=r"needs two images.*but .*/a has one"):
        load_folder(tmp_path)
    (tmp_path / "both").mkdir()
    (tmp_path / "both/train").symlink_to(digit_folder)
    (tmp_path / "both/val").mkdir()
    for name in ("one", "two"):
        (tmp_path / "both/val" / name).symlink_to(digit_folder / name)
    with pytest.raises(ExampleError, match=r"must have the same classes, but zero is in only one"):
        load_folder(tmp_path / "both")


@pytest.mark.exhaustive
def test_commands_refuse_bad_input_in_one_sentence_and_leave_nothing(tmp_path):
    """The user sees exit code 2, no traceback, and no directory."""
    out = tmp_path / "run"

    def refused(*argv):
        command = [sys.executable, "-m", "examples.vit.train", "--out", str(out), *argv]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert not out.exists()
        return result.stderr.strip().splitlines()[-1]

    said = refused("--image-size", "9")
    assert said == (
        "error: the image size must be a multiple of the patch size, 2, but is 9; pass 8."
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "2000"], "--batch-size is 2000 and there are 1438 training images"),
        (["--image-size", "9"], "must be a multiple of the patch size, 2, but is 9; pass 8"),
        (["--warmup-epochs", "90"], "the warm-up must be shorter than the run"),
        (["--data", "/nowhere"], "/nowhere is missing"),
        (["--resume"], r"config\.json cannot be read"),
    ],
)
def test_impossible_requests_leave_nothing(tmp_path, argv, message):
    with pytest.raises(ExampleError, match=message):
        train.main([*argv, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_an_unreadable_image_stops_with_its_path_and_keeps_the_checkpoint(digit_folder, tmp_path):
    root = tmp_path / "data"
    for folder in digit_folder.iterdir():
        (root / folder.name).mkdir(parents=True)
        for path in folder.iterdir():
            (root / folder.name / path.name).write_bytes(path.read_bytes())
    argv = ["--data", str(root), *FOLDER, "--workers", "0", "--out", str(tmp_path / "run")]
    data = load_folder(root, batch_size=16)
    bad = data.train_batch.paths[0]
    content = bad.read_bytes()
    bad.write_bytes(content[:50])
    with pytest.raises(ExampleError, match=rf"{bad.name} is not \(.*continue with .*--resume"):
        train.main(argv)
    bad.write_bytes(content)
    train.main(["--resume", "--out", str(tmp_path / "run")])
    assert (tmp_path / "run/metrics.json").exists()


@pytest.mark.exhaustive
def test_predict_refuses_what_is_no_run_or_no_image(digits_run, tmp_path):
    with pytest.raises(ExampleError, match=r"config\.json cannot be read"):
        predict.main([str(tmp_path), "a.png"])
    with pytest.raises(ExampleError, match=r"gone\.png is not"):
        predict.main([str(digits_run), str(tmp_path / "gone.png")])
