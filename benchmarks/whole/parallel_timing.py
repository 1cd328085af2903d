"""Compiles a program for some devices and times it: steps, bytes, memory and the collectives' share."""

import glob
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

from benchmarks.run import peers, timing
from benchmarks.whole.parallel_hlo import received_bytes
from benchmarks.whole.parallel_programs import Build, Program
from benchmarks.without_gpu import target
from jaxfused import dispatch

Row = dict[str, Any]


@dataclass
class Ready:
    """A program that is compiled for its devices."""

    program: Program
    mesh: Any
    compiled: Any
    operands: list[Any]

    def call(self) -> Any:
        """Returns a call's results, of which the leading ones are the next call's operands."""
        results = self.compiled(*self.operands)
        carries = self.program.carries
        self.operands[:carries] = results[:carries]
        return results

    def counted(self) -> Row:
        """Returns the bytes that a device receives, and those of its memory."""
        memory, count = self.compiled.memory_analysis(), self.mesh.size
        row: Row = {"received": received_bytes(self.compiled.as_text(), count)}
        row["bytes"] = {
            kind: getattr(memory, f"{kind}_size_in_bytes")
            for kind in ("argument", "output", "temp")
        }
        row["peak"] = memory.peak_memory_in_bytes
        if self.mesh.devices.flat[0].platform == "cpu":
            # XLA's peak on a CPU leaves out temporary memory.
            row["peak"] += memory.temp_size_in_bytes
        return row

    def timed(self) -> Row:
        """Returns the milliseconds of a step."""

        def run(times: int) -> None:
            for _ in range(times):
                results = self.call()
                if jax.default_backend() == "cpu":
                    # On a CPU, steps that run at the same time would wait for each other's threads.
                    jax.block_until_ready(results)
            jax.block_until_ready(results)

        return timing.steps(run)

    def shares(self) -> Row:
        """Returns the collectives' share of a step on a GPU; see `_shares`."""
        if jax.default_backend() != "gpu":
            return {}
        try:
            return _shares(lambda: jax.block_until_ready(self.call()), self.mesh.size)
        except Exception as error:
            return {"note": f"no profile: {peers.describe(error)}"}


def lowered(
    build: Build, devices: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[[], Ready]:
    """Traces and lowers a program for `devices`; returns a function that compiles it.

    Args:
      build: function of a mesh with the axis "data".
      devices: those of the mesh; they may be H200s that are not here.
      options: compiler options of XLA.
    """
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    is_here = devices[0] in jax.devices()
    # Flax would look up the models' axis names in any mesh that is set; this mesh has other names.
    with nnx.use_eager_sharding(False):
        program = build(mesh)
        operands = [*program.make()]
        with jax.set_mesh(program.mesh or mesh):
            if is_here:
                low = program.step.lower(*operands)
            else:
                with dispatch.assume(target.H200):
                    low = program.step.trace(*operands).lower(lowering_platforms=("cuda",))

    def compile() -> Ready:
        if is_here:
            compiled = low.compile(compiler_options=dict(options or {}))
        else:
            compiled = target.compile(low, options=options)
        return Ready(program, mesh, compiled, operands)

    return compile


def _shares(step: Callable[[], Any], devices: int) -> Row:
    """Profiles a step: milliseconds of a device in which it runs kernels.

    "collectives" are those of NCCL's kernels, "waits" the part of them in which no other kernel runs,
    "computes" the milliseconds of other kernels, and "share" is collectives over both together.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        [path] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = [*jax.profiler.ProfileData.from_file(path).planes]
        found = [kernels(plane.lines) for plane in planes if "GPU:" in plane.name]
    ours, others = ([part[i] for part in found if part[1]] for i in range(2))
    of_collectives, of_others = (sum(map(_length, each)) / devices / 1e6 for each in (ours, others))
    beside = sum(overlap(*pair) for pair in zip(ours, others, strict=True)) / devices / 1e6
    return {
        "collectives": of_collectives,
        "computes": of_others,
        "waits": of_collectives - beside,
        "share": of_collectives / (of_collectives + of_others),
    }


Spans = list[tuple[float, float]]


def kernels(lines: Any) -> tuple[Spans, Spans]:
    """Returns the spans in which NCCL's kernels run, and those in which others do, in nanoseconds."""
    spans: tuple[list[Any], list[Any]] = ([], [])
    for line in lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                end = event.start_ns + event.duration_ns
                spans["nccl" not in event.name.lower()].append((event.start_ns, end))
    return _merged(spans[0]), _merged(spans[1])


def _merged(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def overlap(first: Spans, second: Spans) -> float:
    # Both together, less what either adds alone.
    return _length(first) + _length(second) - _length(_merged([*first, *second]))
