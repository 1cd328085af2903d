"""Flags that all training programs share, and the argparse types of numbers."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from examples import optimizers
from examples.errors import ExampleError
from examples.runs import Run

# Flags of one call, which are not saved in config.json.
_CALL_FLAGS = ("out", "resume", "coordinator", "processes", "process_id", "cpu_devices")
# Flags of the device mesh. A program without them may resume a run that was started with them.
_DEVICE_FLAGS = ("mesh", "tensor", "fsdp")
# Flags that say only where and how a run is carried out; all others define what the run computes.
_PLACE_FLAGS = (*_CALL_FLAGS, *_DEVICE_FLAGS, "workers", "checkpoint_every", "data")


def add_flags(parser: argparse.ArgumentParser, *, out: str) -> None:
    """Adds the flags that every example has; each example may set other defaults."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", type=Path, default=Path(out), help="directory of the run (%(default)s)"
    )
    run.add_argument("--resume", action="store_true", help="continue the run in --out")
    run.add_argument(
        "--seed", type=whole(0, most=2**63 - 1), default=0, help="of weights, data order, dropout"
    )
    run.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the computation (auto: float32 on a CPU, else bfloat16); parameters are float32",
    )
    run.add_argument("--workers", type=whole(0), help="processes that make batches (%(default)s)")
    run.add_argument("--evaluate-every", type=whole(1), metavar="N", help="epochs (%(default)s)")
    run.add_argument("--checkpoint-every", type=whole(1), metavar="N", help="epochs (%(default)s)")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--optimizer",
        choices=tuple(optimizers.OPTIMIZERS),
        default=optimizers.DEFAULT,
        help=f"its learning rate and decay default to multiples of {optimizers.DEFAULT}'s"
        " (%(default)s)",
    )
    optimizer.add_argument("--epochs", type=whole(1), help="passes over the data (%(default)s)")
    optimizer.add_argument(
        "--batch-size", type=whole(1), help="images, or rows of text, a step (%(default)s)"
    )
    optimizer.add_argument(
        "--learning-rate", type=number(above=0), help="at the end of the warm-up (%(default)s)"
    )
    optimizer.add_argument("--warmup-epochs", type=number(least=0), help="(%(default)s)")
    optimizer.add_argument(
        "--weight-decay",
        type=number(least=0),
        help="of the kernels only, of muon's matrices; sgd has none (%(default)s)",
    )
    optimizer.add_argument(
        "--clip-norm",
        type=number(above=0),
        default=1.0,
        help="largest global norm of the gradients (%(default)s)",
    )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags.

    With --resume, flags that are not passed are read from the run, and a passed flag that defines what
    the run computes must agree with it. The learning rate and the weight decay have the named
    optimizer's defaults. The dtype "auto" becomes this device's, so that a run resumed on another
    device keeps its dtype.
    """
    entry = optimizers.OPTIMIZERS[parser.parse_args(argv).optimizer]
    parser.set_defaults(
        learning_rate=parser.get_default("learning_rate") * entry.rate,
        weight_decay=parser.get_default("weight_decay") * entry.decay,
    )
    args = parser.parse_args(argv)
    if args.resume:
        run = Run.load(args.out)
        if run.directory != args.out:
            raise ExampleError(
                f"a run is resumed from its newest checkpoint, but --out {args.out} is one of them;"
                f" pass --out {run.directory}, and remove the later checkpoints to go on from this one."
            )
        # Runs of older versions have no --optimizer; they used the default one.
        saved = {"optimizer": optimizers.DEFAULT} | run.flags
        if others := sorted(saved.keys() - vars(args).keys() - {*_DEVICE_FLAGS}):
            raise ExampleError(
                f"a run is resumed by the program that started it, but {args.out} was started by"
                f" another example, with --{others[0].replace('_', '-')}; pass another --out."
            )
        parser.set_defaults(**saved)
        args = parser.parse_args(argv)
        for name, value in saved.items():
            if name not in _PLACE_FLAGS and getattr(args, name) != value:
                flag = "--" + name.replace("_", "-")
                raise ExampleError(
                    f"a run keeps its flags, but {args.out} was started with {flag} {value} and"
                    f" now got {flag} {getattr(args, name)}; leave {flag} out, or pass another"
                    " --out to start a new run."
                )
    if args.dtype == "auto":
        args.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return args


def saved_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags that config.json stores, with paths as strings."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in _CALL_FLAGS
    }


def check_replaces_none(out: Path, inputs: Sequence[Path]) -> None:
    """Checks that a result is not written over a file that it is made of.

    Raises:
      ExampleError: it would be.
    """
    if out.resolve() in [path.resolve() for path in inputs]:
        raise ExampleError(
            f"a result must not replace what it is made of, but {out} is both; pass another output."
        )


def whole(least: int, *, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type: an integer of at least `least`, and at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            limits = f"from {least} up" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be an integer {limits}, but is {text!r}")
        return value

    return parse


def number(
    *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """Returns an argparse type: a finite number with least <= value, above < value < below."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # This form of the condition also rejects nan.
        if not (least <= value < below and value > above and math.isfinite(value)):
            limits = [
                *([f"from {least:g} up"] if least > -math.inf else []),
                *([f"above {above:g}"] if above > -math.inf else []),
                *([f"below {below:g}"] if below < math.inf else []),
            ]
            raise argparse.ArgumentTypeError(
                f"must be a finite number {' and '.join(limits)}, but is {text!r}"
            )
        return value

    return parse
