"""The two sources of labelled images: scikit-learn's handwritten digits and a folder of classes.

Both return a `Data`. Images are uint8, [B, H, W, C]. `rows` selects the part of each batch that this
process makes; its images are the same as in the whole batch. Worker processes import this module, so it
does not import JAX.
"""

import functools
import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from examples.errors import ExampleError
from examples.images import (
    Batch,
    MakeBatch,
    epoch_indices,
    epoch_of,
    find_images,
    read_image,
)


@dataclass(frozen=True)
class HeldOut:
    """Images for evaluation, one at a time or in batches: `held_out(i)` is batch i."""

    image: Callable[[int], np.ndarray]
    labels: np.ndarray
    batch_size: int
    rows: slice

    @property
    def batches(self) -> range:
        """Indices of the batches that cover all images."""
        return range(-(-len(self.labels) // self.batch_size))

    def __call__(self, batch: int) -> Batch:
        # The last batch repeats the last image, so that all batches have the same shape.
        first = batch * self.batch_size
        indices = np.minimum(np.arange(first, first + self.batch_size), len(self.labels) - 1)
        indices = indices[self.rows]
        return dict(image=np.stack([self.image(i) for i in indices]))


@dataclass(frozen=True)
class Data:
    """Labelled images, split into those for training and those for evaluation."""

    classes: tuple[str, ...]
    channels: int
    train_size: int
    train_batch: MakeBatch
    """Function from a training step to its batch: "image", augmented, and "label"."""
    held_out: HeldOut
    fingerprint: str
    """Hash that changes when images are added, removed or renamed."""


def split(labels: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices to train on and those to hold out, the same share of every class.

    The seed is a constant and not the run's, so that runs of different seeds can be compared.
    """
    rng = np.random.default_rng(0)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(held_out * len(members))), len(members) - 1)
        test.append(members[:count])
        train.append(members[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


# --- digits ---------------------------------------------------------------------------------------


def digits(
    *, batch_size: int, seed: int, image_size: int, held_out: float, rows: slice = slice(None)
) -> Data:
    """1,797 handwritten digits of 8 x 8 pixels, from UCI's repository, as scikit-learn ships them.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", 1998,
    https://doi.org/10.24432/C50P49
    """
    # The import takes a second, and worker processes do not need it.
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = np.round(loaded.images * (255 / 16)).astype(np.uint8)
    if image_size != 8:
        images = np.stack(
            [Image.fromarray(i).resize((image_size, image_size), Image.BICUBIC) for i in images]
        )
    images = images[..., None]
    labels = loaded.target.astype(np.int32)
    train, test = split(labels, held_out)
    return Data(
        classes=tuple(str(name) for name in loaded.target_names),
        channels=1,
        train_size=len(train),
        train_batch=_DigitsTrain(images[train], labels[train], batch_size, rows, seed),
        held_out=HeldOut(
            functools.partial(operator.getitem, images[test]), labels[test], batch_size, rows
        ),
        fingerprint="digits",
    )


@dataclass(frozen=True)
class _DigitsTrain:
    images: np.ndarray
    labels: np.ndarray
    batch_size: int
    rows: slice
    seed: int

    def __call__(self, step: int) -> Batch:
        indices = epoch_indices(
            step, size=len(self.labels), batch_size=self.batch_size, seed=self.seed
        )
        rng = np.random.default_rng([self.seed, step, 1])
        # The whole batch is processed, so that its random numbers do not depend on `rows`; it is small.
        images = jitter(self.images[indices], rng)
        return dict(image=images[self.rows], label=self.labels[indices][self.rows])


def jitter(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rotates, scales, shears and shifts each image a little, with bilinear sampling; black outside.

    Digits are not flipped or cropped, which would turn them into other digits.
    """
    batch, height, width, _ = images.shape
    angle = rng.uniform(-0.15, 0.15, batch)  # radians; 9 degrees
    slant = rng.uniform(-0.1, 0.1, batch)
    zoom_y, zoom_x = rng.uniform(0.9, 1.1, (2, batch))
    shift = rng.uniform(-0.08, 0.08, (2, batch)) * np.array([[height], [width]])

    cos, sin = np.cos(angle), np.sin(angle)
    # The matrix maps each pixel of the result to its source, relative to the centre.
    matrix = np.array([[cos / zoom_y, -sin], [sin + slant, cos / zoom_x]])
    centre = np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    grid = np.mgrid[:height, :width] - centre
    y, x = np.einsum("ijb,jhw->ibhw", matrix, grid) + centre[:, None] + shift[..., None, None]

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))).astype(np.float32)
    y = np.clip(y + 1, 0, height + 0.999)
    x = np.clip(x + 1, 0, width + 0.999)
    top, left = y.astype(int), x.astype(int)
    fy, fx = (y - top)[..., None], (x - left)[..., None]
    image = np.arange(batch)[:, None, None]
    upper = padded[image, top, left] * (1 - fx) + padded[image, top, left + 1] * fx
    lower = padded[image, top + 1, left] * (1 - fx) + padded[image, top + 1, left + 1] * fx
    return np.round(upper * (1 - fy) + lower * fy).astype(np.uint8)


# --- folder ---------------------------------------------------------------------------------------


