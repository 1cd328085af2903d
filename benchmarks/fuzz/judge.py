"""Judges a case: runs ours twice, XLA in the same precision, and XLA in float32 as the truth.

A result is right if its error is at most twice that of XLA in the same precision plus two units in the
last place at the largest value, over several draws of the operands. The tests' rule, which compares with
float64, allows one unit; here arrays may be so small that XLA's error is a matter of chance. So a case
that seems wrong is drawn many more times, and the largest errors of all draws are compared.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.fuzz import operators
from benchmarks.fuzz.problem import How, Options, Problem
from benchmarks.fuzz.programs import PLAIN, TRUTH, Arrays, Programs, is_refusal
from benchmarks.run import peers

OK, WRONG, RAISED, DIFFERENT, REFUSED = "ok", "wrong", "raised", "different", "refused"

_DRAWS, _MORE_DRAWS = 4, 28
"""Draws of operands and cotangents for each case, and additional draws for a case that seems wrong."""
_FACTOR, _UNITS = 2.0, 2.0
_TRUTH_ROUNDING = 2.0**-18
"""Error of the float32 truth itself, relative to its largest value."""
_UNSURE = 4.0
"""Allowed multiple of the truth's change when the last bits of all operands change. A difference of
nearly equal numbers, such as the gradient of a norm over two features, cannot be more accurate."""
_TF32_BITS = 10
_KINK_STEPS = 6
_HUGE = 1e30
"""Magnitude from which a value counts as infinite, such as the log-sum-exp over no keys."""

_AS_WRITTEN = {"xla_allow_excess_precision": False}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case."""

    status: str
    why: str = ""
    share: float = 0.0
    """Largest error, relative to the allowed error."""


def judge(options: Options) -> Verdict:
    """Compiles, runs and compares one case; whatever goes wrong is in the verdict."""
    try:
        programs = Programs(operators.problem_of(options), options)
    except Exception as error:
        return Verdict(RAISED, f"the case itself: {peers.describe(error)}")
    try:
        ours = _compiled(programs, programs.ours)
        plain, truth = _compiled(programs, PLAIN), _compiled(programs, TRUTH)
    except Exception as error:
        return Verdict(REFUSED if is_refused(programs, error) else RAISED, peers.describe(error))
    try:
        return _compare(programs, ours, plain, truth)
    except Exception as error:
        return Verdict(RAISED, f"when it ran: {peers.describe(error)}")


def is_refused(programs: Programs, error: Exception) -> bool:
    """Returns whether an error is a refusal, by the named implementation or by validation.

    Validation raises the same error for implementation="xla".
    """
    if not isinstance(error, ValueError | TypeError):
        return False
    if is_refusal(error, programs.ours.implementation):
        return True
    try:
        whole, arguments = programs.traced(PLAIN)
        jax.eval_shape(whole, *arguments)
    except (ValueError, TypeError) as other:
        return str(other) == str(error)
    return False


def _compiled(programs: Programs, how: How) -> Any:
    whole, arguments = programs.traced(how)
    options = None if how == programs.ours else _AS_WRITTEN
    return jax.jit(whole).lower(*arguments).compile(compiler_options=options)


# --- comparison -----------------------------------------------------------------------------------


def _compare(programs: Programs, ours: Any, plain: Any, truth: Any) -> Verdict:
    errors: list[dict[str, Any]] = [{} for _ in programs.result_names()]
    verdict = Verdict(OK)
    for draws in (_DRAWS, _MORE_DRAWS):
        for _ in range(draws):
            if name := _add_draw(errors, programs, ours, plain, truth):
                return Verdict(DIFFERENT, f"{name} is not bitwise the same in a second run")
        verdict = _verdict(programs, errors)
        if verdict.status == OK:
            break
    return verdict


def _add_draw(
    errors: list[dict[str, Any]], programs: Programs, ours: Any, plain: Any, truth: Any
) -> str | None:
    """Updates the largest errors; returns the name of a result that differs in a second run, if any."""
    operands, cotangents = programs.draw()
    first = programs.run(programs.ours, ours, operands, cotangents)
    low = programs.run(PLAIN, plain, operands, cotangents)
    true = programs.run(TRUTH, truth, operands, cotangents)
    again = programs.run(programs.ours, ours, operands, cotangents)
    for name, a, b in zip(programs.result_names(), first, again, strict=True):
        if a.tobytes() != b.tobytes():
            return name
    true, noise = true[: len(errors)], true[len(errors) :]
    slack = _slack(programs, truth, operands, cotangents, true)
    for index, of_one in enumerate(noise):
        slack[index] = slack[index] + of_one
    cut = true
    if programs.problem.tf32:
        # XLA may multiply small matrices in full float32, without tf32's error, so that error is taken
        # from the truth for operands cut to tf32.
        cut = programs.run(TRUTH, truth, *programs.as_tf32(operands, cotangents))[: len(errors)]
    shaken = programs.run(TRUTH, truth, programs.shaken(operands), cotangents)[: len(errors)]
    for seen, *arrays in zip(errors, first, low, true, cut, slack, shaken, strict=True):
        _add(seen, *arrays)
    return None


