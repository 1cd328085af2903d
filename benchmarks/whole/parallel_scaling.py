"""Times whole programs on 1, 2, 4, 8 ... devices, a part of `python -m benchmarks parallel`.

Weak scaling gives each device as much work as one has alone; strong scaling divides one problem. A row
has the time and the parallel efficiency; from the compiled program, the bytes that a device receives and
its memory; from the profiler on a GPU, the collectives' share of the kernels' time; and an estimate.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from benchmarks.run import peers, timing
from benchmarks.whole import parallel_paper
from benchmarks.whole.parallel_hlo import received_bytes
from examples.lm.model import LanguageModel
from examples.lm.sizes import MODELS as LANGUAGE_MODELS
from examples.lm.sizes import config_of, make_loss
from examples.multi_gpu.mesh import OnMesh
from examples.vit.model import MODELS, VisionTransformer

Row = dict[str, Any]
Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of all workloads."""

    vit: Mapping[str, int]
    """Images per device, by the Vision Transformer's name."""
    vit_images: int
    """Images in all for strong scaling of the first of these Vision Transformers."""
    image: int
    language_model: str
    rows: int
    """Rows of text per device."""
    length: int
    """Tokens of a row."""
    tokens: int
    """Tokens of the sequence of context-parallel attention."""
    heads: tuple[int, int, int]
    """Query heads, key heads and features per head of context-parallel attention."""
    mlp: tuple[int, int, int]
    """Rows, width and hidden features of the tensor-parallel MLP."""


FULL = Sizes(
    vit={"vit-b16": 256, "vit-l16": 128},
    vit_images=2048,
    image=224,
    language_model="lm-1b",
    rows=8,
    length=2048,
    tokens=262_144,
    heads=(32, 8, 128),
    mlp=(8192, 4096, 14336),
)
TINY = Sizes(
    vit={"vit-digits": 2},
    vit_images=8,
    image=8,
    language_model="lm-byte",
    rows=1,
    length=16,
    tokens=64,
    heads=(8, 8, 8),
    mlp=(32, 16, 64),
)
"""Sizes for a run on virtual devices of a CPU."""


@dataclass(frozen=True)
class Program:
    """A program for the devices of a mesh."""

    step: Any
    """A function under `jax.jit` or `jax.pmap`."""
    make: Callable[[], tuple[Any, ...]]
    """Function that returns the operands, sharded."""
    carries: int = 0
    """Number of leading operands (donated) that the leading results replace in the next call."""
    mesh: Any = None
    """The program's own mesh over the devices of the mesh that it was built for; None for the latter."""


@dataclass(frozen=True)
class Workload:
    name: str
    kind: Kind
    build: Callable[[Any], Program]
    paper: Callable[[int], parallel_paper.Row] | None = None


