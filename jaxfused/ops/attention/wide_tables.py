"""16-bit tables that a score_mod indexes: their gradients are summed in float32.

An element may be read for every query and key, and JAX would sum all their cotangents in the table's
dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from pallas_kernels.attention.tile_function import bound, closed, inlined, value_of

CALLS = frozenset({"jit", "pjit", "closed_call"})
_READS = frozenset({"copy", "dynamic_slice", "gather", "reshape", "slice", "squeeze", "transpose"})
"""Primitives whose results are elements of their first operand."""
_HALVES = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))


def with_wide_tables(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the program with float32 tables, whose elements are rounded to 16 bits once read."""
    if not any(const.dtype in _HALVES for const in program.consts):
        return program
    program = inlined(program, CALLS)
    jaxpr = program.jaxpr

    def run(consts: Any, args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        wide: dict[Any, Any] = {}
        for var, own, const in zip(jaxpr.constvars, program.consts, consts, strict=True):
            (wide if own.dtype in _HALVES else env)[var] = const

        def is_wide(var: Any) -> bool:
            return not isinstance(var, Literal) and var in wide

        def narrow(var: Any) -> Any:
            return wide[var].astype(var.aval.dtype) if is_wide(var) else value_of(env, var)

        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _READS and is_wide(eqn.invars[0]):
                table, *others = eqn.invars
                wide[eqn.outvars[0]] = bound(eqn, [wide[table], *map(narrow, others)])[0]
            else:
                env.update(zip(eqn.outvars, bound(eqn, [*map(narrow, eqn.invars)]), strict=True))
        return [narrow(var) for var in jaxpr.outvars]

    def widened(array: Any) -> Any:
        return jnp.float32 if array.dtype in _HALVES else array.dtype

    return closed(
        run,
        [const.astype(widened(const)) for const in program.consts],
        [jax.ShapeDtypeStruct(const.shape, widened(const)) for const in program.consts],
        [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in program.in_avals],
    )
