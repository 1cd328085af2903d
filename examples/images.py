"""Image files and batches, for every example: reading, ordering, background workers.

A batch is a pure function of its step. A resumed run therefore sees the data of an uninterrupted one,
whichever worker process makes which batch.
"""

import collections
import concurrent.futures
import functools
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from examples.errors import ExampleError

Batch = dict[str, np.ndarray]
MakeBatch = Callable[[int], Batch]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def find_images(directory: Path) -> list[Path]:
    """Returns the image files below `directory`, sorted, so that every machine sees the same order."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def read_image(path: Path, mode: str) -> Image.Image:
    """Returns the decoded image in the Pillow mode "L" or "RGB", upright.

    Raises:
      ExampleError: the file is missing, truncated or no image, or has 32 bits a pixel.
    """
    return _decode(path, lambda image: in_mode(image, mode))


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """Returns the image in the Pillow mode "L" or "RGB"; the upper 8 of 16 bits are kept.

    Raises:
      ValueError: its pixels have 32 bits.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits, mode {image.mode}, without a level for white")
    if image.mode.startswith("I"):
        # Pillow would clip 16 bits at 255 instead of scaling them.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert(mode)


def read_labels(path: Path) -> np.ndarray:
    """Returns the class numbers of a label image, [H, W]: palette indices as stored, not colours.

    For an image in colour, the brightest channel is returned, so that black is 0.

    Raises:
      ExampleError: the file is missing, truncated or no image.
    """

    def convert(image: Image.Image) -> np.ndarray:
        if image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
            # The largest channel, returned below, is the brightness in RGB but not in these modes.
            image = image.convert("RGB")
        pixels = np.asarray(image)
        if pixels.ndim == 2:
            return pixels
        return pixels[..., : -1 if image.mode.endswith("A") else None].max(axis=-1)

    return _decode(path, convert)


def _decode[T](path: Path, convert: Callable[[Image.Image], T]) -> T:
    """Returns `convert(image)` of a file's image, rotated as its EXIF orientation says."""
    try:
        with Image.open(path) as image:
            return convert(ImageOps.exif_transpose(image))
    # Pillow raises SyntaxError, ValueError and others for broken files, depending on the format.
    except (
        OSError,
        SyntaxError,
        ValueError,
        NotImplementedError,
        MemoryError,
        Image.DecompressionBombError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ExampleError(
            f"every image must be readable, but {path} is not ({reason}); replace or delete it."
        ) from error


def epoch_of(step: int, *, size: int, batch_size: int) -> int:
    """Returns the epoch of `step`; an epoch drops the last images that fill no batch."""
    return step // (size // batch_size)


def epoch_indices(step: int, *, size: int, batch_size: int, seed: int) -> np.ndarray:
    """Returns the indices, below `size`, of a step's images; every epoch has a new random order."""
    epoch = epoch_of(step, size=size, batch_size=batch_size)
    start = step % (size // batch_size) * batch_size
    return _shuffled(size, seed, epoch)[start : start + batch_size]


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


class Loader:
    """Makes batches in worker processes, ahead of the training.

    The processes start with the first batch and stay until the loader, a context manager, is left.

    Args:
      make_batch: function of a step that returns its batch; it is pickled if there are workers.
      workers: number of processes; with 0 this process makes each batch when it is read.
    """

    def __init__(self, make_batch: MakeBatch, workers: int):
        self._make_batch = make_batch
        self._workers = workers
        # Spawned, because a fork of a process that runs JAX's threads can deadlock. The function is
        # sent once to each process and not with each step: a folder's list of paths can be long.
        self._pool = workers and concurrent.futures.ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(make_batch,),
        )

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yields the batch of each step, in order.

        Raises:
          ExampleError: `make_batch` raised it, or a worker died.
        """
        if not self._pool:
            yield from map(self._make_batch, steps)
            return
        steps = iter(steps)
        try:
            # Two batches more than workers are requested, so that a worker always has its next batch.
            ahead = collections.deque(
                self._pool.submit(_make, step)
                for step in itertools.islice(steps, self._workers + 2)
            )
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(self._pool.submit(_make, step) for step in itertools.islice(steps, 1))
                yield batch
        except BrokenProcessPool as error:
            raise ExampleError(
                "the worker processes must stay alive, but one was killed, most likely for lack of"
                " memory; pass fewer --workers or a smaller --batch-size."
            ) from error


_make_batch: MakeBatch
"""Function that this worker process's loader was created with."""


def _start_worker(make_batch: MakeBatch) -> None:
    global _make_batch
    _make_batch = make_batch
    # Ctrl-C reaches every process of the terminal, but only the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make(step: int) -> Batch:
    return _make_batch(step)
