"""Runs a program as it is and fused, in float64 and in a narrower dtype."""

import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.fusion import report
from jaxfused.fusion.recognisers import cross_entropy
from tests.program_fuzz.writer import Program
from tests.support.tolerances import FACTOR, ULPS, ulp

OK, UNFUSED, INVALID, WRONG, RAISED = "ok", "unfused", "invalid", "wrong", "raised"

_EXACT = 1e-12
"""Allowed relative error of a fused program in float64, which may sum in another order."""
_DRAWS = (1, 15)
"""Draws of arguments for a narrow dtype, and further draws if a program seems wrong."""

_UNSURE = 4.0
"""Allowed multiple of a result's change when the last bits of all arguments change: a small sum of large
numbers cannot be more accurate."""
_CANCELS = 1e-3
"""Fraction of the largest result below which a result is a small sum of large numbers, such as the
gradient of a bias of keys. In a narrow dtype it is noise, so float64 alone judges it."""
_BESIDE = 4
"""Points next to the arguments at which a draw is tested for a kink."""
_KINK = 0.05
"""Largest relative change of a result when the arguments' last bits change. Beyond it the program is not
smooth at this draw, as `maximum(x, 0)` near 0, and the draw does not count."""

_LEAST = 1e16
"""Magnitude of a mask's number in whose float64 sum with a logit nothing of the logit is left."""

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a program."""

    status: str
    why: str = ""
    found: tuple[str, ...] = ()
    """Operators in the fused program."""


def judge(program: Program, dtype: str, seed: int = 0) -> Verdict:
    """Judges whether `fuse` keeps the program's values and gradients."""
    # With the default limit, fuse would ignore losses of few logits.
    cross_entropy.FEWEST_LOGITS = 0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        in_float64 = _Compiled(program, "float64")
        verdict = _in_float64(in_float64, seed)
        if verdict.status == OK:
            verdict = _narrow(in_float64, _Compiled(program, dtype), seed)
    return verdict


