"""Trains a classifier of images: `python -m examples.classify.train`, `--help` for the flags.

The models are ConvNeXts, ResNets, the Vision Transformers of examples/vit, and Vision Transformers with
neighbourhood attention. All have the same flags, pictures and checkpoints. Without --data they learn the
handwritten digits that scikit-learn ships, on any CPU in a few minutes; with `--data DIR` the images in
DIR/train/CLASS and DIR/val/CLASS, or DIR/CLASS.
"""

import argparse
from collections.abc import Sequence

import jax
from flax import nnx

from examples import training
from examples.classify.convnext import CONVNEXTS, ConvNeXt
from examples.classify.neighborhood import NEIGHBORHOODS, attention_of
from examples.classify.resnet import RESNETS, ResNet
from examples.errors import ExampleError, run_command
from examples.placement import ONE_DEVICE, OneDevice
from examples.vit import train as vit
from examples.vit.model import MODELS as VITS
from examples.vit.model import VisionTransformer

MODELS = {**CONVNEXTS, **RESNETS, **VITS, **NEIGHBORHOODS}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    parser = vit.make_parser(
        "examples.classify.train",
        out="runs/classify",
        models=MODELS,
        description="Trains a ConvNeXt, ResNet or Vision Transformer on handwritten digits, or on a"
        " folder of images.",
    )
    parser.set_defaults(model="convnext-digits")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = make_parser()
    args = vit.parse_flags(parser, argv, folder_model="convnext-t")
    vit.train(args, create=create)


def create(
    args: argparse.Namespace,
    *,
    channels: int,
    classes: int,
    placement: OneDevice = ONE_DEVICE,
) -> tuple[nnx.GraphDef, dict]:
    """Returns the model of the flags, as its structure and its initial parameters.

    Raises:
      ExampleError: a flag sets an option that the model lacks.
    """
    name = args.model
    if name in VITS:
        return vit.create_vit(args, channels=channels, classes=classes, placement=placement)
    if name in NEIGHBORHOODS:
        return _with_neighborhoods(args, channels=channels, classes=classes, placement=placement)
    refused = dict(dropout=args.dropout, unroll=args.unroll)
    if name in RESNETS:
        # With --data, --drop-path has a default for the other models, which a ResNet ignores.
        refused |= dict(drop_path=args.drop_path if args.data is None else 0.0)
    for flag, value in refused.items():
        if value:
            raise ExampleError(
                f"{name} has no --{flag.replace('_', '-')}, but it is {value:g}; leave it out, or pass"
                " another --model."
            )

    def build() -> nnx.Module:
        shared = dict(
            channels=channels, classes=classes, dtype=args.dtype, rngs=nnx.Rngs(args.seed)
        )
        if name in RESNETS:
            return ResNet(RESNETS[name], **shared)
        size = CONVNEXTS[name]
        return ConvNeXt(size, image_size=args.image_size, drop_path=args.drop_path, **shared)

    images = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, channels), args.dtype)
    return training.create(build, images, placement=placement)


def _with_neighborhoods(
    args: argparse.Namespace, *, channels: int, classes: int, placement: OneDevice
) -> tuple[nnx.GraphDef, dict]:
    size = NEIGHBORHOODS[args.model]

    def build() -> nnx.Module:
        return VisionTransformer(
            size.vit,
            image_size=args.image_size,
            channels=channels,
            classes=classes,
            pool="mean",
            dropout=args.dropout,
            drop_path=args.drop_path,
            dtype=args.dtype,
            precision=args.precision,
            attention=attention_of(size, args.image_size),
            unroll=args.unroll,
            rngs=nnx.Rngs(args.seed),
        )

    images = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, channels), args.dtype)
    return training.create(build, images, placement=placement)


if __name__ == "__main__":
    run_command(main)
