"""`python -m benchmarks kernels LINE`: the kernels of a case of the sweep on an H200, without a GPU.

Ours and each form of stock, one list after the other: what XLA would launch and the bytes of its
operands, not how long that takes. METHOD.md says how far it is what a GPU's own compiler makes.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import peers
from benchmarks.sweep import configs, judge, programs
from benchmarks.sweep.lowering import DIRECTIONS, OURS, STOCK, WHOLE
from benchmarks.without_gpu import hlo, target
from jaxfused.cuda import library

NAME = "kernels"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if reason := target.why_unavailable():
        print(reason)
        return 2
    device = target.prepare()
    if reason := library.why_unavailable():
        print(f"No operator takes its CUDA kernels here: {reason}.")
    config = configs.from_line(options.case)
    for direction in DIRECTIONS[options.direction]:
        print(f"{direction}: {configs.to_line(config)}")
        _show(device, config, direction, options)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("case", metavar="LINE", help="a line that a sweep printed")
    parser.add_argument("direction", nargs="?", choices=DIRECTIONS, default="both")
    parser.add_argument(
        "--triton",
        action="store_true",
        help="products as Triton's kernels instead of cuBLAS's, between which a GPU's autotuner chooses",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the programs' text")
    return parser.parse_args(arguments)


def _show(device: Any, config: configs.Config, direction: str, options: argparse.Namespace) -> None:
    written = programs.of(config)
    shapes = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    forms = {OURS: written.ours}
    forms |= {f"{STOCK} {name}": form for name, form in written.stock.items()}
    ours = None
    for name, form in (forms | dict(written.peers)).items():
        whole = written.whole(form, direction == WHOLE)
        try:
            program = target.compile_for(device, whole, shapes, triton_products=options.triton)
        except Exception as error:
            print(f"\n  {name}: cannot be compiled without a GPU: {peers.describe(error)}")
            continue
        text = program.as_text()
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            file_name = re.sub(r"\W+", "_", f"{name}_{direction}")
            (options.out / f"{file_name}.txt").write_text(text)
        normal = judge.program_text(program)
        ours = ours or normal
        same = ", the program that ours is" if name != OURS and normal == ours else ""
        print(listing(name + same, hlo.kernels(text)), flush=True)


def listing(name: str, kernels: Sequence[hlo.Kernel]) -> str:
    """A line for each kernel: bytes, results and operands, its name and where it comes from."""
    total = sum(kernel.megabytes for kernel in kernels)
    lines = [f"\n  {name}: kernels {len(kernels)}, at most {total:.2f} MB"]
    for kernel in kernels:
        shapes = f"{' '.join(kernel.results)} <- {' '.join(kernel.operands)}"
        indent = "  " * kernel.depth
        lines.append(
            f"  {kernel.megabytes:9.2f} MB  {indent}{kernel.name} ({kernel.what})  {shapes}"
        )
        lines.append(f"{'':14}  {indent}{_short(kernel.source)}")
    return "\n".join(lines)


def _short(source: str) -> str:
    """An operation's place in the program without what every place begins with."""
    return re.sub(r"^jit\((?:run|<lambda>)\)/", "", source)
