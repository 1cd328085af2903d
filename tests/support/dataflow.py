"""Which instructions of a lowered program do not wait for each other, read in its HLO."""

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
    """Returns, for each collective of a kind, how many products are neither before nor after it.

    Calls of functions that multiply count as one product. Of the program's computations that have the
    collective, all are read.

    Args:
      text: `jax.jit(f).lower(*operands).as_text("hlo")`, which keeps what orders instructions.
      collective: the kind, as "collective-permute" or "all-reduce".
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
