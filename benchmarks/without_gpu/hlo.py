"""The kernels of a program, read from the text of its optimised HLO."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_FREE = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
"""Instructions that launch no kernel."""

_CONTROL = {"call", "conditional", "while"}
_WORKSPACE = ("__cublas", "__cudnn")
"""Prefixes of calls whose last result is scratch memory."""


@dataclass(frozen=True)
class Kernel:
    """One kernel launch, or one call into a library, which may launch several kernels."""

    name: str
    what: str
    """Generator of the kernel's code, or the library call with its epilogue."""
    results: tuple[str, ...]
    operands: tuple[str, ...]
    """Shapes that the kernel reads; for an operand that it only slices, those of the slices."""
    source: str
    """Operation of the traced program after which the kernel is named."""
    function: str = ""
    """Name of a fusion's code, which several fusions may share."""
    depth: int = 0
    """Number of loops, branches and calls around the kernel."""

    @property
    def megabytes(self) -> float:
        """Largest number of megabytes that the kernel may read and write."""
        return sum(map(size, self.results + self.operands)) / 1e6


class _Instruction(NamedTuple):
    name: str
    shapes: tuple[str, ...]
    opcode: str
    operands: tuple[str, ...]
    """Names of the instruction's operands; for a parameter, its number."""
    attributes: str


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of the program `text`, in the order of its schedule."""
    computations = dict(_computations(text))
    entry = re.search(r"^ENTRY %(\S+)", text, re.MULTILINE)
    assert entry is not None, "a program has an entry"
    return list(_kernels(computations, entry.group(1), 0))


def size(shape: str) -> int:
    """Returns the bytes of an array such as `bf16[16,196]{1,0}`, or 0 if `shape` is no array."""
    match = re.match(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shape)
    if match is None:
        return 0
    bits, sizes = match.groups()
    return math.prod(int(n) for n in sizes.split(",") if n) * int(bits or 8) // 8


def _computations(text: str) -> Iterator[tuple[str, dict[str, _Instruction]]]:
    for match in re.finditer(r"^(?:ENTRY )?%(\S+) .*\{\n((?:  .*\n)*)\}", text, re.MULTILINE):
        lines = map(_instruction, match.group(2).splitlines())
        yield match.group(1), {line.name: line for line in lines if line is not None}


def _instruction(line: str) -> _Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
    if match is None:
        return None
    shape, rest = _balanced(line[match.end() :])
    opcode, _, rest = rest.lstrip().partition("(")
    operands, attributes = _balanced("(" + rest)
    shapes = tuple(re.findall(r"\w+\[[\d,]*\]", shape))
    names = re.findall(r"\d+" if opcode == "parameter" else r"%([\w.\-]+)", operands)
    return _Instruction(match.group(1), shapes, opcode, tuple(names), attributes)


def _balanced(text: str) -> tuple[str, str]:
    """Returns the parenthesised start of a text, or else its first word, and the rest."""
    if not text.startswith("("):
        word, _, rest = text.partition(" ")
        return word, rest
    depths = itertools.accumulate((c == "(") - (c == ")") for c in text)
    end = next(index for index, depth in enumerate(depths) if depth == 0)
    return text[: end + 1], text[end + 1 :]


def _kernels(
    computations: Mapping[str, Mapping[str, _Instruction]], name: str, depth: int
) -> Iterator[Kernel]:
    instructions = computations[name]
    for instruction in instructions.values():
        if instruction.opcode in _FREE:
            continue
        if instruction.opcode in _CONTROL:
            for body in _bodies(instruction):
                yield from _kernels(computations, body, depth + 1)
            continue
        yield replace(_kernel(instruction, instructions, computations), depth=depth)


def _bodies(instruction: _Instruction) -> list[str]:
    names = r"(?:body|condition|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)"
    found = re.findall(names, instruction.attributes)
    return [name for group in found for name in re.findall(r"%([\w.\-]+)", group)]


def _kernel(
    instruction: _Instruction,
    instructions: Mapping[str, _Instruction],
    computations: Mapping[str, Mapping[str, _Instruction]],
) -> Kernel:
    attributes, results = instruction.attributes, instruction.shapes
    what = _what(instruction)
    if what.startswith(_WORKSPACE) and len(results) > 1:
        results = results[:-1]
    called = re.search(r"calls=%([\w.\-]+)", attributes)
    body = computations.get(called.group(1), {}) if called else {}
    places = {operand: place for place, operand in enumerate(instruction.operands)}
    operands = [
        _slices(body, place) or instructions[operand].shapes for operand, place in places.items()
    ]
    source = re.search(r'metadata=\{op_name="([^"]*)"', attributes)
    shared = re.search(r'deduplicated_name="([^"]*)"', attributes)
    return Kernel(
        instruction.name,
        what,
        results,
        tuple(shape for shapes in operands for shape in shapes),
        source.group(1) if source else "",
        re.sub(r"\W", "_", shared.group(1) if shared else instruction.name),
    )


def _slices(body: Mapping[str, _Instruction], place: int) -> tuple[str, ...]:
    """Returns shapes of the slices that a fusion reads of an operand; () if it reads all of it."""
    parameters = (i for i in body.values() if i.opcode == "parameter")
    names = {i.name for i in parameters if i.operands == (str(place),)}
    shapes: list[str] = []
    for instruction in body.values():
        if names.isdisjoint(instruction.operands):
            continue
        if instruction.opcode in ("bitcast", "convert", "reshape"):
            names.add(instruction.name)
        elif instruction.opcode in ("slice", "dynamic-slice"):
            shapes += instruction.shapes
        else:
            return ()
    return tuple(shapes)


def _what(instruction: _Instruction) -> str:
    def first(pattern: str) -> str:
        match = re.search(pattern, instruction.attributes)
        return match.group(1) if match else ""

    if instruction.opcode == "fusion":
        generator = first(r'"fusion_backend_config":\{"kind":"(\w+)"')
        return generator.strip("_") or first(r"kind=k(\w+)").lower()
    if instruction.opcode != "custom-call":
        return instruction.opcode
    target = first(r'custom_call_target="([^"]*)"')
    epilogue = first(r'"epilogue":"(\w+)"') or first(r'"activation_mode":"k?(\w+)"')
    return target if epilogue in ("", "DEFAULT", "None") else f"{target} {epilogue}"
