"""A decoder as in the examples of Flax: logical axes, segment masks, a tied embedding."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.adoption.compare import assert_adopts

LAYERS, WIDTH, TOKENS = 2, 32, 50


class MlpBlock(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        kernel_init = nn.with_logical_partitioning(
            nn.initializers.xavier_uniform(), ("embed", "mlp")
        )
        h = nn.Dense(4 * WIDTH, dtype=self.dtype, kernel_init=kernel_init)(x)
        h = nn.with_logical_constraint(nn.relu(h), ("batch", "length", "mlp"))
        h = nn.Dropout(0.1, deterministic=True)(h)
        return nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class Decoder(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(TOKENS, WIDTH)
        x = embed(ids)
        positions = self.param("positions", nn.initializers.normal(0.5), (1, ids.shape[1], WIDTH))
        x = (x + positions).astype(self.dtype)
        mask = nn.combine_masks(
            nn.make_attention_mask(ids > 0, ids > 0, dtype=self.dtype),
            nn.make_causal_mask(ids, dtype=self.dtype),
        )
        for _ in range(LAYERS):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.MultiHeadDotProductAttention(
                4, dtype=self.dtype, use_bias=False, deterministic=True, dropout_rate=0.1
            )(y, mask=mask)
            x = x + nn.Dropout(0.1, deterministic=True)(y)
            x = x + MlpBlock(self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x).astype(jnp.float32))


def test_the_language_models_of_flax():
    ids = jax.random.randint(jax.random.key(0), (2, 8), 1, TOKENS).at[1, 5:].set(0)
    params = nn.meta.unbox(Decoder(jnp.float32).init(jax.random.key(0), ids))
    into = {
        "dot_product_attention": LAYERS,
        "layer_norm": 2 * LAYERS + 1,
        "qkv_projection": LAYERS,
        "mlp": LAYERS,
    }
    assert_adopts(lambda dtype: Decoder(dtype).apply, params, ids, into=into)
