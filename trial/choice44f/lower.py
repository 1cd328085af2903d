"""lower.py BUILD CASES FOLDER PART PARTS: lowers programs as for an H200 with the tree of PYTHONPATH, on a CPU.

Each line of CASES is a case: line, direction, builds, and for some builds `force` {build: {stage: implementation}},
which puts an implementation first at a stage. FOLDER/ID.BUILD gets the module, its choices and their rules.
"""

import contextlib
import json
import os
import pickle
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

os.environ["XDG_CACHE_HOME"] = os.devnull
import jax

jax.config.update("jax_platforms", "cpu")
from benchmarks.sweep import configs, programs
from benchmarks.sweep.lowering import WHOLE
from jaxfused import dispatch
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library, runner

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
KEY = jax.eval_shape(lambda: jax.random.key(0))
ANYTHING = jax.export.DisabledSafetyCheck.custom_call("ALL")
PLATFORM = os.environ.get("PLATFORM", "cuda")
if PLATFORM == "cpu":
    H200 = dispatch.Device("cpu", "cpu", None, 0)
ROOT = str(Path.cwd())


@contextlib.contextmanager
def forced(stages):
    """Puts `stages[name]` first at the stages of these names, whatever rule or table says."""
    if not stages:
        yield
        return
    among, measured = runner.Runner._among, runner.Runner._measured

    def first(self, stage, shapes, reasons, estimate=None):
        name = stages.get(stage.name)
        if name is not None and reasons.get(name, "absent") is None:
            reasons = {name: None, **{k: v for k, v in reasons.items() if k != name}}
        return among(self, stage, shapes, reasons, estimate)

    def untouched(self, choice, found):
        return choice if choice.stage in stages else measured(self, choice, found)

    runner.forget()
    with mock.patch.object(runner.Runner, "_among", first), mock.patch.object(runner.Runner, "_measured", untouched):
        yield
    runner.forget()


def shapes(operand):
    return None if operand is None else [str(operand.dtype), *operand.shape]


def rule_of(choice):
    """Returns FILE:LINE of the statement that returned the choice's rule, and its sentence."""
    if choice.source in ("table", "neighbour"):
        return {"place": f"the shipped table ({choice.source})", "why": str(choice.measured)[:200]}
    kernel = choice.kernel
    if kernel is None or not hasattr(kernel, "estimate"):
        gate = "jaxfused/ops/conv/depthwise_conv_regimes.py:why_xla" if "depthwise" in choice.stage else "a gate"
        return {"place": f"{gate} (left_to_xla), then the order of why_not", "why": ""}
    found = []

    def tracer(frame, event, value):
        if event == "return" and isinstance(value, tuple) and hasattr(value, "why"):
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return tracer

    reasons = kernel.why_not(H200, *choice.operands)
    able = [n for n, why in reasons.items() if why is None]
    sys.settrace(tracer)
    try:
        rule = kernel.estimate(H200, able, *choice.operands)
    finally:
        sys.settrace(None)
    if rule is None:
        return {"place": "no rule", "why": str({k: v for k, v in reasons.items() if v})[:200]}
    places = [f for f in found if f[2] not in ("_xla", "_kernels", "<lambda>")]
    place = "; ".join(f"{f.removeprefix(ROOT + '/')}:{n} {name}" for f, n, name in places)
    return {"place": place, "why": rule.why, "first": list(rule.first)}


def ways_of(choices):
    ways = []
    for c in choices:
        config = c.config
        if config is None and c.kernel is not None:
            try:
                found = runner.configs(c.kernel, c.implementation, H200, c.operands)
                config = found[0] if found else None
            except Exception as error:
                config = type(error).__name__
        ways.append([c.stage, [shapes(o) for o in c.operands], c.implementation, str(config)])
    return ways


def handlers(module):
    """Returns the names of our CUDA C handlers that a module calls."""
    found = set(re.findall(rb"jaxfused_[a-z0-9_]+", module.mlir_module_serialized))
    return sorted(name.decode() for name in found)


def one(case, build):
    written = programs.of(configs.from_line(case["line"]))
    arrays = jax.eval_shape(written.make_inputs, KEY)
    f = jax.jit(written.whole(written.ours, case["direction"] == WHOLE))
    with forced(case.get("force", {}).get(build)), dispatch.recorded() as choices:
        module = jax.export.export(f, platforms=[PLATFORM], disabled_checks=[ANYTHING])(*arrays)
    return {
        "module": replace(module, _get_vjp=None),
        "ways": ways_of(choices),
        "rules": [rule_of(c) for c in choices] if build != "before" else [],
        "handlers": handlers(module),
        "avals": [shapes(a) for a in jax.tree.leaves(arrays)],
        "weight_bytes": written.weight_bytes,
    }


OTHER = {"xla": "pallas", "pallas": "xla", "cuda": "pallas"}


def other_than(case, build, folder):
    """Returns `force` with OTHER of what build "now" runs, where it says "other"."""
    stages = case.get("force", {}).get(build, {})
    if "other" not in stages.values():
        return {}
    ways = pickle.loads((folder / f"{case['id']}.now").read_bytes())["ways"]
    now = {w[0]: OTHER[w[2]] for w in ways}
    return {"force": {build: {s: now.get(s, "none") if n == "other" else n for s, n in stages.items()}}}


def main():
    build, cases, folder, part, parts = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:6])
    done, spent = 0, 0.0
    with (
        dispatch.assume(H200),
        mock.patch.object(cuda_library, "why_unavailable", lambda: None),
        mock.patch.object(cuda_library, "architectures", lambda: ("75-real", "90-real")),
        mock.patch.object(cuda_library, "register", lambda: None),
        mock.patch.object(cublaslt, "why_unavailable", lambda: None),
    ):
        for line in cases.read_text().splitlines()[part::parts]:
            case = json.loads(line)
            mine = [b for b in case["builds"] if (b == "before") == (build == "before")]
            # "now" first: a build that takes another implementation has to know which one that is.
            for each in mine[::-1]:
                path = folder / f"{case['id']}.{each}"
                if path.exists():
                    continue
                begin = time.monotonic()
                try:
                    found = one(case | other_than(case, each, folder), each)
                except Exception as error:
                    found = {"raised": f"{type(error).__name__}: {str(error)[:500]}"}
                partial = path.with_suffix(path.suffix + "~")
                partial.write_bytes(pickle.dumps(found))
                partial.rename(path)
                done, spent = done + 1, spent + time.monotonic() - begin
            if done % 10 == 9:
                jax.clear_caches()
    print(f"{build} {part}: {done} programs in {spent:.0f} s", flush=True)


main()