def _verdict(programs: Programs, errors: list[dict[str, Any]]) -> Verdict:
    """Returns the verdict on the worst result, from the largest errors so far."""
    shares = [_share(programs.problem, seen) for seen in errors]
    worst = max(range(len(shares)), key=lambda i: shares[i][0], default=None)
    if worst is None:
        return Verdict(OK)
    share, why = shares[worst]
    if share <= 1.0:
        return Verdict(OK, share=share)
    return Verdict(WRONG, f"{programs.result_names()[worst]}: {why}", share)


def _slack(
    programs: Programs, truth: Any, operands: Arrays, cotangents: list[Any], true: list[Any]
) -> list[Any]:
    """Returns how far results change while a relu's input is shifted up and down by its rounding error.

    Within that range rounding decides whether the input is above 0 and has a gradient. The shift grows
    in steps whose changes are added up: in a sum over rows two inputs that cross 0 may cancel each other
    at one shift and not at another.
    """
    slack = [np.zeros(a.shape, np.float32) for a in true]
    for name in programs.problem.kinks:
        farthest = float(jnp.finfo(_coarsest(programs.problem)).eps) * 8
        for sign in (1.0, -1.0):
            before = true
            for step in range(1, _KINK_STEPS + 1):
                shift = sign * farthest * step / _KINK_STEPS
                shifted = operands | {name: operands[name].astype(jnp.float32) + shift}
                moved = programs.run(TRUTH, truth, shifted, cotangents)
                moved = moved[: len(true)]
                slack = [s + np.abs(m - t) for s, m, t in zip(slack, moved, before, strict=True)]
                before = moved
    return slack


def _coarsest(problem: Problem) -> Any:
    dtypes = [jnp.dtype(operand.dtype) for operand in problem.operands.values()]
    dtypes += [jnp.dtype("float16")] * problem.tf32
    return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))


def _add(
    seen: dict[str, Any], ours: Any, plain: Any, true: Any, cut: Any, slack: Any, shaken: Any
) -> None:
    """Updates a result's largest errors with those of one draw.

    XLA's error is the larger one of `plain` and of `cut`, the truth for operands cut to tf32.
    """
    seen["dtype"] = ours.dtype
    # A value that overflows only in float16 is no error.
    limit = min(_HUGE, float(jnp.finfo(ours.dtype).max) / 2)
    usual = np.isfinite(true) & (np.abs(true) < limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, plain = ours.astype(np.float32), plain.astype(np.float32)
        same_nan = np.isnan(ours) == np.isnan(true)
        same_huge = usual | np.isnan(true) | ((np.abs(ours) >= limit) & (ours * true > 0))
        finite_plain, finite_cut = usual & np.isfinite(plain), usual & np.isfinite(cut)
        off = np.where(usual, np.maximum(np.abs(ours - true) - slack, 0.0), 0.0)
        plain_off = np.where(finite_plain, np.abs(plain - true), 0.0)
        cut_off = np.where(finite_cut, np.maximum(np.abs(cut - true) - slack, 0.0), 0.0)
        unsure = np.where(usual & np.isfinite(shaken), np.abs(shaken - true), 0.0)
    # A value that overflows in XLA at the same precision is no error.
    strange = ~(same_nan & same_huge & np.where(usual, np.isfinite(ours), True))
    strange &= ~(usual & ~np.isfinite(plain))
    off = np.where(strange | ~np.isfinite(off), 0.0, off)
    for key, values in (
        ("error", off),
        ("plain", np.maximum(plain_off, cut_off)),
        ("unsure", unsure),
        ("largest", np.where(usual, np.abs(true), 0.0)),
    ):
        seen[key] = max(seen.get(key, 0.0), float(values.max(initial=0.0)))
    seen["strange"] = seen.get("strange", 0) + int(strange.sum())
    seen["shape"] = true.shape


def _share(problem: Problem, seen: dict[str, Any]) -> tuple[float, str]:
    """Returns a result's error relative to the allowed error, and a sentence about it."""
    if seen["strange"]:
        return (
            np.inf,
            f"{seen['strange']} values of {seen['shape']} are NaN or Inf where XLA's are not",
        )
    info = jnp.finfo(seen["dtype"])
    bits = min(info.nmant, _TF32_BITS) if problem.tf32 else info.nmant
    largest = seen["largest"]
    exponent = np.floor(np.log2(max(largest, float(info.smallest_normal))))
    unit = 2.0 ** (exponent - bits)
    allowed = _FACTOR * seen["plain"] + _UNITS * unit + _TRUTH_ROUNDING * largest
    allowed += _UNSURE * seen["unsure"]
    return seen["error"] / allowed, (
        f"{seen['dtype']} {seen['shape']}: error {seen['error']:.3g}, allowed {allowed:.3g}"
        f" from {_FACTOR:g} x {seen['plain']:.3g} of XLA + {_UNITS:g} units of {unit:.3g}"
        f" + {_UNSURE:g} x {seen['unsure']:.3g} of float32;"
        f" largest value {largest:.3g}"
    )
