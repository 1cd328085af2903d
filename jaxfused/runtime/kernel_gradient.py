"""`jax.custom_vjp` for functions that run kernels, with readable errors for other derivatives.

Kernels have a reverse-mode gradient of first order. Other derivatives are refused here, with the
operator's name and the remedy, before JAX reaches a kernel that it cannot differentiate.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxfused.runtime.runner import Runner

Arrays = Sequence[Any]


class kernel_gradient:
    """A decorator like `jax.custom_vjp`, for a function whose static arguments come first.

    Args:
      f: the function; one of its static arguments is the `Runner`, if it has any.
      nondiff_argnums: the positions of the static arguments.
      op: the operator's name, or None if a static argument has it as its attribute `op`.
      in_float8: whether the operator runs in float8, where XLA has no other derivatives either.
      remedy: what a refusal recommends; None recommends another implementation or precision.
      once: whether a second derivative is refused, because the gradient runs kernels too.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        nondiff_argnums: tuple[int, ...] = (),
        *,
        op: str | None = None,
        in_float8: bool = False,
        remedy: str | None = None,
        once: bool = True,
    ) -> None:
        functools.update_wrapper(self, f)
        self.count, self.op, self.in_float8 = len(nondiff_argnums), op, in_float8
        self.remedy, self.once = remedy, once
        self.function = jax.custom_vjp(f, nondiff_argnums=nondiff_argnums)

    def defvjp(
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False
    ) -> None:
        """Sets forward and backward, with the arguments of `jax.custom_vjp.defvjp`."""

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
        return self.function(*static, *_in_reverse_of(refusal, operands))

    def _once(self, static: Arrays, operands: Any) -> None:
        """Makes JAX raise an error if it differentiates these operands of a forward or backward again.

        The operands are not copied, so that a loop whose steps all save them saves them once.
        """
        on_gpu = any(isinstance(a, Runner) and a.device.platform == "gpu" for a in static)
        # JAX would round cotangents of float8 numbers to float8 without a scale, up to infinity.
        if self.once and (on_gpu or self.in_float8):
            leaves, places = _inexact(operands)
            refusal = self._refusal(static, "second derivative")
            _not_at_all.bind(*(leaves[i] for i in places), refusal=refusal)

    def _refusal(self, static: Arrays, what: str) -> str:
        op = self.op or next(a.op for a in static if hasattr(a, "op"))
        if self.remedy is not None:
            return f"{op} has no {what}; {self.remedy}."
        if self.in_float8:
            return f"{op} in float8 has no {what}; pass another precision than 'fp8'."
        return f"{op} on a GPU has no {what}; pass implementation='xla'."


def gradients_in_xla[Operands: Any](
    f: Callable[[Operands], Any], operands: Operands, cotangents: Any
) -> tuple[Operands]:
    """Computes an operator's backward by differentiating `f`, its forward in plain jax.numpy.

    Operands are a NamedTuple. Floats get gradients, other dtypes and absent operands None.
    """
    floats = {
        name: operand
        for name, operand in operands._asdict().items()
        if operand is not None and jnp.issubdtype(operand.dtype, jnp.floating)
    }
    _, pullback = jax.vjp(lambda floats: f(operands._replace(**floats)), floats)
    [gradients] = pullback(cotangents)
    return (type(operands)(**(dict.fromkeys(operands._fields) | gradients)),)


def _in_reverse_of(refusal: str, operands: Any) -> Any:
    """Returns the operands, such that floating-point ones have derivatives in reverse mode only."""
    given, tree = jax.tree.flatten(operands)
    leaves, places = _inexact(operands)
    identical = _in_reverse.bind(*(leaves[i] for i in places), refusal=refusal)
    for i, leaf in zip(places, identical, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(
        tree,
        [
            CustomVJPPrimal(leaf, a.perturbed) if isinstance(a, CustomVJPPrimal) else leaf
            for a, leaf in zip(given, leaves, strict=True)
        ],
    )


def _inexact(operands: Any) -> tuple[list[Any], list[int]]:
    """Returns the leaves of operands, and the indices of those with a float dtype."""
    leaves = [a.value if isinstance(a, CustomVJPPrimal) else a for a in jax.tree.leaves(operands)]
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return leaves, places


def _refuse(*arrays: Any, refusal: str) -> Any:
    raise TypeError(refusal)


_not_at_all = Primitive("jaxfused_no_derivative")
"""Primitive without results; differentiating it by any of its operands raises `refusal`."""
_in_reverse = Primitive("jaxfused_only_in_reverse")
"""Identity; JAX may transpose its tangents (reverse mode) but not evaluate them."""
_tangents = Primitive("jaxfused_tangents_in_reverse")
"""Identity of tangents that JAX may only transpose; evaluating it raises `refusal`."""

for primitive in (_not_at_all, _in_reverse, _tangents):
    primitive.multiple_results = True
_not_at_all.def_impl(lambda *arrays, refusal: [])
_not_at_all.def_abstract_eval(lambda *types, refusal: [])
_in_reverse.def_impl(lambda *arrays, refusal: list(arrays))
_in_reverse.def_abstract_eval(lambda *types, refusal: types)
_tangents.def_impl(_refuse)
_tangents.def_abstract_eval(lambda *types, refusal: types)


def _in_reverse_jvp(primals: Arrays, tangents: Arrays, *, refusal: str) -> tuple[Arrays, Arrays]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    passed = list(tangents)
    for i, tangent in zip(
        moving, _tangents.bind(*(tangents[i] for i in moving), refusal=refusal), strict=True
    ):
        passed[i] = tangent
    # The arrays are returned uncopied: a residual saved by the forward is the caller's own array.
    return list(primals), passed


# JAX calls these rules only where a tangent is not zero.
ad.primitive_jvps[_not_at_all] = lambda primals, tangents, *, refusal: _refuse(refusal=refusal)
ad.primitive_jvps[_in_reverse] = _in_reverse_jvp
ad.primitive_transposes[_tangents] = lambda cotangents, *arrays, refusal: [
    ad.instantiate_zeros(c) for c in cotangents
]


mlir.register_lowering(_not_at_all, lambda context, *values, refusal: ())
mlir.register_lowering(_in_reverse, lambda context, *values, refusal: values)
mlir.register_lowering(_tangents, lambda context, *values, refusal: _refuse(refusal=refusal))
batching.primitive_batchers[_not_at_all] = lambda arrays, axes, *, refusal: (
    _not_at_all.bind(*arrays, refusal=refusal),
    (),
)
batching.primitive_batchers[_in_reverse] = lambda arrays, axes, *, refusal: (
    _in_reverse.bind(*arrays, refusal=refusal),
    axes,
)
batching.primitive_batchers[_tangents] = lambda arrays, axes, *, refusal: (
    _tangents.bind(*arrays, refusal=refusal),
    axes,
)
