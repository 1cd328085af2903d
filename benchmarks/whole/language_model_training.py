"""Training steps of a transformer of 1.3 billion parameters: ours, and plain JAX with cuDNN's attention.

24 layers of 2048, rows of 4,096 tokens, 65,536 tokens a step in four parts, clipping and AdamW.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.run import timing
from benchmarks.run.budget import Rows
from examples import optimizers
from examples.lm import sizes
from examples.lm.config import Config, Rope
from examples.lm.data import START
from examples.lm.model import LanguageModel
from examples.multi_gpu.metadata import without_metadata

Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""Function (state, tokens [parts, rows, T + 1]) -> (state, mean loss)."""

ROWS = ("bf16", "stock", "fp8")
"""Rows of the result; ours are also timed over rows of four packed documents each."""
_BARS = (("bf16", "stock", 1.2), ("bf16 documents", "stock", 1.2))
_RATE, _DECAY, _STDDEV = 3e-4, 0.1, 0.02


@dataclasses.dataclass(frozen=True)
class _Shape:
    config: Config
    length: int = 4096
    parts: int = 4
    rows: int = 4

    def flops(self) -> int:
        """Returns the operations of a step's products, with causal attention over whole rows."""
        c = self.config
        block = c.width * 2 * (c.heads + c.key_heads) * c.head_size + 3 * c.width * c.hidden
        weights = c.depth * block + c.width * c.vocabulary
        of_token = 6 * weights + c.depth * 6 * self.length * c.heads * c.head_size
        return of_token * self.parts * self.rows * self.length


def _shape(tiny: bool) -> _Shape:
    width, depth, heads, key_heads, hidden, vocabulary = (
        (64, 2, 4, 2, 96, 512) if tiny else (2048, 24, 32, 8, 5632, 32_000)
    )
    size = width // heads
    config = dataclasses.replace(
        sizes.config_of("lm-1b", vocabulary=vocabulary),
        width=width,
        depth=depth,
        heads=heads,
        key_heads=key_heads,
        head_size=size,
        hidden=hidden,
        ropes=(Rope(size, 10_000.0),) * depth,
        windows=(None,) * depth,
        scale=size**-0.5,
        head_norms=False,
    )
    return _Shape(config, 64, 2, 2) if tiny else _Shape(config)


def train(rows: Rows, names: Sequence[str], tiny: bool) -> int:
    """Measures rows of `ROWS`; returns 1 if a bar is missed."""
    shape = _shape(tiny)
    programs = {
        name: _stock(shape, tiny) if name == "stock" else _ours(shape, name == "fp8")
        for name in names
    }
    whole, documents = (_tokens(shape, documents=documents) for documents in (False, True))

    def lower(name: str) -> Any:
        step, begin = programs[name]
        return jax.jit(step, donate_argnums=0).lower(jax.eval_shape(begin), jax.typeof(whole))

    def measure(name: str, compiled: Any) -> dict[str, Any]:
        begin = programs[name][1]
        if name != "stock":
            rows.add(f"{name} documents", _timed(shape, compiled, begin(), documents))
        return _timed(shape, compiled, begin(), whole)

    rows.measure({name: lambda name=name: lower(name) for name in names}, measure)
    return rows.compare(_BARS)


def _timed(shape: _Shape, compiled: Any, state: Any, batch: jax.Array) -> dict[str, Any]:
    losses: list[float] = []

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, loss = compiled(state, batch)
        losses.append(float(loss))

    run(1)
    run(1)
    # Random weights know nothing, and a step on the same tokens has to teach something.
    chance = math.log(shape.config.vocabulary)
    if not (abs(losses[0] - chance) < 1 and losses[1] < losses[0]):
        return {"wrong": f"losses {losses}, of which the first should be about {chance:.2f}"}
    row: dict[str, Any] = timing.steps(run)
    seconds = row["milliseconds"] / 1e3
    tokens = shape.parts * shape.rows * shape.length
    row |= {"tokens_per_second": tokens / seconds, "teraflops": shape.flops() / seconds / 1e12}
    return row | {"losses": [*losses[:2], losses[-1]]}


