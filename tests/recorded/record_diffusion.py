"""Records blocks and tables of diffusers in diffusion.npz.

Run in an environment with torch and diffusers 0.42.1: `python -m tests.recorded.record_diffusion`.
"""

import inspect
from typing import Any

import diffusers
import torch
from diffusers.models import attention, downsampling, normalization, resnet, upsampling
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import auraflow_transformer_2d as auraflow
from diffusers.models.transformers import cogvideox_transformer_3d as cogvideox
from diffusers.models.transformers import hunyuan_transformer_2d as hunyuan_dit
from diffusers.models.transformers import transformer_cogview4 as cogview4
from diffusers.models.transformers import transformer_cosmos as cosmos
from diffusers.models.transformers import transformer_flux as flux
from diffusers.models.transformers import transformer_flux2 as flux2
from diffusers.models.transformers import transformer_hunyuan_video as hunyuan
from diffusers.models.transformers import transformer_ltx as ltx
from diffusers.models.transformers import transformer_lumina2 as lumina2
from diffusers.models.transformers import transformer_mochi as mochi
from diffusers.models.transformers import transformer_qwenimage as qwen
from diffusers.models.transformers import transformer_wan as wan
from diffusers.models.transformers import transformer_z_image as z_image

from tests.recorded.recorder import given, record, save

B, T, TEXT, D, HEADS, H = 2, 6, 4, 32, 2, 16


