"""Lowers or compiles one case for an H200 that is absent; nothing is computed.

Tracing and lowering find most errors of a kernel, such as layouts and shared memory. Compiling adds the
errors of Mosaic's passes and of ptxas.
"""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz import judge, operators
from benchmarks.fuzz.problem import How, Options
from benchmarks.fuzz.processes import Judge
from benchmarks.fuzz.programs import Programs, is_refusal
from benchmarks.run import peers
from benchmarks.without_gpu import target

_MOSAIC = "mosaic_gpu"
"""Word in a program's text that calls a kernel of Mosaic GPU."""


def lowered(options: Options) -> judge.Verdict:
    """Judges whether a case lowers, with the default implementation and with the drawn one."""
    return _judge(options, lambda text, program: None)


def compiled(options: Options) -> judge.Verdict:
    """Judges whether a case compiles, with the default implementation and with the drawn one."""
    seen = set()

    def compile_new(text: str, program: Any) -> None:
        # A program without Mosaic kernels would test only XLA.
        if _MOSAIC in text and text not in seen:
            target.compile(program)
        seen.add(text)

    return _judge(options, compile_new)


WITHOUT_GPU: dict[str, Judge] = {"lowered": lowered, "compiled": compiled}


def _judge(options: Options, finish: Callable[[str, Any], None]) -> judge.Verdict:
    """Returns the verdict on a case; `finish` is called with each program's text and the program."""
    device = _device()
    try:
        programs = Programs(operators.problem_of(options), options)
    except Exception as error:
        return judge.Verdict(judge.RAISED, f"the case itself: {peers.describe(error)}")
    for implementation in dict.fromkeys((None, programs.ours.implementation)):
        try:
            whole, arguments = programs.traced(How(implementation, False))
            program = target.lower_for(device, whole, arguments)
            finish(program.as_text(), program)
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
    """Returns the H200 for which this process compiles."""
    return target.prepare()
