"""Segments images of any size by programs of a few fixed shapes.

An image that fits a compiled size is padded to it by mirroring. A larger one is cut into tiles of the
largest size; neighbours overlap, and each pixel's class comes from the tile whose edge is farther away.
Tiles are computed in batches. While the device computes one, the next is copied to it and the results of
the previous one are copied back.
"""

import collections
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from examples.errors import ExampleError
from examples.unet.artifact import Artifact, Program
from examples.unet.tiles import cut_tile

Size = tuple[int, int]

_AHEAD = 2
"""Number of batches in progress at the same time."""


@dataclass(frozen=True)
class Window:
    """Position of a tile in its image, and the pixels of the image that get their class from it."""

    top: int
    left: int
    rows: slice
    columns: slice


@dataclass
class Segmentation:
    """Class of each pixel, and the network's certainty in 255ths, both uint8 [H, W]."""

    classes: np.ndarray
    sure: np.ndarray
    missing: int = 0
    """Number of tiles whose result is not written yet."""


@dataclass
class Stages:
    """Seconds of each step of a segmentation, such as "copy in" and "network", without overlap."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - begin


class Runner:
    """Runs the programs of a file on images of any size.

    Args:
      artifact: the file.
      overlap: of neighbouring tiles, as a share of a tile, at most a half.
    """

    def __init__(self, artifact: Artifact, *, overlap: float = 0.25):
        self.artifact = artifact
        self.overlap = overlap
        self._batches: dict[Size, list[int]] = collections.defaultdict(list)
        for batch, *size in sorted(artifact.description.shapes):
            self._batches[tuple(size)].append(batch)
        self._programs: dict[tuple[int, Size], Program] = {}

    def segment(self, image: np.ndarray, stages: Stages | None = None) -> Segmentation:
        """Returns the segmentation of an image, uint8 [H, W, channels]."""
        return next(self.segment_all([image], stages))

    def segment_all(
        self, images: Iterable[np.ndarray], stages: Stages | None = None
    ) -> Iterator[Segmentation]:
        """Yields the segmentation of each image, in order.

        Args:
          images: uint8 [H, W, channels] of any sizes; a memory-mapped one is read tile by tile.
          stages: gets each stage's seconds; the stages then do not overlap. None to overlap them.

        Raises:
          ExampleError: an image has another dtype, number of channels, or no pixels.
        """
        jobs: collections.deque[Segmentation] = collections.deque()
        flying: collections.deque = collections.deque()
        for size, group in self._groups(images, jobs):
            flying.append((self._launch(size, group, stages), group))
            if len(flying) >= _AHEAD:
                _land(*flying.popleft(), stages)
            yield from _finished(jobs)
        while flying:
            _land(*flying.popleft(), stages)
        yield from _finished(jobs)

    def warm(self) -> None:
        """Loads all programs and runs each once, so that the first answer is as fast as later ones."""
        channels = self.artifact.description.channels
        for batch, *size in self.artifact.description.shapes:
            images = np.zeros((batch, *size, channels), np.uint8)
            program = self._program(batch, tuple(size))
            jax.block_until_ready(program(self.artifact.weights, images))

    def size_for(self, height: int, width: int) -> Size:
        """Returns the smallest compiled size that holds an image, else the largest."""
        by_area = sorted(self._batches, key=lambda size: size[0] * size[1])
        fits = [size for size in by_area if size[0] >= height and size[1] >= width]
        return fits[0] if fits else by_area[-1]

    def _groups(
        self, images: Iterable[np.ndarray], jobs: collections.deque
    ) -> Iterator[tuple[Size, list]]:
        """Yields (size, tiles) for one call of a program; the tiles may be of several images."""
        group: list = []
        size: Size | None = None
        for image in images:
            self._check(image)
            height, width = image.shape[:2]
            wanted = self.size_for(height, width)
            if group and wanted != size:
                yield size, group
                group = []
            size = wanted
            windows = list(_windows((height, width), size, self.overlap))
            job = Segmentation(
                *(np.empty((height, width), np.uint8) for _ in range(2)), missing=len(windows)
            )
            jobs.append(job)
            for window in windows:
                group.append((image, window, job))
                if len(group) == self._batches[size][-1]:
                    yield size, group
                    group = []
        if group:
            yield size, group

    def _launch(self, size: Size, group: list, stages: Stages | None) -> tuple[jax.Array, ...]:
        """Starts a group's copy to the device, its program, and the copy of the result back."""
        timed = stages or Stages()
        batch = next(batch for batch in self._batches[size] if batch >= len(group))
        with timed.time("prepare"):
            tiles = [cut_tile(image, w.top, w.left, size) for image, w, _ in group]
            tiles += tiles[-1:] * (batch - len(tiles))
            stacked = np.stack(tiles)
        with timed.time("copy in"):
            images = jax.device_put(stacked, jax.devices()[0])
            if stages:
                jax.block_until_ready(images)
        with timed.time("load"):
            program = self._program(batch, size)
        with timed.time("network"):
            answer = program(self.artifact.weights, images)
            if stages:
                jax.block_until_ready(answer)
        # On a CPU JAX 0.11.2 copies in a thread, which aborts a process that exits before it has ended.
        if jax.default_backend() != "cpu":
            for array in answer:
                array.copy_to_host_async()
        return answer

    def _program(self, batch: int, size: Size) -> Program:
        if (batch, size) not in self._programs:
            self._programs[batch, size] = self.artifact.program(batch, *size)
        return self._programs[batch, size]

    def _check(self, image: np.ndarray) -> None:
        channels = self.artifact.description.channels
        if (
            image.dtype != np.uint8
            or image.ndim != 3
            or image.shape[2] != channels
            or not image.size
        ):
            raise ExampleError(
                f"the network reads uint8 [height, width, {channels}] with a pixel or more, but got"
                f" {image.dtype} {list(image.shape)}; convert it."
            )


def _land(answer: tuple[jax.Array, ...], group: list, stages: Stages | None) -> None:
    """Writes a group's results into the segmentations of its images."""
    with (stages or Stages()).time("copy out"):
        parts = [np.asarray(array) for array in answer]
    for index, (_, w, job) in enumerate(group):
        for whole, part in zip((job.classes, job.sure), parts, strict=True):
            tile = part[index]
            rows, columns = (
                slice(s.start - start, s.stop - start)
                for s, start in ((w.rows, w.top), (w.columns, w.left))
            )
            whole[w.rows, w.columns] = tile[rows, columns]
        job.missing -= 1


def _finished(jobs: collections.deque) -> Iterator[Segmentation]:
    while jobs and not jobs[0].missing:
        yield jobs.popleft()


def _windows(shape: Size, size: Size, overlap: float) -> Iterator[Window]:
    rows, columns = (
        list(_parts(length, tile, int(tile * overlap)))
        for length, tile in zip(shape, size, strict=True)
    )
    for top, kept_rows in rows:
        for left, kept_columns in columns:
            yield Window(top, left, kept_rows, kept_columns)


def _parts(length: int, tile: int, overlap: int) -> Iterator[tuple[int, slice]]:
    """Yields each tile's first pixel along an axis, and its slice between the middles of overlaps."""
    starts = [*range(0, max(length - tile, 0), tile - overlap), max(length - tile, 0)]
    borders = [(a + tile + b) // 2 for a, b in itertools.pairwise(starts)]
    for start, first, last in zip(starts, [0, *borders], [*borders, length], strict=True):
        yield start, slice(first, last)