def tables(name: str, tokens: int, repeat: str, *, heads: int | None = None) -> Any:
    """Records cosines and sines of a row's own angles, repeated in the library's layout of pairs."""
    shape = (tokens, H // 2) if heads is None else (tokens, heads, H // 2)
    angles = given(name, "angles", *shape)
    if repeat == "neighbours":
        angles = angles.repeat_interleave(2, dim=-1)
    elif repeat == "halves":
        angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def block(
    name: str, module: torch.nn.Module, *, names: tuple[str, ...] = (), **inputs: Any
) -> None:
    """Records a block, called with those of x, text and time that it accepts."""
    x, text = given(name, "x", B, T, D), given(name, "text", B, TEXT, D)
    time = given(name, "time", B, D)
    taken = inspect.signature(module.forward).parameters
    arguments: dict[str, Any] = {"hidden_states": x}
    if "encoder_hidden_states" in taken:
        arguments["encoder_hidden_states"] = text
    if "temb" in taken:
        arguments["temb"] = time
    arguments |= inputs

    def run(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        results = module(**arguments)
        if isinstance(results, torch.Tensor):
            return {"y": results}
        found = dict(zip(names, results, strict=True))
        return {key: value for key, value in found.items() if value is not None}

    record(name, module, run)


class Given(torch.nn.Module):
    """Replaces the embedding of time and class by a row's own numbers."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return given(self.name, "time", B, D)


def transformers() -> None:
    basic = dict(dim=D, num_attention_heads=HEADS, attention_head_dim=H, attention_bias=True)
    dit = attention.BasicTransformerBlock(
        **basic,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=3,
        norm_elementwise_affine=False,
    )
    # The block would look the embedding up; here it is given.
    dit.norm1.emb = Given("DiT")
    block("DiT", dit)
    pixart = attention.BasicTransformerBlock(
        **basic,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        cross_attention_dim=D,
    )
    block("PixArt", pixart, timestep=given("PixArt", "time", B, 6 * D))
    plain = attention.BasicTransformerBlock(
        dim=D, num_attention_heads=HEADS, attention_head_dim=H, cross_attention_dim=D
    )
    block("block of a U-Net", plain)
    of_flux = dict(dim=D, num_attention_heads=HEADS, attention_head_dim=H)
    both = dict(names=("text", "y"))
    block(
        "Flux",
        flux.FluxTransformerBlock(**of_flux),
        image_rotary_emb=tables("Flux", TEXT + T, "neighbours"),
        **both,
    )
    block(
        "Flux, one stream",
        flux.FluxSingleTransformerBlock(**of_flux),
        image_rotary_emb=tables("Flux, one stream", TEXT + T, "neighbours"),
        **both,
    )
    of_two = flux2.Flux2TransformerBlock(D, HEADS, H)
    block(
        "Flux 2",
        of_two,
        temb_mod_img=given("Flux 2", "image modulation", B, 6 * D),
        temb_mod_txt=given("Flux 2", "text modulation", B, 6 * D),
        image_rotary_emb=tables("Flux 2", TEXT + T, "neighbours"),
        **both,
    )
    name = "Flux 2, one stream"
    block(
        name,
        flux2.Flux2SingleTransformerBlock(D, HEADS, H),
        temb_mod=given(name, "modulation", B, 3 * D),
        image_rotary_emb=tables(name, TEXT + T, "neighbours"),
        split_hidden_states=True,
        **both,
    )
    name = "Z-Image"
    angles = given(name, "angles", B, T, H // 2)
    z = z_image.ZImageTransformerBlock(0, D, HEADS, HEADS, 1e-5, qk_norm=True)
    record(
        name,
        z,
        lambda module: module(
            given(name, "x", B, T, D),
            None,
            torch.polar(torch.ones_like(angles), angles),
            given(name, "time", B, D),
        ),
    )
    block("SD3, last", attention.JointTransformerBlock(**of_flux, context_pre_only=True), **both)
    block("SD3", attention.JointTransformerBlock(**of_flux), **both)
    block(
        "SD3.5",
        attention.JointTransformerBlock(**of_flux, qk_norm="rms_norm", use_dual_attention=True),
        **both,
    )
    block("AuraFlow", auraflow.AuraFlowJointTransformerBlock(**of_flux), **both)
    name = "Qwen-Image"
    angles = given(name, "angles", TEXT + T, H // 2)
    turned = torch.polar(torch.ones_like(angles), angles)
    block(
        name,
        qwen.QwenImageTransformerBlock(**of_flux),
        encoder_hidden_states_mask=None,
        image_rotary_emb=(turned[TEXT:], turned[:TEXT]),
        **both,
    )
    other = dict(names=("y", "text"))
    block(
        "HunyuanVideo",
        hunyuan.HunyuanVideoTransformerBlock(HEADS, H, 4.0),
        freqs_cis=tables("HunyuanVideo", T, "neighbours"),
        **other,
    )
    cos, sin = tables("Wan", T, "neighbours")
    block(
        "Wan",
        wan.WanTransformerBlock(D, 64, HEADS, cross_attn_norm=True),
        temb=given("Wan", "time", B, 6, D),
        rotary_emb=(cos[None, :, None], sin[None, :, None]),
    )
    angles = given("LTX", "angles", 1, T, D // 2).repeat_interleave(2, dim=-1)
    block(
        "LTX",
        ltx.LTXVideoTransformerBlock(D, HEADS, H, D),
        temb=given("LTX", "time", B, T, 6 * D),
        image_rotary_emb=(angles.cos(), angles.sin()),
    )
    block(
        "CogVideoX",
        cogvideox.CogVideoXBlock(D, HEADS, H, D),
        image_rotary_emb=tables("CogVideoX", T, "neighbours"),
        **other,
    )
    block(
        "CogView4",
        cogview4.CogView4TransformerBlock(D, HEADS, H, D),
        image_rotary_emb=tables("CogView4", T, "halves"),
        **other,
    )
    name = "Lumina 2"
    angles = given(name, "angles", B, T, 4)
    block(
        name,
        lumina2.Lumina2TransformerBlock(D, 4, 2, 16, 1.0, 1e-5),
        attention_mask=torch.ones(B, T, dtype=torch.bool),
        image_rotary_emb=torch.polar(torch.ones_like(angles), angles),
    )
    block(
        "Mochi",
        mochi.MochiTransformerBlock(D, HEADS, H, D),
        image_rotary_emb=tables("Mochi", T, "once", heads=HEADS),
        encoder_attention_mask=torch.ones(B, TEXT),
        **other,
    )
    block(
        "Hunyuan-DiT",
        hunyuan_dit.HunyuanDiTBlock(
            D, HEADS, cross_attention_dim=D, activation_fn="gelu-approximate", skip=True
        ),
        image_rotary_emb=tables("Hunyuan-DiT", T, "neighbours"),
        skip=given("Hunyuan-DiT", "skip", B, T, D),
    )
    block(
        "Cosmos",
        cosmos.CosmosTransformerBlock(HEADS, H, D, adaln_lora_dim=8, out_bias=False),
        embedded_timestep=given("Cosmos", "time", B, D),
        temb=given("Cosmos", "shared", B, 3 * D),
        image_rotary_emb=tables("Cosmos", T, "halves"),
    )


def perceptrons_and_norms() -> None:
    for name, options in (
        ("geglu", {}),
        ("swiglu", dict(activation_fn="swiglu")),
        ("geglu-approximate", dict(activation_fn="geglu-approximate")),
        ("gelu", dict(activation_fn="gelu")),
    ):
        block(f"perceptron {name}", attention.FeedForward(D, inner_dim=24, **options))
    last = normalization.AdaLayerNormContinuous(D, D, elementwise_affine=False, eps=1e-6)
    name = "last norm of Flux"
    record(name, last, lambda m: m(given(name, "x", B, T, D), given(name, "time", B, D)))


def positions() -> None:
    name = "tables of Flux"
    ids = torch.zeros(TEXT + 6, 3)
    ids[TEXT:, 1], ids[TEXT:, 2] = torch.arange(6) // 3, torch.arange(6) % 3

    def halved(pair: Any) -> dict[str, torch.Tensor]:
        cos, sin = pair
        return dict(cos=cos[..., ::2], sin=sin[..., ::2])

    record(name, flux.FluxPosEmbed(10000, [4, 6, 6]), lambda m: halved(m(ids)))

    def of_qwen(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        image, text = module([(1, 3, 4)], max_txt_seq_len=TEXT, device=torch.device("cpu"))
        both = torch.cat([text, image])
        return dict(cos=both.real, sin=both.imag)

    record("tables of Qwen-Image", qwen.QwenEmbedRope(10000, [4, 6, 6], scale_rope=True), of_qwen)
    video = torch.zeros(1, 4, 2, 3, 4)
    record(
        "tables of HunyuanVideo",
        hunyuan.HunyuanVideoRotaryPosEmbed(1, 1, [4, 6, 6]),
        lambda m: halved(m(video)),
    )
    record(
        "tables of Wan",
        wan.WanRotaryPosEmbed(16, (1, 1, 1), 32),
        lambda m: {key: table[0, :, 0] for key, table in halved(m(video)).items()},
    )
    record(
        "tables of LTX",
        ltx.LTXVideoRotaryPosEmbed(32),
        lambda m: {
            key: table[0] for key, table in halved(m(video, 2, 3, 4, (0.5, 32.0, 32.0))).items()
        },
    )
    learned = given("tables of Mochi", "learned", 3, HEADS, H // 2)
    record(
        "tables of Mochi",
        mochi.MochiRoPE(),
        lambda m: dict(zip(("cos", "sin"), m(learned, 2, 3, 4, dtype=torch.float32), strict=True)),
    )
    record(
        "tables of CogView4",
        cogview4.CogView4RotaryPosEmbed(16, 1, (8, 8)),
        lambda m: {
            key: table[:, : H // 2]
            for key, table in zip(("cos", "sin"), m(torch.zeros(1, 4, 3, 4)), strict=True)
        },
    )


def convolutions() -> None:
    def picture(name: str, *shape: int) -> torch.Tensor:
        return given(name, "x", *(shape or (B, 16, 6, 8)))

    options = dict(in_channels=16, out_channels=24, temb_channels=12, groups=4)
    for name, more in (
        ("residual block", {}),
        ("residual block, scale_shift", dict(time_embedding_norm="scale_shift")),
        ("residual block, factor 2", dict(output_scale_factor=2.0, out_channels=16)),
    ):
        module = resnet.ResnetBlock2D(**options | more)
        record(name, module, lambda m, n=name: m(picture(n), given(n, "time", B, 12)))
    for name, module in (
        ("downsampling of a U-Net", downsampling.Downsample2D(16, use_conv=True)),
        ("downsampling of a VAE", downsampling.Downsample2D(16, use_conv=True, padding=0)),
        ("upsampling", upsampling.Upsample2D(16, use_conv=True)),
    ):
        record(name, module, lambda m, n=name: m(picture(n)))
    name = "attention of a VAE"
    module = Attention(
        16,
        heads=1,
        dim_head=16,
        norm_num_groups=4,
        eps=1e-6,
        bias=True,
        residual_connection=True,
        rescale_output_factor=2.0,
    )
    record(name, module, lambda m: m(picture(name)))


def main() -> None:
    transformers()
    perceptrons_and_norms()
    positions()
    convolutions()
    save("diffusion.npz", diffusers)


if __name__ == "__main__":
    main()
