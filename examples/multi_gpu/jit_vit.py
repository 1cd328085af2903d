"""The training of `examples.vit.train` on all devices: `python -m examples.multi_gpu.jit_vit`.

--tensor N and --fsdp are short for a --mesh of all devices: data=-1,tensor=N or fsdp=-1,tensor=N.
"""

import argparse
from collections.abc import Sequence

from examples.errors import run_command
from examples.flags import whole
from examples.multi_gpu import launch, mesh
from examples.placement import OneDevice
from examples.vit import train
from examples.vit.model import MODELS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh and of several processes."""
    group = parser.add_argument_group("mesh")
    group.add_argument(
        "--tensor",
        type=whole(1),
        default=1,
        metavar="N",
        help="devices that share each layer; the others share the batch (%(default)s)",
    )
    group.add_argument(
        "--fsdp",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="split parameters and optimizer state over the devices that share the batch",
    )
    launch.add_flags(parser)


def placement(
    args: argparse.Namespace, *, heads: int, tokens: int, layers: str | None = None
) -> OneDevice:
    """Returns the placement of the flags `--tensor` and `--fsdp`."""
    flag = f"{'fsdp' if args.fsdp else 'data'}=-1,tensor={args.tensor}"
    return mesh.placement(flag, heads=heads, tokens=tokens, layers=layers)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = train.make_parser("examples.multi_gpu.jit_vit", out="runs/jit_vit")
    add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = train.parse_flags(parser, argv)
    train.train(args, placement(args, heads=MODELS[args.model].heads, tokens=0))


if __name__ == "__main__":
    run_command(main)
