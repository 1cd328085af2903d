"""Text of a mask: its rule, the fraction of blocks that attention visits, and their picture."""

import numpy as np

from jaxfused.ops.attention.masks.blocks import EMPTY, FULL, prepare
from jaxfused.ops.attention.masks.mask_class import AttentionMask

_BLOCK = 128
_MOST = 32
"""Largest number of rows and columns of a picture."""
_SHADES = {EMPTY: "·", FULL: "█"}
_PARTIAL = "▒"


def picture(mask: AttentionMask) -> str:
    """Returns the text lines of a mask, with a picture for each of the first heads that differ."""
    heads = list(dict.fromkeys(mask.of_heads))
    lines = [repr(mask), _summary(mask)]
    for one in heads[:4]:
        if len(heads) > 1:
            numbers = [n for n, own in enumerate(mask.of_heads) if own == one]
            lines += ["", f"heads {', '.join(map(str, numbers))}: {one!r}", _summary(one)]
        lines += _drawn(one)
    if len(heads) > 4:
        lines += ["", f"and {len(heads) - 4} more kinds of heads"]
    return "\n".join(lines)


def _summary(mask: AttentionMask) -> str:
    kinds = np.concatenate([prepare((m,), _BLOCK, _BLOCK).kinds for m in mask.of_heads])
    full, partial = np.sum(kinds == FULL), np.sum(kinds > FULL)
    share = 100 * (full + partial) / max(1, kinds.size)
    return (
        f"{share:.1f} % of the blocks of {_BLOCK} x {_BLOCK} are visited: {full} full and {partial}"
        f" partial ones of {kinds.size}"
    )


def _drawn(mask: AttentionMask) -> list[str]:
    """Returns one character for each cell, which is a block or several of them."""
    if 0 in mask.shape:
        return []
    queries, keys = (max(1, -(-size // _MOST)) for size in mask.shape)
    (kinds,) = prepare((mask,), queries, keys).kinds
    return ["".join(_SHADES.get(kind, _PARTIAL) for kind in row) for row in kinds.tolist()]
