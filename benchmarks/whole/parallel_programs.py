"""The programs that `python -m benchmarks parallel` times on one device and on several."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused
from benchmarks.run.case import gradient_in_jax
from examples.lm.model import LanguageModel
from examples.lm.sizes import MODELS as LANGUAGE_MODELS
from examples.lm.sizes import make_loss
from examples.multi_gpu.mesh import OnMesh
from examples.vit.model import MODELS, VisionTransformer


@dataclass(frozen=True)
class Sizes:
    """Sizes of all programs."""

    vit: Mapping[str, int]
    """Images per device, by the Vision Transformer's name."""
    vit_images: int
    """Images in all for strong scaling of the first of these Vision Transformers."""
    image: int
    channels: int
    classes: int
    language_model: str
    rows: int
    """Rows of text per device."""
    length: int
    """Tokens of a row."""
    tokens: int
    """Tokens of the sequence of context-parallel attention, for scaling."""
    sequence: int
    """Tokens of the sequence of context-parallel attention, for the bars."""
    heads: tuple[int, int, int]
    """Query heads, key heads and features per head of context-parallel attention."""
    mlp: tuple[int, int, int]
    """Rows, width and hidden features of the tensor-parallel MLP."""


FULL = Sizes(
    vit={"vit-b16": 256, "vit-l16": 128},
    vit_images=2048,
    image=224,
    channels=3,
    classes=1000,
    language_model="lm-1b",
    rows=8,
    length=2048,
    tokens=262_144,
    sequence=65_536,
    heads=(32, 8, 128),
    mlp=(8192, 4096, 14336),
)
TINY = Sizes(
    vit={"vit-digits": 2},
    vit_images=8,
    image=8,
    channels=1,
    classes=10,
    language_model="lm-byte",
    rows=1,
    length=16,
    tokens=64,
    sequence=128,
    heads=(8, 8, 8),
    mlp=(32, 16, 64),
)
"""Sizes for a run on virtual devices of a CPU."""

DOCUMENTS = 16


@dataclass(frozen=True)
class Program:
    """A program for the devices of a mesh."""

    step: Any
    """A function under `jax.jit` or `jax.pmap`."""
    make: Callable[[], tuple[Any, ...]]
    """Function that returns the operands, sharded; their shapes if the devices are not here."""
    carries: int = 0
    """Number of leading operands (donated) that the leading results replace in the next call."""
    mesh: Any = None
    """The program's own mesh over the devices of the mesh that it was built for; None for the latter."""
    judged: Callable[[Any], Any] = lambda results: results
    """Function of a call's results to the tree of arrays that one device has too."""
    order: np.ndarray | None = None
    """Tokens at each position of the results' second axis; None for the order of one device."""


Build = Callable[[Any], Program]
"""Function of a mesh with the axis "data"."""


def put(mesh: Any, spec: Any, make: Callable[..., Any], *args: Any) -> Any:
    """Returns `make(*args)` with each leaf split as `spec` says, or its shapes for absent devices."""
    sharding = NamedSharding(mesh, spec)
    if mesh.devices.flat[0] in jax.devices():
        return jax.jit(make, out_shardings=sharding)(*args)
    shapes = jax.eval_shape(make, *args)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)


def _repeated(make: Callable[[], jax.Array], count: int) -> Callable[[], jax.Array]:
    """Returns a function whose result is that of `make`, `count` times along the first axis."""
    return lambda: jnp.concatenate([make()] * count)