def folder(
    directory: Path,
    *,
    batch_size: int,
    seed: int,
    image_size: int,
    held_out: float,
    least_crop: float,
    flip: bool,
    decoded: int | None = None,
    rows: slice = slice(None),
) -> Data:
    """Images in DIR/train/CLASS and DIR/val/CLASS, or in DIR/CLASS with a share of them held out.

    Args:
      directory: the folder.
      batch_size: images a batch.
      seed: seed of the order and the augmentation.
      image_size: height and width of the batches' images.
      held_out: the share of each class to hold out, where there is no DIR/val.
      least_crop: smallest share of an image's area that a training crop may cover.
      flip: whether half of the training images are mirrored.
      decoded: height and width of training images if the device crops and mirrors them; None if this
        process does.
      rows: the part of each batch that this process makes.

    Raises:
      ExampleError: the folder is missing, or a class is empty or in DIR/val only.
    """
    if not directory.is_dir():
        raise ExampleError(
            f"--data must name a folder, but {directory} is"
            f" {'a file' if directory.exists() else 'missing'}; pass a folder with one subfolder"
            " of images for each class."
        )
    root = directory / "train" if (directory / "train").is_dir() else directory
    val = directory / "val"
    classes, train_paths, train_labels = _labelled(root)
    if root != directory and val.is_dir():
        val_classes, test_paths, test_labels = _labelled(val)
        if val_classes != classes:
            odd = sorted(set(classes) ^ set(val_classes))
            raise ExampleError(
                f"train and val must have the same classes, but {', '.join(odd[:5])} is in only"
                f" one of {root} and {val}; add the folder to the other."
            )
    else:
        counts = np.bincount(train_labels)
        if counts.min() < 2:
            raise ExampleError(
                "a class needs two images, one to train on and one to hold out, but"
                f" {root / classes[counts.argmin()]} has one; add images."
            )
        train, test = split(train_labels, held_out)
        test_paths, test_labels = [train_paths[i] for i in test], train_labels[test]
        train_paths, train_labels = [train_paths[i] for i in train], train_labels[train]

    names = "\n".join(str(path.relative_to(directory)) for path in train_paths + test_paths)
    return Data(
        classes=classes,
        channels=3,
        train_size=len(train_paths),
        train_batch=_FolderTrain(
            train_paths, train_labels, batch_size, rows, seed, image_size, least_crop, flip, decoded
        ),
        held_out=HeldOut(
            functools.partial(_held_out_image, test_paths, image_size),
            test_labels,
            batch_size,
            rows,
        ),
        fingerprint=hashlib.sha256(names.encode()).hexdigest(),
    )


def _labelled(root: Path) -> tuple[tuple[str, ...], list[Path], np.ndarray]:
    """Returns (class names, paths, labels) of the folders in `root`."""
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) < 2:
        raise ExampleError(
            f"there must be two classes or more, but {root} has {len(folders)} subfolders; make"
            " one subfolder of images for each class."
        )
    paths, labels = [], []
    for label, path in enumerate(folders):
        found = find_images(path)
        if not found:
            raise ExampleError(
                f"every class needs images, but {path} has none (png, jpeg, bmp, gif, webp or"
                " tiff); add some, or remove the folder."
            )
        paths += found
        labels += [label] * len(found)
    return tuple(p.name for p in folders), paths, np.array(labels, np.int32)


@dataclass(frozen=True)
class _FolderTrain:
    paths: list[Path]
    labels: np.ndarray
    batch_size: int
    rows: slice
    seed: int
    image_size: int
    least_crop: float
    flip: bool
    decoded: int | None

    def __call__(self, step: int) -> Batch:
        size = len(self.paths)
        indices = epoch_indices(step, size=size, batch_size=self.batch_size, seed=self.seed)
        indices = indices[self.rows]
        epoch = epoch_of(step, size=size, batch_size=self.batch_size)
        images = [self._image(i, np.random.default_rng([self.seed, epoch, i])) for i in indices]
        return dict(image=np.stack(images), label=self.labels[indices])

    def _image(self, index: int, rng: np.random.Generator) -> np.ndarray:
        image = read_image(self.paths[index], "RGB")
        if self.decoded is not None:
            return centre_crop(image, self.decoded)
        image = image.resize(
            (self.image_size, self.image_size),
            Image.BICUBIC,
            box=random_crop(*image.size, self.least_crop, rng),
            reducing_gap=2.0,
        )
        array = np.asarray(image)
        return array[:, ::-1] if self.flip and rng.random() < 0.5 else array


def random_crop(
    width: int, height: int, least: float, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """Returns a box (left, top, right, bottom) of random area, aspect (3:4 to 4:3) and position.

    Source: Szegedy et al., "Going deeper with convolutions", 2014, section 6,
    https://arxiv.org/abs/1409.4842
    """
    area = width * height * rng.uniform(least, 1)
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    crop_width = min(width, np.sqrt(area * aspect))
    crop_height = min(height, np.sqrt(area / aspect))
    left = rng.uniform(0, width - crop_width)
    top = rng.uniform(0, height - crop_height)
    return left, top, left + crop_width, top + crop_height


def _held_out_image(paths: list[Path], image_size: int, index: int) -> np.ndarray:
    return centre_crop(read_image(paths[index], "RGB"), image_size)


def centre_crop(image: Image.Image, image_size: int) -> np.ndarray:
    """Returns the largest centred square, resized."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    resized = image.resize((image_size, image_size), Image.BICUBIC, box=box, reducing_gap=2.0)
    return np.asarray(resized)
