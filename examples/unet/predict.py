"""Segments an image of any size: `python -m examples.unet.predict IN OUT`.

IN is an image, or an `.npy` file of uint8 [height, width] or [height, width, 3], which may be larger
than the memory. OUT is a `.png` or `.npy` of the same size: 255 in the foreground, 0 elsewhere.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from examples.errors import ExampleError, run_command
from examples.flags import check_replaces_none, whole
from examples.runs import Run
from examples.unet.image_files import check_output, open_image, write_rows
from examples.unet.tiles import predict_rows
from examples.unet.train import create, make_predict


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", type=Path, metavar="IN")
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path("runs/unet"),
        help="the --out of a run, or one of its checkpoints/N (%(default)s)",
    )
    parser.add_argument(
        "--probability",
        action="store_true",
        help="write how sure the model is, 0 to 255, in place of the mask",
    )
    parser.add_argument(
        "--tile", type=whole(1), metavar="PIXELS", help="height and width (the run's --crop)"
    )
    parser.add_argument(
        "--overlap",
        type=whole(0),
        metavar="PIXELS",
        help="of neighbouring tiles, at most half of one (half of one)",
    )
    parser.add_argument(
        "--batch-size", type=whole(1), default=8, help="tiles at once (%(default)s)"
    )
    args = parser.parse_args(argv)

    # The files are checked first, so that a wrong path is reported before the model is loaded.
    check_output(args.output)
    check_replaces_none(args.output, [args.input])
    run = Run.load(args.checkpoint)
    run.check_program("examples.unet.train", "levels")
    flags, channels = argparse.Namespace(**run.flags), run.config["channels"]
    tile = args.tile or flags.crop
    overlap = tile // 2 if args.overlap is None else args.overlap
    if overlap > tile // 2:
        raise ExampleError(
            f"tiles may overlap by half at most, but --overlap is {overlap} and tiles have {tile}"
            f" pixels; pass --overlap {tile // 2} or less."
        )
    image = open_image(args.input, channels)

    graphdef, params = create(flags, channels=channels, size=tile)
    params = run.restore(dict(params=params))["params"]
    predict = make_predict(graphdef, dtype=flags.dtype)
    rows = predict_rows(
        image,
        lambda tiles: predict(params, tiles),
        tile=tile,
        overlap=overlap,
        batch_size=args.batch_size,
    )
    foreground = 0

    def pixels() -> Iterator[np.ndarray]:
        nonlocal foreground
        with tqdm(total=len(image), unit=" rows") as progress:
            for probabilities in rows:
                mask = probabilities >= 0.5
                foreground += np.count_nonzero(mask)
                shown = np.round(probabilities * 255) if args.probability else mask * 255
                yield shown.astype(np.uint8)
                progress.update(len(probabilities))

    height, width = image.shape[:2]
    write_rows(args.output, (height, width), pixels())
    print(
        f"{foreground / (height * width):.1%} foreground in {width} x {height} pixels; see {args.output}"
    )


if __name__ == "__main__":
    run_command(main)
