"""Autotuning tables: for each device, the measured ranking of a kernel's implementations at its shapes.

The tuner writes tables. A call looks up its stage there before it uses the stage's own rule. A table
does not depend on an operator's code: a stage is its name, its static parameters and the shapes and
dtypes of its operands, and a config is a text that is compared with those of the configs that are
legal today.

A device has up to two files of one format: the one that the package ships, and the user's, whose entries
take precedence. They are read on first use. A file that is broken, or for another device or version, is
refused with a message. Without a readable home folder, as in a container that runs under another user's
number, there is no user's file.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxfused import dispatch

FORMAT = 2
"""Version of the files' format. Since version 2, statics do not list fields that have their default."""

_GROWN = {
    "dot_product_attention forward": {11: 7, 12: 12},
    "dot_product_attention backward": {15: 11, 16: 16},
}
"""Stages that got operands (`query_offset`, `pattern_heads`) after entries of this format were written:
for each number of operands before, the position at which the new operand was inserted."""

SHIPPED = Path(__file__).parent / "tables"

FARTHEST = 0.1
"""Largest distance of shapes that share times: the sum over axes of |log2| of the ratio of sizes.

The product of all sizes then differs by 7 % at most. At larger distances the number of waves differs,
and the cost model predicts better than the nearest measured shapes: benchmarks/LAB.md has the
figures.
"""

_ALIGNMENT = 64
"""Largest alignment of a last axis, in elements, on which a kernel's time depends. Shapes share times
only if gcd(axis, 64) is equal: the bytes of an access and a tile's instructions depend on it."""


# --- entries --------------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """A measured implementation and config of a kernel."""

    implementation: str
    config: str | None
    """Text of the config, as `config_text` writes it; None for the implementation's default."""
    microseconds: float


class Key(NamedTuple):
    """Key of a table's entry: a kernel's name, static parameters and operands."""

    kernel: str
    """Name of the kernel, such as "layer_norm forward"."""
    statics: str
    """The kernel's static parameters as JSON, without the fields that have their default.

    An entry thus still matches after a field with a default is added. A field whose default changes
    needs another name, because entries without the field were measured with the old default.
    """
    operands: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """Dtype and shape of each operand; None for an absent operand."""

    @classmethod
    def of(cls, kernel: Any, operands: Sequence[Any]) -> "Key":
        """Returns the key of a kernel (a stage) for operands of these shapes and dtypes."""
        return cls(
            kernel.name,
            _canonical(_as_json(kernel, exact=False)),
            tuple(
                None if o is None else (np.dtype(o.dtype).name, tuple(o.shape)) for o in operands
            ),
        )

    @property
    def family(self) -> tuple[Any, ...]:
        """All of the key but the sizes of axes. Only keys of one family can share times."""
        ranks = tuple(None if o is None else (o[0], len(o[1])) for o in self.operands)
        return self.kernel, self.statics, ranks


Entries = Mapping[Key, tuple[Ranked, ...]]
"""Rankings of implementations and configs by key, the fastest first."""


def config_text(config: Any) -> str | None:
    """Returns the text that identifies a config in a file: JSON of its fields, nested ones too."""
    return None if config is None else _canonical(_as_json(config, exact=True))


def _as_json(value: Any, *, exact: bool) -> Any:
    """Converts a value of dataclasses, tuples, numbers, strings and dtypes to the types of JSON.

    Unless `exact`, fields that have their default are left out, and floats are reduced to their sign,
    because a kernel's time does not depend on constants such as an epsilon, a scale or a rate.
    """
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _as_json(getattr(value, field.name), exact=exact)
            for field in dataclasses.fields(value)
            if exact or not _has_default(value, field)
        }
        # The class is part of a config's text, because configs of two classes may have equal
        # fields.
        return {"class": type(value).__name__} | fields if exact else fields
    if isinstance(value, tuple | list):
        return [_as_json(item, exact=exact) for item in value]
    if isinstance(value, float) and not exact:
        return "0.0" if value == 0 else "> 0.0" if value > 0 else "< 0.0"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type | np.dtype):
        return np.dtype(value).name
    return str(value)


def _has_default(value: Any, field: "dataclasses.Field[Any]") -> bool:
    """Returns whether a dataclass's field has its default value."""
    if field.default is dataclasses.MISSING:
        return False
    mine, default = (_as_json(v, exact=False) for v in (getattr(value, field.name), field.default))
    return bool(mine == default)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# --- the table ------------------------------------------------------------------------------------


class File(NamedTuple):
    """An existing file of a device's table."""

    path: Path
    entries: int
    refusal: str | None
    """Message that says why the file is not used, or None."""

    def __str__(self) -> str:
        return self.refusal or f"{self.path} ({self.entries} entries)"


class Found(NamedTuple):
    """A ranking of implementations and configs, and whether it was measured at exactly these shapes."""

    ranking: tuple[Ranked, ...]
    exact: bool
    operands: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """`Key.operands` at which the ranking was measured."""


