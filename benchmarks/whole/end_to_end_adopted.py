"""Training steps of networks of other libraries, unchanged and under `jaxfused.fuse`.

The networks are Hugging Face's Flax models, of the last release that has them, and a Vision Transformer
made of Equinox's layers; `pip install '.[adoption]'` installs both libraries. Compute is in bfloat16,
and parameters are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.whole.end_to_end_jax import Batch, Network, Workload, with_fuse, with_optax

_CLASSES = 1000


def workloads() -> dict[str, Workload]:
    """Returns workloads by name; nothing is imported before a network is built."""
    made = [
        _workload("flax-vit-b16", _flax_vit, functools.partial(_images, 128)),
        _workload("flax-gpt2", _flax_gpt2, functools.partial(_tokens, 16, 1024, 50257)),
        _workload("flax-llama-1b", _flax_llama, functools.partial(_tokens, 4, 1024, 32000)),
        _workload("equinox-vit-b16", _equinox_vit, functools.partial(_images, 128)),
    ]
    return {workload.name: workload for workload in made}


def _workload(
    name: str, build: Callable[[], Network], make_batch: Callable[[jax.Array], Batch]
) -> Workload:
    return Workload(
        name,
        make_batch,
        {"stock": lambda: with_optax(build()), "fused": lambda: with_fuse(build())},
        lambda: build().forward_flops(make_batch),
    )


# --- batches --------------------------------------------------------------------------------------


def _images(batch: int, key: jax.Array) -> Batch:
    """Draws images [N, C, H, W], the layout of both libraries, and labels."""
    keys = jax.random.split(key)
    images = jax.random.normal(keys[0], (batch, 3, 224, 224), jnp.bfloat16)
    return images, jax.random.randint(keys[1], (batch,), 0, _CLASSES)


def _tokens(batch: int, length: int, vocabulary: int, key: jax.Array) -> Batch:
    """Draws tokens, and for each the one that follows."""
    tokens = jax.random.randint(key, (batch, length + 1), 0, vocabulary)
    return tokens[:, :-1], tokens[:, 1:]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# --- Hugging Face ---------------------------------------------------------------------------------


def _of_transformers(cls: Any, config: Any, input_shape: tuple[int, ...]) -> Network:
    model = cls(config, dtype=jnp.bfloat16, input_shape=input_shape, _do_init=False)

    def loss(params: Any, averages: Any, batch: Batch) -> tuple[jax.Array, Any]:
        inputs, labels = batch
        return _cross_entropy(model(inputs, params=params).logits, labels), averages

    return Network(lambda key: (model.init_weights(key, input_shape), ()), loss)


def _flax_vit() -> Network:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        num_labels=_CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _of_transformers(FlaxViTForImageClassification, config, (1, 224, 224, 3))


def _flax_gpt2() -> Network:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _of_transformers(FlaxGPT2LMHeadModel, config, (1, 8))


def _flax_llama() -> Network:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    return _of_transformers(FlaxLlamaForCausalLM, config, (1, 8))


# --- Equinox --------------------------------------------------------------------------------------


def _equinox_vit(
    width: int = 768, depth: int = 12, heads: int = 12, patch: int = 16, positions: int = 197
) -> Network:
    import equinox as eqx

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
            biases = dict.fromkeys(
                ("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True
            )
            self.attention = eqx.nn.MultiheadAttention(heads, width, **biases, key=keys[0])
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, activation=jax.nn.gelu, key=keys[1])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    class ViT(eqx.Module):
        embed: eqx.nn.Conv2d
        token: jax.Array
        positions: jax.Array
        blocks: list[Block]
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, depth + 4)
            self.embed = eqx.nn.Conv2d(3, width, patch, patch, key=keys[0])
            self.token = 0.02 * jax.random.normal(keys[1], (1, width))
            self.positions = 0.02 * jax.random.normal(keys[2], (positions, width))
            self.blocks = [Block(key) for key in keys[4:]]
            self.norm = eqx.nn.LayerNorm(width)
            self.head = eqx.nn.Linear(width, _CLASSES, key=keys[3])

        def __call__(self, image: jax.Array) -> jax.Array:
            x = self.embed(image)
            x = jnp.concatenate([self.token, x.reshape(len(x), -1).T]) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x[0]))

    static = eqx.filter_eval_shape(ViT, jax.random.key(0))
    static = eqx.partition(static, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def loss(params: Any, averages: Any, batch: Batch) -> tuple[jax.Array, Any]:
        images, labels = batch
        narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
        return _cross_entropy(jax.vmap(eqx.combine(narrow, static))(images), labels), averages

    return Network(lambda key: (eqx.filter(ViT(key), eqx.is_array), ()), loss)
