"""Layers of transformers' text models, rebuilt from public operators and compared with its numbers.

tests/recorded/record_text.py ran the layers of transformers 5.23.0, with parameters that depend on their
names; tests/recorded/text.npz has the results. Each function here shows how a family is written with
this package.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.recorded.values import Row, load

ROWS = load("text.npz")
B, T, D, HEADS, KEY_HEADS = 2, 8, 32, 4, 2


def dense(row: Row, name: str, x, activation=None):
    bias = row.bias(name) if f"{name}.bias" in row else None
    return jaxfused.linear(x, row.kernel(name), bias, activation=activation)


def in_heads(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def qkv(row, x):
    q, k, v = (dense(row, f"{name}_proj", x) for name in "qkv")
    return in_heads(q, HEADS), in_heads(k, KEY_HEADS), in_heads(v, KEY_HEADS)


def rope_of(row):
    return jaxfused.rope_from_config(row.options["config"], layer=0)


def attend(row, q, k, v, out="o_proj", **options):
    y = jaxfused.dot_product_attention(q, k, v, **{"is_causal": True} | options)
    return dense(row, out, y.reshape(B, T, -1))


def llama(row, x, *, interleaved=False, **options):
    q, k, v = qkv(row, x)
    q, k = jaxfused.rope(q, k, interleaved=interleaved, **rope_of(row))
    return attend(row, q, k, v, **options)


def norm_of_each_head(row, x, *, epsilon=1e-6, scale_offset=0.0, **options):
    q, k, v = qkv(row, x)
    norm = dict(epsilon=epsilon, scale_offset=scale_offset)
    q = jaxfused.rms_norm(q, row["q_norm.weight"], **norm)
    k = jaxfused.rms_norm(k, row["k_norm.weight"], **norm)
    q, k = jaxfused.rope(q, k, **rope_of(row))
    return attend(row, q, k, v, **options)


def olmo2(row, x):
    """The norm spans all heads."""
    q, k, v = (dense(row, f"{name}_proj", x) for name in "qkv")
    q = in_heads(jaxfused.rms_norm(q, row["q_norm.weight"], epsilon=1e-5), HEADS)
    k = in_heads(jaxfused.rms_norm(k, row["k_norm.weight"], epsilon=1e-5), KEY_HEADS)
    q, k = jaxfused.rope(q, k, **rope_of(row))
    return attend(row, q, k, in_heads(v, KEY_HEADS))


def cohere(row, x):
    """Each head has a LayerNorm with its own scale, [heads, features]."""
    q, k, v = qkv(row, x)
    q = jaxfused.layer_norm(q, row["q_norm.weight"], epsilon=1e-5)
    k = jaxfused.layer_norm(k, row["k_norm.weight"], epsilon=1e-5)
    q, k = jaxfused.rope(q, k, interleaved=True, **rope_of(row))
    return attend(row, q, k, v)


def gpt_neox(row, x):
    """One matrix has the query, key and value of one head after another as columns."""
    heads = in_heads(dense(row, "query_key_value", x), HEADS)
    q, k, v = jnp.split(heads, 3, axis=-1)
    q, k = jaxfused.rope(q, k, **rope_of(row))
    return attend(row, q, k, v, out="dense")


def phi3(row, x):
    """One matrix, as `qkv_projection` takes it."""
    options = rope_of(row)
    rotary_dim = options.pop("rotary_dim")
    cos, sin = jaxfused.rope_tables(jnp.arange(T), rotary_dim, **options)
    w = row.kernel("qkv_proj")
    return attend(
        row, *jaxfused.qkv_projection(x, w, heads=HEADS, key_heads=KEY_HEADS, cos=cos, sin=sin)
    )


def nanochat(row, x):
    """Angles are negative, and norms without a scale follow the rotation."""
    options = rope_of(row)
    cos, sin = jaxfused.rope_tables(jnp.arange(T), options.pop("rotary_dim"), **options)
    q, k, v = qkv(row, x)
    q, k = jaxfused.rope(q, k, cos=cos, sin=-sin)
    return attend(row, jaxfused.rms_norm(q), jaxfused.rms_norm(k), v)


def qwen3_next(row, x):
    """q_proj gives each head's query and gate; the norms store scale - 1."""
    q, gate = jnp.split(in_heads(dense(row, "q_proj", x), HEADS), 2, axis=-1)
    k, v = (in_heads(dense(row, f"{name}_proj", x), KEY_HEADS) for name in "kv")
    q = jaxfused.rms_norm(q, row["q_norm.weight"], scale_offset=1.0)
    k = jaxfused.rms_norm(k, row["k_norm.weight"], scale_offset=1.0)
    q, k = jaxfused.rope(q, k, **rope_of(row))
    y = jaxfused.dot_product_attention(q, k, v, is_causal=True) * jax.nn.sigmoid(gate)
    return dense(row, "o_proj", y.reshape(B, T, -1))


