"""Functions with a stated gradient that also have forward-mode derivatives.

A `jax.custom_vjp` has no forward mode. A `jax.custom_jvp` has both modes if JAX can transpose the
operation on its tangents. Here that operation is a primitive: its value is JAX's own derivative of the
function, and its transpose is the stated gradient. `jax.custom_derivatives.linear_call` has no rule for
`jax.vmap`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Arrays = Sequence[Any]


class stated_gradient:
    """A decorator like `jax.custom_vjp`, for a function that has JAX's derivative in forward mode.

    Args:
      f: the function.
      nondiff_argnums: the positions of the static arguments.
      linear: the positions of arguments in which the function is jointly linear. A derivative by these
        alone saves none of their values.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        nondiff_argnums: tuple[int, ...] = (),
        linear: tuple[int, ...] = (),
    ) -> None:
        functools.update_wrapper(self, f)
        self.f, self.nondiff_argnums, self.linear = f, nondiff_argnums, linear

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets forward and backward, with the arguments of `jax.custom_vjp.defvjp`."""
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any) -> Any:
        static = tuple(args[i] for i in self.nondiff_argnums)
        places = [i for i in range(len(args)) if i not in self.nondiff_argnums]
        leaves, tree = jax.tree.flatten([args[i] for i in places])
        is_linear = [i in self.linear for i in places for _ in jax.tree.leaves(args[i])]
        call = _Call(self, static, tree, tuple(is_linear))
        return _evaluate(call, *_varying_alike(leaves))


@dataclass(frozen=True)
class _Call:
    """Trees and static arguments of a differentiated function's call, without the arrays."""

    function: stated_gradient
    static: tuple[Any, ...]
    operands: Any
    """Tree of the operands."""
    is_linear: tuple[bool, ...]
    """For each leaf, whether it belongs to an argument in which the function is linear."""

    def __call__(self, f: Callable[..., Any], leaves: Arrays) -> Any:
        args = jax.tree.unflatten(self.operands, leaves)
        for i, value in zip(self.function.nondiff_argnums, self.static, strict=True):
            args.insert(i, value)
        return f(*args)

    def gradients(self, saved: Any, cotangents: Any, leaves: Arrays) -> list[Any]:
        """Returns the stated gradient of each leaf, with zeros in place of None."""
        stated = self.function.bwd(*self.static, saved, cotangents)
        gradients = []
        for operand, gradient in zip(
            jax.tree.unflatten(self.operands, leaves), stated, strict=True
        ):
            if gradient is None:
                gradient = jax.tree.map(lambda leaf: None, operand)
            own = jax.tree.map(
                lambda leaf, part: jnp.zeros_like(leaf) if part is None else part, operand, gradient
            )
            gradients += jax.tree.leaves(own)
        return gradients


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _evaluate(call: _Call, *leaves: jax.Array) -> Any:
    return call(call.function.f, leaves)


def _evaluate_jvp(call: _Call, primals: Arrays, tangents: Arrays) -> tuple[Any, Any]:
    y, saved = call(call.function.fwd, primals)
    own, results = jax.tree.flatten(y)
    kept, saved_tree = jax.tree.flatten(saved)
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
    linear = all(call.is_linear[i] for i in moving)
    leaves = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype) if linear and is_linear else None
        for a, is_linear in zip(primals, call.is_linear, strict=True)
    )
    fixed = [a for a, given in zip(primals, leaves, strict=True) if given is None]
    dy = _linear.bind(
        *fixed,
        *kept,
        *(tangents[i] for i in moving),
        map=_Derivative(call, moving, leaves, saved_tree, results),
        fixed=len(fixed) + len(kept),
    )
    assert len(dy) == len(own)
    return y, jax.tree.unflatten(results, dy)


_evaluate.defjvp(_evaluate_jvp, symbolic_zeros=True)


def _varying_alike(leaves: Arrays) -> Arrays:
    """Makes the arrays vary along the same Manual axes, so that JAX adds gradients over devices."""
    along = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    missing = [sorted(frozenset().union(*along) - names) for names in along]
    return [
        jax.lax.pcast(leaf, tuple(names), to="varying") if names else leaf
        for leaf, names in zip(leaves, missing, strict=True)
    ]


# --- the derivative as a primitive ----------------------------------------------------------------


class _Map(Protocol):
    """Interface of a hashable function that is linear in its second list of arrays."""

    def value(self, fixed: Arrays, tangents: Arrays) -> list[Any]: ...

    def transposed(self, fixed: Arrays, cotangents: Arrays) -> list[Any]: ...


