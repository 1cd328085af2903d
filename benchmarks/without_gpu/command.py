"""`python -m benchmarks kernels LINE`: the kernels of a case of the sweep on an H200, without a GPU.

It prints one list for ours and for each form of stock: the kernels that XLA would launch and the bytes
of their operands, but no times. METHOD.md says how closely the list agrees with a compilation on the
GPU.
"""

import argparse
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.run import peers
from benchmarks.sweep import configs, judge, programs
from benchmarks.sweep.lowering import DIRECTIONS, OURS, STOCK, WHOLE
from benchmarks.without_gpu import hlo, ptx, target
from jaxfused.runtime import cuda_library

NAME = "kernels"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if reason := target.why_unavailable():
        print(reason)
        return 2
    device = target.prepare()
    if reason := cuda_library.why_unavailable():
        print(f"No operator takes its CUDA kernels here: {reason}.")
    config = configs.from_line(options.case)
    for direction in DIRECTIONS[options.direction]:
        print(f"{direction}: {configs.to_line(config)}")
        with tempfile.TemporaryDirectory() as elsewhere:
            _show(device, config, direction, not options.cublas, options.out or Path(elsewhere))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("case", metavar="LINE", help="a line that a sweep printed")
    parser.add_argument("direction", nargs="?", choices=DIRECTIONS, default="both")
    parser.add_argument(
        "--cublas",
        action="store_true",
        help="every product is cuBLAS's and not Triton's, between which a GPU's autotuner chooses",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for XLA's text of programs, and PTX"
    )
    return parser.parse_args(arguments)


def _show(device: Any, config: configs.Config, direction: str, triton: bool, folder: Path) -> None:
    written = programs.of(config)
    shapes = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    forms = {OURS: written.ours}
    forms |= {f"{STOCK} {name}": form for name, form in written.stock.items()}
    ours = None
    for name, form in (forms | dict(written.peers)).items():
        whole = written.whole(form, direction == WHOLE)
        dump = folder / re.sub(r"\W+", "_", f"{name}_{direction}")
        try:
            lowered = target.lower_for(device, whole, shapes)
            program = target.compile(lowered, triton_products=triton, dump=dump)
        except Exception as error:
            print(f"\n  {name}: cannot be compiled without a GPU: {peers.describe(error)}")
            continue
        text = program.as_text()
        normal = judge.program_text(program)
        same = ", the program that ours is" if normal == ours else ""
        if name == OURS:
            ours = normal
        print(listing(name + same, hlo.kernels(text), ptx.instructions(dump)), flush=True)


def listing(name: str, kernels: Sequence[hlo.Kernel], instructions: Mapping[str, str]) -> str:
    """Returns two lines for each kernel: its bytes, and its source and instructions."""
    total = sum(kernel.megabytes for kernel in kernels)
    lines = [f"\n  {name}: kernels {len(kernels)}, at most {total:.2f} MB"]
    for kernel in kernels:
        shapes = f"{' '.join(kernel.results)} <- {' '.join(kernel.operands)}"
        indent = "  " * kernel.depth
        lines.append(
            f"  {kernel.megabytes:9.2f} MB  {indent}{kernel.name} ({kernel.what})  {shapes}"
        )
        counted = instructions.get(kernel.function)
        lines.append(f"{'':14}  {indent}{_short(kernel.source)}{f'; {counted}' if counted else ''}")
    return "\n".join(lines)


def _short(source: str) -> str:
    """Returns an instruction's op_name without the prefix of jit, which all op_names share."""
    return re.sub(r"^jit\((?:run|<lambda>)\)/", "", source)
