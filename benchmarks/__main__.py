"""The commands: `python -m benchmarks [NAME...]`, and those with options of their own."""

import argparse
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import benchmarks
from benchmarks import cases, jla, optimizer
from benchmarks.fuzz import command as fuzz
from benchmarks.report import plot, report, results
from benchmarks.run import budget, ceilings, lowering, peers, runner
from benchmarks.run.case import LABELS, LESS, OURS
from benchmarks.sweep import command as sweep
from benchmarks.whole import (
    checkpoint,
    compile_time,
    end_to_end,
    end_to_end_report,
    language_model,
    parallel,
    pipeline,
    soak,
)
from benchmarks.without_gpu import command as without_gpu
from benchmarks.without_gpu import lowered

_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    end_to_end_report.NAME: end_to_end.main,
    sweep.NAME: sweep.main,
    checkpoint.NAME: checkpoint.main,
    compile_time.NAME: compile_time.main,
    fuzz.NAME: fuzz.main,
    jla.NAME: jla.main,
    language_model.NAME: language_model.main,
    optimizer.NAME: optimizer.main,
    parallel.NAME: parallel.main,
    pipeline.NAME: pipeline.main,
    soak.NAME: soak.main,
    lowered.NAME: lowered.main,
    without_gpu.NAME: without_gpu.main,
}


def operators() -> dict[str, ModuleType]:
    """Returns the modules of benchmarks.cases that have cases to run."""
    names = [module.name for module in pkgutil.iter_modules(cases.__path__)]
    modules = {name: importlib.import_module(f"benchmarks.cases.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "cases")}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]](arguments[1:])
    modules = operators()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        epilog=f"Commands with options of their own: {', '.join(_COMMANDS)}",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(modules)}")
    parser.add_argument("--peers", default=",".join(peers.PROBES), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY)
    parser.add_argument(
        "--budget",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="per NAME; torch.compile is left out of the cases that begin later (default 180)",
    )
    parser.add_argument(
        "--seconds", type=float, help="hard limit for all; what is measured is saved"
    )
    options = parser.parse_args(arguments)
    usual = [n for n, module in modules.items() if not getattr(module, "ON_REQUEST", False)]
    names = options.names or usual
    wanted = [name for name in options.peers.split(",") if name]
    for kind, given, known in (("NAME", names, modules), ("--peers", wanted, peers.PROBES)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{kind}: {', '.join(unknown)} is not known; known are {', '.join(known)}")

    if jax.default_backend() != "gpu":
        print(
            "The benchmarks need an NVIDIA GPU, but JAX sees only"
            f" {jax.devices()[0].device_kind!r}; install jax[cuda13] on a machine that has one."
        )
        return 2
    count = max(1, (os.cpu_count() or 1) // 2)
    workers = lowering.processes(count)
    # They import all that they need while the ceilings are measured.
    for _ in range(count):
        workers.submit(lowering.load, names)
    with budget.limited(options.seconds), workers:
        return _measured(options, {name: modules[name] for name in names}, wanted, workers)


def _measured(
    options: argparse.Namespace,
    modules: dict[str, ModuleType],
    wanted: list[str],
    workers: Executor,
) -> int:
    gpu = jax.devices()[0].device_kind
    missing = peers.missing(wanted)
    for peer, reason in missing.items():
        print(f"missing peer: {LABELS[peer]}: {reason}", flush=True)
    chosen = {*OURS, *(set(LESS) - set(peers.PROBES)), *wanted} - set(missing)
    machine: dict[str, Any] = {"versions": results.versions(), "gpu_before": results.gpu_state()}
    print(f"{gpu}, {machine['gpu_before']}", flush=True)
    measured = ceilings.measure()
    print(report.ceilings_line({"ceilings": measured}), flush=True)

    lowering.register()
    for name, module in modules.items():
        begin = time.monotonic()
        section: dict[str, Any] = {
            "date": results.now(),
            "commit": results.commit(),
            "machine": machine,
            "ceilings": measured,
            "missing": missing,
            "quick": options.quick,
        }

        def save(cases: list[dict[str, Any]], name: str = name, section: Any = section) -> None:
            section["cases"] = cases
            results.save_section(options.out, gpu, name, section)

        cases = module.cases(options.quick)
        elsewhere = lowering.start(workers, name, options.quick, cases, chosen)
        runner.run(cases, chosen, budget=options.budget, save=save, elsewhere=elsewhere)
        section["seconds"] = time.monotonic() - begin
        machine["gpu_after"] = results.gpu_state()
        path = results.save_section(options.out, gpu, name, section)
        # Charts are drawn from the file's rounded numbers.
        written = results.load(path)["benchmarks"][name]
        plot.draw(gpu, name, written, plot.chart_path(options.out, gpu, name))
        report.print_report(name, written)
        print(f"{name}: {section['seconds']:.0f} s; {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
