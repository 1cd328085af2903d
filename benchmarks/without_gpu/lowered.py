"""`python -m benchmarks lowered`: whether a change of the code changes any program, without a GPU.

Cases of the fuzz and of the sweep, an example of each operator and the optimizers are lowered, forward
and with gradients, for an absent H200 and an absent A100. The file has the hash of each lowering's text,
the implementations chosen with their reasons, and its keys of the tuning table; `--compare` says what
differs between two files. METHOD.md says what is hashed.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

from benchmarks import optimizer
from benchmarks.fuzz import operators
from benchmarks.fuzz.problem import How, Options
from benchmarks.fuzz.programs import Programs
from benchmarks.sweep import configs, programs
from jaxfused import dispatch
from jaxfused.__main__ import EXAMPLES, Example
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library, table

NAME = "lowered"

DEVICES = (
    dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132),
    dispatch.Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108),
)
IMPLEMENTATIONS = (None, "pallas", "cuda", "xla")
FORWARD, GRADIENT = "forward", "gradient"

PARTS = ("text", "raised", "choices", "keys")
Record = dict[str, Any]
"""A lowering's text hash or error, choices of kernels, and keys of the tuning table, as JSON values."""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.compare:
        before, now = (json.loads(path.read_text()) for path in options.compare)
        lines = differences(before, now)
        print("\n".join(lines or [f"all {len(now['lowerings'])} lowerings are equal"]))
        return 1 if lines else 0
    jax.config.update("jax_platforms", "cpu")
    # This user's tuning table must not change what is lowered.
    os.environ["XDG_CACHE_HOME"] = os.devnull
    begin = time.monotonic()
    found = lowered(options.seed, options.cases, options.only)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    records = found["lowerings"].values()
    print(
        f"{options.out}: {len(records)} lowerings of {len(found['drawn'])} cases,"
        f" {sum('raised' in record for record in records)} of them raised;"
        f" {time.monotonic() - begin:.0f} s"
    )
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--cases",
        type=int,
        default=144,
        metavar="N",
        help="how many cases of the fuzz and of the sweep are drawn, beside examples and optimizers"
        " (default: %(default)s)",
    )
    parser.add_argument("--only", metavar="WORD", help="cases that have this word in their names")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "NOW"))
    options = parser.parse_args(arguments)
    if not options.compare and not options.out:
        parser.error("name a file to write, --out, or two to compare, --compare")
    return options


# --- what is lowered ------------------------------------------------------------------------------


def lowered(seed: int, cases: int, only: str | None = None) -> dict[str, Any]:
    """Returns the drawn cases, and the record of each lowering by its name."""
    begin = time.monotonic()
    made: dict[str, tuple[Any, Callable[[], Iterator[Program]]]] = {}
    for index, name in zip(range(cases), itertools.cycle(operators.OPERATORS)):
        drawn = operators.drawn(seed, index, [name])
        made[f"{name} fuzz {index}"] = drawn, partial(_of_fuzz, drawn)
    for index, name in zip(range(cases), itertools.cycle(configs.OPERATORS)):
        config = configs.drawn(name, seed, index)
        made[f"{name} sweep {index}"] = configs.to_line(config), partial(_of_sweep, config)
    for name, example in EXAMPLES.items():
        made[f"{name} example"] = None, partial(_of_example, example)
    for row in (row for tree in ("vit-b", "llama") for row in optimizer.rows(tree)):
        made[f"optimizer {row.name}"] = None, partial(_of_optimizer, row)
    found: dict[str, Any] = {"drawn": {}, "lowerings": {}}
    for name, (drawn, each) in made.items():
        if only is not None and only not in name.split():
            continue
        print(f"[{time.monotonic() - begin:4.0f} s] {name}", flush=True)
        found["drawn"][name] = drawn
        for program in each():
            for device in DEVICES:
                label = f"{name}, {program.direction}, {program.implementation}, {device.name}"
                found["lowerings"][label] = record(program, device)
    return found


class Program(NamedTuple):
    """A function to lower."""

    direction: str
    implementation: str | None
    function: Callable[..., Any]
    operands: Sequence[Any]


def _of_fuzz(drawn: Options) -> Iterator[Program]:
    problem = operators.problem_of(drawn)
    for direction in (FORWARD, GRADIENT)[: 1 + problem.with_gradient]:
        case = Programs(problem, drawn | {"gradient": direction == GRADIENT})
        for implementation in IMPLEMENTATIONS:
            yield Program(direction, implementation, *case.traced(How(implementation, False)))


