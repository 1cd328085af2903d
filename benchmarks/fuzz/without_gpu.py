"""Compiles one case for an H200 that is not there; nothing is computed.

Tracing, the lowering of a kernel, Mosaic's passes and ptxas refuse what they cannot do, and so finds
this every error but a wrong result.
"""

import functools
from typing import Any

from benchmarks import peers
from benchmarks.fuzz import judge, operators
from benchmarks.fuzz.problem import How, Options
from benchmarks.fuzz.programs import Programs, is_refusal
from benchmarks.without_gpu import target

_MOSAIC = "mosaic_gpu"
"""Is in a program that calls a kernel of Mosaic GPU."""


def judge_without_gpu(options: Options) -> judge.Verdict:
    """Whether a case compiles by the choice without a name, and by the implementation that was drawn."""
    device, seen = _device(), set()
    try:
        programs = Programs(operators.problem_of(options), options)
    except Exception as error:
        return judge.Verdict(judge.RAISED, f"the case itself: {peers.describe(error)}")
    for implementation in dict.fromkeys((None, programs.ours.implementation)):
        try:
            whole, arguments = programs.traced(How(implementation, False))
            lowered = target.lower_for(device, whole, arguments)
            text = lowered.as_text()
            # XLA's own kernels compile as anybody's do.
            if _MOSAIC in text and text not in seen:
                target.compile(lowered)
            seen.add(text)
        except Exception as error:
            if is_refusal(error, implementation):
                continue
            if implementation is None and judge.is_refused(programs, error):
                return judge.Verdict(judge.REFUSED, peers.describe(error))
            name = "" if implementation is None else f"implementation={implementation!r}: "
            return judge.Verdict(judge.RAISED, name + peers.describe(error))
    return judge.Verdict(judge.OK)


@functools.cache
def _device() -> Any:
    """The H200 of this process."""
    return target.prepare()
