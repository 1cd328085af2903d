"""A Transformer, a Vision Transformer and a U-Net block of Equinox's layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.adoption.compare import assert_adopts

LAYERS, WIDTH = 2, 32
INTO = {
    "dot_product_attention": LAYERS,
    "layer_norm": 2 * LAYERS + 1,
    "qkv_projection": LAYERS,
    "mlp": LAYERS,
}


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, use_output_bias=True, key=keys[0])
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1, inference=True)

    def __call__(self, x, mask):
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y, mask=mask))
        y = jax.vmap(self.norm2)(x)
        return x + self.dropout(jax.vmap(self.mlp)(y))


class ViT(eqx.Module):
    embed: eqx.nn.Conv2d
    token: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = eqx.nn.Conv2d(3, WIDTH, 8, 8, key=keys[0])
        self.token = jnp.ones((1, WIDTH))
        self.blocks = [Block(key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, 10, key=keys[1])

    def __call__(self, image):
        x = self.embed(image)
        x = jnp.concatenate([self.token, x.reshape(len(x), -1).T])
        for block in self.blocks:
            x = block(x, None)
        return self.head(jax.vmap(self.norm)(x)[0])


class Decoder(eqx.Module):
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.blocks = [Block(key) for key in jax.random.split(key, LAYERS)]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.norm)(x)


@pytest.mark.parametrize("model", [ViT, Decoder])
def test_a_model_of_equinox(model):
    arrays, rest = eqx.partition(model(jax.random.key(0)), eqx.is_array)
    shape = (3, 3, 32, 32) if model is ViT else (3, 8, WIDTH)
    x = jax.random.normal(jax.random.key(1), shape)

    def of_dtype(dtype):
        def f(arrays, x):
            narrow = jax.tree.map(lambda a: a.astype(dtype), arrays)
            return jax.vmap(eqx.combine(narrow, rest))(x.astype(dtype))

        return f

    patches = {"linear": 1} if model is ViT else {}
    assert_adopts(of_dtype, arrays, x, into=INTO | patches)


class ImageBlock(eqx.Module):
    norms: list[eqx.nn.GroupNorm]
    convs: list[eqx.nn.Conv2d]
    embed: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.GroupNorm(4, WIDTH) for _ in range(2)]
        self.convs = [eqx.nn.Conv2d(WIDTH, WIDTH, 3, padding=1, key=key) for key in keys[:2]]
        self.embed = eqx.nn.Linear(WIDTH, WIDTH, key=keys[2])

    def __call__(self, x):
        y = self.convs[0](jax.nn.silu(self.norms[0](x)))
        y = y + self.embed(x.mean((1, 2)))[:, None, None]
        return x + self.convs[1](jax.nn.silu(self.norms[1](y)))


def test_images_of_equinox_are_transposed_in_16_bits_only():
    arrays, rest = eqx.partition(ImageBlock(jax.random.key(0)), eqx.is_array)
    x = jax.random.normal(jax.random.key(1), (3, WIDTH, 8, 6))

    def of_dtype(dtype):
        def f(arrays, x):
            narrow = jax.tree.map(lambda a: a.astype(dtype), arrays)
            return jax.vmap(eqx.combine(narrow, rest))(x.astype(dtype))

        return f

    assert_adopts(of_dtype, arrays, x, into={"group_norm": 2, "conv": 2}, into_float32={})
