"""`python -m benchmarks compile`: how long a ViT of 12 layers in a Python loop takes to compile.

Stock is the network in flax.linen; ours is the same source with its imports swapped to jaxfused.linen.
Each measurement has a process of its own, so that it finds nothing in a cache.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import optax

import jaxfused.linen
from benchmarks.report import results
from benchmarks.run import timing
from benchmarks.without_gpu import target
from examples.placement import INITIAL_VALUES
from examples.vit.model import MODELS, ViTSize
from jaxfused import dispatch

NAME = "compile"

SIZES = {
    "vit-s16": MODELS["vit-s16"],
    "vit-b16": MODELS["vit-b16"],
}
LAYERS = {"stock": flax.linen, "ours": jaxfused.linen}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.05),
    "sgd": lambda: optax.sgd(1e-3, momentum=0.9),
}
CLASSES = 1000


@dataclass(frozen=True)
class Job:
    """A network to compile and its options, as sent to the process that compiles it."""

    size: str
    variant: str
    devices: int
    batch: int
    image_size: int
    optimizer: str
    lower_for: str | None


# --- the network ----------------------------------------------------------------------------------


class ViT(flax.linen.Module):
    """A ViT as users of Flax write it, with a Python loop over its layers."""

    size: ViTSize
    layers: Any
    """Python module of the layers: flax.linen or jaxfused.linen."""

    @flax.linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, nn, dtype = self.size, self.layers, jnp.bfloat16
        patch = (size.patch, size.patch)
        x = nn.Conv(size.width, patch, strides=patch, padding="VALID", dtype=dtype)(images)
        x = x.reshape(len(x), -1, size.width)
        init = flax.linen.initializers.normal(0.02)
        token = self.param("class_token", init, (1, 1, size.width)).astype(dtype)
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        x = x + self.param("positions", init, (1, *x.shape[1:])).astype(dtype)
        for _ in range(size.depth):
            y = nn.LayerNorm(dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(size.heads, dtype=dtype)(y)
            y = nn.LayerNorm(dtype=dtype)(x)
            y = flax.linen.gelu(nn.Dense(size.hidden, dtype=dtype)(y))
            x = x + nn.Dense(size.width, dtype=dtype)(y)
        x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(CLASSES, dtype=dtype)(x[:, 0]).astype(jnp.float32)


def program(job: Job) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two functions: from a key to (state, batch), and from (state, batch) to (state, loss)."""
    model = ViT(SIZES[job.size], LAYERS[job.variant])
    optimizer = OPTIMIZERS[job.optimizer]()

    def init(key: jax.Array) -> Any:
        shape = (job.batch, job.image_size, job.image_size, 3)
        images = jax.random.normal(key, shape, jnp.bfloat16)
        labels = jax.random.randint(key, (job.batch,), 0, CLASSES)
        # Both variants have the same parameters; stock's initialisation compiles sooner.
        params = ViT(SIZES[job.size], flax.linen).init(key, images[:1])
        return (params, optimizer.init(params)), (images, labels)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return init, step


# --- one measurement ------------------------------------------------------------------------------


