"""Prints the classes of images: `python -m examples.vit.predict CHECKPOINT IMAGE...`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import ImageOps

from examples.errors import run_command
from examples.images import read_image
from examples.runs import Run
from examples.vit.data import centre_crop
from examples.vit.train import Create, create_vit, make_predict


def main(
    argv: Sequence[str] | None = None,
    *,
    module: str = "examples.vit.predict",
    create: Create = create_vit,
) -> None:
    """Runs the command; `argv` replaces the command line, and `create` makes another model."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="Prints the classes of images."
    )
    parser.add_argument(
        "checkpoint", type=Path, help="the --out of a run, or one of its checkpoints/N"
    )
    parser.add_argument("images", type=Path, nargs="+", metavar="image")
    parser.add_argument(
        "--invert",
        action="store_true",
        help="swap dark and bright: the digits were learned bright on dark",
    )
    args = parser.parse_args(argv)

    run = Run.load(args.checkpoint)
    run.check_program(module.replace(".predict", ".train"), "image_size")
    config = run.config
    flags = argparse.Namespace(**run.flags)
    # Images are read first, so that a wrong path is reported before the model is loaded.
    images = [read_image(path, "L" if config["channels"] == 1 else "RGB") for path in args.images]
    if args.invert:
        images = [ImageOps.invert(image) for image in images]
    batch = np.stack([centre_crop(image, flags.image_size) for image in images])

    graphdef, params = create(flags, channels=config["channels"], classes=len(config["classes"]))
    params = run.restore(dict(params=params))["params"]
    logits = make_predict(graphdef, dtype=flags.dtype)(
        params, batch.reshape(len(batch), flags.image_size, flags.image_size, config["channels"])
    )
    probabilities = np.asarray(jax.nn.softmax(logits))
    width = max(len(str(path)) for path in args.images)
    for path, row in zip(args.images, probabilities, strict=True):
        best = np.argsort(-row)[:3]
        guesses = ", ".join(f"{config['classes'][c]} {row[c]:.1%}" for c in best)
        print(f"{path!s:{width}}  {guesses}")


if __name__ == "__main__":
    run_command(main)
