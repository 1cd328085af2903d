"""Reading GGUF files: a header with metadata, and tensors in blocks.

The package `gguf` is not used: it does not check sizes before it reads, and returns numbers only in
float32.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4
_AGAIN = "download or convert it again"


class Blocks(NamedTuple):
    """A type of blocks in which GGUF stores tensors."""

    name: str
    values: int
    """Number of values in a block."""
    size: int
    """Bytes of a block."""


TYPES = {
    0: Blocks("F32", 1, 4),
    1: Blocks("F16", 1, 2),
    2: Blocks("Q4_0", 32, 18),
    3: Blocks("Q4_1", 32, 20),
    6: Blocks("Q5_0", 32, 22),
    7: Blocks("Q5_1", 32, 24),
    8: Blocks("Q8_0", 32, 34),
    10: Blocks("Q2_K", 256, 84),
    11: Blocks("Q3_K", 256, 110),
    12: Blocks("Q4_K", 256, 144),
    13: Blocks("Q5_K", 256, 176),
    14: Blocks("Q6_K", 256, 210),
    20: Blocks("IQ4_NL", 32, 18),
    23: Blocks("IQ4_XS", 256, 136),
    24: Blocks("I8", 1, 1),
    25: Blocks("I16", 1, 2),
    26: Blocks("I32", 1, 4),
    28: Blocks("F64", 1, 8),
    30: Blocks("BF16", 1, 2),
    35: Blocks("TQ2_0", 256, 66),
    39: Blocks("MXFP4", 32, 17),
}


class Tensor(NamedTuple):
    """A tensor as a file stores it."""

    kind: str
    bytes: np.ndarray
    """Bytes of the rows' blocks, uint8 [..., F, bytes], mapped into memory."""
    shape: tuple[int, ...]
    """Shape [..., F, D]; values along D are contiguous."""


def read(op: str, path: Path) -> dict[str, Tensor]:
    """Returns a file's tensors, mapped into memory and not read yet.

    Raises:
      ValueError: the header breaks the format, or does not fit the file, which may be truncated.
    """
    header, tensors, metadata = _opened(op, path, with_arrays=False)
    mapped, alignment = header.mapped, metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{op}: {path} has alignment {alignment!r}, no power of two; {_AGAIN}.")
    places = [header.place() for _ in range(tensors)]
    start = -(-header.at // alignment) * alignment
    result: dict[str, Tensor] = {}
    for name, kind, shape, offset in places:
        if name in result:
            raise ValueError(f"{op}: {path} has tensor {name!r} twice; {_AGAIN}.")
        row = shape[-1] // kind.values * kind.size
        count = math.prod(shape[:-1]) * row
        first = start + offset
        if offset % alignment or first + count > mapped.size:
            raise ValueError(
                f"{op}: {path} has {mapped.size} bytes, but its header says that tensor {name!r} has"
                f" {count} from byte {first} on; it is truncated or damaged; {_AGAIN}."
            )
        content = mapped[first : first + count].reshape(*shape[:-1], row)
        result[name] = Tensor(kind.name, content, shape)
    return result


def metadata(op: str, path: Path) -> dict[str, Any]:
    """Returns a file's metadata by its keys: numbers, texts, and lists of these.

    Raises:
      ValueError: as `read` does.
    """
    return _opened(op, path, with_arrays=True)[2]


def _opened(op: str, path: Path, *, with_arrays: bool) -> tuple["_Header", int, dict[str, Any]]:
    """Returns the header, read up to its first tensor, the number of tensors, and the metadata."""
    if path.stat().st_size < 24:
        raise ValueError(f"{op}: {path} has too few bytes for a GGUF file; {_AGAIN}.")
    header = _Header(op, path, np.memmap(path, np.uint8, "r"))
    if header.bytes(4) != b"GGUF" or header.number("I") not in (2, 3):
        raise ValueError(f"{op}: {path} is no GGUF file of version 2 or 3; {_AGAIN}.")
    tensors, pairs = header.number("Q"), header.number("Q")
    found: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.string()
        found[key] = header.value(with_arrays=with_arrays)
    return header, tensors, found


class _Header:
    """A file's header; the methods read from byte `at` on and move it."""

    def __init__(self, op: str, path: Path, mapped: np.ndarray):
        self.op, self.path, self.mapped, self.at = op, path, mapped, 0

    def bytes(self, count: int) -> bytes:
        self.skip(count)
        return self.mapped[self.at - count : self.at].tobytes()

    def skip(self, count: int) -> None:
        if count > self.mapped.size - self.at:
            raise ValueError(
                f"{self.op}: {self.path} ends within its header, at byte {self.mapped.size}; it is"
                f" truncated or damaged; {_AGAIN}."
            )
        self.at += count

    def number(self, code: str) -> Any:
        (number,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))
        return number

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, *, with_arrays: bool) -> Any:
        """Reads a metadata value; arrays, such as the vocabulary, are skipped unless `with_arrays`."""
        kind = self.number("I")
        if kind in _FIXED:
            return self.number(_FIXED[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self._fail(f"a value of type {kind}")
        of, count = self.number("I"), self.number("Q")
        if of in _FIXED:
            self.skip(size := count * struct.calcsize(f"<{_FIXED[of]}"))
            if not with_arrays:
                return None
            part = self.mapped[self.at - size : self.at]
            return part.view(np.dtype(_FIXED[of]).newbyteorder("<")).tolist()
        if of != _STRING:
            self._fail(f"an array of type {of}")
        if with_arrays:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.skip(self.number("Q"))
        return None

    def place(self) -> tuple[str, Blocks, tuple[int, ...], int]:
        """Reads a tensor's name, type, shape and offset."""
        name, axes = self.string(), self.number("I")
        if not 1 <= axes <= _MOST_AXES:
            self._fail(f"tensor {name!r} of {axes} axes")
        shape = tuple(reversed([self.number("Q") for _ in range(axes)]))
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TYPES:
            names = ", ".join(form.name for form in TYPES.values())
            raise ValueError(
                f"{self.op}: {self.path} has tensor {name!r} of type {kind}, but {names} are read;"
                " quantise it to one of them by llama.cpp."
            )
        if shape[-1] % TYPES[kind].values or math.prod(n for n in shape if n) >= 2**48:
            self._fail(f"tensor {name!r} of shape {shape} in blocks of {TYPES[kind].values}")
        return name, TYPES[kind], shape, offset

    def _fail(self, what: str) -> None:
        raise ValueError(f"{self.op}: {self.path} has {what}, which no GGUF file has; {_AGAIN}.")