def deepseek(row, x):
    """The last features of a head rotate in interleaved pairs, and all heads share the rotated key."""
    nope, turned, rank = 12, 8, 20
    options = rope_of(row)
    q = jaxfused.rms_norm(dense(row, "q_a_proj", x), row["q_a_layernorm.weight"])
    q_nope, q_rope = jnp.split(in_heads(dense(row, "q_b_proj", q), HEADS), (nope,), axis=-1)
    latent, k_rope = jnp.split(dense(row, "kv_a_proj_with_mqa", x), (rank,), axis=-1)
    latent = jaxfused.rms_norm(latent, row["kv_a_layernorm.weight"])
    k_nope, v = jnp.split(in_heads(dense(row, "kv_b_proj", latent), HEADS), (nope,), axis=-1)
    q_rope, k_rope = jaxfused.rope(q_rope, k_rope[:, :, None], interleaved=True, **options)
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, q_rope.shape)], axis=-1)
    scale = options["scaling"].logit_factor() / math.sqrt(nope + turned)
    # Values are narrower than keys, so that zeros are appended and cut off the result.
    width = v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - width)))
    y = jaxfused.dot_product_attention(q, k, v, is_causal=True, scale=scale)[..., :width]
    return dense(row, "o_proj", y.reshape(B, T, -1))


def gemma4(row, x):
    """Values have a norm without a scale, logits no scale, and only a few pairs of a head rotate."""
    q, k, v = qkv(row, x)
    q = jaxfused.rms_norm(q, row["q_norm.weight"])
    k = jaxfused.rms_norm(k, row["k_norm.weight"])
    q, k = jaxfused.rope(q, k, **rope_of(row))
    return attend(row, q, k, jaxfused.rms_norm(v), scale=1.0)


def gptj(row, x):
    """Interleaved pairs of a head's first half rotate."""
    q, k, v = (in_heads(dense(row, f"{name}_proj", x), HEADS) for name in "qkv")
    q, k = jaxfused.rope(q, k, rotary_dim=4, interleaved=True)
    return attend(row, q, k, v, out="out_proj")


def modernbert(row, x):
    """local_attention=4 is two tokens on each side."""
    q, k, v = (in_heads(y, HEADS) for y in jnp.split(dense(row, "Wqkv", x), 3, axis=-1))
    q, k = jaxfused.rope(q, k, theta=row.options["theta"])
    return attend(row, q, k, v, out="Wo", is_causal=False, local_window_size=(2, 2))


def t5(row, x):
    """Logits have no scale, and a bias by distance."""
    q, k, v = (in_heads(dense(row, name, x), HEADS) for name in "qkv")
    return attend(row, q, k, v, out="o", is_causal=False, scale=1.0, bias=row.results["bias"])


ATTENTIONS = {
    "Llama": llama,
    "Mistral": lambda row, x: llama(row, x, local_window_size=(2, 0)),
    "Gemma 2": lambda row, x: llama(
        row, x, local_window_size=(2, 0), scale=24**-0.5, logits_soft_cap=5.0
    ),
    "Gemma 3": lambda row, x: norm_of_each_head(
        row, x, scale_offset=1.0, local_window_size=(2, 0), scale=24**-0.5
    ),
    "Qwen 2": llama,
    "Qwen 3": norm_of_each_head,
    "OLMo 2": olmo2,
    "Cohere": cohere,
    "GLM 4": lambda row, x: llama(row, x, interleaved=True),
    "GLM 4.5 MoE": llama,
    "GPT-NeoX": gpt_neox,
    "gpt-oss": lambda row, x: llama(row, x, local_window_size=(2, 0), sinks=row["sinks"]),
    "Phi-3": phi3,
    "Granite": lambda row, x: llama(row, x, scale=0.3),
    "SmolLM3 without rope": lambda row, x: attend(row, *qkv(row, x)),
    "NanoChat": nanochat,
    "EXAONE 4": lambda row, x: norm_of_each_head(row, x, epsilon=1e-5),
    "Qwen3-Next": qwen3_next,
    "DeepSeek-V3": deepseek,
    "Gemma 4": gemma4,
    "GPT-J": gptj,
    "ModernBERT": modernbert,
    "T5": t5,
}


def group_norm_of_mamba(row, x):
    """silu(gate) x is normalised in groups of 8, with a scale for every feature."""
    gated = (x * jax.nn.silu(row.input("gate", x.shape))).reshape(B, T, 4, 8)
    return jaxfused.rms_norm(gated, row["weight"].reshape(4, 8)).reshape(x.shape)


