"""Segments images by a file of examples.unet.export.

    python -m examples.unet.segment FILE IN... --out DIR

IN are images or folders of them, of any size. DIR gets a PNG for each, whose grey values are the
classes' numbers.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from examples.errors import ExampleError, run_command
from examples.flags import check_replaces_none, number
from examples.images import find_images
from examples.unet.artifact import Artifact
from examples.unet.image_files import open_image, write_rows
from examples.unet.runner import Runner

_DECODED_AHEAD = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.segment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("inputs", type=Path, nargs="+", metavar="IN")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    add_flags(parser)
    args = parser.parse_args(argv)

    inputs = _images(args.inputs)
    for source, name in inputs:
        check_replaces_none(args.out / name, [source])
    begin = time.perf_counter()
    runner = open_runner(args)
    opened = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    first = None
    pixels = 0
    with ThreadPoolExecutor(1) as pool:
        images = _decoded(pool, inputs, runner.artifact.description.channels)
        results = runner.segment_all(images)
        for (_, name), result in zip(inputs, results, strict=True):
            first = first or time.perf_counter()
            target = args.out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_rows(target, result.classes.shape, [result.classes])
            pixels += result.classes.size
    seconds = time.perf_counter() - begin
    print(
        f"{len(inputs)} images of {pixels / 1e6:.1f} million pixels in {seconds:.2f} s:"
        f" {opened - begin:.2f} s to open {args.file}, {first - opened:.2f} s to the first answer;"
        f" see {args.out}",
        file=sys.stderr,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a file's programs are run."""
    parser.add_argument(
        "--recompile",
        action="store_true",
        help="compile the file's portable program where it was compiled for another machine",
    )
    parser.add_argument(
        "--overlap",
        type=number(least=0, below=0.500001),
        default=0.25,
        metavar="SHARE",
        help="of a tile that it shares with the next (%(default)s)",
    )


def open_runner(args: argparse.Namespace) -> Runner:
    """Returns the runner of the flags."""
    return Runner(Artifact(args.file, recompile=args.recompile), overlap=args.overlap)


def _images(inputs: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Returns each image's path, and the path of its result."""
    found = []
    for path in inputs:
        if path.is_dir():
            found += [(p, p.relative_to(path).with_suffix(".png")) for p in find_images(path)]
        else:
            found.append((path, Path(path.stem + ".png")))
    if not found:
        raise ExampleError(
            f"IN must name images, but {', '.join(map(str, inputs))} has none; pass others."
        )
    targets: dict[Path, Path] = {}
    for source, name in found:
        if name in targets:
            raise ExampleError(
                f"results must differ in their names, but {targets[name]} and {source} would both be"
                f" {name}; rename one, or pass one at a time."
            )
        targets[name] = source
    return found


def _decoded(
    pool: ThreadPoolExecutor, inputs: Sequence[tuple[Path, Path]], channels: int
) -> Iterator[np.ndarray]:
    """Yields the images, decoded ahead while the device works."""
    sources = [source for source, _ in inputs]
    ahead = [pool.submit(open_image, path, channels) for path in sources[:_DECODED_AHEAD]]
    for path in [*sources[_DECODED_AHEAD:], *[None] * len(ahead)]:
        yield ahead.pop(0).result()
        if path is not None:
            ahead.append(pool.submit(open_image, path, channels))


if __name__ == "__main__":
    run_command(main)
