"""A call that is traced once for all places of a program where its operands have the same types.

Equal layers call an operator with the same options and shapes, and tracing its stages takes longer
than JAX's work on the traced program. `jax.jit` caches the trace by the call's static arguments, the
operands' types and JAX's settings; each call in the program becomes one equation that holds the
cached trace.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxfused import dispatch

Arrays = Sequence[jax.Array | None]


class Call(Protocol):
    """A computation over arrays or Nones; equal calls compute the same function."""

    def batched(
        self, in_batched: Sequence[bool], *operands: jax.Array | None
    ) -> tuple[jax.Array | None, ...]:
        """Returns the results for a batch: axis 0 of all results and of the operands that have it."""


class Choices:
    """The implementations chosen while a call was traced."""

    def __init__(self, choices: Sequence[dispatch.Choice]) -> None:
        self.list = tuple(choices)


class Traced(NamedTuple):
    """A call's results as pytree leaves; the choices are part of the tree's structure, not leaves."""

    results: tuple[jax.Array | None, ...]
    choices: Choices


def apply(call: Call, traced: Any, operands: Arrays) -> tuple[jax.Array | None, ...]:
    """Returns the results of a call, and records the implementations chosen in it.

    Args:
      traced: the trace, by `jax.jit`, of the function that computes the call's `Traced`.
    """
    results, choices = jax.tree.unflatten(traced.out_tree, traced.jaxpr.out_avals)
    for choice in choices.list:
        dispatch.record(choice)
    present = [operand for operand in operands if operand is not None]
    given = tuple(operand is not None for operand in operands)
    computed = iter(_call.bind(*present, jaxpr=traced.jaxpr, call=call, given=given))
    return tuple(None if result is None else next(computed) for result in results)


jax.tree_util.register_pytree_node(
    Choices, lambda choices: ((), choices), lambda choices, _: choices
)


_call = Primitive("jaxfused_call")
_call.multiple_results = True


@_call.def_impl
def _compute(*operands: jax.Array, jaxpr: ClosedJaxpr, call: Call, given: Sequence[bool]) -> Any:
    del call, given
    # JAX compiles a `jax.shard_map` outside of `jax.jit` anew at each call.
    is_mapped = any(equation.primitive.name == "shard_map" for equation in jaxpr.eqns)
    return (_compiled if is_mapped else _evaluated)(jaxpr, *operands)


def _evaluated(jaxpr: ClosedJaxpr, *operands: jax.Array) -> Any:
    return jaxpr_as_fun(jaxpr)(*operands)


_compiled = jax.jit(_evaluated, static_argnums=0)


def forget() -> None:
    """Clears the cache of compiled calls."""
    cast(Any, _compiled).clear_cache()


@_call.def_effectful_abstract_eval
def _types(*operands: Any, jaxpr: ClosedJaxpr, call: Call, given: Sequence[bool]) -> Any:
    del operands, call, given
    return jaxpr.out_avals, jaxpr.effects


def _batched(
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    call: Call,
    given: Sequence[bool],
) -> tuple[list[jax.Array], list[int]]:
    del jaxpr
    remaining = zip(arrays, axes, strict=True)
    operands: list[jax.Array | None] = []
    in_batched = []
    for there in given:
        array, axis = next(remaining) if there else (None, None)
        operands.append(array if array is None or axis is None else jnp.moveaxis(array, axis, 0))
        in_batched.append(axis is not None)
    results = [r for r in call.batched(in_batched, *operands) if r is not None]
    return results, [0] * len(results)


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, **static: Any
) -> tuple[list[Any], list[Any]]:
    """Differentiates the traced program, for second derivatives of XLA's implementations."""
    del static
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*some: Any) -> list[Any]:
        replaced = dict(zip(moving, some, strict=True))
        return jaxpr_as_fun(jaxpr)(*(replaced.get(i, x) for i, x in enumerate(primals)))

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


batching.primitive_batchers[_call] = _batched
ad.primitive_jvps[_call] = _derivative
mlir.register_lowering(_call, mlir.lower_fun(_compute, multiple_results=True))
