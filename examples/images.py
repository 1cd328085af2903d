"""Image files and batches, for every example: reading, ordering, background workers.

A batch is a pure function of its step. That is what makes a resumed run see the data of an
uninterrupted one, whichever worker process makes which batch.
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
    """The image files below `directory`, sorted, so that every machine sees one order."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def read_image(path: Path, mode: str) -> Image.Image:
    """The decoded image in the Pillow mode "L" or "RGB", upright.

    Raises:
      ExampleError: the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as image:
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):
                # 16 bits a pixel: Pillow would clip them at 255 instead of scaling.
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            return image.convert(mode)
    # Pillow raises SyntaxError, ValueError and others for broken files, depending on the format.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise ExampleError(
            f"every image must be readable, but {path} is not ({reason}); replace or delete it."
        ) from error


def epoch_of(step: int, *, size: int, batch_size: int) -> int:
    """The epoch that `step` belongs to; an epoch drops the last images that fill no batch."""
    return step // (size // batch_size)


def epoch_indices(step: int, *, size: int, batch_size: int, seed: int) -> np.ndarray:
    """Which of `size` images make the batch of `step`: a new order every epoch, from the seed."""
    epoch = epoch_of(step, size=size, batch_size=batch_size)
    start = step % (size // batch_size) * batch_size
    return _shuffled(size, seed, epoch)[start : start + batch_size]


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def batches(make_batch: MakeBatch, steps: Iterable[int], *, workers: int = 0) -> Iterator[Batch]:
    """`make_batch(step)` for each step, in order.

    With `workers`, as many processes make the batches ahead of time; `make_batch` must then be an
    object that pickles. Closing the iterator ends the processes.

    Raises:
      ExampleError: what `make_batch` raised, or a worker died.
    """
    if workers == 0:
        yield from map(make_batch, steps)
        return
    # Spawned, because a fork of a process that runs JAX's threads can deadlock.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(make_batch,),
    )
    steps = iter(steps)
    try:
        # Two more than there are workers: each has one at hand when it finishes its own.
        ahead = collections.deque(
            pool.submit(_make, step) for step in itertools.islice(steps, workers + 2)
        )
        while ahead:
            batch = ahead.popleft().result()
            ahead.extend(pool.submit(_make, step) for step in itertools.islice(steps, 1))
            yield batch
    except BrokenProcessPool as error:
        raise ExampleError(
            "the worker processes must stay alive, but one was killed, most likely for lack of"
            " memory; pass fewer --workers or a smaller --batch-size."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_make_batch: MakeBatch
"""In a worker process: the function that it was started with, sent once and not for each step."""


def _start_worker(make_batch: MakeBatch) -> None:
    global _make_batch
    _make_batch = make_batch
    # Ctrl-C reaches every process of the terminal; the parent alone decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make(step: int) -> Batch:
    return _make_batch(step)
