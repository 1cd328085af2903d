"""The programs of one case: ours, the two references, and random inputs for all of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fuzz.problem import How, Operand, Options, Problem

PLAIN, TRUTH = How("xla", False), How("xla", True)

_SHAKE = 2.0**-22
"""Relative change of a float32 by about two units in its last place."""

Arrays = dict[str, Any]


def is_refusal(error: Exception, implementation: str | None) -> bool:
    """Returns whether the error says that the named implementation cannot run the case."""
    if implementation is None or not isinstance(error, ValueError):
        return False
    named = rf"implementation=['\"]{implementation}['\"]|but '{implementation}' was passed"
    return re.search(named, str(error)) is not None


class Programs:
    """A problem with its options: random inputs, and the three ways to compute it."""

    def __init__(self, problem: Problem, options: Options):
        self.problem, self._options = problem, options
        self.ours = How(options.get("implementation"), False)
        names = tuple(problem.operands)
        self.batched = {None: (), "all": names, "first": names[:1]}[options["vmap"]]
        self._gradient = options["gradient"] and problem.with_gradient
        self._rng = np.random.default_rng(options["data"])
        shapes = {n: jax.ShapeDtypeStruct(self._shape(n), o.dtype) for n, o in _items(problem)}
        forward = problem.whole(PLAIN, self.batched, False)
        self.results = jax.eval_shape(forward, shapes, problem.constants, None)
        self.shapes = shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.problem.operands[name].shape
        return (self._options["vmap_size"], *shape) if name in self.batched else shape

    def traced(self, how: How) -> tuple[Any, tuple[Any, ...]]:
        """Returns the function to compile, and the shapes of its arguments."""
        whole = self.problem.whole(how, self.batched, self._gradient)
        operands, cotangents = self._cast(how, self.shapes, self.results)
        return whole, (operands, self.problem.constants, cotangents)

    def draw(self) -> tuple[Arrays, list[Any]]:
        """Draws operands and cotangents in the dtypes of our program."""
        operands = {
            name: jnp.asarray(self._normal(self._shape(name), operand), operand.dtype)
            for name, operand in _items(self.problem)
        }
        cotangents = [
            jnp.asarray(self._normal(r.shape, Operand(r.shape, "float32")), r.dtype)
            for r in self.results
        ]
        return operands, cotangents

    def _normal(self, shape: tuple[int, ...], operand: Operand) -> np.ndarray:
        values = self._rng.standard_normal(shape, np.float32)
        return operand.mean + operand.deviation * values

    def run(self, how: How, compiled: Any, operands: Arrays, cotangents: list[Any]) -> list[Any]:
        operands, cotangents = self._cast(how, operands, cotangents)
        results = compiled(operands, self.problem.constants, cotangents)
        return [np.asarray(result) for result in results]

    def shaken(self, operands: Arrays) -> Arrays:
        """Returns operands in float32, each value changed by about two units in its last place."""
        return {
            name: jnp.asarray(
                np.asarray(a, np.float32)
                * (1 + _SHAKE * self._rng.standard_normal(a.shape, np.float32))
            )
            for name, a in operands.items()
        }

    def as_tf32(self, operands: Arrays, cotangents: list[Any]) -> tuple[Arrays, list[Any]]:
        """Truncates float32 to tf32's 11 significant bits, which tensor cores read.

        Other dtypes stay as they are.
        """
        cut = jax.tree.map(_as_tf32, (operands, list(cotangents)))
        return cut[0], cut[1]

    def _cast(self, how: How, operands: Arrays, cotangents: Any) -> tuple[Any, Any]:
        if not how.exact:
            return operands, cotangents
        wide = jax.tree.map(_as_float32, (operands, list(cotangents)))
        return wide[0], wide[1]

    def result_names(self) -> list[str]:
        names = [f"result {index}" for index in range(len(self.results))]
        return names + [f"gradient of {n}" for n in self.problem.operands] * self._gradient


def _items(problem: Problem) -> Any:
    return problem.operands.items()


def _as_tf32(a: jax.Array) -> jax.Array:
    if a.dtype != jnp.float32:
        return a
    bits = jax.lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _as_float32(a: Any) -> Any:
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(a.shape, jnp.float32)
    return a.astype(jnp.float32)