def workloads(sizes: Sizes) -> list[Workload]:
    """Returns the workloads of weak and of strong scaling."""
    machine = parallel_paper.Machine()
    first = next(iter(sizes.vit))
    of_vit = {"vit-b16": parallel_paper.VIT_B, "vit-l16": parallel_paper.VIT_L}
    found = [
        Workload(
            f"{model} {variant}",
            "weak",
            functools.partial(_vit, sizes, model, variant, None),
            functools.partial(
                _paper_of_vit, of_vit[model], 2 if variant == "bfloat16" else 4, machine
            )
            if model in of_vit
            else None,
        )
        for model in sizes.vit
        for variant in ("xla", "zero1", "bfloat16", "pmap")
    ]
    found.append(
        Workload(
            f"{first} xla", "strong", functools.partial(_vit, sizes, first, "xla", sizes.vit_images)
        )
    )
    found.append(
        Workload(
            f"{sizes.language_model} fsdp",
            "weak",
            functools.partial(_language_model, sizes),
            lambda n: parallel_paper.fully_sharded(*parallel_paper.LANGUAGE_MODEL, n, machine),
        )
    )
    found += [
        Workload(
            f"attention {method}",
            "strong",
            functools.partial(_attention, sizes, method),
            lambda n: parallel_paper.context_parallel(sizes.tokens, n, machine),
        )
        for method in ("all_to_all", "ring", "all_gather")
    ]
    found += [
        Workload(
            f"attention window {method}",
            "strong",
            functools.partial(_attention, sizes, method, window=sizes.tokens // 32),
        )
        for method in ("all_to_all", "ring", "all_gather")
    ]
    found += [
        Workload(
            f"gated_mlp {variant}",
            "strong",
            functools.partial(_gated_mlp, sizes, variant),
            lambda n: parallel_paper.tensor_parallel(n, machine),
        )
        for variant in ("xla", "whole rows", "sequence")
    ]
    return found


def _paper_of_vit(of_one: tuple[float, float], wire: int, machine: Any, count: int) -> Any:
    return parallel_paper.data_parallel("", *of_one, count, machine, wire=wire)


def measure(
    sizes: Sizes, counts: Sequence[int], names: Sequence[str], save: Callable[[str, Row], None]
) -> None:
    """Times the workloads whose name contains one of `names`, or all, on each number of devices."""
    for workload in workloads(sizes):
        if names and not any(name in workload.name for name in names):
            continue
        alone = None
        for count in counts:
            row: Row = dict(model=workload.name, kind=workload.kind, gpus=count)
            try:
                row |= _timed(workload, count)
            except Exception as error:  # One workload that does not fit must not end the run.
                row["error"] = peers.describe(error)
            if "milliseconds" in row:
                # If the work does not fit on one device, the smallest count that ran is the reference.
                scale = 1 if workload.kind == "weak" else count
                alone = scale * row["milliseconds"] if alone is None else alone
                ideal = alone if workload.kind == "weak" else alone / count
                row["used"] = ideal / row["milliseconds"]
            if workload.paper is not None and sizes is FULL:
                paper = workload.paper(count)
                row["paper"] = dict(
                    collectives=1e3 * paper.collectives,
                    received=paper.received,
                    apart=paper.apart,
                    hidden=paper.hidden,
                )
            save("scaling", row)


def _timed(workload: Workload, count: int) -> Row:
    """Returns the step time, bytes received and memory of a workload on the first `count` devices."""
    mesh = jax.make_mesh(
        (count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    # Flax would look up the models' axis names in any mesh that is set; this mesh has other names.
    with nnx.use_eager_sharding(False):
        program = workload.build(mesh)
        operands = [*program.make()]
    with jax.set_mesh(program.mesh or mesh), nnx.use_eager_sharding(False):
        compiled = program.step.lower(*operands).compile()

        def once() -> Any:
            results = compiled(*operands)
            operands[: program.carries] = results[: program.carries]
            return results

        def run(times: int) -> None:
            for _ in range(times):
                results = once()
                if jax.default_backend() == "cpu":
                    # On a CPU, steps that run at the same time would wait for each other's threads.
                    jax.block_until_ready(results)
            jax.block_until_ready(results)

        row = timing.steps(run)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        row["received"] = received_bytes(text, count)
        row["bytes"] = {
            kind: getattr(memory, f"{kind}_size_in_bytes")
            for kind in ("argument", "output", "temp")
        }
        row["peak"] = memory.peak_memory_in_bytes
        if jax.default_backend() == "cpu":  # XLA's peak on a CPU leaves out temporary memory.
            row["peak"] += memory.temp_size_in_bytes
        if jax.default_backend() == "gpu":
            row |= _collective_share(once, count, row["milliseconds"])
    return row


def _collective_share(once: Callable[[], Any], count: int, milliseconds: float) -> Row:
    """Returns the time of all kernels and of collectives, overlapped or not, and their quotient.

    "waits" are the milliseconds of a step in which a device runs no kernel but collectives, or none.
    """
    try:
        timed = timing.kernels(lambda: jax.block_until_ready(once()))
    except Exception as error:
        return {"note": f"no kernel times: {peers.describe(error)}"}
    in_all = sum(seconds for _, seconds in timed)
    of_collectives = sum(seconds for name, seconds in timed if "nccl" in name.lower())
    return {
        "kernels": in_all,
        "collectives": of_collectives,
        "share": of_collectives / in_all,
        "waits": max(0.0, milliseconds - 1e-3 * (in_all - of_collectives) / count),
    }


def line(row: Row) -> str:
    """Formats a row as a line of text."""
    head = f"scaling {row['model']:22} {row['kind']:6} {row['gpus']:2}"
    if "error" in row:
        return f"{head} {row['error']}"
    received = sum(row["received"].values()) / 1e6
    memory = row["peak"] / 1e9
    share = ""
    if "share" in row:
        share = f" collectives {row['share']:.0%}, {row['waits']:.2f} ms beside no other kernel"
    paper = row.get("paper")
    beside = (
        f"  on paper {paper['apart']:.0%} to {paper['hidden']:.0%}, {paper['received'] / 1e6:,.0f} MB"
        if paper
        else ""
    )
    return (
        f"{head} {row['milliseconds']:9.2f} ms {row['used']:6.1%} {received:10,.1f} MB received"
        f" {memory:7.2f} GB{share}{beside}"
    )


def draw(device: str, rows: Sequence[Row], path: Path) -> None:
    """Draws each workload's parallel efficiency over the number of devices."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, dpi=150)
    for axis, kind in zip(axes, ("weak", "strong"), strict=True):
        names = dict.fromkeys(row["model"] for row in rows if row["kind"] == kind)
        for name in names:
            points = [r for r in rows if (r["model"], r["kind"]) == (name, kind) and "used" in r]
            axis.plot([r["gpus"] for r in points], [r["used"] for r in points], "o-", label=name)
        axis.set(title=f"{kind} scaling on {device}", xlabel="devices", xscale="log", ylim=(0, 1.1))
        counts = sorted({row["gpus"] for row in rows})
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        if names:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("share of the devices that is used")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


# --- the programs ---------------------------------------------------------------------------------


def _put(mesh: Any, spec: P, make: Callable[[], Any]) -> Any:
    return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()


def _vit(sizes: Sizes, model: str, variant: str, images: int | None, mesh: Any) -> Program:
    """Returns a data-parallel training step of a ViT, with gradients reduced as `variant` says."""
    count = mesh.size
    batch = sizes.vit[model] * count if images is None else images
    classes = 10
    channels = 3 if sizes is FULL else 1

    def build() -> nnx.Module:
        return VisionTransformer(
            MODELS[model],
            image_size=sizes.image,
            channels=channels,
            classes=classes,
            dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )

    graphdef = nnx.graphdef(nnx.eval_shape(build))
    optimizer = jaxfused.optim.adamw(1e-3)
    if variant == "zero1":
        optimizer = jaxfused.parallel.zero1(optimizer, mesh=mesh)

    def init() -> Any:
        return nnx.to_pure_dict(nnx.state(build(), nnx.Param))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return jaxfused.softmax_cross_entropy(nnx.merge(graphdef, params)(images), labels).mean()

    def summed(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        if variant != "pmap":
            params = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(loss)(params, images, labels)
        return jaxfused.parallel.mean_gradients(grads, "data", bfloat16=variant == "bfloat16")

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        if variant == "bfloat16":
            grads = jax.shard_map(
                summed, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()
            )(params, images, labels)
        elif variant == "pmap":
            grads = summed(params, images, labels)
        else:
            grads = jax.grad(loss)(params, images, labels)
        return optimizer.step(grads, state, params, max_norm=1.0)

    shape = (batch, sizes.image, sizes.image, channels)

    def operands() -> tuple[Any, ...]:
        params = _put(mesh, P(), init)
        state = optimizer.init(params)
        if variant != "zero1":
            state = jax.device_put(state, NamedSharding(mesh, P()))
        pixels = functools.partial(jax.random.normal, jax.random.key(0), shape)
        labels = functools.partial(jnp.zeros, batch, jnp.int32)
        batched = (_put(mesh, P("data"), pixels), _put(mesh, P("data"), labels))
        if variant != "pmap":
            return params, state, *batched
        apart = [a.reshape(count, batch // count, *a.shape[1:]) for a in batched]
        copies = jax.tree.map(lambda a: jnp.stack([a] * count), (params, state))
        return jax.device_put((*copies, *apart), NamedSharding(mesh, P("data")))

    if variant == "pmap":
        mapped = jax.pmap(
            step, axis_name="data", devices=[*mesh.devices.flat], donate_argnums=(0, 1)
        )
        return Program(mapped, operands, 2)
    return Program(jax.jit(step, donate_argnums=(0, 1)), operands, 2)


def _language_model(sizes: Sizes, mesh: Any) -> Program:
    """Returns a training step of a language model, with parameters and state sharded (FSDP)."""
    config = config_of(
        sizes.language_model, vocabulary=LANGUAGE_MODELS[sizes.language_model].vocabulary
    )

    def build() -> LanguageModel:
        return LanguageModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    graphdef = nnx.graphdef(nnx.eval_shape(build))
    optimizer = jaxfused.optim.adamw(1e-3)
    place = OnMesh(dict(fsdp=mesh.size), layers="blocks")
    value_and_grad = place.value_and_grad(make_loss(graphdef))

    def step(params: Any, state: Any, text: jax.Array) -> tuple[Any, Any]:
        _, grads = value_and_grad(params, {"text": text}, jax.random.key(0))
        return optimizer.step(grads, state, params, max_norm=1.0)

    def operands() -> tuple[Any, ...]:
        params = place.parameters(lambda: nnx.state(build(), nnx.Param))
        state = place.init(optimizer.init, params)
        shape = (sizes.rows * mesh.size, sizes.length + 1)
        text = functools.partial(jnp.ones, shape, jnp.int32)
        return params, state, _put(place.mesh, place.batch.spec, text)

    return Program(jax.jit(step, donate_argnums=(0, 1)), operands, 2, place.mesh)


def _normal(mesh: Any, spec: P, shape: Sequence[int], seed: int, scale: float = 1.0) -> jax.Array:
    def make() -> jax.Array:
        return scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    return _put(mesh, spec, make)


def _with_gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(dy: jax.Array, *operands: jax.Array) -> Any:
        y, pullback = jax.vjp(f, *operands)
        return y, *pullback(dy)

    return step


def _attention(sizes: Sizes, method: str, mesh: Any, *, window: int | None = None) -> Program:
    """Returns causal attention over one long sequence, forward and gradients."""
    heads, key_heads, features = sizes.heads
    layout = "contiguous" if method == "all_to_all" or window is not None else "zigzag"
    attend = functools.partial(
        jaxfused.context_parallel_attention,
        axis_name="data",
        method=method,
        layout=layout,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
    )

    def operands() -> tuple[Any, ...]:
        spec = P(None, "data")
        return tuple(
            _normal(mesh, spec, (1, sizes.tokens, count, features), i)
            for i, count in enumerate((heads, heads, key_heads, key_heads))
        )

    return Program(jax.jit(_with_gradients(attend)), operands)


def _gated_mlp(sizes: Sizes, variant: str, mesh: Any) -> Program:
    """Returns gated_mlp with hidden features split over the devices, forward and gradients."""
    rows, width, hidden = sizes.mlp
    f: Callable[..., jax.Array] = jaxfused.gated_mlp
    if variant != "xla":
        f = functools.partial(
            jaxfused.parallel.gated_mlp,
            axis_name="data",
            sequence_parallel=variant == "sequence",
        )
    tokens = P(None, "data") if variant == "sequence" else P()

    def operands() -> tuple[Any, ...]:
        x = [_normal(mesh, tokens, (1, rows, width), i) for i in range(2)]
        up = [_normal(mesh, P(None, "data"), (width, hidden), i, width**-0.5) for i in range(2, 4)]
        return *x, *up, _normal(mesh, P("data"), (hidden, width), 4, hidden**-0.5)

    return Program(jax.jit(_with_gradients(f)), operands)
