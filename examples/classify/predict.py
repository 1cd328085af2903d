"""Prints the classes of images: `python -m examples.classify.predict CHECKPOINT IMAGE...`."""

from collections.abc import Sequence

from examples.classify.train import create
from examples.errors import run_command
from examples.vit import predict


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    predict.main(argv, module="examples.classify.predict", create=create)


if __name__ == "__main__":
    run_command(main)
