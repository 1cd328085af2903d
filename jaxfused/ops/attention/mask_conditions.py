"""Divides a `mask_mod` into conditions by which kernels skip blocks of keys, and a rest.

A function that allows a pair where all of several conditions hold is divided into them: positions
(`k <= q`, `q - k < 128`), segments (`document[b, q] == document[b, k]`), lengths (`k < length[b]`), and
the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxfused.ops.attention.index_function import NO_MESH, IndexFunction
from jaxfused.ops.attention.kernel_function import Division

_SWAPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq"}
_UNLIMITED = 2**29
_LINEAR = ("neg", "add", "sub", "convert_element_type", "copy")
_Linear = tuple[int, int, int]


@dataclass
class Conditions:
    """Conditions of a mask_mod, all of which must hold; None for one that is absent."""

    left: int | None = None
    """Condition k >= q - left."""
    right: int | None = None
    """Condition k <= q + right."""
    segments: tuple[IndexFunction, IndexFunction] | None = None
    """Two functions that must be equal: the first depends on b and q, the second on b and k."""
    lengths: list[IndexFunction] = field(default_factory=list)
    """Functions of b; keys must lie below each of them."""
    rest: IndexFunction | None = None

    @property
    def window(self) -> tuple[int, int] | None:
        """Sides of a window; None without a limit, or with the causal one alone (right = 0)."""
        if self.left is None and self.right in (None, 0):
            return None
        left, right = (_UNLIMITED if side is None else side for side in (self.left, self.right))
        return left, right

    def with_segments(self) -> IndexFunction:
        """Returns `rest` with the condition on segments added."""
        assert self.segments is not None
        queries, keys = self.segments
        same = _traced(lambda *places: queries(*places) == keys(*places))
        return same if self.rest is None else _both([self.rest, same])


def conditions(function: IndexFunction) -> Conditions:
    """Divides a traced mask_mod of (b, h, q, k) into conditions and a rest."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return _conditions(Division(function.program, "mask_mod"))


def _conditions(division: Division) -> Conditions:
    found, rest = Conditions(), []
    (result,) = division.program.jaxpr.outvars
    for var in _all_of(division, result):
        if not _take(division, var, found):
            rest.append(var)
    if rest:
        functions = [division.of_places(var) for var in rest]
        found.rest = functions[0] if len(functions) == 1 else _both(functions)
    return found


def _all_of(division: Division, var: Any) -> list[Any]:
    """Returns the operands of a chain of logical ands that ends in `var`, or `var` alone."""
    eqn = None if isinstance(var, Literal) else division.equations.get(var)
    if eqn is None or eqn.primitive.name != "and":
        return [var]
    return [condition for given in eqn.invars for condition in _all_of(division, given)]


def _both(functions: Sequence[IndexFunction]) -> IndexFunction:
    def f(*places: Any) -> Any:
        result = functions[0](*places)
        for function in functions[1:]:
            result = result & function(*places)
        return result

    return _traced(f)


def _traced(f: Callable[..., Any]) -> IndexFunction:
    return IndexFunction(jax.make_jaxpr(f)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 4))


def _take(division: Division, var: Any, found: Conditions) -> bool:
    """Adds a condition to `found` if it has one of the known forms; returns whether it has."""
    eqn = None if isinstance(var, Literal) else division.equations.get(var)
    if eqn is None or eqn.primitive.name not in _SWAPPED:
        return False
    name, (one, other) = eqn.primitive.name, eqn.invars
    return (
        _takes_positions(division, name, one, other, found)
        or _takes_length(division, name, one, other, found)
        or _takes_length(division, _SWAPPED[name], other, one, found)
        or (name == "eq" and _takes_segments(division, one, other, found))
        or (name == "eq" and _takes_segments(division, other, one, found))
    )


def _takes_positions(
    division: Division, name: str, one: Any, other: Any, found: Conditions
) -> bool:
    left_side, right_side = _linear(division, one), _linear(division, other)
    if left_side is None or right_side is None:
        return False
    of_q, of_k, number = _sum(left_side, right_side, -1)
    if (of_q, of_k) == (-1, 1):
        name, of_q, of_k, number = _SWAPPED[name], 1, -1, -number
    if (of_q, of_k) != (1, -1):
        return False
    # The comparison is now of q - k + number with 0.
    right = {"ge": number, "gt": number - 1, "eq": number}.get(name)
    left = {"le": -number, "lt": -number - 1, "eq": -number}.get(name)
    if any(side is not None and not 0 <= side < _UNLIMITED for side in (left, right)):
        return False
    found.left = min((side for side in (found.left, left) if side is not None), default=None)
    found.right = min((side for side in (found.right, right) if side is not None), default=None)
    return True


def _linear(division: Division, var: Any) -> _Linear | None:
    """Returns (x, y, z) of a variable x q + y k + z, or None if it is no such sum.

    Integers of fewer than 32 bits give None, because they may wrap.
    """
    if var.aval.dtype not in (jnp.int32, jnp.int64) or var.aval.shape:
        return None
    if isinstance(var, Literal):
        return 0, 0, int(var.val)
    letter = division.letters.get(var)
    if letter is not None:
        return {"q": (1, 0, 0), "k": (0, 1, 0)}.get(letter)
    eqn = division.equations.get(var)
    if eqn is None or eqn.primitive.name not in _LINEAR:
        return None
    sums = [linear for given in eqn.invars if (linear := _linear(division, given)) is not None]
    if len(sums) < len(eqn.invars):
        return None
    name = eqn.primitive.name
    if name == "neg":
        return _sum((0, 0, 0), sums[0], -1)
    if name in ("add", "sub"):
        return _sum(sums[0], sums[1], 1 if name == "add" else -1)
    return sums[0]


def _sum(one: _Linear, other: _Linear, sign: int) -> _Linear:
    of_q, of_k, number = (a + sign * b for a, b in zip(one, other, strict=True))
    return of_q, of_k, number


def _takes_length(division: Division, name: str, one: Any, other: Any, found: Conditions) -> bool:
    """Adds a condition `k < length` or `k <= length` to `found`, if the length depends on b alone."""
    if isinstance(one, Literal) or division.letters.get(one) != "k" or name not in ("lt", "le"):
        return False
    if isinstance(other, Literal) or division.dependences[other] != {"b"}:
        return False
    if other.aval.dtype != jnp.int32:
        return False
    length = division.of_places(other)
    if name == "le":
        # k <= length is k < length + 1; the minimum avoids an overflow.
        last = length
        length = _traced(lambda *places: jnp.minimum(last(*places), _UNLIMITED) + 1)
    found.lengths.append(length)
    return True


def _takes_segments(division: Division, one: Any, other: Any, found: Conditions) -> bool:
    if found.segments is not None or isinstance(one, Literal) or isinstance(other, Literal):
        return False
    is_id = jnp.issubdtype(one.aval.dtype, jnp.integer) and one.aval.dtype.itemsize <= 4
    by = division.dependences
    if not is_id or not {"q"} <= by[one] <= set("bq") or not {"k"} <= by[other] <= set("bk"):
        return False
    found.segments = division.of_places(one), division.of_places(other)
    return True
