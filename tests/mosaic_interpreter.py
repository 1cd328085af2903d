"""What Mosaic's GPU interpreter of JAX 0.11.2 lacks for the attention kernels, until it has it.

Stores to an accumulator of wgmma, and products whose left operand is in registers. The kernels need
both: an accumulator is multiplied between two products, and the weights never leave the registers.

And memory under two descriptions, through one of which TMA writes what wgmma reads through the other:
the interpreter gives each description memory of its own.
"""

import functools

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.state import primitives
from jax._src.state.types import AbstractRef


def complete(monkeypatch) -> None:
    """Adds what is missing, for one test."""
    interpreter = jaxpr_interpret.JaxprInterpreter
    of_references = interpreter._interpret_wgmma_ref_p

    def interpret_product(self, eqn, token, get_operands):
        if isinstance(eqn.invars[1].aval, AbstractRef):
            return of_references(self, eqn, token, get_operands)
        accumulator, left, right, *leaves = get_operands()
        transforms = jax.tree.unflatten(
            eqn.params["b_transforms_tree"] or jax.tree.structure([]), leaves
        )
        right, transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, right, transforms)
        token = gpu_callbacks.callback.io_callback(
            functools.partial(_multiply, source_info=eqn.source_info),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token,
            self.mesh_location,
            self.thread,
            accumulator,
            left,
            right,
            transforms,
        )
        return token, []

    monkeypatch.setattr(interpreter, "_interpret_wgmma_ref_p", interpret_product)

    def store(self, tracer, index, value):
        primitives.ref_swap(tracer, index, value)

    monkeypatch.setattr(core.WGMMAAbstractAccumulatorRef, "_setitem", store)
    monkeypatch.setattr(jaxpr_interpret, "resolve_ref", _one_memory(jaxpr_interpret.resolve_ref))


def _one_memory(resolve):
    """`resolve_ref`, by which all descriptions of one shape mean the memory of the first.

    Their elements are the same, since tiles and swizzles are no part of what the interpreter stores.
    """

    def resolve_ref(aval, key, transforms):
        own, rest = resolve(aval, key, transforms)
        if not isinstance(aval, core.AbstractRefUnion):
            return own, rest
        members = [
            jaxpr_interpret._member_inner_aval(m) for m in jaxpr_interpret.union_members(aval)
        ]
        alike = all(m.shape == members[0].shape and m.dtype == members[0].dtype for m in members)
        return (key[0] if alike else own), rest

    return resolve_ref


@gpu_callbacks.fail_on_exception
def _multiply(
    token, mesh_location, thread, accumulator, left, right, transforms, *, source_info=None
):
    """Adds left @ right to the accumulator, read and written as the interpreter's own product does."""
    memory = gpu_callbacks._get_shared_memory()
    info = gpu_callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)
    accumulator, right = map(gpu_callbacks.HostAllocationKey.from_array, (accumulator, right))
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    whole = memory.access(accumulator, ())

    def read(buffer, place):
        content, _, _ = memory.get_buffer_content(buffer, place, thread, logging_info=info)
        return content

    total = read(accumulator, whole)
    factor = read(right, memory.access(right, transforms)).astype(total.dtype)
    total = total + np.asarray(left).astype(total.dtype) @ factor
    memory.store_buffer_content(accumulator, whole, total, thread, logging_info=info)
    return token
