"""Counts the bytes that a device receives in a compiled program, by kind of collective."""

import math
import re
from collections.abc import Mapping

_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}
_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\((?P<operands>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d+(?:e\dm\d\w*)?|pred)\[([\d,]*)\]")


def received_bytes(hlo: str, devices: int) -> dict[str, float]:
    """Returns the bytes that a device receives, by kind of collective; each must span all devices.

    A collective in a loop counts as often as the loop's known trip count says.

    Args:
      hlo: `compiled.as_text()`.
      devices: number of devices on which the program runs.
    """
    trips = _trips(hlo)
    found: dict[str, float] = {}
    computation = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        match = _COLLECTIVE.search(line)
        if match is None or devices == 1:
            continue
        arrays = [_bytes(*array) for array in _ARRAY.findall(match["result"])]
        # An asynchronous start's shape lists operands, then as many results; all-reduce-start may
        # list results alone.
        with_operands = "-start(" in line and (
            match["kind"] != "all-reduce" or match["result"].startswith("((")
        )
        size = sum(arrays[len(arrays) // 2 :]) if with_operands else sum(arrays)
        kind = match["kind"]
        share = (devices - 1) / devices
        of_result = {"all-reduce": 2 * share, "reduce-scatter": devices - 1.0}
        factor = of_result.get(kind, 1.0 if kind == "collective-permute" else share)
        found[kind] = found.get(kind, 0.0) + size * factor * trips.get(computation, 1)
    return found


def _bytes(dtype: str, shape: str) -> int:
    return _SIZES.get(dtype, 1) * math.prod(int(size) for size in shape.split(",") if size)


def _trips(hlo: str) -> Mapping[str, int]:
    """Returns the known trip count of each loop, by the name of its body."""
    loop = re.compile(r"body=%?([\w.\-]+).*?known_trip_count\D+(\d+)")
    return {body: int(count) for body, count in loop.findall(hlo)}