NORMS = {
    "Llama's norm": lambda row, x: jaxfused.rms_norm(
        x, row["weight"].astype(x.dtype), epsilon=1e-5, round_before_scale=True
    ),
    "Gemma's norm": lambda row, x: jaxfused.rms_norm(
        x, row["weight"].astype(x.dtype), epsilon=1e-5, scale_offset=1.0
    ),
    "OLMo 2's norm": lambda row, x: jaxfused.rms_norm(
        x, row["weight"].astype(x.dtype), epsilon=1e-5
    ),
    "gpt-oss's norm": lambda row, x: jaxfused.rms_norm(
        x, row["weight"].astype(x.dtype), epsilon=1e-5
    ),
    "Cohere's norm": lambda row, x: jaxfused.layer_norm(
        x, row["weight"].astype(x.dtype), epsilon=1e-5
    ),
    "Nemotron's norm": lambda row, x: jaxfused.layer_norm(
        x, row["weight"], row["bias"], epsilon=1e-5, scale_offset=1.0
    ),
    "Mamba 2's norm": group_norm_of_mamba,
    "Qwen3-Next's norm": lambda row, x: (
        jaxfused.rms_norm(x, row["weight"]) * jax.nn.silu(row.input("gate", x.shape))
    ),
}


def gated(row, x, activation):
    kernels = (row.kernel(f"{name}_proj") for name in ("gate", "up", "down"))
    return jaxfused.gated_mlp(x, *kernels, activation=activation)


def plain(row, x, names, activation):
    up, down = names
    return dense(row, down, dense(row, up, x, activation))


def phi3_mlp(row, x):
    """One matrix, the gate's columns first."""
    gate, up = jnp.split(row.kernel("gate_up_proj"), 2, axis=-1)
    return jaxfused.gated_mlp(x, gate, up, row.kernel("down_proj"), activation="silu")


def gpt2_mlp(row, x):
    """GPT-2 stores its matrices as [inputs, outputs]."""
    up, down = ((row[f"{name}.weight"], row.bias(name)) for name in ("c_fc", "c_proj"))
    return jaxfused.mlp(x, *up, *down, activation="gelu_tanh")


PERCEPTRONS = {
    "Llama's perceptron": lambda row, x: gated(row, x, "silu"),
    "Gemma's perceptron": lambda row, x: gated(row, x, "gelu_tanh"),
    "Phi-3's perceptron": phi3_mlp,
    "Nemotron's perceptron": lambda row, x: plain(row, x, ("up_proj", "down_proj"), "relu2"),
    "CLIP's perceptron": lambda row, x: plain(row, x, ("fc1", "fc2"), "quick_gelu"),
    "GPT-2's perceptron": gpt2_mlp,
}
LAYERS = ATTENTIONS | NORMS | PERCEPTRONS
TABLES = ("Qwen2-VL", "Qwen3-VL")


def test_every_row_has_a_test():
    assert set(ROWS) == {*LAYERS, *TABLES}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_transformers(name):
    row = ROWS[name]
    x = row.input("x", (B, T, D))
    y = jax.jit(lambda x: LAYERS[name](row, x))(x)
    wanted = row.results["y"]
    np.testing.assert_allclose(y, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", [name for name in NORMS if "y16" in ROWS[name].results])
def test_norms_have_the_bits_of_transformers_in_bfloat16(name):
    row = ROWS[name]
    x = jnp.asarray(row.input("x", (B, T, D)), jnp.bfloat16)
    y = jax.jit(lambda x: LAYERS[name](row, x))(x)
    # Another order of a sum may give a neighbouring value.
    assert np.mean(np.asarray(y, np.float32) != row.results["y16"]) < 0.005


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_three_axes(name):
    """Pair i has the frequency it would have in the whole head, and its axis depends on the model."""
    row = ROWS[name]
    inverse = jaxfused.RopeScaling().frequencies(16, 1e4)
    t, h, w = row.options["section"]
    if name == "Qwen2-VL":
        axis = np.repeat(np.arange(3), (t, h, w))
    else:
        # Time, row and column alternate, and the remaining pairs belong to time.
        axis = np.zeros(8, int)
        axis[1 : 3 * h : 3], axis[2 : 3 * w : 3] = 1, 2
    frequencies = np.where(axis == np.arange(3)[:, None], inverse, 0.0)
    positions = jnp.asarray(row.options["positions"]).T
    cos, sin = jaxfused.axial_rope_tables(positions=positions, frequencies=frequencies)
    np.testing.assert_allclose(cos, row.results["cos"], atol=1e-6)
    np.testing.assert_allclose(sin, row.results["sin"], atol=1e-6)
