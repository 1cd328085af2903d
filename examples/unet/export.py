"""Makes one file for inference: `python -m examples.unet.export SOURCE`, `--help` for the flags.

SOURCE is a run of examples.unet.train, or a .safetensors or .npz file with the state dict of
torchvision's DeepLabV3. Batch norms are folded into the convolutions, kernels are stored in bfloat16,
int8 or float8, and programs are compiled for this machine, for each size and batch.
`python -m examples.unet.segment` and `python -m examples.unet.serve` answer from the file.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError, run_command
from examples.flags import check_replaces_none, number, whole
from examples.images import find_images
from examples.quantization import flags_of
from examples.runs import Run
from examples.unet import artifact, network
from examples.unet.dataset import Data
from examples.unet.image_files import open_image
from examples.unet.metrics import scores
from examples.unet.network import Network
from examples.unet.runner import Runner
from examples.unet.tiles import cut_tile
from examples.unet.train import load_data

PRECISIONS = ("float32", "bfloat16", "int8", "fp8")
_CODES = {"int8": "int8", "fp8": "float8_e4m3fn"}
_LEAST_CHANNELS = 128
"""Fewest input and output channels of a quantised convolution; with fewer, 8 bits are no faster."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = _flags(argv)
    is_run = args.source.is_dir()
    dtype = "float32" if args.precision == "float32" else "bfloat16"
    data = None
    if is_run:
        run = Run.load(args.source)
        net = network.of_run(run, dtype=dtype)
        data = load_data(flags_of(run, args))
        side = run.flags["crop"]
    else:
        net, side = network.of_weights(args.source, dtype=dtype), 512
    sizes = args.size or [(side, side)]
    shapes = [(batch, *size) for size in sizes for batch in sorted(set(args.batch_size))]
    _check_sizes(net, shapes)
    if args.precision in _CODES:
        batches = _calibration(args, net, data, sizes[0])
        net = quantized(net, args.precision, batches, percentile=args.input_percentile)
    net = dataclasses.replace(net, model=network.narrowed(net.model, dtype))
    artifact.write(args.out, net, precision=args.precision, shapes=shapes)
    megabytes = args.out.stat().st_size / 1e6
    print(f"{net.name} in {args.precision}: {megabytes:.1f} MB in {args.out}")
    if data is not None:
        print(_scores(Runner(artifact.Artifact(args.out)), data))


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.unet.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("--out", type=Path, default=Path("model.segment"), help="(%(default)s)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where a run's images are now")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bfloat16", help="of products (%(default)s)"
    )
    parser.add_argument(
        "--size",
        type=_size,
        nargs="+",
        metavar="HxW",
        help="sizes of images to compile for; others are padded to one, or cut into tiles of the"
        " largest (the run's --crop, or 512x512)",
    )
    parser.add_argument(
        "--batch-size", type=whole(1), nargs="+", default=[1, 8], help="to compile for (1 8)"
    )
    parser.add_argument(
        "--calibrate",
        type=whole(1),
        default=8,
        metavar="BATCHES",
        help="on which scales of inputs in 8 bits are chosen (%(default)s)",
    )
    parser.add_argument(
        "--calibrate-on",
        type=Path,
        metavar="DIR",
        help="images to choose scales on, for weights without a run",
    )
    parser.add_argument(
        "--input-percentile",
        type=number(above=0, below=100.000001),
        metavar="PERCENT",
        help="of the inputs' magnitudes that a scale holds (99.99 in int8, 100 in fp8)",
    )
    args = parser.parse_args(argv)
    if not args.source.exists():
        raise ExampleError(
            f"SOURCE must be a run's directory or a file of weights, but {args.source} is missing; pass"
            " the --out of examples.unet.train, or a .safetensors or .npz file."
        )
    if not args.out.absolute().parent.is_dir():
        raise ExampleError(
            f"the output needs a folder, but {args.out.parent} is missing; make it, or pass another"
            " --out."
        )
    check_replaces_none(args.out, [args.source])
    if args.precision in _CODES and not args.source.is_dir() and args.calibrate_on is None:
        raise ExampleError(
            f"{args.precision} chooses its scales by images, and {args.source} has none; pass a folder"
            " of images as --calibrate-on."
        )
    if args.input_percentile is None:
        args.input_percentile = 99.99 if args.precision == "int8" else 100.0
    return args


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or 0 in (int(match[1]), int(match[2])):
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH, such as 512x768, but is {text!r}")
    return int(match[1]), int(match[2])


def _check_sizes(net: Network, shapes: Sequence[tuple[int, int, int]]) -> None:
    for shape in shapes:
        images = jax.ShapeDtypeStruct((*shape, net.channels), jnp.uint8)
        try:
            jax.eval_shape(lambda images: net.answer(net.model, images), images)
        except ValueError as error:
            raise ExampleError(str(error)) from error


def quantized(
    net: Network, precision: str, batches: Iterable[np.ndarray], *, percentile: float
) -> Network:
    """Returns the network with kernels and inputs of its wide convolutions in 8 bits.

    Wide are those of windows larger than 1 x 1 and `_LEAST_CHANNELS` or more; if there are none, all
    convolutions are quantised.

    Args:
      net: the network.
      precision: "int8" or "fp8".
      batches: uint8 images, on which the scales of the inputs are calibrated.
      percentile: of the inputs' magnitudes that a scale holds.
    """
    code = _CODES[precision]
    wide = [
        "/".join(map(str, path))
        for path, layer in nnx.iter_modules(net.model)
        if isinstance(layer, nnx.Conv)
        and min(layer.in_features, layer.out_features) >= _LEAST_CHANNELS
        and max(layer.kernel_size) > 1
    ]
    pattern = f"^({'|'.join(map(re.escape, wide))})$" if wide else ""
    rule = jaxfused.QuantizationRule(pattern, code, input_dtype=code, input_percentile=percentile)
    calibration = jaxfused.Calibration(
        list(batches), call=lambda model, images: model(net.scaled(jnp.asarray(images)))
    )
    model = jaxfused.quantize_params(net.model, [rule], calibration=calibration)
    return dataclasses.replace(net, model=model)


def _calibration(
    args: argparse.Namespace, net: Network, data: Data | None, size: tuple[int, int]
) -> list[np.ndarray]:
    if args.calibrate_on is None:
        return [data.train_batch(step)["image"] for step in range(args.calibrate)]
    if not args.calibrate_on.is_dir():
        raise ExampleError(
            f"--calibrate-on must name a folder of images, but {args.calibrate_on} is none; pass one."
        )
    paths = find_images(args.calibrate_on)[: 4 * args.calibrate]
    if not paths:
        raise ExampleError(
            f"--calibrate-on must name a folder of images, but {args.calibrate_on} has none; add some."
        )
    tiles = [cut_tile(open_image(path, net.channels), 0, 0, size) for path in paths]
    # The last images, which do not fill a batch of four, are used only if there is no full batch.
    full = len(tiles) // 4 * 4 or len(tiles)
    return [np.stack(tiles[i : i + 4]) for i in range(0, full, 4)]


def _scores(runner: Runner, data: Data) -> str:
    batches = [data.held_out(i) for i in range(data.held_out.images)]
    found = runner.segment_all(batch["image"] for batch in batches)
    pairs = [(s.classes, batch["mask"]) for s, batch in zip(found, batches, strict=True)]
    result = scores(pairs, len(runner.artifact.description.classes))
    return (
        f"mean IoU {result.mean_iou:.4f}, mean Dice {result.mean_dice:.4f} on {len(pairs)} held-out"
        " images"
    )


if __name__ == "__main__":
    run_command(main)
