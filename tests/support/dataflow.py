"""Finds instructions of a lowered program's HLO that do not depend on each other."""

import re

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?([\w.\-]+) = .*?([\w\-]+)\((.*)$")


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{"):
            name = line.removeprefix("ENTRY ").split()[0]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def products_beside(text: str, collective: str) -> list[int]:
    """Returns, for each collective of a kind, the number of products that can overlap it.

    These are products of its computation that neither depend on it nor it on them. A call of a function
    that multiplies counts as one product.

    Args:
      text: `jax.jit(f).lower(*operands).as_text("hlo")`, which has all dependences.
      collective: the kind, such as "collective-permute" or "all-reduce".
    """
    computations = _computations(text)
    multiplying = {name for name, lines in computations.items() if " dot(" in "\n".join(lines)}
    found = []
    for lines in computations.values():
        sources: dict[str, set[str]] = {}
        products, collectives = set(), []
        for name, kind, rest in filter(None, (map(_parts, lines))):
            operands = set(re.findall(r"[\w.\-]+", rest.partition(")")[0])) & sources.keys()
            sources[name] = operands.union(*(sources[operand] for operand in operands))
            called = set(re.findall(r"to_apply=([\w.\-]+)", rest))
            if kind == "dot" or (kind == "call" and called & multiplying):
                products.add(name)
            if kind == collective:
                collectives.append(name)
        found += [
            sum(c not in sources[p] and p not in sources[c] for p in products) for c in collectives
        ]
    return sorted(found)


def _parts(line: str) -> tuple[str, ...] | None:
    match = _INSTRUCTION.match(line)
    return None if match is None else match.groups()