def _tokens(shape: _Shape, *, documents: bool) -> jax.Array:
    """Draws tokens; squares make some likelier, so that there is something to learn."""
    vocabulary = shape.config.vocabulary
    size = (shape.parts, shape.rows, shape.length + 1)
    tokens = (jax.random.uniform(jax.random.key(0), size) ** 2 * vocabulary).astype(jnp.int32)
    tokens = jnp.where(tokens == START, START + 1, tokens)
    return tokens.at[..., :: shape.length // 4].set(START) if documents else tokens


def _accumulated(loss_of: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., Any]:
    """Returns a function (params, parts) -> (mean loss, mean gradients in float32)."""

    def run(params: Any, parts: jax.Array) -> Any:
        def add(carry: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_of)(params, part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add, zero, parts)
        return jax.tree.map(lambda a: a / len(parts), sums)

    return run


def _drawn(shapes: Any) -> Any:
    """Returns random matrices, and vectors of ones."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim < 2:
            return jnp.ones(leaf.shape, leaf.dtype)
        return _STDDEV * jax.random.normal(key, leaf.shape, leaf.dtype)

    # One program for each shape compiles fast; one for the whole model takes minutes.
    return tree.unflatten([draw(*pair) for pair in zip(keys, leaves, strict=True)])


def _ours(shape: _Shape, fp8: bool) -> tuple[Step, Callable[[], Any]]:
    """Returns the step of examples/lm's model, loss and optimizer, and the function of its state."""

    def build() -> LanguageModel:
        precision: Any = "fp8" if fp8 else None
        return LanguageModel(shape.config, dtype="bfloat16", precision=precision, rngs=nnx.Rngs(0))

    graphdef, params = nnx.split(nnx.eval_shape(build))
    loss = sizes.make_loss(graphdef)
    optimizer = optimizers.make("adamw", optax.constant_schedule(_RATE), _DECAY)
    key = jax.random.key(0)
    value_and_grad = _accumulated(lambda params, part: loss(params, dict(text=part), key))

    def step(state: Any, parts: jax.Array) -> Any:
        value, gradients = value_and_grad(state[0], parts)
        return optimizer.step(gradients, state[1], state[0], max_norm=1.0), value

    def begin() -> Any:
        drawn = _drawn(without_metadata(params))
        return drawn, jax.jit(optimizer.init)(drawn)

    return step, begin


def _stock(shape: _Shape, tiny: bool) -> tuple[Step, Callable[[], Any]]:
    """Returns the same network in plain JAX with Optax, as `_ours` does."""
    c, dtype = shape.config, jnp.bfloat16
    features = c.heads * c.head_size
    columns = features + 2 * c.key_heads * c.head_size
    matrices = dict(
        qkv=(c.width, columns),
        project=(features, c.width),
        gate_up=(c.width, 2 * c.hidden),
        down=(c.hidden, c.width),
    )
    layer = matrices | dict(norm1=(c.width,), norm2=(c.width,))
    ends = dict(embed=(c.vocabulary, c.width), head=(c.width, c.vocabulary), norm=(c.width,))
    shapes = jax.tree.map(
        lambda size: jax.ShapeDtypeStruct(size, jnp.float32),
        ends | dict(layers=[layer] * c.depth),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(_RATE, b2=0.999, weight_decay=_DECAY)
    )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, -1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(dtype)

    def rope(x: jax.Array) -> jax.Array:
        rates = 10_000.0 ** (-jnp.arange(c.head_size // 2) * 2 / c.head_size)
        angles = (jnp.arange(x.shape[1])[:, None] * rates)[None, :, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    def block(p: Any, x: jax.Array) -> jax.Array:
        y = norm(x, p["norm1"]) @ p["qkv"].astype(dtype)
        ends = [features, features + c.key_heads * c.head_size]
        q, k, v = (
            part.reshape(*part.shape[:2], -1, c.head_size) for part in jnp.split(y, ends, axis=-1)
        )
        implementation: Any = "xla" if tiny else "cudnn"
        attended = jax.nn.dot_product_attention(
            rope(q), rope(k), v, is_causal=True, implementation=implementation
        )
        x = x + attended.reshape(*x.shape[:2], -1) @ p["project"].astype(dtype)
        gate, up = jnp.split(norm(x, p["norm2"]) @ p["gate_up"].astype(dtype), 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ p["down"].astype(dtype)

    def loss_of(params: Any, text: jax.Array) -> jax.Array:
        x = params["embed"].astype(dtype)[text[:, :-1]]
        for p in params["layers"]:
            x = block(p, x)
        logits = (norm(x, params["norm"]) @ params["head"].astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    value_and_grad = _accumulated(loss_of)

    def step(state: Any, parts: jax.Array) -> Any:
        value, gradients = value_and_grad(state[0], parts)
        updates, opt = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    def begin() -> Any:
        drawn = _drawn(shapes)
        return drawn, jax.jit(tx.init)(drawn)

    return step, begin
