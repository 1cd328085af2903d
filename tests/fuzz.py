"""`python -m tests.fuzz emulated|interpreted|programs`: what the fuzz can look for on the CPU.

`emulated` computes each case by the CUDA C kernels, as tests/cuda_emulator runs them, and `interpreted`
by the Pallas kernels, in Mosaic's interpreter. `programs` has programs of its own, for `jaxfused.fuse`
(tests/program_fuzz). Of the other two, what follows are options of `python -m benchmarks fuzz`;
sizes are bounded, as both are slow. The environment's EMULATED_ARCHITECTURE, 90 by default, says whose
paths the CUDA C kernels take.
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
from jaxfused.runtime import cuda_library, platforms
from tests.conftest import EMULATED, HOPPER
from tests.cuda_emulator import build
from tests.program_fuzz import command as program_fuzz
from tests.support import mosaic_interpreter


def emulated(options: Options) -> judge.Verdict:
    """The verdict on a case of CUDA C kernels."""
    _emulate()
    return judge.judge(options)


def interpreted(options: Options) -> judge.Verdict:
    """The verdict on a case of Pallas kernels."""
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
    platforms.KERNELS_RUN_EVERYWHERE = True
    # As in other tests, kernels need not have run on a GPU.
    dispatch.UNMEASURED = frozenset()
    # A kernel runs once, and need not be fast.
    jax.config.update("jax_disable_most_optimizations", True)


_WAYS = {"emulated": (emulated, "cuda", 100), "interpreted": (interpreted, "pallas", 50)}
"""By name: the judge, the implementation that it can run, and what bounds sizes by default."""
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
