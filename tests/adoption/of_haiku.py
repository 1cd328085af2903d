"""A Transformer of Haiku's layers."""

import haiku as hk
import jax
import jax.numpy as jnp

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
