"""What one case of the fuzz is: an operator applied to random operands, in three precisions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.run.draw import Draw

Options = dict[str, Any]
"""What was drawn: sizes and options by name, of JSON's types."""

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
"""What rows are quantised to."""


class How(NamedTuple):
    """In which of the three ways a function is to be computed."""

    implementation: str | None
    """None for what is judged, "xla" for what it is judged by."""
    exact: bool
    """Whether operands are float32, and so shall results be that name a dtype."""

    def out_dtype(self, dtype: str | None) -> str | None:
        return "float32" if self.exact and dtype else dtype


class Operand(NamedTuple):
    """A random array of which a gradient is taken."""

    shape: tuple[int, ...]
    dtype: str
    mean: float = 0.0
    deviation: float = 1.0


Function = Callable[..., Any]
"""(operands by name, constants by name, How) to an array or a tuple of arrays."""


@dataclass(frozen=True)
class Problem:
    """An operator with its operands."""

    function: Function
    operands: Mapping[str, Operand]
    constants: Mapping[str, Any]
    """Operands without a gradient: masks, lengths, labels, tables, quantised weights."""
    kinks: tuple[str, ...] = ()
    """Operands that are added to what a relu reads: shifting them shows what its kink does."""
    tf32: bool = False
    """Whether float32 products may round their operands to 11 bits."""
    with_gradient: bool = True
    noise: Callable[[Any, Any, Any, Any], Mapping[str, jax.Array]] | None = None
    """(operands, constants, results, cotangents) to how far what is named may be off besides: the
    gradient of an operand, or "result 0". Without gradients there are no cotangents, but None."""

    def whole(self, how: How, batched: tuple[str, ...], gradient: bool) -> Function:
        """(operands, constants, cotangents) to a list: results and, if asked, gradients.

        After them the exact one has the noise of each of them, where the problem has it.
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
        # In the order of the problem: inside jax.jit a dict is in that of its keys.
        for name in self.operands:
            values = noise.get(name, jnp.zeros(operands[name].shape))
            # The gradient of what a batch shares is a sum over the batch.
            if batched and name in noise and name not in batched:
                values = jnp.sqrt(jnp.sum(values**2, axis=0))
            whole.append(values)
        return whole


def _mapped(f: Function, batched: tuple[str, ...], operands: Any, *axes: int) -> Function:
    """`f` over a batch of the operands named in `batched`, or as it is; `axes`: of what follows."""
    if not batched:
        return f
    return jax.vmap(f, in_axes=({name: 0 if name in batched else None for name in operands}, *axes))


# --- what several operators draw ------------------------------------------------------------------


def length(draw: Draw, most: int) -> int:
    """A size from 0 up; 0, 1 and the neighbours of multiples of 8 come often."""
    most = draw.bounded(most)
    kind = draw.pick(("any", "any", "any", "tiny", "near"))
    if kind == "any":
        return draw.size(1, most)
    if kind == "tiny":
        return draw.pick((0, 1, 1, 2, 3, 4, 5, 7))
    near = draw.size(1, max(1, most // 8)) * 8 + draw.pick((-1, 0, 0, 1))
    return min(near, most)


def features(draw: Draw, most: int) -> int:
    """At least 1; multiples of 8 and of 64 come often, as kernels want them."""
    unit = draw.pick((1, 8, 8, 16, 64, 64, 128))
    return min(most, max(1, draw.size(1, most) // unit) * unit)


def rows(draw: Draw, most: int) -> list[int]:
    """The axes before the features: none to three, together at most `most` rows."""
    rank = draw.pick((0, 1, 1, 2, 2, 3))
    shape: list[int] = []
    for _ in range(rank):
        shape.append(draw.shard(max(1, size)) if (size := length(draw, most)) else 0)
        most = max(1, most // max(1, shape[-1]))
    return shape


def maybe_dtype(draw: Draw, probability: float) -> str | None:
    """None, or the dtype of a parameter that is there."""
    return (
        draw.pick(("float32", "float32", "bfloat16", "float16"))
        if draw.chance(probability)
        else None
    )


def activation(draw: Draw, probability: float = 0.5) -> str | None:
    return draw.pick(ACTIVATIONS) if draw.chance(probability) else None


def rng_of(options: Options) -> np.random.Generator:
    """The stream of a case's constants."""
    return np.random.default_rng(options["data"] + 1)


def present(**operands: Operand | None) -> dict[str, Operand]:
    """Those that are there."""
    return {name: operand for name, operand in operands.items() if operand is not None}


def parameter(size: int, dtype: str | None, mean: float = 0.0) -> Operand | None:
    return None if dtype is None else Operand((size,), dtype, mean, 0.5)


def weight(shape: tuple[int, int], dtype: str) -> Operand:
    """[D, F] that keeps the variance of what it multiplies."""
    return Operand(shape, dtype, 0.0, max(1, shape[0]) ** -0.5)


def array(values: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(values, dtype)
