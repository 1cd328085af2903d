"""`examples.lm.train` with the flags of jit_vit: `python -m examples.multi_gpu.jit_lm`."""

from collections.abc import Sequence

from examples.errors import run_command
from examples.lm import train
from examples.lm.sizes import MODELS
from examples.multi_gpu import launch
from examples.multi_gpu.jit_vit import add_flags, placement


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = train.make_parser("examples.multi_gpu.jit_lm", out="runs/jit_lm")
    add_flags(parser)
    launch.start(parser.parse_args(argv))
    args = train.parse_flags(parser, argv)
    config = MODELS[args.model]
    options = dict(heads=config.key_heads, tokens=args.length, layers=config.layers)
    train.train(args, placement(args, **options))


if __name__ == "__main__":
    run_command(main)
