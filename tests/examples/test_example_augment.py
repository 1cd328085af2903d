import jax
import numpy as np
import pytest
from PIL import Image

from examples import augmentation
from examples.errors import ExampleError
from examples.unet import train as unet
from examples.vit import train as vit
from jaxfused import augment

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", augmentation.NAMES)
def test_chains_give_what_the_models_take(name):
    chain = augmentation.of_classes(name, crop=8, least_crop=0.25, flip=True, dtype="bfloat16")
    y = jax.eval_shape(chain, KEY, np.zeros((2, augmentation.decoded_size(8), 9, 3), np.uint8))
    assert y.shape == (2, 8, 8, 3) and y.dtype == "bfloat16"
    batch = augment.Batch(np.zeros((2, 8, 8, 1), np.uint8), masks=np.zeros((2, 8, 8), np.uint8))
    chain = augmentation.of_masks(name, turn=True, dtype="float32")
    y = jax.eval_shape(chain, KEY, batch)
    assert y.images.shape == (2, 8, 8, 1) and y.masks.dtype == np.uint8


@pytest.mark.exhaustive
def test_a_sheet_shows_images_and_what_becomes_of_them(tmp_path, capsys):
    paths = []
    for i in range(2):
        paths.append(str(tmp_path / f"{i}.png"))
        levels = np.random.default_rng(i).integers(0, 256, (20, 30, 3))
        Image.fromarray(levels.astype(np.uint8)).save(paths[-1])
    out = tmp_path / "sheet.png"
    options = ["--size", "14", "--columns", "3", "--augment", "light"]
    augmentation.main([*paths, *options, "--out", str(out)])
    with Image.open(out) as sheet:
        assert sheet.size == (4 * 16, 2 * 16)
    assert "pass 1: RandomResizedCrop" in capsys.readouterr().out
    with pytest.raises(ExampleError, match="is both"):
        augmentation.main([*paths, "--out", paths[0]])


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_classifier_trains_on_what_the_device_changes(tmp_path):
    for name, level in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(5):
            levels = np.full((20, 24, 3), level, np.uint8)
            Image.fromarray(levels).save(tmp_path / "images" / name / f"{i}.png")
    data = ["--data", str(tmp_path / "images"), "--model", "vit-digits", "--image-size", "8"]
    flags = ["--batch-size", "4", "--epochs", "1", "--warmup-epochs", "0", "--workers", "0"]
    vit.main([*data, *flags, "--augment", "light", "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "predictions.png").exists()


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_segmentation_trains_on_what_the_device_changes(tmp_path):
    small = ["--base", "4", "--levels", "2", "--groups", "2", "--crop", "32", "--crops", "8"]
    flags = ["--epochs", "1", "--warmup-epochs", "0", "--out", str(tmp_path)]
    unet.main([*small, *flags, "--augment", "rand"])
    assert (tmp_path / "predictions.png").exists()
