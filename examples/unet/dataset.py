"""Images with masks: the nuclei that come with this example, or a user's own folder.

Both sources return a `Data`. Images are uint8, [H, W, C]; masks are uint8, [H, W], 1 for the foreground.
Worker processes import this module, so it does not import JAX.
"""

import functools
import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.errors import ExampleError
from examples.images import (
    Batch,
    MakeBatch,
    epoch_indices,
    epoch_of,
    find_images,
    read_image,
    read_labels,
)

Pair = tuple[np.ndarray, np.ndarray]
"""An image and its mask."""

ReadPair = Callable[[int], Pair]

_NUCLEI = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Crops:
    """Makes the batch of a training step: random crops, turned, mirrored, brighter or darker.

    Args:
      read: function of i that returns image i and its mask.
      images: number of images.
      crops: number of crops of each image in an epoch.
      batch_size: crops a batch.
      seed: seed of the order and the augmentation.
      crop: height and width of a crop in pixels.
      turn: whether crops are turned by quarters and mirrored.
      plain: whether crops are left unchanged, because the device augments them.
    """

    read: ReadPair
    images: int
    crops: int
    batch_size: int
    seed: int
    crop: int
    turn: bool
    plain: bool = False

    @property
    def size(self) -> int:
        """Number of crops in an epoch."""
        return self.images * self.crops

    def __call__(self, step: int) -> Batch:
        place = dict(size=self.size, batch_size=self.batch_size)
        epoch = epoch_of(step, **place)
        pairs = [
            self._pair(i, np.random.default_rng([self.seed, epoch, i]))
            for i in epoch_indices(step, **place, seed=self.seed)
        ]
        images, masks = zip(*pairs, strict=True)
        return dict(image=np.stack(images), mask=np.stack(masks))

    def _pair(self, index: int, rng: np.random.Generator) -> Pair:
        image, mask = random_crop(*self.read(index // self.crops), self.crop, rng)
        if self.plain:
            return image, mask
        if self.turn:
            image, mask = turned(image, mask, rng)
        return relit(image, rng), mask


@dataclass(frozen=True)
class HeldOut:
    """Whole images for evaluation: `held_out(i)` is image i with its mask."""

    read: ReadPair
    images: int

    def __call__(self, index: int) -> Batch:
        image, mask = self.read(index)
        return dict(image=image, mask=mask)


@dataclass(frozen=True)
class Data:
    """Images with masks, split into those for training and those for evaluation."""

    channels: int
    train_size: int
    """Number of crops in an epoch."""
    train_batch: MakeBatch
    held_out: HeldOut
    fingerprint: str
    """Hash that changes when images are added, removed or renamed."""


def _held_out_count(size: int, share: float) -> int:
    """Returns the number of images, or columns, of `size` to hold out: at least one, and not all."""
    return min(max(1, round(share * size)), size - 1)


# --- augmentation ---------------------------------------------------------------------------------


def random_crop(image: np.ndarray, mask: np.ndarray, crop: int, rng: np.random.Generator) -> Pair:
    """Returns a random square of `crop` pixels; a smaller image is mirrored at its edges."""
    missing = [(0, max(0, crop - size)) for size in mask.shape]
    image = np.pad(image, [*missing, (0, 0)], mode="symmetric")
    mask = np.pad(mask, missing, mode="symmetric")
    top, left = (rng.integers(size - crop + 1) for size in mask.shape)
    window = np.s_[top : top + crop, left : left + crop]
    return image[window], mask[window]


def turned(image: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> Pair:
    """Returns the pair in one of the eight orientations of a square, at random."""
    quarters = rng.integers(4)
    image, mask = np.rot90(image, quarters), np.rot90(mask, quarters)
    return (image[:, ::-1], mask[:, ::-1]) if rng.random() < 0.5 else (image, mask)


def relit(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the image with another exposure, black level and contrast curve, and a little noise."""
    light = (image / np.float32(255)) ** np.float32(np.exp(rng.uniform(-0.3, 0.3)))
    light = light * rng.uniform(0.6, 1.5) + rng.uniform(-0.05, 0.05)
    noise = rng.uniform(0, 0.02) * rng.standard_normal(image.shape, np.float32)
    return np.round((light + noise).clip(0, 1) * 255).astype(np.uint8)


# --- nuclei ---------------------------------------------------------------------------------------


def nuclei(
    *,
    batch_size: int,
    seed: int,
    crop: int,
    crops: int,
    turn: bool,
    held_out: float,
    plain: bool = False,
) -> Data:
    """Returns one image of cell nuclei: the left part for training, the right part for evaluation.

    Source: Caicedo et al., "Nucleus segmentation across imaging experiments: the 2018 Data Science
    Bowl", 2019, https://doi.org/10.1038/s41592-019-0612-7; see data/README.md.
    """
    image, mask = _read_pair([(_NUCLEI / "image.png", _NUCLEI / "labels.png")], "L", 0)
    border = image.shape[1] - _held_out_count(image.shape[1], held_out)
    left, right = (
        functools.partial(operator.getitem, [(image[:, columns], mask[:, columns])])
        for columns in (np.s_[:border], np.s_[border:])
    )
    train = Crops(left, 1, crops, batch_size, seed, crop, turn, plain)
    return Data(
        channels=1,
        train_size=train.size,
        train_batch=train,
        held_out=HeldOut(right, 1),
        fingerprint="nuclei",
    )


# --- folder ---------------------------------------------------------------------------------------


def folder(
    directory: Path,
    *,
    batch_size: int,
    seed: int,
    crop: int,
    crops: int,
    turn: bool,
    held_out: float,
    plain: bool = False,
) -> Data:
    """Reads DIR/images and DIR/masks, with files of the same names; the suffixes may differ.

    The background is black, or label 0, in a mask; everything else is foreground.

    Args:
      directory: DIR.
      batch_size: crops a batch.
      seed: seed of the order and the augmentation.
      crop: height and width of the crops, in pixels.
      crops: number of crops of each image in an epoch.
      turn: whether crops are turned by quarters and mirrored.
      held_out: the share of the images to hold out.
      plain: whether crops are left unchanged, because the device augments them.

    Raises:
      ExampleError: a folder is missing, an image or a mask has no partner, or a mask is lossy.
    """
    images, masks = (_by_name(directory / name) for name in ("images", "masks"))
    if len(images) < 2:
        raise ExampleError(
            "there must be two images or more, one to train on and one to hold out, but"
            f" {directory / 'images'} has {len(images)} (png, jpeg, bmp, gif, webp or tiff); add some."
        )
    for name in [*images, *masks]:
        if name not in masks or name not in images:
            path, other = (images[name], "masks") if name in images else (masks[name], "images")
            raise ExampleError(
                f"every image needs a mask of the same name and every mask an image, but {path}"
                f" has no partner in {directory / other}; add {directory / other / name}.png, or"
                " remove it."
            )
    pairs = [(images[name], masks[name]) for name in images]
    for _, mask in pairs:
        if _is_lossy(mask):
            raise ExampleError(
                f"a mask must be stored without loss, but {mask} is not, so that its background is not"
                " black everywhere; save the masks as PNG."
            )
    # The seed is a constant and not the run's, so that runs of different seeds can be compared.
    order = np.random.default_rng(0).permutation(len(pairs))
    count = _held_out_count(len(pairs), held_out)
    test, train = ([pairs[i] for i in np.sort(part)] for part in (order[:count], order[count:]))
    train_batch = Crops(
        functools.partial(_read_pair, train, "RGB"),
        len(train),
        crops,
        batch_size,
        seed,
        crop,
        turn,
        plain,
    )
    return Data(
        channels=3,
        train_size=train_batch.size,
        train_batch=train_batch,
        held_out=HeldOut(functools.partial(_read_pair, test, "RGB"), len(test)),
        fingerprint=hashlib.sha256("\n".join(images).encode()).hexdigest(),
    )


def _is_lossy(path: Path) -> bool:
    """Returns whether a picture is a JPEG, or a WebP without a lossless chunk."""
    suffix = path.suffix.lower()
    return suffix in (".jpg", ".jpeg") or (suffix == ".webp" and b"VP8L" not in path.read_bytes())


def _by_name(directory: Path) -> dict[str, Path]:
    """Returns the image files below `directory`, by their relative path without the suffix."""
    if not directory.is_dir():
        raise ExampleError(
            f"--data must name a folder with images/ and masks/ in it, but {directory} is"
            f" {'a file' if directory.exists() else 'missing'}; pass the folder above them."
        )
    found: dict[str, Path] = {}
    for path in find_images(directory):
        name = path.relative_to(directory).with_suffix("").as_posix()
        if name in found:
            raise ExampleError(
                f"names must differ in more than the suffix, but {found[name]} and {path} do not;"
                " rename or remove one."
            )
        found[name] = path
    return found


def _read_pair(paths: list[tuple[Path, Path]], mode: str, index: int) -> Pair:
    """Returns image `index` in the Pillow mode "L" or "RGB", and its mask."""
    image_path, mask_path = paths[index]
    image = np.asarray(read_image(image_path, mode))
    mask = read_labels(mask_path) > 0
    if mask.shape != image.shape[:2]:
        raise ExampleError(
            f"a mask must have the size of its image, but {mask_path} has {_size(mask)} pixels and"
            f" {image_path} {_size(image)}; replace one of them."
        )
    return image.reshape(*mask.shape, -1), mask.astype(np.uint8)


def _size(array: np.ndarray) -> str:
    return f"{array.shape[1]} x {array.shape[0]}"
