"""`jax.vmap` and derivatives of kernels over whole trees, by the same computation in jax.numpy.

An optimizer's kernels update all leaves at once. A step is seldom mapped or differentiated: these rules
need not be fast.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

Function = Callable[..., Sequence[jax.Array]]


def with_reference_rules(by_kernels: Function, by_reference: Function) -> Function:
    """Returns `by_kernels` with the rules of `by_reference` for `jax.vmap` and for differentiation.

    Both functions take the same arrays and return the same number of arrays.
    """

    @custom_vmap
    def batchable(*arrays):
        return tuple(by_kernels(*arrays))

    @batchable.def_vmap
    def rule(axis_size, in_batched, *arrays):
        del axis_size
        in_axes = [0 if batched else None for batched in in_batched]
        new = jax.vmap(lambda *entry: tuple(by_reference(*entry)), in_axes)(*arrays)
        return new, (True,) * len(new)

    @jax.custom_jvp
    def differentiable(*arrays):
        return batchable(*arrays)

    # Symbolic zero tangents are skipped: multiplied by the infinite derivative of a root at 0, a
    # zero would give NaN.
    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def jvp(primals, tangents):
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_moving(*some):
            replaced = dict(zip(moving, some, strict=True))
            return tuple(by_reference(*(replaced.get(i, x) for i, x in enumerate(primals))))

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])

    return differentiable
