"""Counts the instructions of XLA's kernels in the PTX that it dumps."""

import re
from collections import Counter
from pathlib import Path

_COUNTED = re.compile(
    r"(ld|st)\.(global|shared)|shfl|red|atom|div|ex2|lg2|rcp|r?sqrt|tanh|sin|cos|mma|wgmma"
)
"""Instructions that are counted: memory, exchanges between threads, and those slower than an
addition."""


def instructions(folder: Path) -> dict[str, str]:
    """Returns counts by kernel: all instructions, and those that access memory or are slow."""
    texts = (path.read_text() for path in sorted(folder.glob("*.ptx")))
    return {name: count(body) for text in texts for name, body in _entries(text)}


def count(body: str) -> str:
    """Returns a kernel's instructions in a line, each counted as it is written, not as it runs."""
    found = Counter(
        re.findall(r"^\s+(?:@!?%\S+ )?([a-z]\w*(?:[.:]+\w+)*)[\s;]", body, re.MULTILINE)
    )
    counted = (f"{n} {name}" for name, n in found.items() if _COUNTED.match(name))
    return ", ".join([f"{found.total()} instructions", *counted])


def _entries(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\.entry (\w+)\((.*?)^\}", text, re.DOTALL | re.MULTILINE)
