"""Compares several GPUs with one of them: `python -m benchmarks parallel`.

Data parallel: a training step under Auto axes, with parameters on every device and the same number of
images for each. The share is the step's time on the slowest device alone over that on all. All devices
also run at the same time without all-reduces, each its own step, which separates the cost of the host
from that of the all-reduces. Tensor parallel: forward and gradients of an mlp whose hidden features are
split, and the time of one device that has them all. Context parallel: forward and gradients of attention
over one long sequence, by each method of `context_parallel_attention`. `--scaling` times whole programs
on 1, 2, 4 and 8 devices instead, and draws a chart; `--tiny` runs them on a CPU's virtual devices;
`--paper` prints estimates for more GPUs, and `--without-gpu` counts the memory and bytes of an FSDP step
that it compiles for GPUs that are not there.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from benchmarks.report import results
from benchmarks.run import timing
from benchmarks.run.case import gradient_in_jax
from benchmarks.whole import (
    end_to_end,
    end_to_end_jax,
    parallel_absent,
    parallel_context,
    parallel_paper,
    parallel_scaling,
)
from examples.vit.model import MODELS

NAME = "parallel"
SIZES = {"vit-b16": 256, "vit-l16": 128}
"""Images per device, by model."""
ROWS, WIDTH, HIDDEN = 8192, 4096, 14336
"""Rows, width and hidden features of the MLPs whose hidden features are split."""

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measures on one device and on all, and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=SIZES, default=["vit-b16"])
    variants = ("ours", "ours-copies", "stock")
    parser.add_argument("--variants", nargs="*", choices=variants, default=["ours", "stock"])
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--no-context", action="store_true", help="leave out the long sequence")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY)
    parser.add_argument(
        "--scaling", nargs="*", metavar="NAME", help="whole programs; names are parts of theirs"
    )
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any devices")
    parser.add_argument("--paper", action="store_true", help="only print the estimates")
    parser.add_argument(
        "--without-gpu", action="store_true", help="memory and bytes of FSDP for absent H200s"
    )
    options = parser.parse_args(arguments)
    if options.without_gpu:
        return parallel_absent.run(options.devices)
    if options.paper:
        print(parallel_paper.table(parallel_paper.rows()))
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.scaling is not None and (options.tiny or jax.default_backend() == "gpu"):
        return _scaling(options)
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print(
            f"{NAME}: this needs two NVIDIA GPUs at least, but JAX sees {jax.device_count()} of"
            f" platform {jax.default_backend()!r}."
        )
        return 2
    section: Row = {
        "date": results.now(),
        "machine": {"versions": results.versions(), "gpu_before": results.gpu_state()},
        "devices": jax.device_count(),
        "data": [],
        "tensor": [],
        "context": [],
    }
    gpu = jax.devices()[0].device_kind

    def save(kind: str, row: Row) -> None:
        section[kind].append(row)
        results.save_section(options.out, gpu, NAME, section)
        print(_line(kind, row), flush=True)

    measure(options.models, options.variants, options.layers, save)
    if not options.no_context:
        parallel_context.measure(save)
    return 0


def _scaling(options: argparse.Namespace) -> int:
    """Measures whole programs on several numbers of devices, and draws a chart."""
    counts = sorted(count for count in options.devices if count <= jax.device_count())
    section: Row = {
        "date": results.now(),
        "machine": {
            "versions": results.versions(),
            "gpu_before": results.gpu_state(),
            "topology": results.topology(),
        },
        "devices": counts,
        "scaling": [],
    }
    kind = jax.devices()[0].device_kind

    def save(name: str, row: Row) -> None:
        section[name].append(row)
        path = results.save_section(options.out, kind, "parallel_scaling", section)
        parallel_scaling.draw(kind, section[name], path.with_name(path.stem + "-scaling.png"))
        print(parallel_scaling.line(row), flush=True)

    sizes = parallel_scaling.TINY if options.tiny else parallel_scaling.FULL
    parallel_scaling.measure(sizes, counts, options.scaling, save)
    return 0


def measure(
    models: Sequence[str],
    variants: Sequence[str],
    layers: Sequence[str],
    save: Callable[[str, Row], None],
) -> None:
    """Compiles all programs in parallel, then runs one after the other."""
    devices = jax.devices()
    # Each device is timed alone too, because devices are not equally fast.
    groups = [*([device] for device in devices), devices]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = {
            (model, variant): [_data_parallel(pool, model, variant, group) for group in groups]
            for model in models
            for variant in variants
        }
        splits = {
            (layer, side): [_tensor_parallel(pool, layer, side, group) for group in groups]
            for layer in layers
            for side in ("ours", "stock")
        }
    for (model, variant), futures in steps.items():
        compiled = [future.result() for future in futures]
        row = _row(model, variant, [step.time() for step in compiled])
        save("data", row | {"apart": _time_apart(compiled[:-1])})
    for (layer, side), layers_of in splits.items():
        save("tensor", _row(layer, side, [future.result()() for future in layers_of]))


def _row(model: str, variant: str, measured: Sequence[Row]) -> Row:
    *each, every = measured
    one = max(each, key=lambda row: float(row["milliseconds"]))
    milliseconds = [row["milliseconds"] for row in each]
    x = one["milliseconds"] / every["milliseconds"]
    return {
        "model": model,
        "variant": variant,
        "each": milliseconds,
        "one": one,
        "all": every,
        "x": x,
    }


def _line(kind: str, row: Row) -> str:
    each, every = row["each"], row["all"]["milliseconds"]
    x = f"{row['x']:.1%}" if kind == "data" else f"{row['x']:.2f}x"
    if "apart" in row:
        x += f" (apart at once {row['apart']['milliseconds']:.2f} ms)"
    kernels = " ".join(
        f"{name} {ms:.2f} -> {row['all']['kinds'].get(name, 0.0):.2f}"
        for name, ms in row["one"].get("kinds", {}).items()
    )
    return (
        f"{kind:6} {row['model']:10} {row['variant']:12} {' '.join(f'{ms:.2f}' for ms in each)}"
        f" -> {every:.2f} ms  {x}"
        f"  {kernels}"
    )


# --- data parallel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A compiled training step on some devices, and functions that make its operands."""

    compiled: Any
    init: Callable[[jax.Array], Any]
    make_batch: Callable[[jax.Array], Any]

    def operands(self) -> tuple[Any, Any]:
        key = jax.random.key(0)
        return self.init(key), self.make_batch(key)

    def time(self) -> Row:
        row, step = end_to_end.timed_steps(self.compiled, *self.operands())
        return row | end_to_end.kernel_times(step, self.compiled)