class Table:
    """The measured entries of a device. Equal tables choose equal implementations."""

    def __init__(self, entries: Entries, files: Sequence[File] = ()):
        self.entries = dict(entries)
        self.files = tuple(files)
        self.digest = _digest(self.entries)
        """SHA-256, in hexadecimal digits, of all entries but their times."""
        self._families: dict[tuple[Any, ...], list[Key]] = {}
        for key in self.entries:
            self._families.setdefault(key.family, []).append(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{self.digest[:12]}, {len(self.entries)} entries"

    def find(self, kernel: Any, operands: Sequence[Any]) -> Found | None:
        """Returns the ranking at these shapes, or at the nearest ones within FARTHEST, or None."""
        key = Key.of(kernel, operands)
        if key in self.entries:
            return Found(self.entries[key], True, key.operands)
        family = self._families.get(key.family)
        if not family:
            return None
        letters = kernel.axes(*operands).operands
        # Ties are broken by the operands, so that the order of entries does not matter.
        nearest = min(family, key=lambda other: (_distance(letters, key, other), other.operands))
        if _distance(letters, key, nearest) > FARTHEST:
            return None
        return Found(self.entries[nearest], False, nearest.operands)


def _distance(letters: Sequence[str], one: Key, other: Key) -> float:
    """Returns the sum of |log2| of the ratios of sizes; axes with the same letter count once."""
    apart: dict[str, float] = {}
    for names, mine, theirs in zip(letters, one.operands, other.operands, strict=True):
        if mine is None or theirs is None:
            continue
        for axis, (name, a, b) in enumerate(zip(names, mine[1], theirs[1], strict=True)):
            matrix = len(names) > 1
            if a != b and (
                min(a, b) <= 1
                or (
                    (matrix and axis == len(names) - 1)
                    and math.gcd(a, _ALIGNMENT) != math.gcd(b, _ALIGNMENT)
                )
            ):
                return math.inf
            apart[name] = abs(math.log2(a / b)) if a != b else 0.0
    return sum(apart.values())


def _digest(entries: Entries) -> str:
    content = sorted(
        (key.kernel, key.statics, _canonical(key.operands), [ranked[:2] for ranked in ranking])
        for key, ranking in entries.items()
    )
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


# --- files ----------------------------------------------------------------------------------------


def file_name(device: dispatch.Device) -> str:
    """Returns a device's file name, its name and number of SMs, such as "nvidia-h200-132.json"."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return f"{slug}-{device.multiprocessors}.json"


def user_path(device: dispatch.Device) -> Path:
    """Returns the user's file of a device, in jaxfused/tuning of $XDG_CACHE_HOME, or of ~/.cache.

    Raises:
      Refused: the user's home folder is unknown.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise Refused(
            "jaxfused: there is no place for measured choices, because the user has no home folder"
            f" ({error}); set XDG_CACHE_HOME to a folder, or name a file: path=, or --out."
        ) from error
    return Path(cache) / "jaxfused" / "tuning" / file_name(device)


def _places(device: dispatch.Device) -> list[Path]:
    """Returns the existing table files of a device: the shipped one, then the user's."""
    paths = [SHIPPED / file_name(device)]
    with contextlib.suppress(Refused):
        paths.append(user_path(device))
    found = []
    for path in paths:
        # A folder that this user may not read has no file for this user.
        with contextlib.suppress(OSError):
            if path.exists():
                found.append(path)
    return found


@functools.cache
def load(device: dispatch.Device) -> Table:
    """Returns the table of a device, read once: the shipped file's entries, overridden by the user's.

    If several processes run one program, all of them must call this function, which compares their
    tables.

    Raises:
      RuntimeError: the processes have different tables, and would compile different programs.
    """
    if device.compute_capability is None:
        return Table({})
    entries: dict[Key, tuple[Ranked, ...]] = {}
    files = []
    for path in _places(device):
        try:
            found = read(path, device)
        except Refused as refusal:
            warnings.warn(str(refusal), stacklevel=2)
            files.append(File(path, 0, str(refusal)))
        else:
            entries |= found
            files.append(File(path, len(found), None))
    table = Table(entries, files)
    _compare_processes(table, device)
    return table


def _compare_processes(table: Table, device: dispatch.Device) -> None:
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(bytes.fromhex(table.digest), np.uint8)
    # The comparison runs in a separate thread, which does not share this thread's trace, mesh and
    # device.
    with ThreadPoolExecutor(1) as thread:
        digests = thread.submit(multihost_utils.process_allgather, digest).result()
    different = [i for i, other in enumerate(digests) if other.tobytes() != digest.tobytes()]
    if different:
        raise RuntimeError(
            "jaxfused: all processes of a program need the same table of measured choices, but that of"
            f" process {jax.process_index()} is {table.digest[:12]} and that of process"
            f" {different[0]} is {digests[different[0]].tobytes().hex()[:12]}; copy one file"
            f" jaxfused/tuning/{file_name(device)} of the users' caches to all hosts, or delete it on"
            " all of them."
        )


