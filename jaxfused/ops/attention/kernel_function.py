"""score_mod and mask_mod, divided into what kernels evaluate and what XLA computes before them.

Kernels evaluate terms that depend on the score, or on the query and the key together. Terms of the batch
entry, the head and at most one of query and key are computed by XLA, as arrays that the kernel reads. So
are numbers that kernels cannot compute, such as elements of a table by relative positions, if they do
not depend on the score.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxfused.ops.attention.index_function import NO_MESH, IndexFunction
from pallas_kernels.attention.tile_function import (
    TileFunction,
    bound,
    inlined,
    value_of,
    why_not_on_tiles,
)

_FUNCTIONS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_BY_HEAD = frozenset("bh")


@dataclass(frozen=True, eq=False)
class KernelFunction:
    """A traced function of (score, b, h, q, k), or of (b, h, q, k), in the form that kernels take."""

    function: TileFunction | None
    """Function that kernels evaluate; None if kernels cannot evaluate it."""
    reads: tuple[IndexFunction, ...] = ()
    """Functions of (b, h, q, k) that XLA computes and `function` reads."""
    reason: str | None = None
    """Why kernels cannot evaluate the function; None if they can."""

    @property
    def reads_matrices(self) -> bool:
        """True if the function reads numbers that depend on query and key together."""
        return any(read.used[2] and read.used[3] for read in self.reads)

    def values(self, places: Any) -> tuple[jax.Array, ...]:
        """Returns the arrays that the function reads, [B or 1, N or 1, T or 1, S or 1] each."""
        arrays = [read.over(places) for read in self.reads]
        return tuple(a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in arrays)


def kernel_function(function: IndexFunction, name: str) -> KernelFunction:
    """Divides the function that a caller passed as `name`, "score_mod" or "mask_mod"."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return Division(function.program, name).divided(function)


def over_arrays(
    function: TileFunction, reads: Sequence[jax.Array], queries: int, keys: int, score: Any = None
) -> jax.Array:
    """Evaluates the function for all elements in XLA, [B or 1, N or 1, T, S].

    Args:
      function: the function, in the form that kernels evaluate.
      reads: the arrays that it reads, [B or 1, N or 1, T or 1, S or 1].
      queries: T.
      keys: S.
      score: [B, N, T, S], of a function of the score.
    """
    q = jnp.arange(queries, dtype=jnp.int32).reshape(1, 1, -1, 1)
    k = jnp.arange(keys, dtype=jnp.int32).reshape(1, 1, 1, -1)
    args = [*([] if score is None else [score]), q, k, *reads]
    has = [[array.shape[axis] > 1 for axis in range(4)] for array in args]
    mapped = [any(own[axis] for own in has) for axis in range(4)]

    def f(*args: jax.Array) -> jax.Array:
        return jaxpr_as_fun(function.program)(*args)[0]

    for axis in (3, 2, 1, 0):
        if mapped[axis]:
            f = jax.vmap(f, [0 if own[axis] else None for own in has])
    squeezed = [array.reshape([size for size in array.shape if size > 1]) for array in args]
    dtypes = [aval.dtype for aval in function.program.in_avals]
    result = f(*(array.astype(dtype) for array, dtype in zip(squeezed, dtypes, strict=True)))
    axes = [axis for axis in range(4) if not mapped[axis]]
    return jnp.expand_dims(result, axes)


