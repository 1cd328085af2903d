"""Hugging Face's Flax models, of the last release that has them, with random weights."""

import jax
import jax.numpy as jnp
import pytest
from transformers import (
    BertConfig,
    CLIPTextConfig,
    FlaxBertModel,
    FlaxCLIPTextModel,
    FlaxGPT2Model,
    FlaxLlamaModel,
    FlaxViTModel,
    GPT2Config,
    LlamaConfig,
    ViTConfig,
)

from tests.adoption.compare import assert_adopts

LAYERS = 2
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 50)
PADDING = jnp.array([[1] * 8, [1] * 5 + [0] * 3])
BLOCK = {"dot_product_attention": LAYERS, "qkv_projection": LAYERS}


def assert_language_model_adopts(cls, config, into, padding):
    params = cls(config, input_shape=(1, 8)).params

    def model(dtype):
        flax_model = cls(config, dtype=dtype, input_shape=(1, 8), _do_init=False)
        keywords = {} if padding is None else {"attention_mask": padding}
        return lambda p, ids: flax_model(ids, params=p, **keywords).last_hidden_state

    assert_adopts(model, params, TOKENS, into=into)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_llama(padding):
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    into = BLOCK | {"rms_norm": 2 * LAYERS + 1, "gated_mlp": LAYERS}
    assert_language_model_adopts(FlaxLlamaModel, config, into, padding)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_bert(padding):
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    into = BLOCK | {"layer_norm": 2 * LAYERS + 1, "mlp": LAYERS}
    assert_language_model_adopts(FlaxBertModel, config, into, padding)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_gpt2(padding):
    """GPT-2's queries, keys and values are parts of one product."""
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=16)
    into = BLOCK | {"layer_norm": 2 * LAYERS + 1, "mlp": LAYERS}
    assert_language_model_adopts(FlaxGPT2Model, config, into, padding)


def test_clip():
    """CLIP's activation is quick_gelu."""
    config = CLIPTextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    into = BLOCK | {"layer_norm": 2 * LAYERS + 1, "mlp": LAYERS}
    assert_language_model_adopts(FlaxCLIPTextModel, config, into, PADDING)


def test_vit():
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    params = FlaxViTModel(config).params

    def model(dtype):
        flax_model = FlaxViTModel(config, dtype=dtype, _do_init=False)
        return lambda p, images: flax_model(images, params=p).last_hidden_state

    images = jax.random.normal(jax.random.key(0), (2, 3, 32, 32))
    into = BLOCK | {"layer_norm": 2 * LAYERS + 1, "mlp": LAYERS, "linear": 1}
    assert_adopts(model, params, images, into=into)
