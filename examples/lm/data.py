"""Rows of text for training: the bytes of documents, one after another.

A token is a byte; START stands in front of each document. Documents are packed: they are concatenated
and cut into rows of T + 1 tokens, and `examples.lm.sizes.split` returns the document of each token.
Worker processes import this module, so it does not import JAX.
"""

import bz2
import hashlib
import lzma
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.errors import ExampleError
from examples.images import Batch, epoch_indices, epoch_of

START = 256
"""Token before each document, and after the last."""
TOKENS = 264
"""Size of the vocabulary: bytes, START, and unused tokens up to a size that kernels support."""

_SUFFIXES = (".txt", ".md", ".py", ".rst", ".c", ".h", ".json", ".html", ".xml", ".tex")
_NOT_READ = frozenset({"test", "tests", "idlelib", "site-packages", "__pycache__"})
"""Folders of Python's library that are left out: tests and other projects' packages."""


@dataclass(frozen=True)
class Rows:
    """Rows of a packed text; `rows(step)` is a batch of them, in a new order in each pass."""

    tokens: np.ndarray
    """Tokens of all documents, uint16, with a START before each and at the end."""
    length: int
    """Number of tokens T of a row that the model reads."""
    batch_size: int
    part: slice
    """Rows of a batch that this process makes."""
    seed: int

    @property
    def count(self) -> int:
        """Returns the number of rows in a pass over the text."""
        return (len(self.tokens) - 1) // self.length - 1

    def __call__(self, step: int) -> Batch:
        """Returns a step's rows [B, T + 1]: the first T tokens are read, the last T are the labels."""
        of_all = dict(size=self.count, batch_size=self.batch_size)
        rows = epoch_indices(step, **of_all, seed=self.seed)[self.part]
        # Each pass cuts the text into rows at another random offset.
        shift = np.random.default_rng([self.seed, epoch_of(step, **of_all), 1]).integers(
            self.length
        )
        return dict(text=self._cut(rows * self.length + shift))

    def in_order(self, batch: int) -> Batch:
        """Returns a batch of rows that cover the text once, filled with START beyond its end."""
        rows = np.arange(batch * self.batch_size, (batch + 1) * self.batch_size)[self.part]
        return dict(text=self._cut(rows * self.length))

    @property
    def batches(self) -> range:
        """Indices of the batches that cover the text once."""
        return range(-(-(len(self.tokens) - 1) // (self.length * self.batch_size)))

    def _cut(self, starts: np.ndarray) -> np.ndarray:
        places = starts[:, None] + np.arange(self.length + 1)
        inside = places < len(self.tokens)
        return np.where(inside, self.tokens[np.minimum(places, len(self.tokens) - 1)], START)


@dataclass(frozen=True)
class Texts:
    """Documents to train on, and documents that are held out."""

    train: tuple[bytes, ...]
    held_out: tuple[bytes, ...]
    fingerprint: str
    """Hash of the files' names, which changes when files are added, removed or renamed."""

    def compressed(self) -> dict[str, float]:
        """Returns the bits per byte to which xz and bz2 compress the concatenated held-out texts."""
        text = b"".join(self.held_out)
        made = dict(xz=lzma.compress(text, preset=9), bz2=bz2.compress(text))
        return {name: 8 * len(data) / len(text) for name, data in made.items()}


def read_texts(folder: Path | None, *, held_out: float) -> Texts:
    """Returns the text files of a folder, or the sources of Python's own library.

    A file's name alone decides whether it is held out, so every machine and run makes the same split.

    Raises:
      ExampleError: a file cannot be read, or there are too few.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    if not root.is_dir():
        raise ExampleError(
            f"--data must be a folder of texts, but there is no {root}; pass another."
        )
    suffixes = (".py",) if folder is None else _SUFFIXES
    left_out = _NOT_READ if folder is None else frozenset()
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix.lower() in suffixes and not left_out & {*path.relative_to(root).parts}
    )
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        try:
            text = (root / name).read_bytes()
        except OSError as error:
            raise ExampleError(
                f"every text must be readable, but {root / name} is not ({error}); remove it."
            ) from error
        if text:
            is_held_out = zlib.crc32(name.encode()) < held_out * 2**32
            parts[is_held_out].append(text)
    if not parts[False] or not parts[True]:
        raise ExampleError(
            f"texts to learn and to hold out are needed, but {root} has {len(parts[False])} and"
            f" {len(parts[True])} files of {', '.join(suffixes)} that are not empty; pass a --data with"
            " more of them, or another --held-out."
        )
    fingerprint = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return Texts(tuple(parts[False]), tuple(parts[True]), fingerprint)


def packed(texts: Sequence[bytes]) -> np.ndarray:
    """Returns all texts in one array of tokens, with a START before each and after the last."""
    start = np.array([START], np.uint16)
    parts = [part for text in texts for part in (start, np.frombuffer(text, np.uint8))]
    return np.concatenate([*parts, start])
