"""`python -m tests.fuzz emulated|interpreted|programs`: random tests that run on the CPU.

`emulated` runs each case by the CUDA C kernels in the emulator of tests/cuda_emulator, and `interpreted`
by the Pallas kernels in Mosaic's interpreter. Both take the options of `python -m benchmarks fuzz`, with
bounded sizes, because they are slow. `programs` judges random programs under `jaxfused.fuse`
(tests/program_fuzz). The environment variable EMULATED_ARCHITECTURE, 90 by default, is the architecture
of the CUDA C kernels.
"""

import functools
import os
import sys
from collections.abc import Sequence

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.fuzz import command, judge
from benchmarks.fuzz.problem import Options
from jaxfused import dispatch
from jaxfused.runtime import cuda_library, lowering
from tests.conftest import EMULATED, HOPPER
from tests.cuda_emulator import build
from tests.program_fuzz import command as program_fuzz
from tests.support import mosaic_interpreter


def emulated(options: Options) -> judge.Verdict:
    """Returns the verdict on a case by CUDA C kernels."""
    _emulate()
    return judge.judge(options)


def interpreted(options: Options) -> judge.Verdict:
    """Returns the verdict on a case by Pallas kernels."""
    _interpret()
    with plgpu.force_gpu_interpret_mode():
        return judge.judge(options)


@functools.cache
def _emulate() -> None:
    architecture = os.environ.get("EMULATED_ARCHITECTURE", "90")
    _assume(EMULATED[architecture])
    cuda_library.PATH, cuda_library.PLATFORM = build.library(architecture), "cpu"


@functools.cache
def _interpret() -> None:
    _assume(HOPPER)
    for_good = pytest.MonkeyPatch()
    mosaic_interpreter.prepare(for_good)
    mosaic_interpreter.complete(for_good)
    mosaic_interpreter.upcast_integers(for_good)


def _assume(device: dispatch.Device) -> None:
    dispatch.current_device = lambda *arrays: device
    lowering.KERNELS_RUN_EVERYWHERE = True
    # Each kernel runs only once, so that compiling fast matters more than running fast.
    jax.config.update("jax_disable_most_optimizations", True)


_WAYS = {"emulated": (emulated, "cuda", 100), "interpreted": (interpreted, "pallas", 50)}
"""By name: the judge, the implementation that it runs, and the default bound of sizes."""
_QUICK_COMPILES = (
    "--xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in (*_WAYS, "programs"):
        print(f"usage: python -m tests.fuzz {'|'.join(_WAYS)}|programs [options of the fuzz]")
        return 2
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK_COMPILES}"
    if arguments[0] == "programs":
        jax.config.update("jax_disable_most_optimizations", True)
        return program_fuzz.main(arguments[1:])
    judged, implementation, largest = _WAYS[arguments[0]]
    defaults = ["--implementation", implementation, "--largest", str(largest), "--limit", "600"]
    return command.run(command.parsed([*defaults, *arguments[1:]]), judged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