class _Compiled:
    """A program in a dtype, plain and fused, compiled as one function that shares equal parts."""

    def __init__(self, program: Program, dtype: str):
        self.program, self.dtype = program, dtype
        self.f = program.function(dtype)
        self.names = [*program.results, *(f"the gradient to {name}" for name in program.floating)]
        # Without excess precision, each value has the dtype that the program states.
        self._run = jax.jit(
            lambda *args: (self.results(jaxfused.fuse(self.f), *args), self.plain(*args)),
            compiler_options={"xla_allow_excess_precision": False},
        )

    def plain(self, *args: Any) -> list[Any]:
        return self.results(self.f, *args)

    def results(self, f: Any, arrays: Any, cotangents: Any) -> list[Any]:
        """Returns values of the function, and gradients to all floating arguments."""
        floating = [i for i, value in enumerate(self.program.inputs.values()) if value.is_floating]

        def of_floating(*some: Any) -> Any:
            merged = list(arrays)
            for i, array in zip(floating, some, strict=True):
                merged[i] = array
            return f(*merged)

        results, pullback = jax.vjp(of_floating, *(jnp.asarray(arrays[i]) for i in floating))
        return [*results, *pullback(tuple(cotangents))]

    def draw(self, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        """Draws arguments and cotangents."""
        arrays = self.program.arrays(self.dtype, rng)
        shapes = jax.eval_shape(self.f, *arrays)
        drawn = [rng.standard_normal(s.shape).astype(jnp.bfloat16).astype(s.dtype) for s in shapes]
        return arrays, [np.asarray(a) for a in drawn]

    def run(self, arrays: Arrays, cotangents: Arrays) -> tuple[list[Any], list[Any]]:
        """Returns our results and the plain ones, in their own dtypes."""
        ours, plain = self._run(arrays, cotangents)
        return [np.asarray(a) for a in ours], [np.asarray(a) for a in plain]


def _in_float64(compiled: _Compiled, seed: int) -> Verdict:
    with jax.enable_x64(True):
        try:
            arrays, cotangents = compiled.draw(np.random.default_rng(seed))
        except Exception as error:
            return Verdict(INVALID, _first_line(error))
        try:
            found = _found(compiled.f, arrays)
            if isinstance(found, Verdict) or not found:
                return found or Verdict(UNFUSED)
            ours, plain = compiled.run(arrays, cotangents)
            if any(
                (np.isfinite(a) != np.isfinite(b)).any() for a, b in zip(ours, plain, strict=True)
            ):
                # If XLA computes a maximum twice, in two ways, its gradient may be 0 / 0.
                plain = [np.asarray(a) for a in compiled.plain(arrays, cotangents)]
        except Exception as error:
            return _raised(compiled, arrays, cotangents, error)
        largest = max((_largest(a) for a in plain), default=0.0)
        _, shaken = compiled.run(_shaken(arrays, np.random.default_rng(seed), 2.0**-52), cotangents)
    results = len(compiled.program.results)
    for i, (name, a, b, s) in enumerate(zip(compiled.names, ours, plain, shaken, strict=True)):
        # The gradient of a silu written with exp(-x) is Inf / Inf at a large -x, where ours is 0.
        usual = np.isfinite(b) if i >= results else np.full(b.shape, True)
        if not np.array_equal(np.isfinite(a)[usual], np.isfinite(b)[usual]):
            return Verdict(WRONG, f"float64: {name} is NaN or Inf elsewhere", found)
        error = _largest((a - b)[usual])
        unsure = _UNSURE * max(_largest(s - b), _rounding_of_masks(compiled.program) * _largest(b))
        if error > 10 * _EXACT * _largest(b) + _EXACT * largest + unsure:
            why = f"float64: {name} is off by {error:.3g} of {_largest(b):.3g}"
            return Verdict(WRONG, why, found)
    return Verdict(OK, found=found)


def _rounding_of_masks(program: Program) -> float:
    """Returns the rounding, in float64, of logits to which a mask adds a finite number such as -1e8.

    It is the relative change of the probabilities in a row whose keys are all masked.
    """
    added = [float(number) for number in re.findall(r"-\d+(?:\.\d+)?e\d+", str(program))]
    return max((2.0**-52 * abs(number) for number in added if abs(number) < _LEAST), default=0.0)


def _raised(compiled: _Compiled, arrays: Arrays, cotangents: Arrays, error: Exception) -> Verdict:
    """Returns INVALID if the program raises without `fuse` too, else RAISED."""
    try:
        jax.eval_shape(compiled.plain, arrays, cotangents)
    except Exception as other:
        return Verdict(INVALID, _first_line(other))
    return Verdict(RAISED, f"in {compiled.dtype}: {_first_line(error)}")


def _narrow(in_float64: _Compiled, compiled: _Compiled, seed: int) -> Verdict:
    """Judges by the rule of tests/support/tolerances.py, over several draws."""
    dtype = compiled.dtype
    rng = np.random.default_rng(seed)
    errors: dict[str, np.ndarray] = {}
    found: tuple[str, ...] | Verdict = ()
    wrong: list[str] = []
    for draws in _DRAWS:
        for _ in range(draws):
            arrays, cotangents = compiled.draw(rng)
            try:
                found = found or _found(compiled.f, arrays)
                if isinstance(found, Verdict) or not found:
                    return found or Verdict(OK)
                ours, plain = compiled.run(arrays, cotangents)
            except Exception as error:
                return _raised(compiled, arrays, cotangents, error)
            with jax.enable_x64(True):
                wide = _widened(arrays, cotangents)
                _, truth = in_float64.run(*wide)
                _, shaken = in_float64.run(_shaken(wide[0], rng, 2.0**-23), wide[1])
                half = float(jnp.finfo(dtype).eps) / 2
                beside = [
                    in_float64.run(_shaken(wide[0], rng, half), wide[1])[1] for _ in range(_BESIDE)
                ]
            largest = max((_largest(t) for t in truth), default=0.0)
            for i, (name, a, b, t, s) in enumerate(
                zip(compiled.names, ours, plain, truth, shaken, strict=True)
            ):
                usual = np.isfinite(t) & np.isfinite(b)
                if not np.isfinite(a[usual]).all():
                    return Verdict(
                        WRONG, f"{dtype}: {name} is NaN or Inf where it need not be", found
                    )
                changed = max(_largest(n[i] - t) for n in beside)
                if _largest(t) < _CANCELS * largest or changed > _KINK * _largest(t):
                    continue
                unit = ulp(_largest(t), a.dtype)
                off = [_largest(np.where(usual, x.astype(np.float64) - t, 0.0)) for x in (a, b, s)]
                # Results in a narrow dtype are no more accurate than the last bits of their arguments.
                off[1] = max(off[1], changed)
                seen = errors.setdefault(name, np.zeros(4))
                np.maximum(seen, [*off, unit], out=seen)
        wrong = [
            f"{dtype}: {name} is off by {ours:.3g}, and by {plain:.3g} as written (unit {unit:.3g})"
            for name, (ours, plain, unsure, unit) in errors.items()
            if ours > FACTOR * plain + ULPS * unit + _UNSURE * unsure
        ]
        if not wrong:
            return Verdict(OK, found=found)
    return Verdict(WRONG, wrong[0], found)


def _shaken(arrays: Arrays, rng: np.random.Generator, share: float) -> Arrays:
    """Returns floating arrays with random relative changes of about `share`; others stay."""
    off = [1 + share * rng.standard_normal(a.shape) for a in arrays]
    return [a if a.dtype.kind in "bi" else a * o for a, o in zip(arrays, off, strict=True)]


def _widened(*lots: Arrays) -> list[Arrays]:
    """Casts arrays to float64, except booleans and integers."""
    return [[a if a.dtype.kind in "bi" else a.astype(np.float64) for a in lot] for lot in lots]


def _found(f: Any, arrays: Arrays) -> tuple[str, ...] | Verdict:
    """Returns the operators that `fuse` finds, or a verdict if its search fails."""
    with report.recorded() as reports:
        jax.eval_shape(jaxfused.fuse(f), *arrays)
    for miss in reports[0].misses:
        # A refusal without an operator's own message is an error of the recogniser.
        if miss.reason.startswith("it refused") and "pass" not in miss.reason:
            return Verdict(RAISED, miss.reason)
    return tuple(site.operator for site in reports[0].found)


def _largest(array: np.ndarray) -> float:
    array = np.abs(array.astype(np.float64))
    return float(array.max(where=np.isfinite(array), initial=0.0))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def shrunk(program: Program, dtype: str, verdict: Verdict, seed: int = 0) -> Program:
    """Removes the parts of a program that do not change the verdict."""

    def is_as_wrong(smaller: Program) -> bool:
        return judge(smaller, dtype, seed).status == verdict.status

    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if is_as_wrong(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program):
    if program.wrapper != "program":
        yield replace(program, wrapper="program")
    for i in range(len(program.results)):
        if len(program.results) > 1:
            yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    for i, line in enumerate(program.lines):
        if line.instead is not None and line.expression != line.instead:
            plain = replace(line, expression=line.instead)
            yield replace(program, lines=(*program.lines[:i], plain, *program.lines[i + 1 :]))
