"""Reading and writing safetensors files.

The package `safetensors` (0.8.0) is not used, because it cannot read float8 for NumPy and Flax, and
copies tensors, which are memory-mapped here.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_MOST_HEADER_BYTES = 100_000_000
_MOST_AXES = 32
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

Metadata = dict[str, str]


def read(op: str, path: Path) -> tuple[dict[str, np.ndarray], Metadata]:
    """Returns a file's tensors, mapped into memory and not read yet, and its metadata.

    Raises:
      ValueError: the header breaks the format, or does not fit the file, which may be truncated.
    """
    size = path.stat().st_size
    if size < 8:
        raise ValueError(
            f"{op}: {path} has {size} bytes, too few for a safetensors file; {_AGAIN}."
        )
    mapped = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", mapped[:8].tobytes())
    if length > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(
            f"{op}: {path} has {size} bytes, but by its first 8 a header of {length} follows; it is"
            f" truncated or no safetensors file; {_AGAIN}."
        )
    header = _header(op, path, mapped[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{op}: {path} has metadata that are no strings; {_AGAIN}.")
    data = mapped[8 + length :]
    places = {name: _place(op, path, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise ValueError(
                f"{op}: {path} has tensor {name!r} at byte {start}, but the one before it ends at byte"
                f" {end}; {_AGAIN}."
            )
        end = stop
    if end != data.size:
        raise ValueError(
            f"{op}: {path} has {data.size} bytes of tensors, but its header is about {end}; it is"
            f" truncated or damaged; {_AGAIN}."
        )
    return {
        name: data[start:stop].view(dtype).reshape(shape)
        for name, (dtype, shape, start, stop) in places.items()
    }, metadata


_AGAIN = "download or save it again"


def _header(op: str, path: Path, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{op}: {path} has a header that is no JSON of distinct names ({error}); {_AGAIN}."
        ) from None
    if not isinstance(header, dict):
        raise ValueError(f"{op}: {path} has a header that is no JSON object; {_AGAIN}.")
    return header


def _place(op: str, path: Path, name: str, entry: Any) -> tuple[Any, tuple[int, ...], int, int]:
    """Returns a tensor's dtype and shape, and its first and end byte in the data after the header."""
    entry = entry if isinstance(entry, dict) else {}
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if entry.get("dtype") not in _DTYPES:
        raise ValueError(
            f"{op}: {path} has tensor {name!r} of dtype {entry.get('dtype')!r}, not one of"
            f" {', '.join(_DTYPES)}; save it in one of them."
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{op}: {path} has tensor {name!r} of shape {shape!r} at bytes {offsets!r}, which are no"
            f" sizes; {_AGAIN}."
        )
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if len(shape) > _MOST_AXES or math.prod(n for n in shape if n) >= 2**48:
        raise ValueError(
            f"{op}: {path} has tensor {name!r} of shape {shape}, with more numbers or axes than arrays"
            f" have; {_AGAIN}."
        )
    wanted = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != wanted:
        raise ValueError(
            f"{op}: {path} has tensor {name!r} of shape {tuple(shape)} and dtype {entry['dtype']}, of"
            f" {wanted} bytes, but at bytes {offsets[0]} to {offsets[1]}; {_AGAIN}."
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def is_held(dtype: np.dtype) -> bool:
    """Returns whether a file can store arrays of this dtype."""
    return dtype in _NAMES


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Metadata) -> None:
    """Writes tensors to a file, in the order of falling dtype sizes, then of names."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = dict(
            dtype=_NAMES[array.dtype], shape=list(array.shape), data_offsets=[start, end]
        )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # The file is replaced as a whole, since tensors may be mapped from the one that is there.
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).tobytes())
    part.replace(path)
