"""What fewer bits cost and bring: `python -m examples.vit.quantize CHECKPOINT`.

Quantises the linear layers of a trained Vision Transformer and prints size, held-out accuracy and
images a second for float, int8, fp8 and int4. With --calibrate it looks at what the layers read on so
many training batches first, chooses roundings by that, and prints each layer's error.
"""

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError, run_command
from examples.images import Loader
from examples.training import Run, number, to_float, whole
from examples.vit.data import Data, HeldOut
from examples.vit.train import check_classes, create_vit, load_data, make_predict

# int8 and fp8 are multiplied in their own dtype, so inputs are quantised too; int4 weights become floats
# again.
RULES = {
    "float": [],
    "int8": [jaxfused.QuantizationRule("", "int8", input_dtype="int8")],
    "fp8": [jaxfused.QuantizationRule("", "float8_e4m3fn", input_dtype="float8_e4m3fn")],
    "int4": [jaxfused.QuantizationRule("", "int4")],
}

# What the layers of a block read straight from its norms can be smoothed there.
FOLDS = (jaxfused.Fold("norm1", ("qkv",)), jaxfused.Fold("norm2", ("mlp/up",)))

_SECONDS = 1.0
"""The seconds that one timing lasts; there are three."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    bytes: int
    accuracy: float
    images_per_second: float


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.vit.quantize", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "checkpoint", type=Path, help="the --out of a run, or one of its checkpoints/N"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the run's images are now")
    parser.add_argument(
        "--calibrate",
        type=whole(1),
        metavar="BATCHES",
        help="choose roundings by what the layers read on so many training batches; print errors",
    )
    parser.add_argument(
        "--group-size",
        type=whole(1),
        metavar="FEATURES",
        help="that share a scale in int4, in the layers whose features it divides; by default all",
    )
    parser.add_argument(
        "--smoothing",
        type=number(least=0, below=1),
        metavar="SHARE",
        help="of the inputs' range that moves into int8 kernels; needs --calibrate",
    )
    args = parser.parse_args(argv)
    if args.smoothing is not None and args.calibrate is None:
        raise ExampleError(
            "--smoothing needs inputs of the layers to choose by; pass --calibrate too."
        )

    run = Run.load(args.checkpoint)
    flags = argparse.Namespace(**run.config["flags"])
    folder = args.data or flags.data
    flags.data = None if folder is None else Path(folder)
    data = load_data(flags)
    check_classes(run, data)
    graphdef, params = create_vit(flags, channels=data.channels, classes=len(data.classes))
    model = nnx.merge(graphdef, run.restore(dict(params=params))["params"])

    print(f"{'':5}  {'size':>9}  {'accuracy':>8}  {'images/s':>9}")
    with Loader(data.held_out, flags.workers) as loader:
        for name, rules in RULES.items():
            report = None
            rules = with_flags(model, rules, args.group_size, args.smoothing)
            if not rules:
                quantized = model
            elif args.calibrate is None:
                quantized = jaxfused.quantize_params(model, rules)
            else:
                calibrated = jaxfused.calibrate(
                    model, rules, calibration(data, args.calibrate, flags.dtype)
                )
                quantized, report = calibrated.quantized, calibrated.report
            row = judge(name, quantized, data.held_out, loader, dtype=flags.dtype)
            print(
                f"{row.name:5}  {row.bytes / 1e6:6.2f} MB  {row.accuracy:8.2%}"
                f"  {row.images_per_second:9,.0f}",
                flush=True,
            )
            if report is not None:
                print(report, flush=True)


def with_flags(
    model: nnx.Module,
    rules: Sequence[jaxfused.QuantizationRule],
    group_size: int | None,
    smoothing: float | None,
) -> list[jaxfused.QuantizationRule]:
    """The rules with groups in int4 and smoothing in int8, where the flags ask for them."""
    result = []
    for rule in rules:
        if rule.dtype == "int8":
            rule = replace(rule, smoothing=smoothing)
        if rule.dtype == "int4" and group_size is not None:
            result += in_groups(model, rule, group_size)
        else:
            result.append(rule)
    return result


def in_groups(
    model: nnx.Module, rule: jaxfused.QuantizationRule, group_size: int
) -> list[jaxfused.QuantizationRule]:
    """The rule for all layers with groups, as far as these divide a layer's features."""
    layers = [
        ("/".join(map(str, path)), layer.in_features % group_size == 0)
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, nnx.Linear)
    ]
    names = [re.escape(name) for name, divides in layers if divides]
    if not names:
        raise ExampleError(
            f"--group-size is {group_size}, but it divides the features of no layer; pass a divisor of"
            " the network's width, or leave it out."
        )
    grouped = replace(rule, pattern=f"^({'|'.join(names)})$", group_size=group_size)
    return [grouped] if len(names) == len(layers) else [grouped, rule]


def calibration(data: Data, batches: int, dtype: str) -> jaxfused.Calibration:
    """So many training batches, and how the network is called with them."""
    return jaxfused.Calibration(
        [data.train_batch(step)["image"] for step in range(batches)],
        call=lambda model, images: model(to_float(images, dtype)),
        folds=FOLDS,
    )


def judge(name: str, model: nnx.Module, held_out: HeldOut, loader: Loader, *, dtype: str) -> Row:
    """Size, accuracy on the held-out images and speed at their batch size."""
    graphdef, params = nnx.split(model)
    predict = make_predict(graphdef, dtype=dtype)
    guesses = []
    for batch in loader.batches(held_out.batches):
        guesses.append(np.argmax(predict(params, batch["image"]), axis=-1))
    # The last batch repeats its last image.
    guesses = np.concatenate(guesses)[: len(held_out.labels)]
    images = jax.device_put(batch["image"])
    return Row(
        name,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        accuracy=float(np.mean(guesses == held_out.labels)),
        images_per_second=len(images) * calls_per_second(lambda: predict(params, images)),
    )


def calls_per_second(call: Callable[[], jax.Array]) -> float:
    """The best of three timings, each with one wait at its end."""
    jax.block_until_ready(call())

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return time.perf_counter() - begin

    count = max(1, round(_SECONDS / seconds(1)))
    return count / min(seconds(count) for _ in range(3))


if __name__ == "__main__":
    run_command(main)
