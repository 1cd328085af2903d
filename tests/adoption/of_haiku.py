"""A Transformer of Haiku's layers, and its ResNet."""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from tests.adoption.compare import assert_adopts

LAYERS, WIDTH = 2, 32


def transformer(x):
    initializer = hk.initializers.VarianceScaling(1.0)
    length = x.shape[1]
    mask = jnp.tril(jnp.ones((1, 1, length, length)))

    def norm(x):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    for _ in range(LAYERS):
        y = norm(x)
        x = x + hk.MultiHeadAttention(4, WIDTH // 4, w_init=initializer)(y, y, y, mask=mask)
        y = hk.Linear(4 * WIDTH)(norm(x))
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(y))
    return norm(x)


def test_a_transformer_of_haiku():
    f = hk.without_apply_rng(hk.transform(transformer))
    x = jax.random.normal(jax.random.key(1), (3, 8, WIDTH))
    params = f.init(jax.random.key(0), x)

    def model(dtype):
        def apply(params, x):
            return f.apply(jax.tree.map(lambda a: a.astype(dtype), params), x.astype(dtype))

        return apply

    into = {
        "dot_product_attention": LAYERS,
        "layer_norm": 2 * LAYERS + 1,
        "qkv_projection": LAYERS,
        "mlp": LAYERS,
    }
    assert_adopts(model, params, x, into=into)


def resnet(x, training):
    norm = {"decay_rate": 0.9, "create_scale": True, "create_offset": True}
    return hk.nets.ResNet(
        (1, 1, 1, 1),
        10,
        norm,
        bottleneck=True,
        channels_per_group=(16, 16, 32, 32),
        use_projection=(True, True, True, True),
    )(x, training)


@pytest.mark.parametrize("training", [True, False])
def test_a_resnet_of_haiku(training):
    f = hk.without_apply_rng(hk.transform_with_state(lambda x: resnet(x, training)))
    x = jax.random.normal(jax.random.key(1), (4, 32, 32, 3))
    initialise = hk.transform_with_state(lambda x: resnet(x, True)).init
    params, state = jax.jit(initialise)(jax.random.key(0), x)

    def model(dtype):
        def apply(params, x):
            narrow = jax.tree.map(lambda a: a.astype(dtype), params)
            return f.apply(narrow, state, x.astype(dtype))[0]

        return apply

    # Each of the 17 convolutions has a norm after it.
    assert_adopts(model, params, x, into={"conv": 17, "max_pool": 1})
