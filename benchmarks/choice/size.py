"""`python -m benchmarks.choice.size`: counts lines and constants of the code that chooses kernels.

A choice begins at a stage's `estimate`, or where an operator leaves a call to XLA before its custom_vjp.
The count covers all that these roots name, directly or indirectly, in `jaxfused` and `pallas_kernels`:
functions, classes of sizes, and module constants. A constant is a numeric literal in them other than -1,
0, 1 and 2. A second row adds what orders the configs of a kernel (`configs`). Two kinds of code are not
counted: reasons why a kernel cannot run (`why_not`, `why_unsupported`), which are limits, not choices,
and the Runner and the table, which have no constants of an operator.
"""

import argparse
import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FREE = (-1, 0, 1, 2)
_LIMITS = ("why_not", "why_unsupported", "why_unfit", "why_symbolic", "why_unavailable")
_LAUNCHES = ("run", "forward", "backward", "axes", "batched", "on_parts", "examples")
_GATES = ("left_to_xla", "_left_to_xla", "why_xla")
_NOT_FOLLOWED = (
    "jaxfused.dispatch",
    "jaxfused.runtime.runner",
    "jaxfused.runtime.table",
    "jaxfused.runtime.gate",
    "jaxfused.runtime.sharding",
    "jaxfused.runtime.shapes",
    "jaxfused.runtime.checks",
    "jaxfused.runtime.cuda_library",
    "pallas_kernels.hopper",
)

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Place(NamedTuple):
    """A definition's module, and its name there: CLASS.METHOD for a method."""

    module: str
    name: str


class Module:
    """Definitions of a file, and the modules and names that it imports."""

    def __init__(self, path: Path, name: str):
        self.name = name
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, Place] = {}
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    self.definitions[node.name] = node
                    methods = node.body if isinstance(node, ast.ClassDef) else []
                    for method in methods:
                        if isinstance(method, ast.FunctionDef):
                            self.definitions[f"{node.name}.{method.name}"] = method
                case ast.Assign(targets=[target]):
                    names = target.elts if isinstance(target, ast.Tuple) else [target]
                    for each in names:
                        if isinstance(each, ast.Name):
                            self.definitions[each.id] = node
                case ast.AnnAssign(target=ast.Name(id=target)):
                    self.definitions[target] = node
                case ast.ImportFrom(module=str() as source):
                    for alias in node.names:
                        self.imports[alias.asname or alias.name] = Place(source, alias.name)


@functools.cache
def modules() -> dict[str, Module]:
    """Returns the modules of both packages, by name."""
    found = {}
    for package in ("jaxfused", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name] = Module(path, name)
    return found


@functools.cache
def _resolved(module: str, name: str) -> Place | str | None:
    """Returns what a name in a module refers to: a definition, a module's name, or None."""
    if module not in modules():
        return None
    here = modules()[module]
    if name in here.definitions:
        return Place(module, name)
    if name in here.imports:
        source, imported = here.imports[name]
        whole = f"{source}.{imported}"
        return whole if whole in modules() else _resolved(source, imported)
    return None


def roots(*, with_configs: bool) -> list[Place]:
    """Returns the functions from which the code that chooses kernels is followed."""
    names = {"estimate", *_GATES, *(["configs"] if with_configs else [])}
    return [
        Place(module.name, name)
        for module in modules().values()
        if module.name not in _NOT_FOLLOWED
        for name in module.definitions
        if name.rpartition(".")[2] in names
    ] + list(_inline_gates())


def _inline_gates() -> Iterator[Place]:
    """Yields the functions that pass a computed `why_xla=` to a call."""
    for module in modules().values():
        for name, node in module.definitions.items():
            calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
            if isinstance(node, ast.FunctionDef) and any(
                k.arg == "why_xla" and not isinstance(k.value, ast.Constant)
                for call in calls
                for k in call.keywords
            ):
                yield Place(module.name, f"{name}()")


def reached(begin: Iterable[Place]) -> set[Place]:
    """Returns the definitions that the roots name, directly or indirectly."""
    seen: set[Place] = set()
    waiting = [p for p in begin if not p.name.endswith("()")]
    while waiting:
        place = waiting.pop()
        if place in seen or place.module in _NOT_FOLLOWED:
            continue
        if place.name.rpartition(".")[2] in _LIMITS:
            continue
        seen.add(place)
        waiting += _named_by(place, seen)
    return seen