def vit(sizes: Sizes, model: str, variant: str, images: int | None, mesh: Any) -> Program:
    """Returns a data-parallel training step of a ViT, with gradients reduced as `variant` says.

    Weak scaling gives every device the same images, so that the mean gradient is one device's.
    """
    count = mesh.size
    batch = sizes.vit[model] if images is None else images // count
    kind, _, when = variant.partition(" ")

    build, init = _vit(model, sizes.image, sizes.channels, sizes.classes)
    graphdef = nnx.graphdef(nnx.eval_shape(build))
    optimizer = jaxfused.optim.adamw(1e-3, weight_decay=0.05)
    if kind == "zero1":
        optimizer = jaxfused.parallel.zero1(optimizer, mesh=mesh)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return jaxfused.softmax_cross_entropy(nnx.merge(graphdef, params)(images), labels).mean()

    def summed(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        if kind != "pmap":
            params = lax.pcast(params, "data", to="varying")
        grads = jax.grad(loss)(params, images, labels)
        if "last" in when:
            # No sum begins before the last gradient is computed.
            grads = lax.optimization_barrier(grads)
        narrow = "bfloat16" in variant
        return jaxfused.parallel.mean_gradients(
            grads,
            "data",
            bfloat16=narrow,
            scatter=kind == "zero1",
            bucket=(lambda path: 0) if "last" in when else None,
        )

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        if variant in ("xla", "zero1"):
            grads = jax.grad(loss)(params, images, labels)
        elif kind == "pmap":
            grads = summed(params, images, labels)
        else:
            out = optimizer.specs(params) if kind == "zero1" else P()
            specs = (P(), P("data"), P("data"))
            grads = jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=out)(
                params, images, labels
            )
        return optimizer.step(grads, state, params, max_norm=1.0)

    def operands() -> tuple[Any, ...]:
        shape = (batch, sizes.image, sizes.image, sizes.channels)
        keys = jax.random.split(jax.random.key(0))
        pixels = functools.partial(jax.random.normal, keys[0], shape, jnp.bfloat16)
        labels = functools.partial(jax.random.randint, keys[1], (batch,), 0, sizes.classes)
        params = put(mesh, P(), init)
        if kind == "zero1" and isinstance(jax.tree.leaves(params)[0], jax.Array):
            state = optimizer.init(params)
        else:
            state = put(mesh, P(), optimizer.init, params)
        batched = [put(mesh, P("data"), _repeated(make, count)) for make in (pixels, labels)]
        if kind != "pmap":
            return params, state, *batched
        apart = [a.reshape(count, batch, *a.shape[1:]) for a in batched]
        copies = jax.tree.map(lambda a: jnp.stack([a] * count), (params, state))
        return jax.device_put((*copies, *apart), NamedSharding(mesh, P("data")))

    if kind == "pmap":
        mapped = jax.pmap(
            step, axis_name="data", devices=[*mesh.devices.flat], donate_argnums=(0, 1)
        )
        return Program(mapped, operands, 2)
    return Program(jax.jit(step, donate_argnums=(0, 1)), operands, 2, judged=_moments)


@functools.cache
def _vit(
    model: str, image: int, channels: int, classes: int
) -> tuple[Callable[[], nnx.Module], Callable[[], Any]]:
    """Returns functions that make a ViT and its parameters, the same ones for all variants."""

    def build() -> nnx.Module:
        return VisionTransformer(
            MODELS[model],
            image_size=image,
            channels=channels,
            classes=classes,
            dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )

    return build, lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param))


def _moments(results: Any) -> Any:
    """Returns AdamW's first moments, which after one step are a multiple of the clipped gradients."""
    return [
        state.mu
        for state in jax.tree.leaves(results[1], is_leaf=_has_moments)
        if _has_moments(state)
    ]


def _has_moments(tree: Any) -> bool:
    return hasattr(tree, "mu")


def language_model(sizes: Sizes, mesh: Any, *, bfloat16: bool = False) -> Program:
    """Returns a training step of a language model, with parameters and state sharded (FSDP).

    Every device has the same rows, so that the mean gradient is one device's.
    """
    config = LANGUAGE_MODELS[sizes.language_model]

    def build() -> LanguageModel:
        return LanguageModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    graphdef = nnx.graphdef(nnx.eval_shape(build))
    optimizer = jaxfused.optim.adamw(1e-3)
    devices = [*mesh.devices.flat]
    place = OnMesh(dict(fsdp=mesh.size), layers="blocks", bfloat16=bfloat16, devices=devices)
    value_and_grad = place.value_and_grad(make_loss(graphdef))

    def step(params: Any, state: Any, text: jax.Array) -> tuple[Any, Any]:
        _, grads = value_and_grad(params, {"text": text}, jax.random.key(0))
        return optimizer.step(grads, state, params, max_norm=1.0)

    def operands() -> tuple[Any, ...]:
        params = place.parameters(lambda: nnx.state(build(), nnx.Param))
        state = place.init(optimizer.init, params)
        shape = (sizes.rows, sizes.length + 1)
        text = functools.partial(jax.random.randint, jax.random.key(0), shape, 0, 256)
        return params, state, put(place.mesh, place.batch.spec, _repeated(text, mesh.size))

    return Program(jax.jit(step, donate_argnums=(0, 1)), operands, 2, place.mesh, _moments)