def measure(job: Job) -> dict[str, Any]:
    """Returns the seconds to trace, lower and compile, counts of kernels, and a step's milliseconds."""
    init, step = program(job)
    state_sharding, batch_sharding = _shardings(job.devices)
    init = jax.jit(
        init, out_shardings=(state_sharding, batch_sharding), compiler_options=INITIAL_VALUES
    )
    if job.lower_for:
        state, batch = _with_shardings(jax.eval_shape(init, jax.random.key(0)), job.devices)
    else:
        state, batch = jax.block_until_ready(init(jax.random.key(0)))

    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    traced = clock("trace", lambda: jax.jit(step, donate_argnums=0).trace(state, batch))
    platforms = {"lowering_platforms": (job.lower_for,)} if job.lower_for else {}
    lowered = clock("lower", lambda: traced.lower(**platforms))
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    result |= count_kernels(lowered.as_text())
    if not job.lower_for:
        compiled = clock("compile", lowered.compile)
        result |= _step_time(compiled, state, batch)
    return vars(job) | {"seconds": seconds, "total": sum(seconds.values())} | result


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds

    def __call__(self, stage: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = run()
        self._seconds[stage] = time.perf_counter() - begin
        return result


def _shardings(devices: int) -> tuple[Any, Any]:
    """Returns shardings of state and batch: data parallel under Auto axes, or None on one device."""
    if devices == 1:
        return None, None
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    return (
        jax.sharding.NamedSharding(mesh, spec()),
        jax.sharding.NamedSharding(mesh, spec("data")),
    )


def _with_shardings(shapes: Any, devices: int) -> Any:
    def with_sharding(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
        )

    return tuple(map(with_sharding, shapes, _shardings(devices)))


def _step_time(compiled: Any, state: Any, batch: Any) -> dict[str, Any]:
    loss = None

    def run(steps: int) -> None:
        nonlocal state, loss
        for _ in range(steps):
            state, loss = compiled(state, batch)
        jax.block_until_ready(loss)

    step = timing.steps(run)["milliseconds"]
    return {"milliseconds": step, "loss": float(jax.block_until_ready(loss))}


def count_kernels(text: str) -> dict[str, int]:
    """Counts the kernels in a lowered module, the functions that have any, and their shapes.

    Under Auto axes on several devices, kernels are inside custom_partitioning calls, whose number is
    returned too.
    """
    functions = re.split(r"^  func\.func ", text, flags=re.MULTILINE)
    calls = [re.findall(r"custom_call @mosaic_gpu\w*\(.*", function) for function in functions]
    # A call ends with the types of its operands and results, by which shapes are counted. Its attributes
    # contain source lines, which differ even for the same kernel.
    types = {call.rpartition(" : ")[2] for found in calls for call in found}
    return {
        "kernels": sum(map(len, calls)),
        "functions": sum(map(bool, calls)),
        "shapes": len(types),
        "cuda_calls": len(re.findall(r"custom_call @jaxfused_\w+\(", text)),
        "partitioned_calls": len(re.findall(r"custom_call @CustomSPMDPartitioning\(", text)),
        "text_bytes": len(text),
    }


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    entries: list[dict[str, Any]] = []
    print(f"{'network':9} {'devices':>7} {'':6} {_HEAD}", flush=True)
    for size in options.sizes:
        for devices in options.devices:
            for variant in options.variants:
                job = Job(
                    size,
                    variant,
                    devices,
                    options.batch,
                    options.image_size,
                    options.optimizer,
                    options.lower_for,
                )
                entries.append(_in_process(job))
                print(_line(entries[-1], entries), flush=True)
                if options.out:
                    _save(options.out, arguments, entries)
    return 0 if all("why" not in entry for entry in entries) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("sizes", nargs="*", metavar="NETWORK", help=f"of: {', '.join(SIZES)}")
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="default: 1")
    parser.add_argument("--variants", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--batch", type=int, default=64, help="of all devices (default 64)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument(
        "--lower-for", choices=("cuda",), help="only trace and lower, as on an H200"
    )
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes or list(SIZES)
    if unknown := sorted(set(options.sizes) - set(SIZES)):
        parser.error(f"{', '.join(unknown)} is not known; known are {', '.join(SIZES)}")
    return options


def _in_process(job: Job) -> dict[str, Any]:
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_prepare, initargs=(job,)) as pool:
        try:
            return pool.submit(measure, job).result()
        except Exception as error:
            return vars(job) | {"why": f"{type(error).__name__}: {error}"}


def _prepare(job: Job) -> None:
    """Configures JAX before it lists devices, without a cache of compiled programs.

    To lower without a GPU, operators choose kernels as on an H200, and JAX gets as many CPU devices as
    the job needs.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    if job.lower_for:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", job.devices)
        dispatch.current_device = lambda *arrays: target.H200  # type: ignore[assignment]


_HEAD = (
    f"{'trace':>6} {'lower':>6} {'compile':>7} {'total':>6} {'/stock':>6} {'step ms':>8} {'/stock':>6}"
    f" {'kernels':>7} {'functions':>9} {'shapes':>6} {'CUDA':>4} {'parted':>6}"
)


def _line(entry: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    head = f"{entry['size']:9} {entry['devices']:7} {entry['variant']:6}"
    if "why" in entry:
        return f"{head} {entry['why'][:200]}"
    stock = next((e for e in entries if _is_stock_of(e, entry)), {})
    seconds = entry["seconds"]
    counts = ("kernels", "functions", "shapes", "cuda_calls", "partitioned_calls")
    return " ".join(
        [
            head,
            *(_number(seconds.get(stage), w) for stage, w in _STAGES),
            _number(entry["total"], 6),
            _number(_over(entry, stock, "total"), 6, 2),
            _number(entry.get("milliseconds"), 8, 2),
            _number(_over(entry, stock, "milliseconds"), 6, 2),
            *(f"{entry[name]:{w}}" for name, w in zip(counts, (7, 9, 6, 4, 6), strict=True)),
        ]
    )


_STAGES = (("trace", 6), ("lower", 6), ("compile", 7))


def _is_stock_of(other: dict[str, Any], entry: dict[str, Any]) -> bool:
    same = all(other[key] == entry[key] for key in ("size", "devices"))
    return same and other["variant"] == "stock" and "why" not in other


def _over(entry: dict[str, Any], stock: dict[str, Any], key: str) -> float | None:
    return entry[key] / stock[key] if key in entry and key in stock else None


def _number(value: float | None, width: int, digits: int = 1) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else f"{'-':>{width}}"


def _save(path: Path, arguments: Sequence[str], entries: Sequence[dict[str, Any]]) -> None:
    tags = results.run_tags(arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tags | {"entries": list(entries)}, indent=1) + "\n")