def _named_by(place: Place, seen: set[Place]) -> Iterator[Place]:
    node = modules()[place.module].definitions[place.name]
    owner, dot, _ = place.name.partition(".")
    if dot:
        yield Place(place.module, owner)
    for child in _body(node):
        for part in ast.walk(child):
            if isinstance(part, ast.Name):
                found = _resolved(place.module, part.id)
                if isinstance(found, Place):
                    yield found
            elif isinstance(part, ast.Attribute):
                value = part.value
                if isinstance(value, ast.Name) and value.id == "self":
                    yield from _method(place.module, owner, part.attr)
                    continue
                base = _resolved(place.module, value.id) if isinstance(value, ast.Name) else None
                if isinstance(base, str):
                    found = _resolved(base, part.attr)
                    if isinstance(found, Place):
                        yield found
                else:
                    # The methods and properties of a reached class count if this module imports the
                    # class.
                    for other in [p for p in seen if "." not in p.name]:
                        if _knows(place.module, other):
                            yield from _method(other.module, other.name, part.attr)


def _knows(module: str, place: Place) -> bool:
    """Returns whether a definition belongs to this module or to one that it imports from."""
    sources = {source for source, _ in modules()[module].imports.values()}
    named = {f"{source}.{name}" for source, name in modules()[module].imports.values()}
    return place.module == module or place.module in sources | named


def _method(module: str, owner: str, name: str) -> Iterator[Place]:
    """Yields the method of a class, or of its base classes."""
    if name in _LAUNCHES or module not in modules():
        return
    definitions = modules()[module].definitions
    if f"{owner}.{name}" in definitions:
        yield Place(module, f"{owner}.{name}")
        return
    node = definitions.get(owner)
    for base in node.bases if isinstance(node, ast.ClassDef) else []:
        found = _resolved(module, base.id) if isinstance(base, ast.Name) else None
        if isinstance(found, Place):
            yield from _method(found.module, found.name, name)


def _body(node: Definition) -> list[ast.AST]:
    """Returns the nodes of a definition that are followed and counted; for a class only its fields."""
    if isinstance(node, ast.ClassDef):
        return [n for n in node.body if not isinstance(n, ast.FunctionDef)]
    if isinstance(node, ast.FunctionDef):
        return [node]
    return [node.value] if node.value is not None else []


def constants(node: Definition) -> int:
    """Counts the numeric literals of a definition, except -1, 0, 1 and 2."""
    return sum(
        isinstance(part, ast.Constant)
        and isinstance(part.value, int | float)
        and not isinstance(part.value, bool)
        and part.value not in _FREE
        for child in _body(node)
        for part in ast.walk(child)
    )


def lines(node: Definition) -> int:
    """Counts the lines of a definition with code, without docstrings."""
    nodes = [node] if not isinstance(node, ast.ClassDef) else _body(node)
    found: set[int] = set()
    for child in nodes:
        for part in ast.walk(child):
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if is_text or not hasattr(part, "lineno") or isinstance(part, ast.FunctionDef):
                continue
            text = part.value if isinstance(part, ast.Constant) else None
            if isinstance(text, str):
                continue
            found |= (
                {part.lineno, part.end_lineno or part.lineno} if _spans(part) else {part.lineno}
            )
    return len(found | {node.lineno})


def _spans(part: ast.AST) -> bool:
    return isinstance(part, ast.expr)


def table(*, with_configs: bool) -> Counter[tuple[str, str]]:
    """Returns counts of lines and constants by (module, "lines" or "constants")."""
    counts: Counter[tuple[str, str]] = Counter()
    found = reached(roots(with_configs=with_configs))
    counted: set[int] = set()
    for place in found:
        node = modules()[place.module].definitions[place.name]
        if id(node) in counted:
            continue  # A tuple assignment has several names.
        counted.add(id(node))
        counts[place.module, "lines"] += lines(node)
        counts[place.module, "constants"] += constants(node)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="a line for each file")
    parser.add_argument("--names", metavar="MODULE", help="a line for each definition of a file")
    options = parser.parse_args()
    for title, with_configs in (("implementations", False), ("and configs", True)):
        counts = table(with_configs=with_configs)
        total = {
            kind: sum(n for (_, k), n in counts.items() if k == kind)
            for kind in ("lines", "constants")
        }
        print(f"{title}: {total['lines']} lines, {total['constants']} constants")
        if options.files:
            for module in sorted({m for m, _ in counts}, key=lambda m: -counts[m, "constants"]):
                print(f"  {counts[module, 'lines']:5} {counts[module, 'constants']:4}  {module}")
        if options.names:
            for place in sorted(reached(roots(with_configs=with_configs))):
                node = modules()[place.module].definitions[place.name]
                if place.module == options.names:
                    print(f"  {lines(node):5} {constants(node):4}  {place.name}")


if __name__ == "__main__":
    main()
