"""Blocks and tables of timm, rebuilt from public operators and modules and compared with its numbers.

tests/recorded/record_images.py ran the blocks of timm 1.0.31, with parameters that depend on their
names; tests/recorded/images.npz has the results. Each function here shows how a family is written with
this package.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
from tests.recorded.values import load
from tests.support.grids import parametrize

ROWS = load("images.npz")
B, T, D, HEADS, H = 2, 7, 32, 2, 16


def dense(row, name, x, activation=None):
    bias = row.bias(name) if f"{name}.bias" in row else None
    return jaxfused.linear(x, row.kernel(name), bias, activation=activation)


def norm(row, name, x, epsilon=1e-6, **options):
    weight, bias = row[f"{name}.weight"], row.bias(name)
    return jaxfused.layer_norm(x, weight, bias, epsilon=epsilon, **options)


def perceptron(row, name, x):
    return dense(row, f"{name}.fc2", dense(row, f"{name}.fc1", x, "gelu_erf"))


def of_norm(row, name):
    return {"scale": row[f"{name}.weight"], "bias": row.bias(name)}


def of_layer(row, name):
    return {"kernel": row.kernel(name), "bias": row.bias(name)}


def biases_without_the_keys(row):
    """BEiT, EVA and Swin v2 have no bias for keys."""
    q, v = row["attn.q_bias"], row["attn.v_bias"]
    return jnp.concatenate([q, jnp.zeros_like(q), v])


# --- blocks of the module -------------------------------------------------------------------------


def vit(row, x, **options):
    """LayerScale multiplies each branch; timm's norms of queries and keys are LayerNorms."""
    parameters = {
        "norm1": of_norm(row, "norm1"),
        "norm2": of_norm(row, "norm2"),
        "qkv": of_layer(row, "attn.qkv"),
        "project": of_layer(row, "attn.proj"),
        "mlp": {"up": of_layer(row, "mlp.fc1"), "down": of_layer(row, "mlp.fc2")},
    }
    if "layer_scale" in options:
        parameters |= {f"layer_scale{i}": row[f"ls{i}.gamma"] for i in (1, 2)}
    if "normalize_qk" in options:
        for name in ("query", "key"):
            parameters[f"{name}_scale"] = row[f"attn.{name[0]}_norm.weight"]
            parameters[f"{name}_bias"] = row.bias(f"attn.{name[0]}_norm")
    block = jaxfused.linen.TransformerBlock(HEADS, activation="gelu_erf", **options)
    return block.apply({"params": parameters}, x)


