"""Blocks and tables of diffusers, rebuilt from the public operators and compared with its numbers.

tests/recorded/record_diffusion.py ran the blocks of diffusers 0.42.1, with parameters that depend on
their names; tests/recorded/diffusion.npz has the results. Each function here shows how a family is
written with this package: the order of its modulation's chunks, its norms, and the tokens that are
rotated.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
from tests.recorded.values import load
from tests.support.grids import parametrize

ROWS = load("diffusion.npz")
B, T, TEXT, D, HEADS, H = 2, 6, 4, 32, 2, 16


def dense(row, name, x, activation=None):
    bias = row.bias(name) if f"{name}.bias" in row else None
    return jaxfused.linear(x, row.kernel(name), bias, activation=activation)


def chunks(row, name, condition, number):
    return jnp.split(dense(row, name, jax.nn.silu(condition)), number, axis=-1)


def table_chunks(row, time):
    """Returns six chunks: a learned table [6, D] plus the modulation that all blocks share."""
    values = row["scale_shift_table"].reshape(6, D) + time.reshape(*time.shape[:-1], -1, D)
    return [values[..., i, :] for i in range(6)]


def modulated(x, shift, scale, epsilon=1e-6):
    return jaxfused.layer_norm(x, epsilon=epsilon, image_scale=scale, image_shift=shift)


def affine_norm(row, name, x, epsilon, **options):
    weight, bias = row[f"{name}.weight"], row[f"{name}.bias"]
    return jaxfused.layer_norm(x, weight, bias, epsilon=epsilon, **options)


def heads(x, number=HEADS):
    return x.reshape(*x.shape[:-1], number, -1)


def perceptron(row, name, x, activation="gelu_tanh"):
    """Computes FeedForward of diffusers; "gelu-approximate" is the GELU by a tanh."""
    bias = [
        row.bias(f"{name}.{n}") if f"{name}.{n}.bias" in row else None
        for n in ("net.0.proj", "net.2")
    ]
    up, down = row.kernel(f"{name}.net.0.proj"), row.kernel(f"{name}.net.2")
    return jaxfused.mlp(x, up, bias[0], down, bias[1], activation=activation)


def value_first(row, name, x, activation):
    """Computes its "geglu" and "swiglu": one matrix, with the value's columns before the gate's."""
    up, gate = jnp.split(row.kernel(f"{name}net.0.proj"), 2, axis=-1)
    b_up = b_gate = b_down = None
    if f"{name}net.0.proj.bias" in row:
        b_up, b_gate = jnp.split(row.bias(f"{name}net.0.proj"), 2)
        b_down = row.bias(f"{name}net.2")
    down = row.kernel(f"{name}net.2")
    biases = dict(b_gate=b_gate, b_up=b_up, b_down=b_down)
    return jaxfused.gated_mlp(x, gate, up, down, activation=activation, **biases)


IMAGE_NAMES, TEXT_NAMES = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def qkv(row, name, x, names=IMAGE_NAMES, norms=("norm_q", "norm_k"), norm=None, context=None):
    """Returns queries of x, and keys and values of the context, with a norm per head if there is one."""
    context = x if context is None else context
    q, k, v = (
        heads(dense(row, f"{name}.{n}", source))
        for n, source in zip(names, (x, context, context), strict=True)
    )
    if norm is not None:
        q, k = norm(row, f"{name}.{norms[0]}", q), norm(row, f"{name}.{norms[1]}", k)
    return q, k, v


def rms(epsilon):
    return lambda row, name, x: jaxfused.rms_norm(x, row[f"{name}.weight"], epsilon=epsilon)


def layer(epsilon, affine=True):
    if not affine:
        return lambda row, name, x: jaxfused.layer_norm(x, epsilon=epsilon)
    return lambda row, name, x: affine_norm(row, name, x, epsilon)


def attend(q, k, v):
    y = jaxfused.dot_product_attention(q, k, v)
    return y.reshape(*y.shape[:-2], -1)


def tables(row, tokens, *more):
    angles = row.input("angles", (tokens, *more, H // 2))
    return dict(cos=jnp.cos(angles), sin=jnp.sin(angles), interleaved=True)


def joint(row, name, x, text, *, norm=None, turn=lambda q, k, number: (q, k)):
    """Returns joint attention of text and image; `turn` rotates q and k, with `number` text tokens."""
    of_text = qkv(row, name, text, TEXT_NAMES, ("norm_added_q", "norm_added_k"), norm)
    of_image = qkv(row, name, x, norm=norm)
    q, k, v = (jnp.concatenate(pair, axis=1) for pair in zip(of_text, of_image, strict=True))
    number = text.shape[1]
    y = attend(*turn(q, k, number), v)
    return y[:, number:], y[:, :number]


def all_turn(row, **options):
    both = tables(row, TEXT + T) | options
    return lambda q, k, number: jaxfused.rope(q, k, **both)


def image_turns(row, *more, **options):
    """Returns a rotation of the image only: the text comes first, with angles of 0."""
    found = tables(row, T, *more) | options

    def turn(q, k, number):
        still = ((number, 0),) + ((0, 0),) * (found["cos"].ndim - 1)
        cos = jnp.pad(found["cos"], still, constant_values=1.0)
        sin = jnp.pad(found["sin"], still)
        return jaxfused.rope(q, k, cos=cos, sin=sin, interleaved=found["interleaved"])

    return turn


def second_half(stream, branch, gate1, shift, scale, gate2, feed, epsilon=1e-6):
    """Computes the second half of a block: the norm adds the gated branch, then a gated MLP."""
    y, stream = jaxfused.layer_norm(
        branch, residual=stream, gate=gate1, image_scale=scale, image_shift=shift, epsilon=epsilon
    )
    return stream + gate2[:, None] * feed(y)


# --- blocks ---------------------------------------------------------------------------------------


def dit(row, x, text, time):
    """Calls the module itself, whose two norms differ here."""
    layers = {
        name: {"kernel": kernel, "bias": bias}
        for name, kernel, bias in (
            ("modulation", row.kernel("norm1.linear"), row.bias("norm1.linear")),
            (
                "qkv",
                jnp.concatenate([row.kernel(f"attn1.{n}") for n in IMAGE_NAMES], axis=-1),
                jnp.concatenate([row.bias(f"attn1.{n}") for n in IMAGE_NAMES]),
            ),
            ("project", row.kernel("attn1.to_out.0"), row.bias("attn1.to_out.0")),
        )
    }
    layers["mlp"] = {
        ours: {"kernel": row.kernel(f"ff.net.{theirs}"), "bias": row.bias(f"ff.net.{theirs}")}
        for ours, theirs in (("up", "0.proj"), ("down", "2"))
    }
    block = jaxfused.linen.DiTBlock(HEADS, mlp_epsilon=1e-5)
    return {"y": block.apply({"params": layers}, x, time)}


def pixart(row, x, text, time):
    shift1, scale1, gate1, shift2, scale2, gate2 = table_chunks(row, row.input("time", (B, 6 * D)))
    y = attend(*qkv(row, "attn1", modulated(x, shift1, scale1)))
    h = x + gate1[:, None] * dense(row, "attn1.to_out.0", y)
    cross = dense(row, "attn2.to_out.0", attend(*qkv(row, "attn2", h, context=text)))
    y, h = jaxfused.layer_norm(cross, residual=h, image_scale=scale2, image_shift=shift2)
    return {"y": h + gate2[:, None] * perceptron(row, "ff", y)}


def of_unet(row, x, text, time):
    norm = functools.partial(affine_norm, row, epsilon=1e-5)
    y = attend(*qkv(row, "attn1", norm("norm1", x)))
    y, h = norm("norm2", dense(row, "attn1.to_out.0", y), residual=x)
    y = dense(row, "attn2.to_out.0", attend(*qkv(row, "attn2", y, context=text)))
    y, h = norm("norm3", y, residual=h)
    return {"y": h + value_first(row, "ff.", y, "gelu_erf")}


def two_streams(row, x, text, time, *, norm, turn, names, epsilon=1e-6):
    """Flux, SD3, Qwen-Image, HunyuanVideo: shift, scale, gate, twice, for each stream."""
    of_image, of_text, feed_image, feed_text = names
    image, context = (chunks(row, n, time, 6) for n in (of_image, of_text))
    y, y_text = joint(
        row,
        "attn",
        modulated(x, *image[:2], epsilon),
        modulated(text, *context[:2], epsilon),
        norm=norm,
        turn=turn,
    )
    y, y_text = dense(row, "attn.to_out.0", y), dense(row, "attn.to_add_out", y_text)
    return {
        "y": second_half(x, y, *image[2:], functools.partial(perceptron, row, feed_image)),
        "text": second_half(
            text, y_text, *context[2:], functools.partial(perceptron, row, feed_text)
        ),
    }


LINEARS = ("norm1.linear", "norm1_context.linear", "ff", "ff_context")


def still(q, k, number):
    return q, k


def flux(row, x, text, time):
    return two_streams(row, x, text, time, norm=rms(1e-6), turn=all_turn(row), names=LINEARS)


def flux_of_one_stream(row, x, text, time):
    """Attention and MLP are concatenated, and share an output product."""
    x = jnp.concatenate([text, x], axis=1)
    shift, scale, gate = chunks(row, "norm.linear", time, 3)
    y = modulated(x, shift, scale)
    q, k, v = qkv(row, "attn", y, norm=rms(1e-6))
    q, k = all_turn(row)(q, k, TEXT)
    both = jnp.concatenate([attend(q, k, v), dense(row, "proj_mlp", y, "gelu_tanh")], axis=-1)
    x = x + gate[:, None] * dense(row, "proj_out", both)
    return {"y": x[:, TEXT:], "text": x[:, :TEXT]}


def gate_first(row, name, x):
    """Flux 2 concatenates the gate's columns first, as `gated_mlp` takes them."""
    w, down = row.kernel(f"{name}.linear_in"), row.kernel(f"{name}.linear_out")
    return jaxfused.gated_mlp(x, w, None, down, activation="silu")


