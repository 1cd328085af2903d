"""`python -m jaxfused tune`: tunes a program of the user's from the command line."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxfused.tuning.tuner import tune

_HELP = """Measures the operators of a program on this GPU, and keeps the fastest ways to run them.

PROGRAM names a function without arguments, as module:function or path/to/script.py:function. It returns
(f, args): a function of JAX arrays, such as a training step, and the tuple of its arguments, for which
jax.ShapeDtypeStruct will do. f(*args) is traced, and not run."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxfused tune",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("--seconds", type=float, default=50.0, help="default: %(default).0f")
    parser.add_argument(
        "--out", type=Path, help="a file to write, in place of the one that jaxfused reads"
    )
    options = parser.parse_args(arguments)
    try:
        f, args = load_program(options.program)()
        print(tune(f, *args, seconds=options.seconds, path=options.out))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def load_program(name: str) -> Callable[[], tuple[Callable[..., Any], Sequence[Any]]]:
    """Returns the function that "module:function" or "script.py:function" names."""
    place, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(
            f"tune: PROGRAM is {name!r}, but it names a place and a function in it; pass"
            " module:function or path/to/script.py:function."
        )
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).exists():
        raise ValueError(f"tune: there is no script {place!r}; pass the path of a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)
