"""A language model on a mesh of devices: `python -m examples.multi_gpu.jit_lm`, `--help` for the flags.

The mesh and its flags are those of jit_vit.
"""

from collections.abc import Sequence

from examples.errors import run_command
from examples.lm import train
from examples.lm.sizes import MODELS
from examples.multi_gpu import launch
from examples.multi_gpu.jit_vit import OnMesh, add_flags


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = train.make_parser("examples.multi_gpu.jit_lm", out="runs/jit_lm")
    add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = train.parse_flags(parser, argv)
    train.train(args, OnMesh(MODELS[args.model].key_heads, tensor=args.tensor, fsdp=args.fsdp))


if __name__ == "__main__":
    run_command(main)