def _time_apart(steps: Sequence[_Step]) -> Row:
    """Times the steps while all run at the same time, each on its own devices."""
    states, batches = map(list, zip(*(step.operands() for step in steps), strict=True))

    def run(count: int) -> None:
        for _ in range(count):
            for i, step in enumerate(steps):
                states[i], _ = step.compiled(states[i], batches[i])
        jax.block_until_ready(states)

    return timing.steps(run)


def _data_parallel(
    pool: ThreadPoolExecutor, model: str, variant: str, devices: Sequence[jax.Device]
) -> Future[_Step]:
    """Compiles a data-parallel training step for `devices`."""
    batch = SIZES[model] * len(devices)
    workload = end_to_end_jax.vit(model, MODELS[model], batch=batch)
    program = workload.programs[variant]()
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    init = jax.jit(program.init, out_shardings=whole)
    make_batch = jax.jit(workload.make_batch, out_shardings=split)
    key = jax.random.key(0)
    shapes = jax.eval_shape(program.init, key), jax.eval_shape(workload.make_batch, key)
    step = jax.jit(
        program.step,
        donate_argnums=0,
        in_shardings=(whole, split),
        out_shardings=(whole, whole),
    ).lower(*shapes)

    return pool.submit(lambda: _Step(step.compile(), init, make_batch))


# --- tensor parallel ------------------------------------------------------------------------------


def _stock_mlp(x, w1, w2):
    return nn.gelu(x @ w1) @ w2


def _stock_gated_mlp(x, gate, up, down):
    return (nn.silu(x @ gate) * (x @ up)) @ down


def _mlp(x, w1, w2):
    return jaxfused.mlp(x, w1, None, w2, None)


LAYERS: dict[str, dict[str, Callable[..., jax.Array]]] = {
    "mlp": {"ours": _mlp, "stock": _stock_mlp},
    "gated_mlp": {"ours": jaxfused.gated_mlp, "stock": _stock_gated_mlp},
}


def _tensor_parallel(
    pool: ThreadPoolExecutor, layer: str, side: str, devices: Sequence[jax.Device]
) -> Future[Callable[[], Row]]:
    """Returns a function that measures forward and gradients of a layer with split hidden features."""
    mesh = jax.make_mesh((len(devices),), ("model",), (AxisType.Auto,), devices=devices)
    columns = 2 if layer == "gated_mlp" else 1
    shapes = [(ROWS, WIDTH), *[(WIDTH, HIDDEN)] * columns, (HIDDEN, WIDTH), (ROWS, WIDTH)]
    specs = [P(), *[P(None, "model")] * columns, P("model"), P()]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    program = jax.jit(
        gradient_in_jax(LAYERS[layer][side], len(shapes) - 1, 1),
        in_shardings=shardings,
        out_shardings=(shardings[-1], *shardings[:-1]),
    ).lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))

    def build() -> Callable[[], Row]:
        return partial(_time_layer, program.compile(), shapes, shardings)

    return pool.submit(build)


def _time_layer(compiled: Any, shapes: Sequence[Any], shardings: Sequence[Any]) -> Row:
    arrays = []
    for key, shape, sharding in zip(
        jax.random.split(jax.random.key(0), len(shapes)), shapes, shardings, strict=True
    ):
        make = partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
        arrays.append(jax.jit(make, out_shardings=sharding)(key) * shape[0] ** -0.5)

    def run(count: int) -> None:
        for _ in range(count):
            outputs = compiled(*arrays)
        jax.block_until_ready(outputs)

    return timing.steps(run)
