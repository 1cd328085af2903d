"""Parts that the sweep's operators share: `Programs`, the functions of one case, random operands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.fuzz.problem import How, Problem
from benchmarks.run.case import Arrays, Function, gradient_in_jax

EPSILON = 1e-6

ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


@dataclass(frozen=True)
class Programs:
    """A case's functions, ours and others, all of the same operands."""

    make_inputs: Callable[[jax.Array], Arrays]
    """Function of a key that returns the operands, then a cotangent for each result if any operand gets
    a gradient."""
    ours: Function
    stock: Mapping[str, Function]
    """Functions of stock JAX by form; empty if XLA would exceed its memory limit."""
    differentiable: int
    """Number of leading operands with a gradient; 0 for a forward only."""
    cotangents: int = 1
    """Number of results."""
    peers: Mapping[str, Function] = field(default_factory=dict)
    terms: tuple[float, ...] = ()
    """Usual magnitude of terms that may cancel in each result and gradient, 0 for none. Errors relative
    to it are allowed."""
    reference: Function | None = None
    """Stock's formula in a form that needs little memory; None for the first form of `stock`."""
    truth: Function | None = None
    """Formula whose float32 results are the truth; None to use `plain()`, if that does not quantise."""
    judged: Callable[[Arrays], Arrays] = lambda results: results
    """Function from results to the arrays that are compared with the truth's."""
    units: tuple[Any, ...] = ()
    """Dtypes, one a result, whose unit in the last place is an allowed error; () for our results'."""
    floats: Function | None = None
    """Function from the quantised operands to their float values. A listed case appends these to the
    operands, for its peer that multiplies floats; the other functions ignore them."""
    weight_bytes: int = 0
    """Bytes of weights that a call reads; if not 0, more input sets keep them out of the L2."""

    def whole(self, forward: Function, with_gradient: bool) -> Function:
        """Returns a function from (*operands, *cotangents) to results and, if asked, gradients."""
        if not self.differentiable:
            return lambda *args: _as_tuple(forward(*args))
        if with_gradient:
            return gradient_in_jax(forward, self.differentiable, self.cotangents)
        return lambda *args: _as_tuple(forward(*args[: -self.cotangents]))

    def plain(self) -> Function:
        """Returns the low-precision reference; in float32 it is the truth, unless there is a `truth`."""
        return self.reference or next(iter(self.stock.values()))

    def in_float32(self) -> Function:
        """Returns the truth: a function in float32 throughout, products included."""
        whole = self.whole(self.truth or self.plain(), with_gradient=True)

        def run(*args: jax.Array) -> Arrays:
            with jax.default_matmul_precision("highest"):
                return whole(*(_widened(a) for a in args))

        return run


def _as_tuple(outputs: Any) -> Arrays:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def of_problem(
    problem: Problem, stock: Mapping[str, Function], *, results: int = 1, **more: Any
) -> Programs:
    """Returns the programs of a case that a problem of the fuzz describes: operands, and our call.

    Args:
      problem: the fuzz's problem; the programs' operands are its operands, then its constants.
      stock: stock's forms, as functions of the same operands.
      results: how many of our results are judged.
      more: further fields of the programs.
    """
    names = (*problem.operands, *problem.constants)

    def ours(*args: jax.Array, implementation: str | None = None) -> Any:
        values = dict(zip(names, args, strict=True))
        operands = {name: values[name] for name in problem.operands}
        constants = {name: values[name] for name in problem.constants}
        found = problem.function(operands, constants, How(implementation, exact=False))
        return found if not isinstance(found, tuple) else found[0] if results == 1 else found

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        arrays = [
            random.small(*o.shape, o.dtype, o.mean)
            if len(o.shape) == 1
            else random.normal(o.shape, o.dtype, mean=o.mean, deviation=o.deviation)
            for o in problem.operands.values()
        ]
        arrays += [jnp.asarray(constant) for constant in problem.constants.values()]
        form = next(iter(stock.values()), ours)
        found = _as_tuple(jax.eval_shape(form, *arrays))
        # The cotangent of a loss is 1.
        dys = (random.normal(y.shape, y.dtype) if y.ndim else jnp.ones((), y.dtype) for y in found)
        return (*arrays, *dys)

    return Programs(make_inputs, ours, stock, len(problem.operands), cotangents=results, **more)


class RandomArrays:
    """Random arrays from a stream of keys."""

    def __init__(self, key: jax.Array):
        self._keys = iter(jax.random.split(key, 16))

    def normal(self, shape: tuple[int, ...], dtype: Any, *, mean=0.0, deviation=1.0) -> jax.Array:
        values = jax.random.normal(next(self._keys), shape, dtype)
        return (mean + deviation * values).astype(dtype)

    def weight(self, shape: tuple[int, int], dtype: Any) -> jax.Array:
        """Returns weights [inputs, outputs] that keep the variance of their input."""
        return self.normal(shape, dtype, deviation=shape[0] ** -0.5)

    def small(self, size: int, dtype: Any, mean: float = 0.0) -> jax.Array:
        """Returns a random bias, or with mean 1 a norm's scale."""
        return self.normal((size,), dtype, mean=mean, deviation=0.1)


# --- layers as Flax computes them ------------------------------------------------------------------


def split_operands(config: Any, args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Splits operands into x, its weights or scale, and the bias and residual or None."""
    x, w, *rest = args
    bias = rest.pop(0) if config.bias else None
    return x, w, bias, rest.pop(0) if config.residual else None


def dense(x, w, bias, product: Function = jnp.matmul):
    """Computes flax.linen.Dense, with parameters cast to x's dtype."""
    y = product(x, w.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)


def flax_norm(x, scale, bias, statistics):
    """Computes flax.nnx.LayerNorm or RMSNorm with float32 parameters."""
    wide = x.astype(jnp.float32)
    mean, variance = statistics(wide)
    y = x if mean is None else x - mean
    y = y * (jax.lax.rsqrt(variance + EPSILON) * scale)
    return (y if bias is None else y + bias).astype(x.dtype)


def _centred(wide):
    mean = wide.mean(-1, keepdims=True)
    return mean, jnp.square(wide - mean).mean(-1, keepdims=True)


def _fast(wide):
    mean = wide.mean(-1, keepdims=True)
    return mean, jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)


def mean_square(wide):
    return None, (wide * wide).mean(-1, keepdims=True)


VARIANCES: dict[str, dict[str, Function]] = {
    "layer_norm": {"two passes": _centred, "fast variance": _fast},
    "rms_norm": {"rms": mean_square},
}
"""Functions that return a norm's (mean, variance), by operator and usual form."""
