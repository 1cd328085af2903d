"""Numbers that both recorders and tests make by name, with NumPy's frozen generator."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns normal numbers that depend only on the name and the shape."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    return generator.standard_normal(shape).astype(np.float32)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns numbers like those of a trained network: norm scales around 1, weights of unit gain."""
    normal = numbers(name, shape)
    if len(shape) == 1:
        return 1 + 0.3 * normal if name.endswith("weight") else 0.3 * normal
    return normal / np.float32(np.sqrt(np.prod(shape[1:])))


class Row:
    """A recorded block: the shapes of its parameters, its options and its results."""

    def __init__(self, name: str, described: dict[str, Any], results: dict[str, np.ndarray]):
        self.name = name
        self.options = described.get("options", {})
        self.results = results
        self.shapes = {key: tuple(shape) for key, shape in described.get("shapes", {}).items()}

    def __getitem__(self, key: str) -> np.ndarray:
        """Returns the parameter of that name, in the library's own layout."""
        return parameter(f"{self.name}/{key}", self.shapes[key])

    def __contains__(self, key: str) -> bool:
        return key in self.shapes

    def kernel(self, key: str) -> np.ndarray:
        """Returns the weight of torch's nn.Linear of that name as [inputs, outputs]."""
        return self[f"{key}.weight"].T

    def bias(self, key: str) -> np.ndarray:
        return self[f"{key}.bias"]

    def input(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        return numbers(f"{self.name}/input {key}", shape)


def load(file: str) -> dict[str, Row]:
    """Returns the rows of a file that `save` has written."""
    with np.load(FOLDER / file) as stored:
        header = json.loads(bytes(stored["header"]).decode())
        results: dict[str, dict[str, np.ndarray]] = {name: {} for name in header["rows"]}
        for key in stored.files:
            if key != "header":
                name, result = key.split("|")
                results[name][result] = stored[key]
    return {name: Row(name, row, results[name]) for name, row in header["rows"].items()}


def save(file: str, versions: dict[str, str], rows: dict[str, Any]) -> None:
    """Writes {name: (described, results)} with the versions of the libraries."""
    header = {"versions": versions, "rows": {name: row[0] for name, row in rows.items()}}
    arrays = {
        f"{name}|{key}": np.asarray(value, np.float32)
        for name, (_, results) in rows.items()
        for key, value in results.items()
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(FOLDER / file, header=text, **arrays)
