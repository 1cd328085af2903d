"""Records checkpoints of real packages, small ones, as bytes: `python -m tests.recorded.record_formats`.

The writers of tests/formats have made them, by `make test-formats`.
"""

import sys
from pathlib import Path

import numpy as np

from jaxfused.quantization.checkpoints import safetensors_file
from tests.support.checkpoints import digest

LARGEST = 12_000
"""Most bytes of a checkpoint that is recorded; the others are read by `make test-formats` alone."""


def main(written: Path) -> None:
    recorded = {}
    for folder in sorted(written.iterdir()):
        files = [file for file in sorted(folder.iterdir()) if file.suffix != ".of"]
        if sum(file.stat().st_size for file in files) > LARGEST:
            continue
        for file in files:
            recorded[f"{folder.name}/{file.name}"] = np.frombuffer(file.read_bytes(), np.uint8)
        right = safetensors_file.read("record", folder / "expected.safetensors.of")[0]["weight"]
        recorded[f"{folder.name}/expected"] = np.array([str(right.dtype), digest(right)])
    np.savez_compressed(Path(__file__).with_name("formats.npz"), **recorded)
    print(len({name.split("/")[0] for name in recorded}), "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/formats/written"))
