"""`python -m jaxfused tune`: tunes a program of the user's from the command line."""

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
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
        f, args = _run_program(options.program)
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
        return _function(_module(place), place, function)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).exists():
        raise ValueError(f"tune: there is no script {place!r}; pass the path of a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return _function(module, place, function)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import error inside the module is shown to the user unchanged.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"tune: there is no module {error.name!r} to import; pass the name of one that Python finds"
            " from here, or the path of a file that ends in .py."
        ) from error


def _function(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    what = "has none of that name" if function is None else f"has {type(function).__name__} there"
    raise ValueError(
        f"tune: PROGRAM names a function {name!r}, but {place} {what}; pass that of a function without"
        " arguments."
    )


def _run_program(name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns the function and arguments that the named function returns."""
    program = load_program(name)
    needed = [
        parameter.name
        for parameter in inspect.signature(program).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"tune: {name} takes {', '.join(needed)}, but it is called without arguments; pass a"
            " function without any, which returns (f, args)."
        )
    returned = program()
    match returned:
        case (f, tuple() | list() as args) if callable(f):
            return f, args
    raise ValueError(
        f"tune: {name} must return (f, args), a function and the tuple of its arguments, but it returned"
        f" {type(returned).__name__}."
    )