class Refused(ValueError):
    """Raised for a file that cannot be used; the message has the reason and the remedy."""


def read(path: Path, device: dispatch.Device) -> dict[Key, tuple[Ranked, ...]]:
    """Returns the entries of a file.

    Raises:
      Refused: the file is broken, of another device or of another version.
    """

    def refused(why: str) -> Refused:
        return Refused(
            f"jaxfused: {path} is not used, because {why}; delete it, or move it away, and measure anew"
            " with `python -m jaxfused tune`."
        )

    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise refused(f"it cannot be read as JSON ({error})") from error
    if not isinstance(content, dict) or "format" not in content:
        raise refused("it is no table of measured choices")
    if content["format"] != FORMAT:
        raise refused(f"it has format {content['format']!r}, and this version reads {FORMAT}")
    if _minor(content.get("jaxfused")) != _minor(_version()):
        raise refused(
            f"it was written by jaxfused {content.get('jaxfused')}, whose kernels are not those of"
            f" {_version()}"
        )
    header = _header(device)
    for name in ("device", "compute_capability", "multiprocessors"):
        if content.get(name) != header[name]:
            raise refused(
                f"its {name.replace('_', ' ')} is {content.get(name)!r}, and that of this device is"
                f" {header[name]!r}"
            )
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise refused("it has no list of entries")
    result = {}
    for number, entry in enumerate(entries):
        try:
            key, ranking = _entry(entry)
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refused(
                f"entry {number} is not a kernel, its statics, operands and ranking ({error!r})"
            ) from error
        result[key] = ranking
    return result


def _entry(entry: Any) -> tuple[Key, tuple[Ranked, ...]]:
    operands = tuple(
        None if o is None else (_typed(o[0], str), tuple(_typed(size, int) for size in o[1]))
        for o in _typed(entry["operands"], list)
    )
    statics = _canonical(_typed(entry["statics"], dict))
    ranking = tuple(
        Ranked(
            _typed(implementation, str),
            None if config is None else _canonical(_typed(config, dict)),
            float(microseconds),
        )
        for implementation, config, microseconds in _typed(entry["ranking"], list)
    )
    kernel = _typed(entry["kernel"], str)
    places = _GROWN.get(kernel, {})
    while (place := places.get(len(operands))) is not None:
        operands = (*operands[:place], None, *operands[place:])
    return Key(kernel, statics, operands), ranking


def _typed(value: Any, wanted: type) -> Any:
    if not isinstance(value, wanted):
        raise TypeError(f"{value!r} is no {wanted.__name__}")
    return value


def check_can_write(path: Path, device: dispatch.Device) -> None:
    """Checks that `write` can write to the folder, and can add to the file if it exists.

    Raises:
      Refused: `read` refuses an existing file, which is not overwritten because it may still be needed;
        or the folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp"):
            there = path.exists()
    except OSError as error:
        raise Refused(
            f"jaxfused: {path} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can, or"
            " name another file: path=, or --out."
        ) from error
    if there:
        read(path, device)


def write(path: Path, device: dispatch.Device, entries: Entries) -> None:
    """Adds entries to a file, or creates it. Concurrent readers see the old file or the new one.

    Processes that add to one file wait for each other.

    Raises:
      Refused: `read` refuses the existing file, which stays unchanged.
      OSError: the file cannot be written, and stays unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        _replace(path, device, entries)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Locks a file's folder against other writers, since the file itself (and its lock) is replaced."""
    import fcntl  # Windows lacks fcntl, but has no GPU to measure on.

    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, device: dispatch.Device, entries: Entries) -> None:
    kept = read(path, device) if path.exists() else {}
    lines = [
        json.dumps(
            {
                "kernel": key.kernel,
                "statics": json.loads(key.statics),
                "operands": key.operands,
                "ranking": [
                    (r.implementation, r.config and json.loads(r.config), round(r.microseconds, 2))
                    for r in ranking
                ],
            }
        )
        for key, ranking in (kept | dict(entries)).items()
    ]
    # Each entry has a line of its own, for readers and for version control.
    text = json.dumps(_header(device) | {"entries": []})[:-2] + "\n" + ",\n".join(lines) + "\n]}\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _header(device: dispatch.Device) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "jaxfused": _version(),
        "jax": jax.__version__,
        "device": device.name,
        "compute_capability": list(device.compute_capability or ()),
        "multiprocessors": device.multiprocessors,
    }


def _version() -> str:
    from jaxfused import __version__  # The import is late, to avoid an import cycle.

    return __version__


def _minor(version: Any) -> list[str]:
    """Returns major and minor version; kernels and configs do not change between patch releases."""
    return str(version).split(".")[:2]
