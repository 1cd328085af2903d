"""Compares formats of few bits: `python -m examples.classify.quantize CHECKPOINT`."""

from collections.abc import Sequence

from examples.classify.train import create
from examples.errors import run_command
from examples.vit import quantize


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    quantize.main(argv, module="examples.classify.quantize", create=create)


if __name__ == "__main__":
    run_command(main)
