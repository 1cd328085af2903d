"""Loads a GPTQ checkpoint of 7 billion random weights: `python -m benchmarks checkpoint`.

Seconds of `jaxfused.quantization.load` over those of reading the files, which are in the page cache, and
the largest host memory over their size. The first load also compiles.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.report import results
from benchmarks.run import budget
from jaxfused.quantization.checkpoints import safetensors_file

NAME = "checkpoint"
MUST_READS, MUST_MEMORY = 3.0, 1.3
"""Most accepted seconds by those of reading, and host memory by the checkpoint's size."""
_LOADS, _GROUP = 4, 128
_GPTQ = dict(
    quant_method="gptq",
    bits=4,
    group_size=_GROUP,
    sym=True,
    desc_act=False,
    checkpoint_format="gptq",
)
_FIRST = "model.layers.0.q_proj"


def main(arguments: Sequence[str]) -> int:
    """Writes, reads and loads the checkpoint; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("--blocks", type=int, default=32, help="transformer blocks (%(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=11008, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="hard limit (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written (temporary)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "whole")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        budget.limited(options.seconds, remove=folder),
    ):
        rows = budget.Rows(NAME, options.out, options.seconds)
        return measure(rows, Path(folder), options)


def measure(rows: budget.Rows, folder: Path, options: argparse.Namespace) -> int:
    """Adds a row for reading and one for each load; returns 1 if a bar is missed."""
    expected = write(folder, options.blocks, options.width, options.hidden)
    size = sum(path.stat().st_size for path in folder.iterdir())
    jax.block_until_ready(jnp.zeros(1) + 1)
    read = min(_seconds(lambda: _read(folder)) for _ in range(3))
    rows.add("read", {"seconds": read, "gigabytes": size / 1e9})
    loads, most = [], 0.0
    for number in range(_LOADS):
        before, peak = _resident(), _Peak()
        loaded: dict[str, Any] = {}

        def load(into: dict[str, Any] = loaded) -> None:
            into |= jaxfused.quantization.load(folder)
            jax.block_until_ready(into)

        loads.append(_seconds(load))
        memory = (peak.end() - before) / size
        if number == 0:
            found = loaded[_FIRST].array.dequantize()
            if not np.array_equal(found[:, : expected.shape[1]], expected):
                rows.add("load 1", {"wrong": f"{_FIRST} is not what was written"})
                return 1
        most = max(most, memory)
        row = {"seconds": loads[-1], "reads": loads[-1] / read, "memory": memory}
        rows.add(f"load {number + 1}", row)
    return int(min(loads[1:]) > MUST_READS * read or most > MUST_MEMORY)


def write(folder: Path, blocks: int, width: int, hidden: int) -> np.ndarray:
    """Writes blocks in GPTQ's layout, int4 in groups of 128; returns `_FIRST`'s first 8 columns."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
    shapes |= dict(gate_proj=(width, hidden), up_proj=(width, hidden), down_proj=(hidden, width))
    pool = rng.integers(-(2**31), 2**31, 2**22, np.int32)

    def words(*shape: int) -> np.ndarray:
        return np.resize(np.roll(pool, rng.integers(pool.size)), shape)

    index: dict[str, str] = {}
    for block in range(blocks):
        tensors: dict[str, np.ndarray] = {}
        for name, (k, n) in shapes.items():
            start = f"model.layers.{block}.{name}."
            tensors[start + "qweight"] = words(k // 8, n)
            tensors[start + "qzeros"] = np.full((k // _GROUP, n // 8), 0x77777777, np.int32)
            # float16 numbers of about 0.001.
            scales = words(k // _GROUP, n // 2) & 0x03FF03FF | 0x14001400
            tensors[start + "scales"] = scales.view(np.float16)
            tensors[start + "g_idx"] = np.arange(k, dtype=np.int32) // _GROUP
        shard = f"model-{block + 1:05d}-of-{blocks:05d}.safetensors"
        safetensors_file.write(folder / shard, tensors, {})
        index |= dict.fromkeys(tensors, shard)
        if block == 0:
            packed, scale = (tensors[f"{_FIRST}.{part}"][:, :8] for part in ("qweight", "scales"))
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))
    (folder / "config.json").write_text(json.dumps(dict(quantization_config=_GPTQ)))
    numbers = (packed[:, None] >> np.arange(0, 32, 4)[:, None] & 15).reshape(width, -1) - 8
    return (numbers * np.repeat(scale, _GROUP, 0).astype(np.float32)).astype(np.float32)


def _read(folder: Path) -> None:
    buffer = bytearray(64 * 2**20)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _resident() -> int:
    """Returns the bytes of the process's resident memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class _Peak(threading.Thread):
    """Watches the resident memory every 5 ms from its creation to `end`, which returns the largest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended, self._most = threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, _resident())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return max(self._most, _resident())
