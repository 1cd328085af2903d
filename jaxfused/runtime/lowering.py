"""Makes a kernel's chosen implementation a part of the program: `jax.jit`, platforms, modules.

- Once in a program: the implementation runs inside a `jax.jit` that is equal for equal stages, configs
  and shapes. However often a program calls it, it is traced and lowered once.
- By platform: an operator chooses for the device that its program is expected to run on. JAX may lower
  the program for another platform: `jax.jit` of arrays that are committed to the CPU, on a machine with
  a GPU, or `jax.export` for several platforms at once. On these the stage runs in XLA. A program that
  is lowered for one platform contains no branch by platform.
- In a module of its own: XLA's partitioner lowers each call of a stage into a separate module. The
  stage's lowered text is exported once and inserted into each of these modules.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from jaxfused import dispatch
from jaxfused.runtime import cuda_library, sharding

Results = tuple[jax.Array | None, ...]

KERNELS_RUN_EVERYWHERE = False
"""True if kernels run on all platforms, for tests that interpret, emulate or replace them."""


@dataclass(frozen=True)
class Chosen:
    """The implementation and config chosen for one kernel's work (a stage) on a device."""

    stage: Any
    """The kernel's static parameters and implementations, a `jaxfused.runtime.runner.Stage`."""
    implementation: str
    config: Hashable
    """None for the implementation's default."""
    device: dispatch.Device

    @property
    def run(self) -> Callable[..., Results]:
        """The function that runs the implementation on the operands; call it within `jax_defaults`."""
        # Only stages that implement `HasConfigs` take a config.
        config = {} if self.config is None else {"config": self.config}
        return functools.partial(self.stage.run, self.implementation, self.device, **config)


@contextlib.contextmanager
def jax_defaults(implementation: str) -> Iterator[None]:
    """Sets JAX's default promotions, and for kernels 32-bit types, in place of the user's settings.

    A kernel's indices are 32 bits wide, and its arithmetic promotes dtypes on purpose.
    """
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(jax.config.jax_enable_x64 and implementation == "xla"),
    ):
        yield


# --- once in a program ----------------------------------------------------------------------------


@functools.cache
def jitted(name: str) -> Any:
    """Returns the jitted function (chosen, *operands) that runs kernels of this name.

    `chosen` is static. The function has this name in profiles.
    """

    def run(chosen: Chosen, *operands: jax.Array | None) -> Results:
        with jax_defaults(chosen.implementation):
            if chosen.implementation == "xla":  # XLA's implementation runs on every platform.
                return chosen.run(*operands)
            operands = sharding.untracked(operands)
            if KERNELS_RUN_EVERYWHERE:
                return chosen.run(*operands)
            call, results = jax.make_jaxpr(chosen.run, return_shape=True)(*operands)
        present = [operand for operand in operands if operand is not None]
        given = tuple(operand is not None for operand in operands)
        computed = iter(_kernel.bind(*present, call=call, chosen=chosen, given=given))
        return tuple(None if result is None else next(computed) for result in results)

    run.__name__ = run.__qualname__ = "jaxfused_" + name.replace(" ", "_")
    return jax.jit(run, static_argnums=0)


# --- by platform ----------------------------------------------------------------------------------

_kernel = Primitive("jaxfused_kernel")
_kernel.multiple_results = True


@_kernel.def_impl
def _kernel_impl(*operands: jax.Array, call: ClosedJaxpr, chosen: Chosen, given: Any) -> Any:
    del chosen, given
    return jaxpr_as_fun(call)(*operands)


@_kernel.def_abstract_eval
def _kernel_results(*operands: Any, call: ClosedJaxpr, chosen: Chosen, given: Any) -> Any:
    del operands, chosen, given
    return call.out_avals


def _lower(f: Callable[..., Any], context: Any, operands: Sequence[Any], given: Any) -> Any:
    def present_results(*present: jax.Array) -> list[jax.Array]:
        return [result for result in f(*_all(present, given)) if result is not None]

    return mlir.lower_fun(present_results, multiple_results=True)(context, *operands)


def _all(present: Sequence[jax.Array], given: Sequence[bool]) -> list[jax.Array | None]:
    remaining = iter(present)
    return [next(remaining) if there else None for there in given]


def _lower_for_gpus(context, *operands, call: ClosedJaxpr, chosen: Chosen, given: Any) -> Any:
    # Pallas cannot lower a kernel into a module for several platforms.
    if len(context.module_context.platforms) > 1:
        return _lower(functools.partial(_call_exported, chosen), context, operands, given)
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(context, *operands)


def _lower_elsewhere(context, *operands, call: ClosedJaxpr, chosen: Chosen, given: Any) -> Any:
    def elsewhere(*operands: jax.Array | None) -> list[jax.Array]:
        with jax_defaults("xla"):
            results = chosen.stage.run("xla", chosen.device, *operands)
        present = [result for result in results if result is not None]
        return [_in_parts(r, aval) for r, aval in zip(present, call.out_avals, strict=True)]

    return _lower(elsewhere, context, operands, given)


def _in_parts(result: jax.Array, like: Any) -> jax.Array:
    """Returns XLA's result repeated to the shape of `like`, the kernel's result.

    Shapes differ if a kernel returns the largest magnitude of each of several parts of an array: XLA
    returns one number, that of the whole array. Repeated, it has the same maximum over the parts.
    """
    if result.shape == like.shape:
        return result
    assert result.shape == (1, *like.shape[1:]), (result.shape, like.shape)
    return jnp.broadcast_to(result, like.shape)


mlir.register_lowering(_kernel, _lower_for_gpus, platform="cuda")
mlir.register_lowering(_kernel, _lower_elsewhere)


# --- in a module of its own -----------------------------------------------------------------------


def in_own_module(chosen: Chosen, *operands: jax.Array | None) -> Results:
    """Runs the kernel in a separate module, which XLA asks for wherever it partitions a call.

    The kernel is lowered once, and its text is inserted into each of these modules.
    """
    # XLA's implementation is lowered fast. The callbacks of an interpreted kernel cannot be
    # exported.
    if chosen.implementation == "xla" or jax.default_backend() != "gpu":
        return jitted(chosen.stage.name)(chosen, *operands)
    return _call_exported(chosen, *operands)


def _call_exported(chosen: Chosen, *operands: jax.Array | None) -> Results:
    """Runs the kernel from an exported module for GPUs, whose lowered text is cached."""
    types = tuple(None if o is None else (o.shape, jnp.dtype(o.dtype)) for o in operands)
    return _exported(chosen, types).call(*(o for o in operands if o is not None))


@functools.cache
def _exported(
    chosen: Chosen, operands: tuple[tuple[tuple[int, ...], Any] | None, ...]
) -> jax.export.Exported:
    def run(*present: jax.Array) -> Results:
        with jax_defaults(chosen.implementation):
            return chosen.run(*_all(present, [operand is not None for operand in operands]))

    targets = ("mosaic_gpu_v2", *cuda_library.TARGETS)
    return jax.export.export(
        jax.jit(run),
        platforms=["cuda"],
        disabled_checks=[
            *(jax.export.DisabledSafetyCheck.custom_call(name) for name in targets),
            # A program for several platforms calls the exported module only on GPUs.
            jax.export.DisabledSafetyCheck.platform(),
        ],
    )(*(jax.ShapeDtypeStruct(*operand) for operand in operands if operand is not None))
