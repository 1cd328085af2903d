"""Reads and writes the image files of a prediction.

`.npy` files of any size are read through a memory map. Pillow reads the other formats, and decodes a
whole image at once. `.npy` and PNG files are written row by row.
"""

import contextlib
import io
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from examples.errors import ExampleError
from examples.images import read_image


def open_image(path: Path, channels: int) -> np.ndarray:
    """Returns the image, uint8 [H, W, channels]; for `.npy` a memory map, read when it is indexed.

    Args:
      path: of the file; an `.npy` file holds uint8 [H, W] or [H, W, channels].
      channels: 1 or 3. Grey is repeated three times; Pillow also converts colours to grey.

    Raises:
      ExampleError: the file is missing, unreadable, of another dtype or shape.
    """
    if path.suffix.lower() != ".npy":
        image = np.asarray(read_image(path, "L" if channels == 1 else "RGB"))
        return image.reshape(*image.shape[:2], channels)
    try:
        image = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ExampleError(
            f"every image must be readable, but {path} is not ({reason}); pass an array that"
            " numpy.save wrote."
        ) from error
    if image.ndim == 2:
        image = image[..., None]
    shape = (*image.shape[:2], channels)
    if (
        image.dtype != np.uint8
        or image.ndim != 3
        or 0 in shape
        or image.shape[2] not in (1, channels)
    ):
        raise ExampleError(
            f"the model reads uint8 [height, width{', 3' if channels == 3 else ''}], but {path} has"
            f" {image.dtype} {list(image.shape)}; convert it."
        )
    return np.broadcast_to(image, shape)


def write_rows(path: Path, shape: tuple[int, int], blocks: Iterable[np.ndarray]) -> None:
    """Writes a grey image that arrives some rows at a time; the file is complete or absent.

    Args:
      path: ends in .npy or .png, as `check_output` ensures.
      shape: (height, width).
      blocks: uint8 [rows, width], height rows in all.

    Raises:
      ExampleError: the file cannot be written.
    """
    encode = _ENCODERS[path.suffix.lower()]
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for content in encode(shape, blocks):
                file.write(content)
        partial.replace(path)
    except OSError as error:
        raise ExampleError(
            f"the output must be writable, but {path} is not ({error.strerror}); pass another OUT."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Raises an ExampleError if `write_rows` cannot write to `path`."""
    if path.suffix.lower() not in _ENCODERS:
        raise ExampleError(
            f"the output is written as {' or '.join(_ENCODERS)}, but OUT is {path}; pass a path"
            " that ends so."
        )
    if not path.parent.is_dir():
        raise ExampleError(
            f"the output needs a folder, but {path.parent} is missing; make it, or pass another OUT."
        )


def _npy(shape: tuple[int, int], blocks: Iterable[np.ndarray]) -> Iterator[bytes]:
    header = io.BytesIO()
    layout = dict(descr="|u1", fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(header, layout)
    yield header.getvalue()
    for block in blocks:
        yield block.tobytes()


def _png(shape: tuple[int, int], blocks: Iterable[np.ndarray]) -> Iterator[bytes]:
    """Yields the bytes of a PNG. Source: https://www.w3.org/TR/png-3/."""
    height, width = shape
    yield b"\x89PNG\r\n\x1a\n"
    # The header says: eight bits, grey, and the default compression, filter and interlace.
    yield _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    deflate = zlib.compressobj()
    for block in blocks:
        # Each row starts with the number of its filter, which is 0 for none.
        yield _png_chunk(b"IDAT", deflate.compress(np.pad(block, ((0, 0), (1, 0))).tobytes()))
    yield _png_chunk(b"IDAT", deflate.flush())
    yield _png_chunk(b"IEND", b"")


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_ENCODERS = {".npy": _npy, ".png": _png}
