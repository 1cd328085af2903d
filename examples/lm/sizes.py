"""Language models for training: their sizes, and the loss of a training step on rows of text."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.lm.config import Config, Rope, Routed
from examples.lm.data import START, TOKENS
from examples.lm.model import LanguageModel
from examples.multi_gpu.layers import zigzag


def _size(
    *,
    width: int,
    depth: int,
    heads: int,
    key_heads: int,
    hidden: int,
    routed: Routed | None = None,
) -> Config:
    """Returns the shape of a model for bytes, built like Qwen3."""
    head_size = width // heads
    return Config(
        vocabulary=TOKENS,
        width=width,
        depth=depth,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        hidden=hidden,
        max_length=32_768,
        ropes=(Rope(head_size, 10_000.0),) * depth,
        windows=(None,) * depth,
        scale=head_size**-0.5,
        head_norms=True,
        routed=routed,
    )


# "lm-byte" learns in five minutes on two CPU cores. In "lm-moe" a token takes two of eight experts,
# whose hidden features add up to those of the MLP of "lm-byte". The others are named by the number of
# parameters in their blocks.
MODELS = {
    "lm-byte": _size(width=128, depth=4, heads=4, key_heads=2, hidden=384),
    "lm-moe": _size(
        width=128, depth=4, heads=4, key_heads=2, hidden=192, routed=Routed(8, experts_of_token=2)
    ),
    "lm-12m": _size(width=384, depth=6, heads=6, key_heads=2, hidden=1152),
    "lm-85m": _size(width=768, depth=12, heads=12, key_heads=4, hidden=2048),
    "lm-300m": _size(width=1024, depth=24, heads=16, key_heads=8, hidden=2816),
    "lm-1b": _size(width=2048, depth=24, heads=16, key_heads=16, hidden=5632),
}


def config_of(name: str, *, vocabulary: int) -> Config:
    """Returns the shape `MODELS[name]` with a vocabulary of this many tokens."""
    return dataclasses.replace(MODELS[name], vocabulary=vocabulary)


def split(text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (tokens, labels, segments, positions), [B, T] each, of rows [B, T + 1] of packed text.

    If devices share a sequence, all four are in `zigzag` order, by which causal attention is equal work
    on each. A token attends to tokens of its own document, and its position counts from the document's
    start. The last token of a document has label -1, because the next document does not follow from it.
    """
    tokens, labels = text[:, :-1].astype(jnp.int32), text[:, 1:].astype(jnp.int32)
    is_start = tokens == START
    place = jnp.arange(tokens.shape[1])
    first = jax.lax.cummax(jnp.where(is_start, place, 0), axis=1)
    return zigzag(
        tokens,
        jnp.where(labels == START, -1, labels),
        jnp.cumsum(is_start, axis=1),
        place - first,
    )


_BALANCE = 0.01
"""Factor of the load-balancing loss of the experts, which is added to the cross-entropy."""


def make_loss(graphdef: nnx.GraphDef) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """Returns a function (params, batch, key) -> mean cross-entropy in nats, plus any balancing loss."""

    def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        model = nnx.merge(graphdef, params)
        tokens, labels, segments, positions = split(batch["text"])
        balances: list[jax.Array] = []
        features, _ = model(tokens, positions=positions, segments=segments, balances=balances)
        loss = model.loss(features, labels)
        return loss + _BALANCE * jnp.mean(jnp.stack(balances)) if balances else loss

    return loss_of


def make_sums(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a function (params, text) -> [B, 2]: a row's summed cross-entropy and count of labels."""

    def sums(params: Any, text: jax.Array) -> jax.Array:
        model: LanguageModel = nnx.merge(graphdef, params)
        tokens, labels, segments, positions = split(text)
        features, _ = model(tokens, positions=positions, segments=segments)
        losses = model.loss(features, labels, reduction="none").astype(jnp.float32)
        return jnp.stack([losses.sum(axis=1), (labels >= 0).sum(axis=1)], axis=1)

    return sums
