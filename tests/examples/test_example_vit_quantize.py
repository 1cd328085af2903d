"""examples/vit/quantize: its table for a trained network, and rejected arguments."""

import argparse
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import jaxfused
from examples import quantization
from examples.errors import ExampleError
from examples.images import Loader
from examples.training import to_float
from examples.vit import data as vit_data
from examples.vit import quantize


@pytest.fixture(scope="module")
def table(digits_run):
    """Returns (bytes, accuracy, images/s) by name, as printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "_SECONDS", 0.02)
        lines = []
        patch.setattr("builtins.print", lambda line, **_: lines.append(line))
        quantize.main([str(digits_run)])
    number = r"([\d.,]+)"
    rows = [
        re.fullmatch(rf"(\w+) +{number} MB +{number}% +{number}", line).groups()
        for line in lines[1:]
    ]
    return {name: [float(v.replace(",", "")) for v in values] for name, *values in rows}


@pytest.mark.exhaustive
def test_the_table_has_a_row_for_each_format(table):
    assert list(table) == ["float", "int8", "fp8", "int4"]
    assert all(images_per_second > 0 for *_, images_per_second in table.values())


@pytest.mark.exhaustive
def test_sizes_are_those_of_the_arrays(table):
    """The kernels, 77 thousand float32 parameters, shrink to 8 or 4 bits per weight."""
    megabytes = {name: size for name, (size, *_) in table.items()}
    assert megabytes["float"] == pytest.approx(0.31, abs=0.005)
    kernels = 4 * (48 * 144 + 48 * 48 + 2 * 48 * 96) + 4 * 48 + 48 * 10
    for name, bytes_each in {"int8": 1, "fp8": 1, "int4": 0.5}.items():
        saved = kernels * (4 - bytes_each)
        channels = 4 * (144 + 48 + 96 + 48) + 48 + 10  # each with a scale of four bytes
        expected = megabytes["float"] - (saved - 4 * channels) / 1e6
        assert megabytes[name] == pytest.approx(expected, abs=0.011)


@pytest.mark.exhaustive
def test_accuracy_is_the_runs_and_survives_fewer_bits(digits_run, table):
    accuracy = {name: accuracy for name, (_, accuracy, _) in table.items()}
    trained = json.loads((digits_run / "metrics.json").read_text())["test_accuracy"]
    assert accuracy["float"] == pytest.approx(100 * trained, abs=0.006)
    assert accuracy["float"] > 50
    assert abs(accuracy["int8"] - accuracy["float"]) < 2
    assert abs(accuracy["fp8"] - accuracy["float"]) < 3
    assert abs(accuracy["int4"] - accuracy["float"]) < 10


class Constant(nnx.Module):
    """A model that predicts class 3 for every image."""

    def __init__(self):
        self.logits = nnx.Param(jax.nn.one_hot(3, 10))

    def __call__(self, images):
        return jnp.broadcast_to(self.logits[...], (len(images), 10))


def test_the_repeated_images_of_the_last_batch_do_not_count(monkeypatch):
    monkeypatch.setattr(quantization, "_SECONDS", 0.001)
    data = vit_data.digits(batch_size=500, seed=0, image_size=8, held_out=0.4)
    with Loader(data.held_out, 0) as loader:
        row = quantize.judge(
            quantization.Quantized("x", Constant(), None), data.held_out, loader, dtype="float32"
        )
    assert row.accuracy == np.mean(data.held_out.labels == 3)
    assert row.bytes == 40


def test_speed_is_the_best_of_three_timings(monkeypatch):
    now = iter([0.0, 0.5, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0])  # one call, then 3 timings of 2 calls
    monkeypatch.setattr(quantization.time, "perf_counter", lambda: next(now))
    calls = []
    rate = quantization.calls_per_second(lambda: calls.append(1) or jnp.zeros(()))
    assert len(calls) == 1 + 1 + 3 * 2
    assert rate == 2 / 0.5


def test_other_images_than_the_runs_are_refused(digits_run, tmp_path):
    with pytest.raises(ExampleError, match=r"config\.json"):
        quantize.main([str(tmp_path)])
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.new("L", (8, 8), i).save(tmp_path / name / f"{i}.png")
    with pytest.raises(ExampleError, match=r"trained on 10 .* the data has 2 \(cat, dog\)"):
        quantize.main([str(digits_run), "--data", str(tmp_path)])


@pytest.fixture(scope="module")
def trained(digits_run):
    """(model, data) of the short training."""
    run = quantize.Run.load(digits_run)
    flags = argparse.Namespace(**run.config["flags"])
    data = quantize.load_data(flags)
    graphdef, params = quantize.create_vit(flags, channels=1, classes=10)
    return nnx.merge(graphdef, run.restore(dict(params=params))["params"]), data


@pytest.mark.exhaustive
@pytest.mark.long
def test_calibration_brings_int4_nearer_to_the_network(trained):
    """Errors fall in each layer with error feedback, and in the logits of held-out images."""
    model, data = trained
    rules = quantization.in_groups(model, quantization.RULES["int4"][0], 32)
    assert [rule.group_size for rule in rules] == [32, None]
    calibrated = jaxfused.calibrate(model, rules, quantize.calibration(data, 6, "float32"))
    layers = calibrated.report.layers
    assert len(layers) == 2 + 4 * 4
    for layer in layers:
        assert layer.result <= layer.nearest, layer
    assert np.mean([layer.result / layer.nearest for layer in layers]) < 0.75
    nearest = jaxfused.quantize_params(model, rules)
    images = to_float(data.held_out(0)["image"], "float32")
    run = nnx.jit(lambda m: m(images))
    logits = run(model)
    errors = [jnp.linalg.norm(run(m) - logits) for m in (calibrated.quantized, nearest)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.exhaustive
@pytest.mark.long
def test_the_command_prints_the_errors_of_layers(digits_run, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "_SECONDS", 0.002)
    flags = ["--calibrate", "2", "--group-size", "16", "--smoothing", "0.5"]
    quantize.main([str(digits_run), *flags])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("layer ") for line in lines) == 3
    folded = [line for line in lines if line.startswith("blocks/2/qkv")]
    assert "int8 x int8, gptq, smoothing 0.5" in folded[0]
    assert "int4 groups of 16, gptq" in folded[2]
    embed = [line for line in lines if line.startswith("embed")]
    assert "int4, gptq" in embed[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--smoothing", "0.5"], "needs inputs of the layers"),
        (["--input-percentile", "99"], "--input-percentile needs inputs of the layers"),
        (
            ["--calibrate", "1", "--input-percentile", "100.05"],
            "must be at most 100, but is 100.05",
        ),
        (["--group-size", "7"], "--group-size is 7, but it divides the features of no layer"),
    ],
)
def test_flags_are_refused(digits_run, monkeypatch, flags, message):
    monkeypatch.setattr(quantization, "_SECONDS", 0.002)
    with pytest.raises(ExampleError, match=message):
        quantize.main([str(digits_run), *flags])
