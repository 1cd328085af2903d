"""Records blocks and tables of timm in images.npz.

Run in an environment with torch, torchvision and timm 1.0.31: `python -m tests.recorded.record_images`.
"""

import functools

import timm
import torch
from timm.layers import AttentionPoolLatent, RotaryEmbeddingCat
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from timm.models import beit, convnext, eva, mlp_mixer, resnet, swin_transformer
from timm.models import swin_transformer_v2 as swin_v2
from timm.models import vision_transformer as vit
from timm.models import vision_transformer_sam as sam

from tests.recorded.recorder import given, record, save

B, T, D, HEADS, H = 2, 7, 32, 2, 16
NORM = functools.partial(torch.nn.LayerNorm, eps=1e-6)


def tokens(name: str, module: torch.nn.Module, number: int = T, **inputs: torch.Tensor) -> None:
    record(name, module, lambda m: m(given(name, "x", B, number, D), **inputs))


def picture(name: str, module: torch.nn.Module, height: int = 8, width: int = 8) -> None:
    record(name, module, lambda m: m(given(name, "x", 1, height, width, D)))


def transformers() -> None:
    block = functools.partial(vit.Block, D, HEADS, qkv_bias=True, norm_layer=NORM)
    tokens("ViT", block())
    tokens("DINOv2", block(init_values=1.0))
    tokens("ViT with norms of heads", block(qk_norm=True, init_values=1.0))
    turned = functools.partial(eva.EvaBlock, D, HEADS, norm_layer=NORM)
    grid = RotaryEmbeddingCat(H, in_pixels=False, feat_shape=[2, 3], ref_feat_shape=[16, 16])
    tokens("EVA-02", turned(swiglu_mlp=True, scale_mlp=True), rope=grid.get_embed())
    dinov3 = RotaryEmbeddingDinoV3(H, temperature=100.0, feat_shape=[2, 3], rotate_half=True)
    tokens(
        "DINOv3",
        turned(
            swiglu_mlp=True,
            swiglu_align_to=8,
            init_values=1.0,
            rotate_half=True,
            qkv_fused=False,
        ),
        rope=dinov3.get_embed(),
    )
    tokens("BEiT", beit.Block(D, HEADS, qkv_bias=True, init_values=1.0, window_size=(2, 3)))
    picture("Swin", swin_transformer.SwinTransformerBlock(D, (8, 8), HEADS, window_size=4))
    shifted = dict(window_size=4, shift_size=2)
    picture("Swin, shifted", swin_transformer.SwinTransformerBlock(D, (8, 8), HEADS, **shifted))
    picture("Swin v2", swin_v2.SwinTransformerV2Block(D, (8, 8), HEADS, **shifted))
    picture("Swin's merging", swin_transformer.PatchMerging(D, 16), 4, 4)
    picture("Swin v2's merging", swin_v2.PatchMerging(D, 16), 4, 4)
    picture("SAM", sam.Attention(D, HEADS, use_rel_pos=True, input_size=(3, 4)), 3, 4)
    tokens("SigLIP's pool", AttentionPoolLatent(D, num_heads=HEADS, norm_layer=NORM))
    tokens("MLP-Mixer", mlp_mixer.MixerBlock(D, T))
    tokens("ResMLP", mlp_mixer.ResBlock(D, T))


def convolutions() -> None:
    def channels_first(name: str, module: torch.nn.Module) -> None:
        record(name, module, lambda m: m(given(name, "x", B, D, 5, 6)))

    channels_first("ConvNeXt", convnext.ConvNeXtBlock(D, ls_init_value=1.0))
    channels_first("ConvNeXt v2", convnext.ConvNeXtBlock(D, ls_init_value=None, use_grn=True))
    channels_first("ResNet", resnet.Bottleneck(D, 8))


def tables() -> None:
    def sines_and_cosines(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        # Both have two columns per pair, either interleaved or in halves.
        sin, cos = module.get_embed().chunk(2, dim=-1)
        half = getattr(module, "rotate_half", False)
        kept = slice(0, H // 2) if half else slice(0, None, 2)
        return dict(cos=cos[:, kept], sin=sin[:, kept])

    for name, module in (
        ("tables of DINOv3", RotaryEmbeddingDinoV3(H, feat_shape=[3, 4], rotate_half=True)),
        (
            "tables of EVA-02",
            RotaryEmbeddingCat(H, in_pixels=False, feat_shape=[3, 4], ref_feat_shape=[16, 16]),
        ),
        (
            "tables of Perception Encoder",
            RotaryEmbeddingCat(
                H,
                in_pixels=False,
                feat_shape=[3, 4],
                ref_feat_shape=[24, 24],
                grid_offset=1.0,
                grid_indexing="xy",
            ),
        ),
    ):
        record(name, module, sines_and_cosines)


def main() -> None:
    transformers()
    convolutions()
    tables()
    save("images.npz", timm)


if __name__ == "__main__":
    main()
