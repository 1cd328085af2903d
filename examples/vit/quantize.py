"""Compares formats of few bits: `python -m examples.vit.quantize CHECKPOINT`.

Quantises the layers of a trained Vision Transformer and prints size, held-out accuracy and images a
second for float, int8, fp8 and int4. With --calibrate it first reads the layers' inputs on some training
batches, chooses roundings that fit them, and prints each layer's error.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import run_command
from examples.images import Loader
from examples.quantization import (
    FOLDS,
    Quantized,
    add_flags,
    calls_per_second,
    check_flags,
    flags_of,
    in_all_formats,
)
from examples.runs import Run
from examples.training import to_float
from examples.vit.data import Data, HeldOut
from examples.vit.train import Create, check_classes, create_vit, load_data, make_predict


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    accuracy: float
    images_per_second: float


def main(
    argv: Sequence[str] | None = None,
    *,
    module: str = "examples.vit.quantize",
    create: Create = create_vit,
) -> None:
    """Runs the command; `argv` replaces the command line, and `create` makes another model."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="What fewer bits cost and bring."
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    check_flags(args)

    run = Run.load(args.checkpoint)
    run.check_program(module.replace(".quantize", ".train"), "image_size")
    flags = flags_of(run, args)
    data = load_data(flags)
    check_classes(run, data)
    graphdef, params = create(flags, channels=data.channels, classes=len(data.classes))
    model = nnx.merge(graphdef, run.restore(dict(params=params))["params"])

    print(f"{'':5}  {'size':>9}  {'accuracy':>8}  {'images/s':>9}")
    with Loader(data.held_out, flags.workers) as loader:
        for quantized in in_all_formats(
            model, args, lambda batches: calibration(data, batches, flags.dtype)
        ):
            row = judge(quantized, data.held_out, loader, dtype=flags.dtype)
            print(
                f"{row.name:5}  {row.bytes / 1e6:6.2f} MB  {row.accuracy:8.2%}"
                f"  {row.images_per_second:9,.0f}",
                flush=True,
            )
            if quantized.report is not None:
                print(quantized.report, flush=True)


def calibration(data: Data, batches: int, dtype: str) -> jaxfused.Calibration:
    """Returns a calibration on `batches` training batches, with the call of the network."""
    return jaxfused.Calibration(
        [data.train_batch(step)["image"] for step in range(batches)],
        call=lambda model, images: model(to_float(images, dtype)),
        folds=FOLDS,
    )


def judge(quantized: Quantized, held_out: HeldOut, loader: Loader, *, dtype: str) -> Row:
    """Measures size, accuracy on the held-out images, and speed at their batch size."""
    graphdef, params = nnx.split(quantized.model)
    predict = make_predict(graphdef, dtype=dtype)
    guesses = []
    for batch in loader.batches(held_out.batches):
        guesses.append(np.argmax(predict(params, batch["image"]), axis=-1))
    # The last batch repeats its last image.
    guesses = np.concatenate(guesses)[: len(held_out.labels)]
    images = jax.device_put(batch["image"])
    return Row(
        quantized.name,
        quantized.bytes,
        accuracy=float(np.mean(guesses == held_out.labels)),
        images_per_second=len(images) * calls_per_second(lambda: predict(params, images)),
    )


if __name__ == "__main__":
    run_command(main)