def flux2(row, x, text, time):
    """There are no biases, and all blocks share a modulation that is computed outside."""
    image, context = (
        jnp.split(row.input(f"{name} modulation", (B, 6 * D)), 6, axis=-1)
        for name in ("image", "text")
    )
    y, y_text = joint(
        row,
        "attn",
        modulated(x, *image[:2]),
        modulated(text, *context[:2]),
        norm=rms(1e-6),
        turn=all_turn(row),
    )
    y, y_text = dense(row, "attn.to_out.0", y), dense(row, "attn.to_add_out", y_text)
    return {
        "y": second_half(x, y, *image[2:], functools.partial(gate_first, row, "ff")),
        "text": second_half(
            text, y_text, *context[2:], functools.partial(gate_first, row, "ff_context")
        ),
    }


def flux2_of_one_stream(row, x, text, time):
    """One product gives queries, keys, values and both halves of the MLP."""
    x = jnp.concatenate([text, x], axis=1)
    shift, scale, gate = jnp.split(row.input("modulation", (B, 3 * D)), 3, axis=-1)
    y = dense(row, "attn.to_qkv_mlp_proj", modulated(x, shift, scale))
    q, k, v, to_gate, up = jnp.split(y, (D, 2 * D, 3 * D, 6 * D), axis=-1)
    norm = functools.partial(rms(1e-6), row)
    q, k = norm("attn.norm_q", heads(q)), norm("attn.norm_k", heads(k))
    q, k = all_turn(row)(q, k, TEXT)
    both = jnp.concatenate([attend(q, k, heads(v)), jax.nn.silu(to_gate) * up], axis=-1)
    x = x + gate[:, None] * dense(row, "attn.to_out", both)
    return {"y": x[:, TEXT:], "text": x[:, :TEXT]}