def dinov3_tables(height, width, prefix=0):
    places = (2 * (np.arange(n) + 0.5) / n - 1 for n in (height, width))
    options = dict(features=(H // 2, H // 2), theta=100.0, turns=True, prefix=prefix)
    return jaxfused.axial_rope_tables(positions=tuple(places), **options)


def dinov3(row, x):
    """Rope pairs halves, at centred positions in full turns; a class token does not rotate."""
    kernels = [row.kernel(f"attn.{n}_proj") for n in "qkv"]
    biases = [row.bias("attn.q_proj"), jnp.zeros(D), row.bias("attn.v_proj")]
    parameters = {
        "norm1": of_norm(row, "norm1"),
        "norm2": of_norm(row, "norm2"),
        "qkv": {"kernel": jnp.concatenate(kernels, axis=1), "bias": jnp.concatenate(biases)},
        "project": of_layer(row, "attn.proj"),
        "layer_scale1": row["gamma_1"],
        "layer_scale2": row["gamma_2"],
        "mlp": {
            ours: of_layer(row, f"mlp.{theirs}")
            for ours, theirs in (("gate", "fc1_g"), ("up", "fc1_x"), ("down", "fc2"))
        },
    }
    cos, sin = dinov3_tables(2, 3, prefix=1)
    block = jaxfused.linen.TransformerBlock(HEADS, gated=True, layer_scale=1.0)
    return block.apply({"params": parameters}, x, cos=cos, sin=sin)


def eva_tables(height, width, prefix=0):
    """Positions are those of a grid of 16 x 16."""
    places = tuple(np.arange(n) / n * 16 for n in (height, width))
    options = dict(features=(H // 2, H // 2), theta=1e4, prefix=prefix)
    return jaxfused.axial_rope_tables(positions=places, **options)


def eva02(row, x):
    """Rope interleaves pairs, and the gated MLP contains a LayerNorm."""
    cos, sin = eva_tables(2, 3, prefix=1)
    q, k, v = jaxfused.qkv_projection(
        norm(row, "norm1", x),
        row.kernel("attn.qkv"),
        biases_without_the_keys(row),
        heads=HEADS,
        cos=cos,
        sin=sin,
        interleaved=True,
    )
    y = jaxfused.dot_product_attention(q, k, v).reshape(x.shape)
    y, h = norm(row, "norm2", dense(row, "attn.proj", y), residual=x)
    y = dense(row, "mlp.fc1_g", y, "silu") * dense(row, "mlp.fc1_x", y)
    return h + dense(row, "mlp.fc2", norm(row, "mlp.norm", y))


# --- windows --------------------------------------------------------------------------------------


def relative(height, width):
    """Returns the row of a window's table for each query and key: (dy + h - 1)(2 w - 1) + dx + w - 1."""
    row, column = (axis.reshape(-1) for axis in np.mgrid[:height, :width])
    dy, dx = (axis[:, None] - axis[None] for axis in (row, column))
    return (dy + height - 1) * (2 * width - 1) + dx + width - 1


def beit(row, x):
    """Adds three rows to the table of distances: class token to patches, back, and to itself."""
    table = row["attn.relative_position_bias_table"]
    index = np.empty((T, T), int)
    index[1:, 1:] = relative(2, 3)
    index[0], index[:, 0], index[0, 0] = len(table) - 3, len(table) - 2, len(table) - 1
    q, k, v = jaxfused.qkv_projection(
        norm(row, "norm1", x, 1e-6),
        row.kernel("attn.qkv"),
        biases_without_the_keys(row),
        heads=HEADS,
    )
    y = jaxfused.dot_product_attention(q, k, v, bias=table[index].transpose(2, 0, 1)[None])
    y = dense(row, "attn.proj", y.reshape(x.shape))
    y, h = norm(row, "norm2", y, 1e-6, residual=x, gate=row["gamma_1"])
    return h + row["gamma_2"] * perceptron(row, "mlp", y)


WINDOW = 4


def in_windows(x):
    """Converts [B, H, W, ...] to [B * windows, tokens of a window, ...]."""
    b, h, w, *rest = x.shape
    x = x.reshape(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, *rest)
    return x.swapaxes(2, 3).reshape(-1, WINDOW * WINDOW, *rest)


def from_windows(x, shape):
    b, h, w, d = shape
    x = x.reshape(b, h // WINDOW, w // WINDOW, WINDOW, WINDOW, d)
    return x.swapaxes(2, 3).reshape(shape)


def regions(shape, shift):
    """Returns which of the nine parts of a rolled picture each token belongs to: its segment."""
    parts = [np.digitize(np.arange(n), (n - WINDOW, n - shift)) for n in shape[1:3]]
    whole = parts[0][:, None] * 3 + parts[1]
    return in_windows(np.broadcast_to(whole, shape[:3]))


def window_attention(row, x, shift, qkv, bias):
    rolled = jnp.roll(x, (-shift, -shift), (1, 2))
    q, k, v = qkv(in_windows(rolled))
    segments = jnp.asarray(regions(x.shape, shift)) if shift else None
    y = jaxfused.dot_product_attention(
        q, k, v, bias=bias, query_segment_ids=segments, key_value_segment_ids=segments
    )
    y = dense(row, "attn.proj", y.reshape(*y.shape[:2], D))
    return jnp.roll(from_windows(y, x.shape), (shift, shift), (1, 2))


def swin(row, x, shift=0):
    table = row["attn.relative_position_bias_table"]

    def qkv(windows):
        kernel, bias = row.kernel("attn.qkv"), row.bias("attn.qkv")
        return jaxfused.qkv_projection(windows, kernel, bias, heads=HEADS)

    bias = table[relative(WINDOW, WINDOW)].transpose(2, 0, 1)[None]
    y = window_attention(row, norm(row, "norm1", x, 1e-5), shift, qkv, bias)
    y, h = norm(row, "norm2", y, 1e-5, residual=x)
    return h + perceptron(row, "mlp", y)


def swin_v2(row, x):
    """Cosine attention with a learned scale, a bias from an MLP of distances, norms after branches."""

    def qkv(windows):
        q, k, v = jaxfused.qkv_projection(
            windows, row.kernel("attn.qkv"), biases_without_the_keys(row), heads=HEADS
        )
        q, k = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
        # The operator's own division is cancelled here, and the scale of each head is applied.
        scale = jnp.exp(jnp.minimum(row["attn.logit_scale"], math.log(100.0)))[:, 0]
        return q * scale * math.sqrt(H), k, v

    distances = np.stack(np.mgrid[-3:4, -3:4], axis=-1) * 8.0 / (WINDOW - 1)
    places = jnp.asarray(np.sign(distances) * np.log2(np.abs(distances) + 1) / 3, jnp.float32)
    table = dense(row, "attn.cpb_mlp.2", dense(row, "attn.cpb_mlp.0", places, "relu"))
    bias = 16 * jax.nn.sigmoid(table.reshape(-1, HEADS)[relative(WINDOW, WINDOW)])
    y = window_attention(row, x, 2, qkv, bias.transpose(2, 0, 1)[None])
    x = x + norm(row, "norm1", y, 1e-5)
    return x + norm(row, "norm2", perceptron(row, "mlp", x), 1e-5)


def merged(x):
    """Concatenates 2 x 2 patches as features, in the order (row, column) 00, 10, 01, 11."""
    b, h, w, d = x.shape
    return (
        x.reshape(b, h // 2, 2, w // 2, 2, d)
        .transpose(0, 1, 3, 4, 2, 5)
        .reshape(b, h // 2, w // 2, 4 * d)
    )


def sam(row, x):
    """Attention with a bias of rows plus one of columns, both products of the unscaled queries."""
    height, width = x.shape[1:3]
    tokens = x.reshape(1, height * width, D)
    q, k, v = jaxfused.qkv_projection(tokens, row.kernel("qkv"), row.bias("qkv"), heads=HEADS)
    grid = q.reshape(1, height, width, HEADS, H)

    def distances(name, n):
        return row[name][np.arange(n)[:, None] - np.arange(n) + n - 1]

    rows = jnp.einsum("bhwnc,hkc->bnhwk", grid, distances("rel_pos_h", height))
    columns = jnp.einsum("bhwnc,wkc->bnhwk", grid, distances("rel_pos_w", width))
    bias = (rows[..., :, None] + columns[..., None, :]).reshape(1, HEADS, *[height * width] * 2)
    y = jaxfused.dot_product_attention(q, k, v, bias=bias)
    return dense(row, "proj", y.reshape(x.shape))


def siglip_pool(row, x):
    """Pools by a learned query, followed by a norm and a residual MLP."""
    q = dense(row, "q", jnp.broadcast_to(row["latent"], (B, 1, D))).reshape(B, 1, HEADS, H)
    k, v = (a.reshape(B, T, HEADS, H) for a in jnp.split(dense(row, "kv", x), 2, axis=-1))
    y = dense(row, "proj", jaxfused.dot_product_attention(q, k, v).reshape(B, 1, D))
    return (y + perceptron(row, "mlp", norm(row, "norm", y)))[:, 0]


# --- mixers and convolutions ----------------------------------------------------------------------


def mixer(row, x):
    y = perceptron(row, "mlp_tokens", norm(row, "norm1", x).swapaxes(1, 2)).swapaxes(1, 2)
    y, h = norm(row, "norm2", y, residual=x)
    return h + perceptron(row, "mlp_channels", y)


def resmlp(row, x):
    """An affine map replaces the norms."""

    def affine(name, x):
        return row[f"{name}.beta"] + row[f"{name}.alpha"] * x

    mixed = dense(row, "linear_tokens", affine("norm1", x).swapaxes(1, 2)).swapaxes(1, 2)
    x = x + row["ls1"] * mixed
    return x + row["ls2"] * perceptron(row, "mlp_channels", affine("norm2", x))


def conv(row, name, x, size, **options):
    padding = ((size // 2, size // 2),) * 2
    w = row[f"{name}.weight"].transpose(2, 3, 1, 0)
    bias = row.bias(name) if f"{name}.bias" in row else None
    return jaxfused.conv(x, w, bias, padding=padding, **options)


def convnext(row, x):
    parameters = {
        "conv": {
            "kernel": row["conv_dw.weight"].transpose(2, 3, 1, 0),
            "bias": row.bias("conv_dw"),
        },
        "norm": of_norm(row, "norm"),
        "mlp": {"up": of_layer(row, "mlp.fc1"), "down": of_layer(row, "mlp.fc2")},
        "layer_scale": row["gamma"],
    }
    block = jaxfused.linen.ConvNeXtBlock(activation="gelu_erf")
    return block.apply({"params": parameters}, x)


def convnext_v2(row, x):
    """Global response norm: lengths over the picture, divided by their mean over the channels."""
    y = norm(row, "norm", conv(row, "conv_dw", x, 7, feature_group_count=D))
    y = dense(row, "mlp.fc1", y, "gelu_erf")
    length = jnp.linalg.norm(y, axis=(1, 2), keepdims=True)
    share = length / (length.mean(axis=-1, keepdims=True) + 1e-6)
    y = y + row.bias("mlp.grn") + row["mlp.grn.weight"] * (y * share)
    return x + dense(row, "mlp.fc2", y)


def resnet(row, x):
    """The norm is in evaluation, with a new model's statistics."""

    def normed(name, y, residual=None):
        weight, bias = row[f"{name}.weight"], row.bias(name)
        y = y * (weight / math.sqrt(1 + 1e-5)) + bias
        y = y if residual is None else y + residual
        return jax.nn.relu(y)

    y = normed("bn1", conv(row, "conv1", x, 1))
    y = normed("bn2", conv(row, "conv2", y, 3))
    return normed("bn3", conv(row, "conv3", y, 1), residual=x)


TOKENS, PICTURE, CHANNELS = (B, T, D), (1, 8, 8, D), (B, 5, 6, D)
BLOCKS = {
    "ViT": (vit, TOKENS),
    "DINOv2": (functools.partial(vit, layer_scale=1.0), TOKENS),
    "ViT with norms of heads": (
        functools.partial(vit, layer_scale=1.0, normalize_qk="layer_norm"),
        TOKENS,
    ),
    "EVA-02": (eva02, TOKENS),
    "DINOv3": (dinov3, TOKENS),
    "BEiT": (beit, TOKENS),
    "Swin": (swin, PICTURE),
    "Swin, shifted": (functools.partial(swin, shift=2), PICTURE),
    "Swin v2": (swin_v2, PICTURE),
    "Swin's merging": (
        lambda row, x: dense(row, "reduction", norm(row, "norm", merged(x), 1e-5)),
        (1, 4, 4, D),
    ),
    "Swin v2's merging": (
        lambda row, x: norm(row, "norm", dense(row, "reduction", merged(x)), 1e-5),
        (1, 4, 4, D),
    ),
    "SAM": (sam, (1, 3, 4, D)),
    "SigLIP's pool": (siglip_pool, TOKENS),
    "MLP-Mixer": (mixer, TOKENS),
    "ResMLP": (resmlp, TOKENS),
    "ConvNeXt": (convnext, CHANNELS),
    "ConvNeXt v2": (convnext_v2, CHANNELS),
    "ResNet": (resnet, CHANNELS),
}
TABLES = {
    "tables of DINOv3": functools.partial(dinov3_tables, 3, 4),
    "tables of EVA-02": functools.partial(eva_tables, 3, 4),
    # Positions count from 1, and columns come before rows.
    "tables of Perception Encoder": lambda: jaxfused.axial_rope_tables(
        positions=tuple((np.arange(n) + 1) * 24 / n for n in (3, 4)),
        features=(H // 2, H // 2),
        theta=1e4,
        order=(1, 0),
    ),
}


def test_every_row_has_a_test():
    assert set(ROWS) == {*BLOCKS, *TABLES}


@parametrize("name", list(BLOCKS), quick=slice(None, None, 2))
def test_blocks_of_timm(name):
    row = ROWS[name]
    block, shape = BLOCKS[name]
    wanted = row.results["y"]
    if shape is CHANNELS:
        x = row.input("x", (B, D, 5, 6)).transpose(0, 2, 3, 1)
        wanted = wanted.transpose(0, 2, 3, 1)
    else:
        x = row.input("x", shape)
    y = jax.jit(functools.partial(block, row))(x)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_timm(name):
    cos, sin = TABLES[name]()
    np.testing.assert_allclose(cos, ROWS[name].results["cos"], atol=1e-5)
    np.testing.assert_allclose(sin, ROWS[name].results["sin"], atol=1e-5)