@dataclass(frozen=True)
class _Derivative:
    """The linear map from tangents of the differentiated leaves (`moving`) to tangents of the results.

    Its fixed arrays are leaves, then the residuals of the stated gradient.
    """

    call: _Call
    moving: tuple[int, ...]
    leaves: tuple[jax.ShapeDtypeStruct | None, ...]
    """For each leaf its type if its value is not needed, or None if it is among the fixed arrays."""
    saved: Any
    results: Any

    def value(self, fixed: Arrays, tangents: Arrays) -> list[Any]:
        leaves, _ = self._split(fixed)
        moving = dict(zip(self.moving, tangents, strict=True))
        if any(leaf is not None for leaf in self.leaves):
            return self._results([moving.get(i, leaf) for i, leaf in enumerate(leaves)])

        def f(*own: Any) -> list[Any]:
            changed = dict(zip(self.moving, own, strict=True))
            return self._results([changed.get(i, leaf) for i, leaf in enumerate(leaves)])

        return jax.jvp(f, tuple(leaves[i] for i in self.moving), tuple(tangents))[1]

    def transposed(self, fixed: Arrays, cotangents: Arrays) -> list[Any]:
        leaves, saved = self._split(fixed)
        gradients = self.call.gradients(saved, jax.tree.unflatten(self.results, cotangents), leaves)
        return [gradients[i] for i in self.moving]

    def _results(self, leaves: Arrays) -> list[Any]:
        return jax.tree.leaves(self.call(self.call.function.f, leaves))

    def _split(self, fixed: Arrays) -> tuple[list[Any], Any]:
        """Returns the leaves, with zeros for those whose value is not needed, and the residuals."""
        remaining = iter(fixed)
        leaves = [
            next(remaining) if leaf is None else jnp.zeros(leaf.shape, leaf.dtype)
            for leaf in self.leaves
        ]
        return leaves, jax.tree.unflatten(self.saved, list(remaining))


@dataclass(frozen=True)
class _Batched:
    """A linear map under `jax.vmap`, whose batch is the first axis of all results."""

    map: _Map
    axes: tuple[int | None, ...]
    """Batch axis of each fixed array, then of each tangent: 0, or None without a batch."""

    def value(self, fixed: Arrays, tangents: Arrays) -> list[Any]:
        axes = list(self.axes)
        over = (axes[: len(fixed)], axes[len(fixed) :])
        return jax.vmap(self.map.value, in_axes=over)(fixed, tangents)

    def transposed(self, fixed: Arrays, cotangents: Arrays) -> list[Any]:
        over = (list(self.axes[: len(fixed)]), 0)
        gradients = jax.vmap(self.map.transposed, in_axes=over)(fixed, cotangents)
        return [
            jnp.sum(gradient, axis=0) if axis is None else gradient
            for gradient, axis in zip(gradients, self.axes[len(fixed) :], strict=True)
        ]


def _value(*arrays: Any, map: _Map, fixed: int) -> list[Any]:
    return map.value(list(arrays[:fixed]), list(arrays[fixed:]))


@functools.lru_cache(maxsize=4096)
def _result_types(map: _Map, fixed: int, context: Any, *types: Any) -> tuple[Any, ...]:
    del context
    return tuple(jax.make_jaxpr(functools.partial(_value, map=map, fixed=fixed))(*types).out_avals)


_linear = Primitive("jaxfused_derivative")
_linear.multiple_results = True
_linear.def_impl(jax.jit(_value, static_argnames=("map", "fixed")))
_linear.def_abstract_eval(
    lambda *types, map, fixed: _result_types(map, fixed, jax.enable_x64.value, *types)
)
mlir.register_lowering(_linear, mlir.lower_fun(_value, multiple_results=True))


def _jvp(primals: Arrays, tangents: Arrays, *, map: _Map, fixed: int) -> tuple[Any, Any]:
    evaluate = functools.partial(_linear.bind, map=map, fixed=fixed)
    y = evaluate(*primals)
    changes = [ad.instantiate_zeros(t) for t in tangents[fixed:]]
    dy = evaluate(*primals[:fixed], *changes)
    moving = [i for i, t in enumerate(tangents[:fixed]) if not isinstance(t, ad.Zero)]
    if moving:

        def f(*own: Any) -> list[Any]:
            arrays = list(primals)
            for i, array in zip(moving, own, strict=True):
                arrays[i] = array
            return _value(*arrays, map=map, fixed=fixed)

        own = tuple(primals[i] for i in moving)
        more = jax.jvp(f, own, tuple(tangents[i] for i in moving))[1]
        dy = [a + b for a, b in zip(dy, more, strict=True)]
    return y, dy


def _transpose(cotangents: Arrays, *arrays: Any, map: _Map, fixed: int) -> list[Any]:
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    return [None] * fixed + map.transposed(list(arrays[:fixed]), list(cotangents))


def _batched(arrays: Arrays, axes: Any, *, map: _Map, fixed: int) -> tuple[Any, Any]:
    moved = [
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    batched = _Batched(map, tuple(None if axis is None else 0 for axis in axes))
    y = _linear.bind(*moved, map=batched, fixed=fixed)
    return y, [0] * len(y)


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batched
