"""Programs lowered in other processes, because a process of Python uses one core for that."""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import jax

from benchmarks.run import peers
from benchmarks.run.case import BARE, Case
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library

Module = jax.export.Exported | str
"""A lowered function, or the error that lowering it raised."""
Futures = Mapping[str, Future[Module]]
"""A case's modules by the name of their implementation, when they are lowered."""

NO_AUTOTUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""XLA's options for a truth and for inputs, whose times nobody reads."""

_HERE = {"xla", BARE, "cudnn", "cudnn_padded", "flash_attn3"}
"""Quick to lower; and cuDNN's attention has a partitioning rule that no serialised module holds."""


def export(platform: str, f: Callable[..., Any], *shapes: Any) -> Module:
    """Lowers a function for the devices of a platform, to a module that another process compiles."""
    # JAX refuses to export calls of custom libraries, which may change between versions; here the same
    # version compiles the module.
    anything = jax.export.DisabledSafetyCheck.custom_call("ALL")
    # An implementation's error belongs to its row and must not end the run.
    try:
        exported = jax.export.export(jax.jit(f), platforms=[platform], disabled_checks=[anything])(
            *shapes
        )
        # `_get_vjp` is a closure that cannot be pickled; the module contains the gradients.
        return replace(exported, _get_vjp=None)
    except Exception as error:
        return peers.describe(error)


def lowered(module: Module) -> Any:
    """Returns a module as what `jax.jit(f).lower` returns; raises what lowering it raised."""
    if isinstance(module, str):
        raise RuntimeError(module)
    args, _ = jax.tree.unflatten(module.in_tree, module.in_avals)
    return jax.jit(module.call).lower(*args)


def processes(count: int) -> ProcessPoolExecutor:
    """Returns processes that see the GPU, by which operators choose kernels, without memory there."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, initializer=_without_memory)


def register() -> None:
    """Registers the CUDA library's kernels, which modules lowered in other processes call by names."""
    if cuda_library.why_unavailable() is None:
        cuda_library.register()
        cublaslt.why_unavailable()


def load(names: Sequence[str]) -> None:
    """Imports benchmarks.cases.`names`, and what Pallas imports for its first kernel."""
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    for name in names:
        importlib.import_module(f"benchmarks.cases.{name}")


def start(
    pool: Executor, name: str, quick: bool, cases: Sequence[Case], chosen: Collection[str]
) -> list[Futures]:
    """Has each case of benchmarks.cases.`name` lowered, as far as that takes long."""
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()

    def submit(number: int, implementation: str) -> Future[Module]:
        return pool.submit(_lower, platform, name, quick, number, implementation)

    return [
        {n: submit(number, n) for n in case.jax if n in {*chosen} - {*case.skipped} - _HERE}
        if not case.in_place  # An exported module's inputs cannot be donated.
        else {}
        for number, case in enumerate(cases)
    ]


def _lower(platform: str, name: str, quick: bool, number: int, implementation: str) -> Module:
    case = _cases(name, quick)[number]
    shapes = jax.eval_shape(case.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    return export(platform, case.jax[implementation], *shapes)


@functools.cache
def _cases(name: str, quick: bool) -> Sequence[Case]:
    cases: Sequence[Case] = importlib.import_module(f"benchmarks.cases.{name}").cases(quick)
    return cases


def _without_memory() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
