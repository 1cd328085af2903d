"""Augmentations that `--augment` selects, and a contact sheet: `python -m examples.augmentation`.

Worker processes decode images and cut them to one size; a chain of augmentations then runs on the
device, inside the jitted training step.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from examples import flags
from examples.errors import ExampleError, run_command
from examples.images import read_image
from jaxfused import augment

_COLOURS: dict[str, tuple[object, ...]] = {
    "light": (augment.ColorJitter(0.4, 0.4, 0.4),),
    "rand": (augment.RandAugment(),),
    "trivial": (augment.TrivialAugmentWide(),),
}
NAMES = tuple(_COLOURS)
"""Names of the chains, which are the values of `--augment`."""

_LARGER = 8 / 7
"""Height of a decoded image over the height of the crop that the model reads."""


def add_flag(group: argparse._ArgumentGroup) -> None:
    """Adds `--augment` to the flags of an example."""
    group.add_argument(
        "--augment",
        choices=NAMES,
        help="change training images on the device: crops, mirrors and colours, RandAugment or"
        " TrivialAugment",
    )


def decoded_size(image_size: int) -> int:
    """Returns the height, in pixels, of the square images that a chain crops to `image_size`."""
    return round(image_size * _LARGER)


def of_classes(
    name: str, *, crop: int | None, least_crop: float, flip: bool, dtype: str
) -> augment.Chain:
    """Returns the chain for a classifier: uint8 images become `dtype` of -1 to 1.

    Args:
      name: one of `NAMES`.
      crop: height and width of the result, or None where images keep their size.
      least_crop: smallest share of an image's area that a crop covers.
      flip: whether half of the images are mirrored.
      dtype: of the result.
    """
    transforms: list[object] = []
    if crop is not None:
        transforms.append(augment.RandomResizedCrop(crop, scale=(least_crop, 1.0)))
        if flip:
            transforms.append(augment.RandomHorizontalFlip())
    return augment.Chain(*transforms, *_COLOURS[name], augment.Normalize(0.5, 0.5), dtype=dtype)


def of_masks(name: str, *, turn: bool, dtype: str) -> augment.Chain:
    """Returns the chain for segmentation, which moves a crop and its mask alike.

    Args:
      name: one of `NAMES`; "light" changes brightness alone, the others deform and rotate crops too.
      turn: whether crops are turned by quarters and mirrored.
      dtype: of the result, whose values are -1 to 1.
    """
    turns = (augment.RandomQuarterTurn(), augment.RandomHorizontalFlip()) if turn else ()
    bends = (
        () if name == "light" else (augment.ElasticTransform(15.0, 5.0), augment.RandomAffine(10))
    )
    light = (augment.RandomGamma((0.7, 1.4)), augment.ColorJitter(0.4, 0.4, order="fixed"))
    noise = augment.GaussianNoise(sigma=(0.0, 0.02))
    return augment.Chain(*turns, *bends, *light, noise, augment.Normalize(0.5, 0.5), dtype=dtype)


# --- contact sheet --------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.augmentation",
        description="Draws images, each followed by what a chain makes of it.",
    )
    parser.add_argument("images", nargs="*", type=Path, help="files (the U-Net example's image)")
    parser.add_argument("--augment", choices=NAMES, default="rand", help="(%(default)s)")
    parser.add_argument("--size", type=flags.whole(1), default=160, help="pixels (%(default)s)")
    parser.add_argument("--columns", type=flags.whole(1), default=7, help="(%(default)s)")
    parser.add_argument("--seed", type=flags.whole(0), default=0)
    parser.add_argument("--out", type=Path, default=Path("augmentation.png"), help="(%(default)s)")
    args = parser.parse_args(argv)
    paths = args.images or [Path(__file__).parent / "unet" / "data" / "image.png"]
    flags.check_replaces_none(args.out, paths)
    chain = of_classes(args.augment, crop=args.size, least_crop=0.25, flip=True, dtype="float32")
    side = decoded_size(args.size)
    sheet = contact_sheet(
        chain, np.stack([_square(path, side) for path in paths]), args.columns, args.seed
    )
    try:
        Image.fromarray(sheet).save(args.out)
    except (OSError, ValueError) as error:
        raise ExampleError(
            f"the sheet must be writable, but {args.out} is not ({error}); pass another --out."
        ) from error
    print(chain)
    print(chain.describe())
    print(f"see {args.out}")


def _square(path: Path, side: int) -> np.ndarray:
    """Returns the middle square of an image file, resized to [side, side, 3]."""
    image = read_image(path, "RGB")
    least = min(image.size)
    left, top = (image.width - least) // 2, (image.height - least) // 2
    box = (left, top, left + least, top + least)
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box=box))


def contact_sheet(chain: augment.Chain, images: np.ndarray, columns: int, seed: int) -> np.ndarray:
    """Returns one picture, uint8, with a row for each image: the image, then `columns` draws of a chain.

    `images` is uint8 [N, side, side, 3]; the chain returns values of -1 to 1.
    """
    count, side = len(images), images.shape[1]
    repeated = np.repeat(images, columns, 0)
    changed = np.asarray(jax.jit(chain)(jax.random.key(seed), jnp.asarray(repeated)), np.float32)
    levels = np.round((changed + 1) * 127.5).clip(0, 255).astype(np.uint8)
    height, width = levels.shape[1:3]
    cells = np.zeros((count, columns + 1, max(side, height), max(side, width), 3), np.uint8)
    cells[:, 0, :side, :side] = images
    cells[:, 1:, :height, :width] = levels.reshape(count, columns, height, width, 3)
    return cells.swapaxes(1, 2).reshape(count * cells.shape[2], -1, 3)


if __name__ == "__main__":
    run_command(main)