def _normal(
    mesh: Any,
    spec: P,
    shape: Sequence[int],
    seed: int,
    scale: float = 1.0,
    order: np.ndarray | None = None,
) -> jax.Array:
    def make() -> jax.Array:
        array = scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return array if order is None else array[:, order]

    return put(mesh, spec, make)


def attention(
    sizes: Sizes,
    method: str,
    mesh: Any,
    *,
    tokens: int,
    window: int | None = None,
    documents: bool = False,
    attend: Callable[..., jax.Array] | None = None,
) -> Program:
    """Returns causal attention over one long sequence, forward and gradients.

    Args:
      sizes: of the heads.
      method: that of `context_parallel_attention`, after "zigzag " for that order of the tokens.
      mesh: one of one device runs `dot_product_attention`.
      tokens: length of the sequence.
      window: number of keys before a query that it attends to; None for all.
      documents: whether there are `DOCUMENTS` of random lengths, and sinks.
      attend: a peer of (query, key, value) in place of ours.
    """
    heads, key_heads, features = sizes.heads
    *layout, method = method.split()
    masks: dict[str, Any] = dict(
        is_causal=True, local_window_size=None if window is None else (window, 0)
    )
    order = jaxfused.zigzag_order(tokens, mesh.size) if layout and mesh.size > 1 else None

    def ours(query, key, value, segments=None, sinks=None):
        if mesh.size == 1:
            given = {}
            if segments is not None:
                given = dict(query_segment_ids=segments, key_value_segment_ids=segments)
            return jaxfused.dot_product_attention(query, key, value, sinks=sinks, **given, **masks)
        return jaxfused.context_parallel_attention(
            query,
            key,
            value,
            axis_name="data",
            method=method,
            layout="contiguous" if order is None else "zigzag",
            segment_ids=segments,
            sinks=sinks,
            **masks,
        )

    def step(query, key, value, dy, *more):
        f = attend or ours
        y, pullback = jax.vjp(lambda *qkv: f(*qkv, *more), query, key, value)
        return y, *pullback(dy)

    def operands() -> tuple[Any, ...]:
        spec = P(None, "data")
        arrays = tuple(
            _normal(mesh, spec, (1, tokens, count, features), i, order=order)
            for i, count in enumerate((heads, key_heads, key_heads, heads))
        )
        if not documents:
            return arrays
        cuts = np.sort(np.random.default_rng(0).integers(0, tokens, DOCUMENTS - 1))
        segments = np.searchsorted(cuts, np.arange(tokens), side="right").astype(np.int32)[None]
        segments = segments if order is None else segments[:, order]
        sinks = functools.partial(jnp.linspace, -1.0, 1.0, heads)
        return *arrays, put(mesh, spec, lambda: jnp.asarray(segments)), put(mesh, P(), sinks)

    return Program(jax.jit(step), operands, order=order)


def gated_mlp(sizes: Sizes, variant: str, mesh: Any) -> Program:
    """Returns gated_mlp with hidden features split over the devices, forward and gradients."""
    rows, width, hidden = sizes.mlp
    f: Callable[..., jax.Array] = jaxfused.gated_mlp
    if variant == "stock":
        f = _stock_gated_mlp
    elif variant != "xla":
        f = functools.partial(
            jaxfused.parallel.gated_mlp,
            axis_name="data",
            sequence_parallel=variant == "sequence",
        )
    tokens = P(None, "data") if variant == "sequence" else P()
    specs = (tokens, P(None, "data"), P(None, "data"), P("data"), tokens)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)

    def operands() -> tuple[Any, ...]:
        shapes = [(1, rows, width), *[(width, hidden)] * 2, (hidden, width), (1, rows, width)]
        return tuple(
            _normal(mesh, spec, shape, i, shape[0] ** -0.5)
            for i, (spec, shape) in enumerate(zip(specs, shapes, strict=True))
        )

    step = jax.jit(gradient_in_jax(f, 4, 1), out_shardings=(shardings[-1], *shardings[:-1]))
    return Program(step, operands)


def _stock_gated_mlp(x, gate, up, down):
    return (nnx.silu(x @ gate) * (x @ up)) @ down
