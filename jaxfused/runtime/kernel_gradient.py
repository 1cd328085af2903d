"""`jax.custom_vjp` for functions that run kernels, with readable errors for other derivatives.

Kernels have a gradient: reverse mode, first order. Other derivatives are refused here, with the
operator's name and the remedy, before JAX reaches a kernel that it cannot differentiate.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfused.runtime.runner import Runner

Arrays = Sequence[Any]


class kernel_gradient:
    """A decorator like `jax.custom_vjp`, whose static arguments come first.

    Args:
      f: the function; one of its static arguments is the `Runner`, if it has any.
      nondiff_argnums: the static arguments.
      op: the operator's name, or None where a static argument has it as `op`.
      in_float8: whether the operator runs in float8, where XLA has no other derivatives either.
      once: whether a second derivative is refused, because the gradient runs kernels too.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        nondiff_argnums: tuple[int, ...] = (),
        *,
        op: str | None = None,
        in_float8: bool = False,
        once: bool = True,
    ) -> None:
        functools.update_wrapper(self, f)
        self.count, self.op, self.in_float8 = len(nondiff_argnums), op, in_float8
        self.once = once
        self.function = jax.custom_vjp(f, nondiff_argnums=nondiff_argnums)

    def defvjp(
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False
    ) -> None:
        """Takes what `jax.custom_vjp.defvjp` takes."""

        @functools.wraps(fwd)
        def once_forward(*args: Any) -> Any:
            self._once(args[: self.count], args[self.count :])
            return fwd(*args)

        @functools.wraps(bwd)
        def once_backward(*args: Any) -> Any:
            self._once(args[: self.count], args[self.count :])
            return bwd(*args)

        self.function.defvjp(once_forward, once_backward, symbolic_zeros=symbolic_zeros)

    def __call__(self, *args: Any) -> Any:
        static, operands = args[: self.count], args[self.count :]
        refusal = self._refusal(static, "forward mode of differentiation")
        return self.function(*static, *_through(_in_reverse, refusal, operands))

    def _once(self, static: Arrays, operands: Any) -> None:
        """Refuses a second derivative by the operands of kernels.

        The operands are only read: saved for the backward are the caller's own arrays, so that a loop
        keeps one copy of them.
        """
        if self.once and any(isinstance(a, Runner) and a.device.platform == "gpu" for a in static):
            leaves, places = _inexact(operands)
            _not_at_all(self._refusal(static, "second derivative"), *(leaves[i] for i in places))

    def _refusal(self, static: Arrays, what: str) -> str:
        op = self.op or next(a.op for a in static if hasattr(a, "op"))
        if self.in_float8:
            return f"{op} in float8 has no {what}; pass another precision than 'fp8'."
        return f"{op} on a GPU has no {what}; pass implementation='xla'."


def _through(identity: Callable[..., Any], refusal: str, operands: Any) -> Any:
    """Returns the operands, with `identity` applied to those of float dtypes."""
    given, tree = jax.tree.flatten(operands)
    leaves, places = _inexact(operands)
    for i, leaf in zip(places, identity(refusal, *(leaves[i] for i in places)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(
        tree,
        [
            CustomVJPPrimal(leaf, a.perturbed) if isinstance(a, CustomVJPPrimal) else leaf
            for a, leaf in zip(given, leaves, strict=True)
        ],
    )


def _inexact(operands: Any) -> tuple[list[Any], list[int]]:
    """Returns the leaves of operands, and the indices of those of a float dtype."""
    leaves = [a.value if isinstance(a, CustomVJPPrimal) else a for a in jax.tree.leaves(operands)]
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return leaves, places


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _not_at_all(refusal: str, *arrays: jax.Array) -> tuple[()]:
    """Returns nothing; differentiating it by any of the arrays raises `refusal`."""
    return ()


def _not_at_all_jvp(refusal: str, arrays: Arrays, tangents: Arrays) -> tuple[tuple[()], tuple[()]]:
    if not all(isinstance(t, SymbolicZero) for t in tangents):
        raise TypeError(refusal)
    return (), ()


_not_at_all.defjvp(_not_at_all_jvp, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_reverse(refusal: str, *arrays: jax.Array) -> Arrays:
    """Returns the arrays; JAX may transpose their tangents (reverse mode) but not evaluate them."""
    return arrays


def _in_reverse_jvp(refusal: str, arrays: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    passed = list(tangents)
    for i, tangent in zip(
        moving, _tangents.bind(*(tangents[i] for i in moving), refusal=refusal), strict=True
    ):
        passed[i] = tangent
    # The arrays are returned uncopied, so that a value saved here is the caller's own array.
    return tuple(arrays), tuple(passed)


_in_reverse.defjvp(_in_reverse_jvp, symbolic_zeros=True)


def _refuse(*arrays: Any, refusal: str) -> Any:
    raise TypeError(refusal)


_tangents = Primitive("jaxfused_tangents_in_reverse")
_tangents.multiple_results = True
_tangents.def_impl(_refuse)
_tangents.def_abstract_eval(lambda *types, refusal: types)
mlir.register_lowering(_tangents, lambda context, *values, refusal: _refuse(refusal=refusal))
ad.primitive_transposes[_tangents] = lambda cotangents, *arrays, refusal: [
    ad.instantiate_zeros(c) for c in cotangents
]
batching.primitive_batchers[_tangents] = lambda arrays, axes, *, refusal: (
    _tangents.bind(*arrays, refusal=refusal),
    axes,
)
