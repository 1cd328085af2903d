"""examples/classify: sizes as in the papers, short trainings on real digits, rejected flags."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from examples import quantization
from examples.classify import predict, quantize, train
from examples.classify.convnext import CONVNEXTS, ConvNeXt, space_to_depth
from examples.classify.neighborhood import NEIGHBORHOODS, attention_of
from examples.classify.resnet import RESNETS, ResNet
from examples.errors import ExampleError
from examples.vit import data as vit_data
from examples.vit import train as vit_train
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.run_metrics import metrics


@parametrize(
    ("name", "parameters"),
    # Counts of timm, at 224 pixels and 1,000 classes.
    [
        ("convnext-t", 28_589_128),
        ("convnext-b", 88_591_464),
        ("resnet-18", 11_689_512),
        ("resnet-50", 25_557_032),
    ],
    quick=(0, 2),
)
def test_models_have_the_sizes_of_their_papers(name, parameters):
    def build():
        shared = dict(channels=3, classes=1000, rngs=nnx.Rngs(0))
        if name in RESNETS:
            return ResNet(RESNETS[name], **shared)
        return ConvNeXt(CONVNEXTS[name], image_size=224, **shared)

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param))
    assert sum(leaf.size for leaf in leaves) == parameters
    logits = jax.eval_shape(lambda: build()(jnp.zeros((2, 224, 224, 3))))
    assert logits.shape == (2, 1000)


def test_patches_attend_to_near_ones_alone():
    size = NEIGHBORHOODS["near-digits"]
    attention = attention_of(size, image_size=8)
    heads = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
    changed = heads.at[:, :, 0].set(0.0)
    moved = jnp.any(attention(*heads) != attention(*changed), axis=(0, 2, 3)).reshape(4, 4)
    # A patch at a border has the three patches nearest to it, as others have.
    assert moved.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]

    flags = ["--model", "near-digits"]
    args = vit_train.parse_flags(train.make_parser(), flags, folder_model="convnext-t")
    graphdef, params = train.create(args, channels=1, classes=10)
    assert nnx.merge(graphdef, params)(jnp.zeros((2, 8, 8, 1))).shape == (2, 10)


def test_squares_become_pixels():
    image = jnp.arange(4 * 6).reshape(1, 4, 6, 1)
    assert space_to_depth(image, 2).shape == (1, 2, 3, 4)
    assert space_to_depth(image, 2)[0, 1, 2].tolist() == [16, 17, 22, 23]


@pytest.mark.exhaustive
def test_stochastic_depth_needs_a_key():
    size = CONVNEXTS["convnext-digits"]
    model = ConvNeXt(size, image_size=8, channels=1, classes=3, drop_path=0.9, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.ones_like(model.head.kernel[...])
    for stage in model.stages:
        for block in stage:
            block.layer_scale[...] = jnp.ones_like(block.layer_scale[...])
    images = put(np.random.default_rng(0).normal(size=(4, 8, 8, 1)), jnp.float32)
    keyed = [model(images, key=jax.random.key(i)) for i in (1, 1, 2)]
    assert (keyed[0] == keyed[1]).all() and (keyed[0] != keyed[2]).any()
    assert (model(images) == model(images)).all()


@pytest.mark.long
@parametrize("name", ["resnet-digits", "convnext-digits", "near-digits"], quick=())
def test_a_short_training_learns_and_predicts(name, tmp_path, capsys, monkeypatch):
    # A ConvNeXt learns late, because its branches start near 0.
    epochs = "2" if name in RESNETS else "6"
    flags = ["--model", name, "--epochs", epochs, "--warmup-epochs", "0.5", "--held-out", "0.4"]
    train.main([*flags, "--out", str(tmp_path / "run")])
    result = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert result["test_accuracy"] > 0.5
    losses = [r["loss"] for r in metrics(tmp_path / "run") if "loss" in r]
    assert abs(losses[0] - np.log(10)) < 1e-3  # the head starts at zero, so all classes are equal

    digits = vit_data.digits(batch_size=8, seed=0, image_size=8, held_out=0.4)
    path = tmp_path / "digit.png"
    Image.fromarray(digits.held_out.image(0)[..., 0]).save(path)
    capsys.readouterr()
    predict.main([str(tmp_path / "run"), str(path)])
    assert "%" in capsys.readouterr().out

    monkeypatch.setattr(quantization, "_SECONDS", 0.01)
    quantize.main([str(tmp_path / "run"), "--calibrate", "2"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    accuracy = {line[0]: float(line[3][:-1]) for line in lines if line[0] in quantization.RULES}
    assert list(accuracy) == list(quantization.RULES)
    assert accuracy["float"] == pytest.approx(100 * result["test_accuracy"], abs=0.006)
    assert abs(accuracy["int8"] - accuracy["float"]) < 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "resnet-digits", "--dropout", "0.1"], "resnet-digits has no --dropout"),
        (["--model", "resnet-digits", "--drop-path", "0.1"], "resnet-digits has no --drop-path"),
        (["--model", "convnext-digits", "--unroll", "2"], "convnext-digits has no --unroll"),
        (["--model", "convnext-t"], "multiple of 32, .* but is 8; pass 32"),
    ],
)
def test_bad_flags(flags, message, tmp_path):
    with pytest.raises(ExampleError, match=message):
        train.main([*flags, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