class Division:
    """The variables of a program, each with the letters of (s, b, h, q, k) that it depends on."""

    def __init__(self, program: ClosedJaxpr, name: str) -> None:
        self.name, self.of_score = name, name == "score_mod"
        self.program = inlined(program, _FUNCTIONS)
        jaxpr = self.program.jaxpr
        self.equations = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        letters = "sbhqk" if self.of_score else "bhqk"
        self.letters = dict(zip(jaxpr.invars, letters, strict=True))
        self.reasons: list[str] = []
        self.read: list[Any] = []
        self._visited: set[Any] = set()
        self._computed: dict[Any, bool] = {}

    @functools.cached_property
    def dependences(self) -> dict[Any, frozenset[str]]:
        jaxpr = self.program.jaxpr
        found = {var: frozenset(letter) for var, letter in self.letters.items()}
        found |= dict.fromkeys(jaxpr.constvars, frozenset())
        for eqn in jaxpr.eqns:
            given = [found[var] for var in eqn.invars if not isinstance(var, Literal)]
            found |= dict.fromkeys(eqn.outvars, frozenset().union(*given))
        return found

    def is_computed(self, var: Any) -> bool:
        """True if kernels can compute a variable from the indices of query and key alone."""
        if isinstance(var, Literal) or self.letters.get(var) in ("q", "k"):
            return True
        if var not in self._computed:
            eqn = self.equations.get(var)
            self._computed[var] = (
                eqn is not None
                and why_not_on_tiles(eqn) is None
                and all(map(self.is_computed, eqn.invars))
            )
        return self._computed[var]

    def visit(self, var: Any) -> None:
        """Collects the variables that kernels load to compute `var`, and reasons why they cannot."""
        if isinstance(var, Literal) or var in self._visited:
            return
        self._visited.add(var)
        on = self.dependences[var]
        eqn = self.equations.get(var)
        if self.letters.get(var) in ("s", "q", "k"):
            return
        by_one = len(on - _BY_HEAD) <= 1 and "s" not in on
        why = None if eqn is None else why_not_on_tiles(eqn)
        if by_one and not (on and self.is_computed(var)):
            self.read.append(var)
        elif why is None:
            assert eqn is not None
            for given in eqn.invars:
                self.visit(given)
        elif "s" not in on:
            self.read.append(var)
        else:
            assert eqn is not None
            # The first reason is that of the operation closest to the score.
            for given in eqn.invars:
                if not isinstance(given, Literal) and "s" in self.dependences[given]:
                    self.visit(given)
            self.reasons.append(f"kernels do not evaluate {why}, which depends on the score")

    def divided(self, function: IndexFunction) -> KernelFunction:
        (result,) = self.program.jaxpr.outvars
        self.visit(result)
        if self.reasons:
            return KernelFunction(None, reason=f"{self.name}: {self.reasons[0]}")
        reads = tuple(self.of_places(var) for var in self.read)
        args = [jax.ShapeDtypeStruct((), jnp.int32)] * 2
        if self.of_score:
            args.insert(0, self.program.in_avals[0])
        args += [jax.ShapeDtypeStruct((), var.aval.dtype) for var in self.read]
        program = jax.make_jaxpr(functools.partial(self.evaluated, result))(*args)
        is_float = [jnp.issubdtype(var.aval.dtype, jnp.floating) for var in self.read]
        wanted = tuple(
            number and not read.is_constant for number, read in zip(is_float, reads, strict=True)
        )
        on_tiles = TileFunction(
            program,
            of_score=self.of_score,
            wanted=wanted if self.of_score else (False,) * len(reads),
            is_additive=self.of_score and function.is_additive,
        )
        if (reason := on_tiles.why_not()) is not None:
            return KernelFunction(None, reason=f"{self.name}: kernels do not evaluate {reason}")
        return KernelFunction(on_tiles, reads)

    def evaluated(self, result: Any, *args: Any) -> Any:
        """Returns the result from ([score,] q, k, *reads)."""
        inputs = [var for var, letter in self.letters.items() if letter in "sqk"]
        env = dict(zip((*inputs, *self.read), args, strict=True))
        for eqn in self.needed([result], env):
            given = [value_of(env, var) for var in eqn.invars]
            env.update(zip(eqn.outvars, bound(eqn, given), strict=True))
        return value_of(env, result)

    def needed(self, results: Sequence[Any], known: Any) -> list[Any]:
        """Returns the equations, in order, that compute the results from what is known."""
        wanted = {v for v in results if not isinstance(v, Literal) and v not in known}
        found = []
        for eqn in reversed(self.program.jaxpr.eqns):
            if wanted & set(eqn.outvars):
                wanted |= {v for v in eqn.invars if not isinstance(v, Literal) and v not in known}
                found.append(eqn)
        return found[::-1]

    def of_places(self, var: Any) -> IndexFunction:
        """Returns a literal, or a variable without the score, as a function of (b, h, q, k)."""
        jaxpr = self.program.jaxpr
        places = [v for v, letter in self.letters.items() if letter != "s"]
        equations = self.needed([var], set(places))
        consts = {
            v: const
            for v, const in zip(jaxpr.constvars, self.program.consts, strict=True)
            if v is var or any(v in eqn.invars for eqn in equations)
        }

        def function(*args: Any) -> Any:
            env = dict(zip(places, args, strict=True)) | consts
            for eqn in equations:
                given = [value_of(env, v) for v in eqn.invars]
                env.update(zip(eqn.outvars, bound(eqn, given), strict=True))
            return value_of(env, var)

        return IndexFunction(jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 4))
