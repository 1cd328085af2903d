"""What fewer bits cost and bring: `python -m examples.vit.quantize CHECKPOINT`.

Quantises the linear layers of a trained Vision Transformer and prints size, held-out accuracy and
images a second for float, int8, fp8 and int4.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import run_command
from examples.images import Loader
from examples.training import Run
from examples.vit.data import HeldOut
from examples.vit.train import check_classes, create_vit, load_data, make_predict

# int8 and fp8 are multiplied in their own dtype, so inputs are quantised too; int4 weights become floats
# again.
RULES = {
    "float": [],
    "int8": [jaxfused.QuantizationRule("", "int8", input_dtype="int8")],
    "fp8": [jaxfused.QuantizationRule("", "float8_e4m3fn", input_dtype="float8_e4m3fn")],
    "int4": [jaxfused.QuantizationRule("", "int4")],
}

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
    args = parser.parse_args(argv)

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
            quantized = jaxfused.quantize_params(model, rules) if rules else model
            row = judge(name, quantized, data.held_out, loader, dtype=flags.dtype)
            print(
                f"{row.name:5}  {row.bytes / 1e6:6.2f} MB  {row.accuracy:8.2%}"
                f"  {row.images_per_second:9,.0f}",
                flush=True,
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
