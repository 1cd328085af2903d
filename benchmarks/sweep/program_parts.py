"""What the programs of all operators are made of: random operands, and the forms of one case."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.case import Arrays, Function, gradient_in_jax

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
    """Functions of the same operands, of which the first `differentiable` get gradients."""

    make_inputs: Callable[[jax.Array], Arrays]
    """From a key: the operands, then a cotangent for each result."""
    ours: Function
    stock: Mapping[str, Function]
    """By form; empty where XLA would need more memory than it is given."""
    differentiable: int
    cotangents: int = 1
    peers: Mapping[str, Function] = field(default_factory=dict)
    terms: tuple[float, ...] = ()
    """For results and gradients: the usual size of terms that may cancel, 0 where none do."""
    reference: Function | None = None
    """The formula of stock in little memory: by default the first form of stock itself."""

    def whole(self, forward: Function, with_gradient: bool) -> Function:
        """(*operands, *cotangents) to results, and to gradients too if asked."""
        if with_gradient:
            return gradient_in_jax(forward, self.differentiable, self.cotangents)
        return lambda *args: _as_tuple(forward(*args[: -self.cotangents]))

    def plain(self) -> Function:
        """What says how accurate low precision can be, and in float32 what is true."""
        return self.reference or next(iter(self.stock.values()))

    def in_float32(self) -> Function:
        """Results and gradients in float32 throughout, products included."""
        whole = self.whole(self.plain(), with_gradient=True)

        def run(*args: jax.Array) -> Arrays:
            with jax.default_matmul_precision("highest"):
                return whole(*(_widened(a) for a in args))

        return run


def _as_tuple(outputs: Any) -> Arrays:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


class RandomArrays:
    """Arrays of a stream of keys."""

    def __init__(self, key: jax.Array):
        self._keys = iter(jax.random.split(key, 16))

    def normal(self, shape: tuple[int, ...], dtype: Any, *, mean=0.0, deviation=1.0) -> jax.Array:
        values = jax.random.normal(next(self._keys), shape, dtype)
        return (mean + deviation * values).astype(dtype)

    def weight(self, shape: tuple[int, int], dtype: Any) -> jax.Array:
        """[D, F] that keeps the variance of what it multiplies."""
        return self.normal(shape, dtype, deviation=shape[0] ** -0.5)

    def small(self, size: int, dtype: Any, mean: float = 0.0) -> jax.Array:
        """A bias, or a scale about 1."""
        return self.normal((size,), dtype, mean=mean, deviation=0.1)
