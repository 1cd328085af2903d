"""Times prefill and decoding of a model's shape: `python -m examples.lm.speed --shape llama-8b`.

The weights are random, so nothing is downloaded. Decoding is greedy and is timed twice: as the server
runs it, where the host reads the tokens of each step, and in a loop on the device.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from examples.errors import run_command
from examples.flags import whole
from examples.lm.config import Config, Rope
from examples.lm.engine import Engine, Text
from examples.lm.loading import FORMATS, quantized, size_of
from examples.lm.model import Cache, LanguageModel


def _llama(
    *, width: int, depth: int, heads: int, key_heads: int, hidden: int, vocabulary: int, **more
) -> Config:
    head_size = width // heads
    return Config(
        vocabulary=vocabulary,
        width=width,
        depth=depth,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        hidden=hidden,
        max_length=131_072,
        ropes=(Rope(head_size, 500_000.0),) * depth,
        windows=(None,) * depth,
        scale=head_size**-0.5,
        **more,
    )


SHAPES = {
    "smollm2-135m": _llama(
        width=576, depth=30, heads=9, key_heads=3, hidden=1536, vocabulary=49_152, is_tied=True
    ),
    "tinyllama-1.1b": _llama(
        width=2048, depth=22, heads=32, key_heads=4, hidden=5632, vocabulary=32_000
    ),
    "llama-8b": _llama(
        width=4096, depth=32, heads=32, key_heads=8, hidden=14_336, vocabulary=128_256
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = make_parser().parse_args(argv)
    model = random_model(SHAPES[args.shape], args.dtype, args.format)
    numbers, size = size_of(model)
    print(
        f"{args.shape}: {numbers / 1e9:.2f} billion parameters in {size / 1e9:.2f} GB ({args.format},"
        f" {args.dtype}) on {jax.devices()[0].device_kind}; {args.batch} texts of {args.length} tokens"
    )
    first, on_host = served(model, args)
    print(f"first token of one text after {1e3 * first:.1f} ms")
    read = bytes_of_a_step(model, size, args)
    for name, seconds in (("host", on_host), ("device", looped(model, args))):
        print(
            f"loop on the {name}: {1e3 * seconds:.3f} ms a step, {args.batch / seconds:,.0f} tokens/s,"
            f" {read / 1e9 / seconds:,.0f} GB/s of {read / 1e9:.3f} GB"
        )


def random_model(config: Config, dtype: str, form: str) -> LanguageModel:
    """Returns a model with random weights, made on the device."""

    def build() -> LanguageModel:
        return LanguageModel(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)

    # One program for each shape compiles fast; one for the whole model takes minutes.
    graphdef, state = nnx.split(nnx.eval_shape(build))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    state = tree.unflatten(draw(*of_leaf) for of_leaf in zip(keys, leaves, strict=True))
    return quantized(nnx.merge(graphdef, state), form)


def bytes_of_a_step(model: LanguageModel, size: int, args: argparse.Namespace) -> int:
    """Returns the bytes that a step has to read: weights, and the keys and values of all texts."""
    config = model.config
    # A decoding step reads one row of the embedding for each text, so its bytes are left out, unless
    # it is the head too (`is_tied`), of which a step reads all rows.
    embedding = model.embed.embedding[...]
    weights = size - (0 if config.is_tied else embedding.nbytes)
    of_token = (
        2 * config.depth * config.key_heads * config.head_size * jnp.dtype(args.dtype).itemsize
    )
    return weights + args.batch * (args.length + args.steps // 2) * of_token


def served(model: LanguageModel, args: argparse.Namespace) -> tuple[float, float]:
    """Returns the seconds to the first token of one text, and the seconds per step of all texts."""
    engine = Engine(
        model, (), slots=args.batch, length=args.length + args.steps + 3, chunk=args.chunk
    )
    prompt = [1] * args.length

    def first_token() -> float:
        begin = time.perf_counter()
        text = Text(prompt, 1)
        engine.submit(text)
        while not text.tokens:
            engine.step()
        return time.perf_counter() - begin

    first_token()
    first = first_token()
    texts = [Text(prompt, args.steps + 3) for _ in range(args.batch)]
    for text in texts:
        engine.submit(text)
    while any(len(text.tokens) < 2 for text in texts) and engine.is_busy:
        engine.step()
    begin, steps = time.perf_counter(), 0
    while all(text.finish is None for text in texts):
        engine.step()
        steps += 1
    return first, (time.perf_counter() - begin) / max(steps, 1)


def looped(model: LanguageModel, args: argparse.Namespace) -> float:
    """Returns the seconds per step of a loop that runs on the device."""
    graphdef, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params: nnx.State, cache: Cache, tokens: jax.Array) -> tuple[Cache, jax.Array]:
        model = nnx.merge(graphdef, params)

        def step(_: int, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
            features, cache = model(carry[1][:, None], cache=carry[0])
            return cache, model.logits(features[:, 0]).argmax(axis=-1).astype(jnp.int32)

        return lax.fori_loop(0, args.steps, step, (cache, tokens))

    def begin() -> Cache:
        length = args.length + args.steps
        cache = model.empty_cache(batch=args.batch, length=length, chunk=1)
        full = jnp.full(args.batch, args.length, jnp.int32)
        return tuple(dataclasses.replace(layer, lengths=full + 0) for layer in cache)

    tokens = jnp.ones(args.batch, jnp.int32)
    return (
        min(_seconds(lambda cache: loop(params, cache, tokens), begin()) for _ in range(4))
        / args.steps
    )


def _seconds(call: Callable[[Cache], object], cache: Cache) -> float:
    jax.block_until_ready(cache)
    begin = time.perf_counter()
    jax.block_until_ready(call(cache))
    return time.perf_counter() - begin


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.lm.speed", description="How fast a model reads and writes."
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="float", help="(%(default)s)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)"
    )
    sizes = (("batch", 1), ("length", 1024), ("steps", 128), ("chunk", 512))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=whole(1), default=default, help="(%(default)s)")
    return parser


if __name__ == "__main__":
    run_command(main)
