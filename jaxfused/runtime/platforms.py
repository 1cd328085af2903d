"""Kernels for NVIDIA GPUs in programs that are lowered for other platforms.

An operator chooses for the device that its program is expected to run on. JAX may lower the program for
another one: `jax.jit` of arrays that are committed to the CPU, on a machine with a GPU, and `jax.export`
for several platforms at once. On other platforms the stage runs in XLA. A program lowered for one
platform contains nothing of this.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

Arrays = Sequence[jax.Array | None]

KERNELS_RUN_EVERYWHERE = False
"""True if kernels are kept on all platforms, for tests that interpret, emulate or replace them."""


class Stage(Protocol):
    """Interface of a computation by a kernel or by XLA; equal stages compute the same function."""

    def on_gpu(self, *operands: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """Returns the results of a kernel for NVIDIA GPUs."""

    def on_gpu_exported(self, *operands: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """Returns the kernel's results from a module that is lowered for GPUs alone."""

    def elsewhere(self, *operands: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """Returns the results of XLA on any platform."""


def by_platform(stage: Stage, operands: Arrays) -> tuple[jax.Array | None, ...]:
    """Returns the results of `stage`: by its kernel if lowered for NVIDIA GPUs, else by XLA."""
    if KERNELS_RUN_EVERYWHERE:
        return stage.on_gpu(*operands)
    call, results = jax.make_jaxpr(stage.on_gpu, return_shape=True)(*operands)
    present = [operand for operand in operands if operand is not None]
    given = tuple(operand is not None for operand in operands)
    computed = iter(_kernel.bind(*present, call=call, stage=stage, given=given))
    return tuple(None if result is None else next(computed) for result in results)


def _all(present: Sequence[jax.Array], given: Sequence[bool]) -> list[jax.Array | None]:
    remaining = iter(present)
    return [next(remaining) if there else None for there in given]


_kernel = Primitive("jaxfused_kernel")
_kernel.multiple_results = True


@_kernel.def_impl
def _kernel_impl(*operands: jax.Array, call: ClosedJaxpr, stage: Stage, given: Any) -> Any:
    del stage, given
    return jaxpr_as_fun(call)(*operands)


@_kernel.def_abstract_eval
def _kernel_results(*operands: Any, call: ClosedJaxpr, stage: Stage, given: Any) -> Any:
    del operands, stage, given
    return call.out_avals


def _lower(f: Callable[..., Any], context: Any, operands: Sequence[Any], given: Any) -> Any:
    def present_results(*present: jax.Array) -> list[jax.Array]:
        return [result for result in f(*_all(present, given)) if result is not None]

    return mlir.lower_fun(present_results, multiple_results=True)(context, *operands)


def _lower_for_gpus(context, *operands, call: ClosedJaxpr, stage: Stage, given: Any) -> Any:
    # Pallas cannot lower a kernel into a module for several platforms.
    if len(context.module_context.platforms) > 1:
        return _lower(stage.on_gpu_exported, context, operands, given)
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(context, *operands)


def _lower_elsewhere(context, *operands, call: ClosedJaxpr, stage: Stage, given: Any) -> Any:
    def elsewhere(*operands: jax.Array | None) -> list[jax.Array]:
        results = [result for result in stage.elsewhere(*operands) if result is not None]
        return [_in_parts(r, aval) for r, aval in zip(results, call.out_avals, strict=True)]

    return _lower(elsewhere, context, operands, given)


def _in_parts(result: jax.Array, like: Any) -> jax.Array:
    """Returns XLA's result repeated to the shape of the kernel's result.

    The shapes differ if a kernel finds a largest magnitude in parts. XLA has one part; repeating it does
    not change the largest.
    """
    if result.shape == like.shape:
        return result
    assert result.shape == (1, *like.shape[1:]), (result.shape, like.shape)
    return jnp.broadcast_to(result, like.shape)


mlir.register_lowering(_kernel, _lower_for_gpus, platform="cuda")
mlir.register_lowering(_kernel, _lower_elsewhere)
