"""One case of the fuzz: an operator applied to random operands, computed in three ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.run.draw import Draw

Options = dict[str, Any]
"""Drawn sizes and options by name, with values that JSON can represent."""

DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
ACTIVATIONS = (
    "relu",
    "relu2",
    "gelu_tanh",
    "gelu_erf",
    "quick_gelu",
    "silu",
    "mish",
    "sigmoid",
    "tanh",
)
RELU = "relu"
ROW_FORMATS = ("int8", "int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that rows are quantised to."""


class How(NamedTuple):
    """One of three ways to compute a function: as drawn, by XLA, and by XLA in float32."""

    implementation: str | None
    """Implementation that the call names: the drawn one in the judged program, "xla" in the others."""
    exact: bool
    """True if operands and results are float32, even if the call names a dtype of results."""

    def out_dtype(self, dtype: str | None) -> str | None:
        return "float32" if self.exact and dtype else dtype


class Operand(NamedTuple):
    """Random array whose gradient is taken."""

    shape: tuple[int, ...]
    dtype: str
    mean: float = 0.0
    deviation: float = 1.0


Function = Callable[..., Any]
"""Function of (operands by name, constants by name, How) that returns an array or a tuple of arrays."""


@dataclass(frozen=True)
class Problem:
    """An operator with its operands."""

    function: Function
    operands: Mapping[str, Operand]
    constants: Mapping[str, Any]
    """Operands without a gradient: masks, lengths, labels, tables, quantised weights."""
    kinks: tuple[str, ...] = ()
    """Operands that are added to a relu's input; the judge shifts them across the relu's kink."""
    tf32: bool = False
    """True if float32 products may round their operands to 11 significant bits."""
    with_gradient: bool = True
    noise: Callable[[Any, Any, Any, Any], Mapping[str, jax.Array]] | None = None
    """Function of (operands, constants, results, cotangents) that returns additional errors to allow, by
    name: "result 0", or an operand for its gradient. Without gradients the cotangents are None."""

    def whole(self, how: How, batched: tuple[str, ...], gradient: bool) -> Function:
        """Returns a function from (operands, constants, cotangents) to results and, if asked, gradients.

        The exact function appends the noise of each result and gradient, if the problem defines
        noise.
        """

        def forward(operands: Any, constants: Any) -> list[jax.Array]:
            def of_one(operands: Any) -> tuple[jax.Array, ...]:
                results = self.function(operands, constants, how)
                return results if isinstance(results, tuple) else (results,)

            return list(_mapped(of_one, batched, operands)(operands))

        def run(operands: Any, constants: Any, cotangents: Any) -> list[Any]:
            noisy = how.exact and self.noise is not None
            if not gradient:
                results = forward(operands, constants)
                return results + self._noise(batched, operands, constants, results) * noisy
            results, pullback = jax.vjp(lambda moving: forward(moving, constants), operands)
            (gradients,) = pullback(cotangents)
            whole = [*results, *(gradients[name] for name in self.operands)]
            if noisy:
                whole += self._noise(batched, operands, constants, results, cotangents)
            return whole

        def precisely(*args: Any) -> list[Any]:
            with jax.default_matmul_precision("highest"):
                return run(*args)

        return precisely if how.exact else run

    def _noise(
        self,
        batched: tuple[str, ...],
        operands: Any,
        constants: Any,
        results: Any,
        cotangents: Any = None,
    ) -> list[jax.Array]:
        if self.noise is None:
            return []
        noise_of = self.noise

        def of_one(operands: Any, results: Any, cotangents: Any) -> Any:
            return dict(noise_of(operands, constants, results, cotangents))

        noise = _mapped(of_one, batched, operands, 0, 0)(operands, results, cotangents)
        whole = [noise.get(f"result {i}", jnp.zeros(y.shape)) for i, y in enumerate(results)]
        if cotangents is None:
            return whole
        # Noise is appended in the order of `self.operands`: jax.jit sorts a dict by its keys.
        for name in self.operands:
            values = noise.get(name, jnp.zeros(operands[name].shape))
            # An unbatched operand's gradient is a sum over the batch, whose errors are independent.
            if batched and name in noise and name not in batched:
                values = jnp.sqrt(jnp.sum(values**2, axis=0))
            whole.append(values)
        return whole


def _mapped(f: Function, batched: tuple[str, ...], operands: Any, *axes: int) -> Function:
    """Returns `f` under vmap over the operands in `batched`; `axes` are the other arguments' in_axes."""
    if not batched:
        return f
    return jax.vmap(f, in_axes=({name: 0 if name in batched else None for name in operands}, *axes))


# --- draws shared by several operators ------------------------------------------------------------


def length(draw: Draw, most: int) -> int:
    """Draws a size from 0 to `most`, often 0, 1 or next to a multiple of 8."""
    most = draw.bounded(most)
    kind = draw.pick(("any", "any", "any", "tiny", "near"))
    if kind == "any":
        return draw.size(1, most)
    if kind == "tiny":
        return draw.pick((0, 1, 1, 2, 3, 4, 5, 7))
    near = draw.size(1, max(1, most // 8)) * 8 + draw.pick((-1, 0, 0, 1))
    return min(near, most)


def features(draw: Draw, most: int) -> int:
    """Draws a number of features from 1 to `most`, often a multiple of 8 or 64, which kernels need."""
    unit = draw.pick((1, 8, 8, 16, 64, 64, 128))
    return min(most, max(1, draw.size(1, most) // unit) * unit)


def rows(draw: Draw, most: int) -> list[int]:
    """Draws the axes before the features: none to three, together at most `most` rows."""
    rank = draw.pick((0, 1, 1, 2, 2, 3))
    shape: list[int] = []
    for _ in range(rank):
        shape.append(draw.shard(max(1, size)) if (size := length(draw, most)) else 0)
        most = max(1, most // max(1, shape[-1]))
    return shape


def maybe_dtype(draw: Draw, probability: float) -> str | None:
    """Draws the dtype of a parameter, or None for no parameter."""
    return (
        draw.pick(("float32", "float32", "bfloat16", "float16"))
        if draw.chance(probability)
        else None
    )


def activation(draw: Draw, probability: float = 0.5) -> str | None:
    return draw.pick(ACTIVATIONS) if draw.chance(probability) else None


def rng_of(options: Options) -> np.random.Generator:
    """Returns the random generator of a case's constants."""
    return np.random.default_rng(options.get("data", 0) + 1)


def present(**operands: Operand | None) -> dict[str, Operand]:
    """Returns the operands that are not None."""
    return {name: operand for name, operand in operands.items() if operand is not None}


def parameter(size: int, dtype: str | None, mean: float = 0.0) -> Operand | None:
    return None if dtype is None else Operand((size,), dtype, mean, 0.5)


def weight(shape: tuple[int, int], dtype: str) -> Operand:
    """Returns weights [inputs, outputs] that keep the variance of their input."""
    return Operand(shape, dtype, 0.0, max(1, shape[0]) ** -0.5)
