"""The kernels that a function launches on a GPU, read from the program that JAX lowers it to."""

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxfused.runtime import cuda_library

_CALL = re.compile(r"stablehlo\.custom_call @(\w+)\(")
# A Mosaic GPU kernel is a separate module in bytecode, which has the name <kernel_name>_mosaic_gpu.
_MOSAIC = re.compile(r"\\00(?!stable_mosaic_gpu)(\w+)_mosaic_gpu\\00")


def lowered(f: Callable, *args: Any) -> str:
    """Returns the program of `f` for CUDA, lowered without a GPU; the arguments may be shapes."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in cuda_library.TARGETS]
    export = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)
    return export(*args).mlir_module()


def kernels(f: Callable, *args: Any) -> list[str]:
    """Returns the kernels that `f` launches on a GPU, in the order of the program.

    A Pallas kernel is listed by its `kernel_name`, another call by its target. Products and sums that
    are left to XLA do not count as kernels here.
    """
    return kernels_in(lowered(f, *args))


def kernels_in(program: str) -> list[str]:
    """Returns the kernels of a program that is already lowered."""
    found = []
    for line in program.splitlines():
        if (call := _CALL.search(line)) is None:
            continue
        target = call[1]
        if target.startswith("mosaic_gpu"):
            [target] = set(_MOSAIC.findall(line))
        found.append(target)
    return found
