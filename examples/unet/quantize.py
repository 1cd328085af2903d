"""Compares formats of few bits: `python -m examples.unet.quantize CHECKPOINT`.

Quantises the convolutions and linear layers of a trained U-Net and prints size, held-out Dice and crops
a second for float, int8, fp8 and int4. The flags are those of `examples.vit.quantize`.
"""

import argparse
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import run_command
from examples.images import Loader
from examples.quantization import (
    Quantized,
    add_flags,
    calls_per_second,
    check_flags,
    flags_of,
    in_all_formats,
)
from examples.runs import Run
from examples.training import to_float
from examples.unet import dataset
from examples.unet.tiles import predict_rows
from examples.unet.train import create, load_data, make_predict, scores


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.quantize", description=__doc__.splitlines()[0]
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    check_flags(args)

    run = Run.load(args.checkpoint)
    run.check_program("examples.unet.train", "levels")
    flags = flags_of(run, args)
    data = load_data(flags)
    graphdef, params = create(flags, channels=data.channels, size=flags.crop)
    model = nnx.merge(graphdef, run.restore(dict(params=params))["params"])

    print(f"{'':5}  {'size':>9}  {'Dice':>8}  {'crops/s':>9}")
    with Loader(data.held_out, flags.workers) as loader:
        for quantized in in_all_formats(
            model, args, lambda batches: calibration(data, batches, flags.dtype)
        ):
            dice, speed = judge(quantized, data, loader, flags)
            print(
                f"{quantized.name:5}  {quantized.bytes / 1e6:6.2f} MB  {dice:8.4f}  {speed:9,.0f}",
                flush=True,
            )
            if quantized.report is not None:
                print(quantized.report, flush=True)


def calibration(data: dataset.Data, batches: int, dtype: str) -> jaxfused.Calibration:
    """Returns a calibration on `batches` training batches, with the call of the network."""
    return jaxfused.Calibration(
        [data.train_batch(step)["image"] for step in range(batches)],
        call=lambda model, images: model(to_float(images, dtype)),
    )


def judge(
    quantized: Quantized, data: dataset.Data, loader: Loader, flags: argparse.Namespace
) -> tuple[float, float]:
    """Returns Dice of the held-out images, and crops a second in batches of the run's size."""
    graphdef, params = nnx.split(quantized.model)
    predict = make_predict(graphdef, dtype=flags.dtype)

    def segmented(image: np.ndarray) -> np.ndarray:
        rows = predict_rows(
            image,
            lambda tiles: predict(params, tiles),
            tile=flags.crop,
            overlap=flags.crop // 2,
            batch_size=flags.batch_size,
        )
        return np.concatenate(list(rows)) >= 0.5

    batches = loader.batches(range(data.held_out.images))
    dice = scores((segmented(batch["image"]), batch["mask"]) for batch in batches)["test_dice"]
    crops = jax.device_put(data.train_batch(0)["image"])
    return dice, len(crops) * calls_per_second(lambda: predict(params, crops))


if __name__ == "__main__":
    run_command(main)
