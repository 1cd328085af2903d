"""Writes a random program line by line, so that a failure is printed as readable code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from benchmarks.run.draw import Draw


@dataclass(frozen=True)
class Line:
    """A statement `name = expression`."""

    name: str
    expression: str
    instead: str | None = None
    """Name of a value of the same shape that replaces the expression when a program is reduced."""

    def __str__(self) -> str:
        return f"    {self.name} = {self.expression}"


@dataclass(frozen=True)
class Input:
    """An argument of the program."""

    shape: tuple[int, ...]
    kind: str = "normal"
    """Kind of array: "normal", "weight", "scale" (about 1), "positive", "mask" (booleans) or
    "labels:N"."""

    @property
    def is_floating(self) -> bool:
        return self.kind not in ("mask",) and not self.kind.startswith("labels")

    def array(self, rng: np.random.Generator) -> np.ndarray:
        """Draws numbers in float64 that bfloat16 represents, equal for every dtype."""
        if self.kind == "mask":
            return rng.random(self.shape) < 0.6
        if self.kind.startswith("labels"):
            return rng.integers(0, int(self.kind.partition(":")[2]), self.shape).astype(np.int32)
        values = rng.standard_normal(self.shape)
        if self.kind == "weight":
            values *= max(1, int(np.prod(self.shape[:-1]))) ** -0.5
        elif self.kind == "scale":
            values = 1 + 0.3 * values
        elif self.kind == "positive":
            values = values**2 + 0.3
        return values.astype(jnp.bfloat16).astype(np.float64)


@dataclass(frozen=True)
class Program:
    """A program: lines of Python, and their inputs."""

    inputs: dict[str, Input]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    wrapper: str = "program"
    """Expression of the judged function, in terms of the written function `program`."""

    @property
    def floating(self) -> list[str]:
        """Returns the arguments that have gradients."""
        return [name for name, value in self.inputs.items() if value.is_floating]

    def source(self) -> str:
        """Returns the source that defines the function `f`."""
        arguments = ", ".join(self.inputs)
        body = "\n".join(str(line) for line in self.lines)
        of_inputs = "\n".join(
            f"# {name}: {value.kind} {list(value.shape)}" for name, value in self.inputs.items()
        )
        results = ", ".join(self.results)
        return (
            f"{of_inputs}\ndef program({arguments}):\n{body}\n    return ({results},)\n"
            f"f = {self.wrapper}"
        )

    def function(self, dtype: str) -> Callable[..., Any]:
        """Returns the function, which computes in `dtype`; float64 skips casts to narrower dtypes."""
        names = dict(NAMES)
        is_exact = dtype == "float64"
        names |= {
            "dtype": jnp.dtype(dtype),
            "wide": lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)),
            "by_16_bits": lambda x: x if is_exact else x.astype(jnp.bfloat16).astype(x.dtype),
        }
        # Reports of `explain` name lines of the file "program.py".
        exec(compile(self.source(), "program.py", "exec"), names)
        return names["f"]

    def arrays(self, dtype: str, rng: np.random.Generator) -> list[np.ndarray]:
        """Draws arguments in the dtype."""
        drawn = [(value, value.array(rng)) for value in self.inputs.values()]
        return [a.astype(jnp.dtype(dtype)) if v.is_floating else a for v, a in drawn]


NAMES: dict[str, Any] = {
    "jax": jax,
    "jnp": jnp,
    "lax": jax.lax,
    "np": np,
    "checkpoint_name": checkpoint_name,
}


@dataclass
class Writer:
    """A program that is being written."""

    draw: Draw
    inputs: dict[str, Input] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    """Intermediate values that are also results."""
    oddity: float = 0.12
    """Probability that a part of the program deviates from the pattern."""

    def input(self, *shape: int, kind: str = "normal") -> str:
        """Adds an argument."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = Input(shape, kind)
        self.shapes[name] = shape
        return name

    def let(self, expression: str, shape: Sequence[int], instead: str | None = None) -> str:
        """Adds a value of this shape."""
        name = f"v{len(self.lines)}"
        self.lines.append(Line(name, expression, instead))
        self.shapes[name] = tuple(shape)
        return name

    def odd(self, share: float = 1.0) -> bool:
        """Draws whether to deviate from the pattern here."""
        return self.draw.chance(self.oddity * share)

    def pick(self, *options: Any) -> Any:
        return self.draw.pick(options)

    def number(self) -> str:
        """Draws a number that a recogniser may drop or confuse by mistake."""
        return self.pick(
            "2.0", "0.5", "1.5", "-1.0", "0.01", "0.25", "1.0", "3.0", "1.004", "1.00002"
        )

    def perturbed(self, name: str, *, axis: int = -1) -> str:
        """Returns the value, or sometimes a small change of it."""
        while self.odd():
            name = self._oddity(name, axis)
        if self.odd(0.25):
            self.beside.append(name)
        return name

    def _oddity(self, name: str, axis: int) -> str:
        shape = self.shapes[name]
        number = self.number()
        size = shape[axis] if shape else 1
        others = [
            other
            for other, of_other in self.shapes.items()
            if of_other == shape and other != name and self._is_floating(other)
        ]
        kinds = [
            f"{name} + {number}",
            f"{name} - {number}",
            f"{name} * {number}",
            f"{name} / {number}",
            f"{number} - {name}",
            f"-{name}",
            f"{name} * {name}",
            f"{name}**{self.pick(2, 3)}",
            f"{number} / (3.0 + {name} * {name})",
            f"{name} + 0.0",
            f"by_16_bits({name})",
            f"wide({name}).astype({name}.dtype)",
            f"checkpoint_name({name}, 'a_name')",
            f"jax.jit(lambda x: x * {number})({name})",
            f"jnp.tanh({name})",
            f"lax.stop_gradient({name})",
            f"jnp.where(jnp.arange({size}) < {max(1, size - 1)}, {name}, {number})"
            if axis == -1
            else f"jnp.abs({name})",
        ]
        if len(shape) >= 2:
            turned = f"jnp.swapaxes({name}, -1, -2)"
            kinds += [
                f"jnp.swapaxes({turned}, -1, -2)",
                f"{name}.reshape(-1).reshape({shape})",
                f"{name}[::-1]",
                f"jnp.expand_dims({name}, 0)[0]",
            ]
            if shape[-1] == shape[-2]:
                kinds.append(turned)
        if others:
            other = self.pick(*others)
            kinds += [f"{name} + {other}", f"{name} * {other}", f"{name} - {other}"]
        return self.let(self.pick(*kinds), shape, name)

    def _is_floating(self, name: str) -> bool:
        return name not in self.inputs or self.inputs[name].is_floating

    def program(self, *results: str, wrapper: str) -> Program:
        """Returns the program written so far."""
        together = dict.fromkeys((*results, *self.beside))
        return Program(dict(self.inputs), tuple(self.lines), tuple(together), wrapper)