def z_image(row, x, text, time):
    """Like Lumina 2, but without a SiLU before the modulation."""
    scale1, gate1, scale2, gate2 = jnp.split(dense(row, "adaLN_modulation.0", time), 4, axis=-1)
    norm = functools.partial(jaxfused.rms_norm, epsilon=1e-5)
    y = norm(x, row["attention_norm1.weight"], image_scale=scale1)
    q, k, v = qkv(row, "attention", y, norm=rms(1e-5))
    angles = row.input("angles", (B, T, H // 2))
    q, k = jaxfused.rope(q, k, cos=jnp.cos(angles), sin=jnp.sin(angles), interleaved=True)
    y = norm(dense(row, "attention.to_out.0", attend(q, k, v)), row["attention_norm2.weight"])
    y, h = norm(y, row["ffn_norm1.weight"], residual=x, gate=jnp.tanh(gate1), image_scale=scale2)
    kernels = (row.kernel(f"feed_forward.w{n}") for n in (1, 3, 2))
    y = jaxfused.gated_mlp(y, *kernels, activation="silu")
    return {"y": h + jnp.tanh(gate2)[:, None] * norm(y, row["ffn_norm2.weight"])}


def last_of_sd3(row, x, text, time):
    """The text is not returned, and its norm has the scale before the shift."""
    image = chunks(row, LINEARS[0], time, 6)
    scale, shift = chunks(row, LINEARS[1], time, 2)
    y, _ = joint(row, "attn", modulated(x, *image[:2]), modulated(text, shift, scale))
    y = dense(row, "attn.to_out.0", y)
    return {"y": second_half(x, y, *image[2:], functools.partial(perceptron, row, "ff"))}


def sd3(row, x, text, time):
    return two_streams(row, x, text, time, norm=None, turn=still, names=LINEARS)


def sd35(row, x, text, time):
    """A second attention reads the image only; its three chunks come last."""
    image, context = chunks(row, LINEARS[0], time, 9), chunks(row, LINEARS[1], time, 6)
    y, y_text = joint(
        row, "attn", modulated(x, *image[:2]), modulated(text, *context[:2]), norm=rms(1e-6)
    )
    own = attend(*qkv(row, "attn2", modulated(x, *image[6:8]), norm=rms(1e-6)))
    y, y_text = dense(row, "attn.to_out.0", y), dense(row, "attn.to_add_out", y_text)
    x = x + image[8][:, None] * dense(row, "attn2.to_out.0", own)
    return {
        "y": second_half(x, y, *image[2:6], functools.partial(perceptron, row, "ff")),
        "text": second_half(
            text, y_text, *context[2:], functools.partial(perceptron, row, "ff_context")
        ),
    }


def auraflow(row, x, text, time):
    """Attention's branch enters the MLP only, whose result is added to the block's input."""
    image, context = (chunks(row, n, time, 6) for n in LINEARS[:2])
    y, y_text = joint(
        row,
        "attn",
        modulated(x, *image[:2], 1e-5),
        modulated(text, *context[:2], 1e-5),
        norm=layer(1e-5, affine=False),
    )

    def end(stream, branch, gate1, shift, scale, gate2, name):
        y, _ = jaxfused.layer_norm(
            branch, residual=stream, gate=gate1, image_scale=scale, image_shift=shift, epsilon=1e-5
        )
        kernels = (row.kernel(f"{name}.{n}") for n in ("linear_1", "linear_2", "out_projection"))
        return stream + gate2[:, None] * jaxfused.gated_mlp(y, *kernels, activation="silu")

    return {
        "y": end(x, dense(row, "attn.to_out.0", y), *image[2:], "ff"),
        "text": end(text, dense(row, "attn.to_add_out", y_text), *context[2:], "ff_context"),
    }


def qwen_image(row, x, text, time):
    names = ("img_mod.1", "txt_mod.1", "img_mlp", "txt_mlp")
    return two_streams(row, x, text, time, norm=rms(1e-6), turn=all_turn(row), names=names)


def hunyuan_video(row, x, text, time):
    return two_streams(row, x, text, time, norm=rms(1e-6), turn=image_turns(row), names=LINEARS)


def over_all_heads(row, name, x, epsilon, context=None, turn=lambda x: x):
    """The norm of queries and keys spans all heads: Wan and LTX."""
    context = x if context is None else context
    q = jaxfused.rms_norm(
        dense(row, f"{name}.to_q", x), row[f"{name}.norm_q.weight"], epsilon=epsilon
    )
    k = jaxfused.rms_norm(
        dense(row, f"{name}.to_k", context), row[f"{name}.norm_k.weight"], epsilon=epsilon
    )
    y = attend(turn(q), turn(k), heads(dense(row, f"{name}.to_v", context)))
    return dense(row, f"{name}.to_out.0", y)


def wan(row, x, text, time):
    shift1, scale1, gate1, shift2, scale2, gate2 = table_chunks(
        row, row.input("time", (B, 6, D)).reshape(B, 6 * D)
    )
    turn = functools.partial(jaxfused.rope, **tables(row, T))
    y = over_all_heads(
        row, "attn1", modulated(x, shift1, scale1), 1e-6, turn=lambda x: turn(heads(x))
    )
    y, h = affine_norm(row, "norm2", y, 1e-6, residual=x, gate=gate1)
    y = over_all_heads(row, "attn2", y, 1e-6, context=text, turn=heads)
    y, h = jaxfused.layer_norm(y, residual=h, image_scale=scale2, image_shift=shift2)
    return {"y": h + gate2[:, None] * perceptron(row, "ffn", y)}


def ltx(row, x, text, time):
    """Each token has a modulation, RMS norms have no scale, and all heads rotate as one."""
    shift1, scale1, gate1, shift2, scale2, gate2 = table_chunks(
        row, row.input("time", (B, T, 6 * D))
    )
    angles = row.input("angles", (1, T, D // 2))[0]
    turn = functools.partial(
        jaxfused.rope, cos=jnp.cos(angles), sin=jnp.sin(angles), interleaved=True
    )

    def as_one(x):
        return heads(turn(x[:, :, None])[:, :, 0])

    y = jaxfused.rms_norm(x, image_scale=scale1, image_shift=shift1)
    h = x + gate1 * over_all_heads(row, "attn1", y, 1e-5, turn=as_one)
    y = over_all_heads(row, "attn2", h, 1e-5, context=text, turn=heads)
    y, h = jaxfused.rms_norm(y, residual=h, image_scale=scale2, image_shift=shift2)
    return {"y": h + gate2 * perceptron(row, "ff", y)}


def cogvideox(row, x, text, time):
    """The image's three chunks, then the text's; both norms share a modulation."""

    def both(name, x, text):
        image, context = jnp.split(jnp.stack(chunks(row, f"{name}.linear", time, 6)), 2)
        y, y_text = (
            affine_norm(row, f"{name}.norm", stream, 1e-5, image_shift=shift, image_scale=scale)
            for stream, (shift, scale, _) in ((x, image), (text, context))
        )
        return jnp.concatenate([y_text, y], axis=1), image[2][:, None], context[2][:, None]

    y, gate, gate_text = both("norm1", x, text)
    q, k, v = qkv(row, "attn1", y, norm=layer(1e-6))
    q, k = image_turns(row)(q, k, TEXT)
    y = dense(row, "attn1.to_out.0", attend(q, k, v))
    x, text = x + gate * y[:, TEXT:], text + gate_text * y[:, :TEXT]
    y, gate, gate_text = both("norm2", x, text)
    y = perceptron(row, "ff", y)
    return {"y": x + gate * y[:, TEXT:], "text": text + gate_text * y[:, :TEXT]}


def cogview4(row, x, text, time):
    """Twelve chunks alternate between image and text, without a SiLU; rope pairs halves."""
    of_both = jnp.split(dense(row, "norm1.linear", time), 12, axis=-1)
    image, context = of_both[::2], of_both[1::2]
    y = jnp.concatenate(
        [modulated(text, *context[:2], 1e-5), modulated(x, *image[:2], 1e-5)], axis=1
    )
    q, k, v = qkv(row, "attn1", y, norm=layer(1e-5, affine=False))
    q, k = image_turns(row, interleaved=False)(q, k, TEXT)
    y = dense(row, "attn1.to_out.0", attend(q, k, v))
    feed = functools.partial(perceptron, row, "ff")
    return {
        "y": second_half(x, y[:, TEXT:], *image[2:], feed, 1e-5),
        "text": second_half(text, y[:, :TEXT], *context[2:], feed, 1e-5),
    }


def lumina2(row, x, text, time):
    """The modulation has scales and gates, no shift; tanh(gate) multiplies a norm of the branch."""
    scale1, gate1, scale2, gate2 = chunks(row, "norm1.linear", time, 4)
    norm = functools.partial(jaxfused.rms_norm, epsilon=1e-5)
    y = norm(x, row["norm1.norm.weight"], image_scale=scale1)
    q, k, v = (
        heads(dense(row, f"attn.{n}", y), number)
        for n, number in zip(IMAGE_NAMES, (4, 2, 2), strict=True)
    )
    q, k = norm(q, row["attn.norm_q.weight"]), norm(k, row["attn.norm_k.weight"])
    angles = row.input("angles", (B, T, 4))
    q, k = jaxfused.rope(q, k, cos=jnp.cos(angles), sin=jnp.sin(angles), interleaved=True)
    y = norm(dense(row, "attn.to_out.0", attend(q, k, v)), row["norm2.weight"])
    y, h = norm(y, row["ffn_norm1.weight"], residual=x, gate=jnp.tanh(gate1), image_scale=scale2)
    kernels = (row.kernel(f"feed_forward.linear_{n}") for n in (1, 3, 2))
    y = jaxfused.gated_mlp(y, *kernels, activation="silu")
    return {"y": h + jnp.tanh(gate2)[:, None] * norm(y, row["ffn_norm2.weight"])}


def mochi(row, x, text, time):
    """RMS norms with modulated scales only, gates, angles per head; in the MLP the value comes first."""
    image, context = (chunks(row, n, time, 4) for n in LINEARS[:2])
    norm = functools.partial(jaxfused.rms_norm, epsilon=1e-6)
    y, y_text = joint(
        row,
        "attn1",
        norm(x, image_scale=image[0]),
        norm(text, image_scale=context[0]),
        norm=rms(1e-5),
        turn=image_turns(row, HEADS),
    )

    def end(stream, branch, _, gate1, scale, gate2, name):
        y, h = norm(norm(branch), residual=stream, gate=jnp.tanh(gate1), image_scale=scale)
        return h + jnp.tanh(gate2)[:, None] * norm(value_first(row, f"{name}.", y, "silu"))

    return {
        "y": end(x, dense(row, "attn1.to_out.0", y), *image, "ff"),
        "text": end(text, dense(row, "attn1.to_add_out", y_text), *context, "ff_context"),
    }


def hunyuan_dit(row, x, text, time):
    """A skip across blocks, a modulation by a shift only, and rope on the cross attention's queries."""
    norm = functools.partial(affine_norm, row, epsilon=1e-6)
    skip = row.input("skip", (B, T, D))
    x = dense(row, "skip_linear", norm("skip_norm", jnp.concatenate([x, skip], axis=-1)))
    y = norm("norm1.norm", x, image_shift=dense(row, "norm1.linear", jax.nn.silu(time)))
    turn = functools.partial(jaxfused.rope, **tables(row, T))
    q, k, v = qkv(row, "attn1", y, norm=layer(1e-6))
    y, h = norm("norm2", dense(row, "attn1.to_out.0", attend(*turn(q, k), v)), residual=x)
    q, k, v = qkv(row, "attn2", y, norm=layer(1e-6), context=text)
    y, h = norm("norm3", dense(row, "attn2.to_out.0", attend(turn(q), k, v)), residual=h)
    return {"y": h + perceptron(row, "ff", y)}


def cosmos(row, x, text, time):
    """Three branches, each with a low-rank modulation plus a shared one; an exact GELU."""
    shared = row.input("shared", (B, 3 * D))

    def branch(name):
        low = dense(row, f"{name}.linear_1", jax.nn.silu(time))
        return jnp.split(dense(row, f"{name}.linear_2", low) + shared, 3, axis=-1)

    turn = functools.partial(jaxfused.rope, **tables(row, T) | dict(interleaved=False))
    shift, scale, gate = branch("norm1")
    q, k, v = qkv(row, "attn1", modulated(x, shift, scale), norm=rms(1e-5))
    y = dense(row, "attn1.to_out.0", attend(*turn(q, k), v))
    shift, scale, next_gate = branch("norm2")
    modulation = dict(image_shift=shift, image_scale=scale)
    y, h = jaxfused.layer_norm(y, residual=x, gate=gate, **modulation)
    y = dense(row, "attn2.to_out.0", attend(*qkv(row, "attn2", y, norm=rms(1e-5), context=text)))
    shift, scale, last_gate = branch("norm3")
    modulation = dict(image_shift=shift, image_scale=scale)
    y, h = jaxfused.layer_norm(y, residual=h, gate=next_gate, **modulation)
    return {"y": h + last_gate[:, None] * perceptron(row, "ff", y, "gelu_erf")}


def last_of_flux(row, x, text, time):
    """The scale comes before the shift here, as in SD3, Qwen-Image and HunyuanVideo."""
    scale, shift = chunks(row, "linear", time, 2)
    return {"y": modulated(x, shift, scale)}


def feed(activation, gated):
    def run(row, x, text, time):
        if gated:
            return {"y": value_first(row, "", x, activation)}
        return {"y": dense(row, "net.2", dense(row, "net.0.proj", x, activation))}

    return run


BLOCKS = {
    "DiT": dit,
    "PixArt": pixart,
    "block of a U-Net": of_unet,
    "Flux": flux,
    "Flux, one stream": flux_of_one_stream,
    "Flux 2": flux2,
    "Flux 2, one stream": flux2_of_one_stream,
    "Z-Image": z_image,
    "SD3": sd3,
    "SD3, last": last_of_sd3,
    "SD3.5": sd35,
    "AuraFlow": auraflow,
    "Qwen-Image": qwen_image,
    "HunyuanVideo": hunyuan_video,
    "Wan": wan,
    "LTX": ltx,
    "CogVideoX": cogvideox,
    "CogView4": cogview4,
    "Lumina 2": lumina2,
    "Mochi": mochi,
    "Hunyuan-DiT": hunyuan_dit,
    "Cosmos": cosmos,
    "last norm of Flux": last_of_flux,
    "perceptron geglu": feed("gelu_erf", gated=True),
    "perceptron swiglu": feed("silu", gated=True),
    # This activation is not gated, in spite of its name.
    "perceptron geglu-approximate": feed("quick_gelu", gated=False),
    "perceptron gelu": feed("gelu_erf", gated=False),
}


# --- convolutions ---------------------------------------------------------------------------------


def conv(row, name, x, **options):
    w = row[f"{name}.weight"].transpose(2, 3, 1, 0)
    return jaxfused.conv(x, w, row.bias(name), **{"padding": ((1, 1), (1, 1))} | options)


def group_norm(row, name, x, epsilon, **options):
    weight, bias = row[f"{name}.weight"], row.bias(name)
    return jaxfused.group_norm(x, weight, bias, num_groups=4, epsilon=epsilon, **options)


def residual_block(row, x, *, scale_shift=False, factor=1.0):
    """The time is added before the second norm, or scales and shifts its result."""
    time = jax.nn.silu(row.input("time", (B, 12)))
    time = dense(row, "time_emb_proj", time)
    y = conv(row, "conv1", group_norm(row, "norm1", x, 1e-6, activation="silu"))
    if scale_shift:
        scale, shift = jnp.split(time, 2, axis=-1)
        modulation = dict(image_scale=scale, image_shift=shift)
        y = group_norm(row, "norm2", y, 1e-6, activation="silu", **modulation)
    else:
        y = y + time[:, None, None]
        y = group_norm(row, "norm2", y, 1e-6, activation="silu")
    y = conv(row, "conv2", y)
    if "conv_shortcut.weight" in row:
        x = conv(row, "conv_shortcut", x, padding=((0, 0), (0, 0)))
    return (x + y) / factor


def vae_attention(row, x):
    """Attention of one head over the pixels adds its residual inside, and divides by a factor."""
    y = group_norm(row, "group_norm", x, 1e-6).reshape(B, -1, 16)
    q, k, v = (dense(row, n, y)[:, :, None] for n in IMAGE_NAMES)
    return (x + dense(row, "to_out.0", attend(q, k, v)).reshape(x.shape)) / 2.0


CONVOLUTIONS = {
    "residual block": residual_block,
    "residual block, scale_shift": functools.partial(residual_block, scale_shift=True),
    "residual block, factor 2": functools.partial(residual_block, factor=2.0),
    "downsampling of a U-Net": lambda row, x: conv(row, "Conv2d_0", x, strides=2),
    "downsampling of a VAE": lambda row, x: conv(
        row, "Conv2d_0", x, strides=2, padding=((0, 1), (0, 1))
    ),
    "upsampling": lambda row, x: conv(row, "conv", jaxfused.upsample(x, 2, method="nearest")),
    "attention of a VAE": vae_attention,
}


# --- tables ---------------------------------------------------------------------------------------

VIDEO = (np.arange(2), np.arange(3), np.arange(4))


def centred(n):
    return np.arange(n) - (n - n // 2)


def flux_tables():
    ids = np.zeros((TEXT + 6, 3))
    ids[TEXT:, 1], ids[TEXT:, 2] = np.arange(6) // 3, np.arange(6) % 3
    return dict(positions=ids, features=(4, 6, 6), theta=1e4)


def qwen_tables():
    """Rows and columns are centred; the text continues from the larger half, on all axes."""
    grid = np.stack(np.meshgrid([0], centred(3), centred(4), indexing="ij"), -1).reshape(-1, 3)
    text = np.repeat(2 + np.arange(TEXT)[:, None], 3, axis=1)
    return dict(positions=np.concatenate([text, grid]), features=(4, 6, 6), theta=1e4)


def ltx_tables():
    """Frequencies rise and alternate between axes; the remainder of 6 comes first, without rotation."""
    rising = 1e4 ** np.linspace(0, 1, 5) * np.pi / 2
    frequencies = np.zeros((3, 16))
    for axis in range(3):
        frequencies[axis, 1 + axis :: 3] = rising
    scales = (0.5 / 20, 32 / 2048, 32 / 2048)
    positions = tuple(2 * n * scale - 1 for n, scale in zip(VIDEO, scales, strict=True))
    return dict(positions=positions, frequencies=frequencies)


def mochi_tables():
    """Learned frequencies per head for all axes at once; centred positions, scaled to one area."""
    scale = (192 * 192 / 12) ** 0.5
    centres = [(np.arange(n) + 0.5 - n / 2) * scale for n in (3, 4)]
    learned = ROWS["tables of Mochi"].input("learned", (3, HEADS, H // 2))
    return dict(positions=(np.arange(2), *centres), frequencies=learned)


TABLES = {
    "tables of Flux": flux_tables,
    "tables of Qwen-Image": qwen_tables,
    "tables of HunyuanVideo": lambda: dict(positions=VIDEO, features=(4, 6, 6), theta=256.0),
    "tables of Wan": lambda: dict(positions=VIDEO, features=(8, 4, 4), theta=1e4),
    "tables of LTX": ltx_tables,
    "tables of Mochi": mochi_tables,
    "tables of CogView4": lambda: dict(
        positions=(np.arange(3) * 8 // 3, np.arange(4) * 8 // 4), features=(8, 8), theta=1e4
    ),
}


def test_every_row_has_a_test():
    assert set(ROWS) == {*BLOCKS, *CONVOLUTIONS, *TABLES}


def near(actual, wanted):
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@parametrize("name", list(BLOCKS), quick=slice(None, None, 2))
def test_blocks_of_diffusers(name):
    row = ROWS[name]
    inputs = (
        row.input("x", (B, T, D)),
        row.input("text", (B, TEXT, D)),
        row.input("time", (B, D)),
    )
    results = jax.jit(functools.partial(BLOCKS[name], row))(*inputs)
    assert results.keys() == row.results.keys()
    jax.tree.map(near, results, row.results)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_diffusers(name):
    row = ROWS[name]
    x = row.input("x", (B, 16, 6, 8)).transpose(0, 2, 3, 1)
    y = jax.jit(functools.partial(CONVOLUTIONS[name], row))(x)
    near(y, row.results["y"].transpose(0, 2, 3, 1))


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_diffusers(name):
    wanted = ROWS[name].results
    cos, sin = jaxfused.axial_rope_tables(**TABLES[name]())
    # LTX and Mochi have angles of thousands of radians, which float32 resolves to three digits.
    size = {"tables of LTX": 2e-2, "tables of Mochi": 1e-3}.get(name, 1e-5)
    np.testing.assert_allclose(cos, wanted["cos"], atol=size)
    np.testing.assert_allclose(sin, wanted["sin"], atol=size)