def _of_sweep(config: configs.Config) -> Iterator[Program]:
    written = programs.of(config)
    arrays = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    for direction in (FORWARD, GRADIENT)[: 1 + bool(written.differentiable)]:
        whole = written.whole(written.ours, direction == GRADIENT)
        yield Program(direction, None, whole, arrays)


def _of_example(example: Example) -> Iterator[Program]:
    yield Program(FORWARD, None, example.call, (*example.shapes, *example.others))
    yield Program(GRADIENT, None, example.value_and_gradients, (example.shapes, example.others))


def _of_optimizer(row: optimizer.Row) -> Iterator[Program]:
    """Yields a step of an optimizer for a vector and a matrix of a decoder."""
    shapes = optimizer.TREES["llama"]["layer0"]
    params = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in ("norm1", "k")}
    state = jax.eval_shape(row.ours.init, params)
    for implementation in IMPLEMENTATIONS:
        step = partial(row.ours.step, implementation=implementation, **row.how)
        yield Program(FORWARD, implementation, step, (params, state, params))


@contextlib.contextmanager
def _library_is_there() -> Iterator[None]:
    """Makes programs call the CUDA library within this context, even if it is not built."""
    built = ("75-real", "80-real", "90-real", "100-real", "120")
    with (
        mock.patch.object(cuda_library, "why_unavailable", lambda: None),
        mock.patch.object(cuda_library, "architectures", lambda: built),
        mock.patch.object(cuda_library, "register", lambda: None),
        mock.patch.object(cublaslt, "why_unavailable", lambda: None),
    ):
        yield


def record(program: Program, device: dispatch.Device) -> Record:
    """Returns the record of a program lowered for a GPU."""
    # A cached trace may belong to another GPU.
    jax.clear_caches()
    with _library_is_there(), dispatch.assume(device), dispatch.recorded(alone=True) as choices:
        try:
            traced = jax.jit(program.function).trace(*program.operands)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            result = {"text": hashlib.sha256(without_places(text).encode()).hexdigest()[:16]}
        # Refusals and their messages must not change either.
        except Exception as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
    return result | {
        "choices": [[c.stage, c.implementation, [*c.reasons.items()]] for c in choices],
        "keys": [table.Key.of(c.kernel, c.operands) for c in choices if c.kernel is not None],
    }


# --- text of a lowered program --------------------------------------------------------------------

_MODULE = re.compile(r'kernel_hash = "(?:[^"\\]|\\.)*", module = "((?:[^"\\]|\\.)*)"')
"""Pattern of a Mosaic GPU kernel in a program's text: MLIR's bytecode and its hash."""
_ESCAPED = re.compile(rb'\\(?:([0-9A-F]{2})|(["\\]))')


def without_places(text: str) -> str:
    """Returns a program's text with its Mosaic bytecode decoded, without files and line numbers."""
    return _MODULE.sub(lambda found: f"module = {_kernel(found[1])}", text)


def _kernel(escaped: str) -> str:
    bytecode = _ESCAPED.sub(
        lambda e: bytes.fromhex(e[1].decode()) if e[1] else e[2], escaped.encode()
    )
    with mlir.make_ir_context() as context:
        mosaic_gpu.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(bytecode)
        # dump_basename ends in the number of kernels that this process has lowered so far.
        del module.operation.attributes["mosaic_gpu.dump_basename"]
        return str(module.operation.get_asm(enable_debug_info=False))


# --- comparing two files --------------------------------------------------------------------------


def differences(before: Any, now: Any) -> list[str]:
    """Returns a line for each lowering that differs, and one with counts by kind of difference."""
    lines = []
    counts: Counter[str] = Counter()
    for label in dict.fromkeys((*before["lowerings"], *now["lowerings"])):
        old, new = (found["lowerings"].get(label) for found in (before, now))
        name = label.rsplit(", ", 3)[0]
        if old is None or new is None:
            parts = ["only before" if new is None else "only now"]
        elif before["drawn"][name] != now["drawn"][name]:
            parts = ["another case was drawn"]
        else:
            parts = [part for part in PARTS if old.get(part) != new.get(part)]
        if parts:
            lines.append(f"{label}: {', '.join(parts)}")
            counts.update(parts)
    if lines:
        counted = ", ".join(f"{part} {count}" for part, count in counts.items())
        lines.append(f"{len(lines)} of {len(now['lowerings'])} lowerings differ: {counted}")
    return lines
