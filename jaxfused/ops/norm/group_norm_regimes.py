"""Regimes of norms over images, by the megabytes of x: where XLA is faster than the CUDA kernels.

The thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

import math
from collections.abc import Collection
from typing import Any

from jaxfused.runtime.estimate import KERNELS, Rule

_SUMMED_IN_A_LOOP = 128
"""Rows of a batch_norm up to which XLA is faster in both directions: a few threads sum in a loop."""
_SMALL = {"group_norm": 0.5, "batch_norm": 0.35}
"""Megabytes of x up to which XLA's kernels start and end sooner."""
_SMALL_OF_WIDE_GROUPS, _WIDE_GROUP = 2.5, 256
"""Megabytes of x up to which XLA's forward is faster, and channels of a group from which that limit
holds."""
_SMALL_OF_FEW_IMAGES, _FEW_IMAGES = 3.2, 4
"""Megabytes of x up to which XLA's backward of group_norm is faster, and images up to which that limit
holds, because CUDA C merges their sums."""


def rule(op: str, able: Collection[str], x: Any, *, backward: bool) -> Rule | None:
    """Returns the order of implementations for x [B, P, G, S], or None if no kernel can run."""
    if "cuda" not in able:
        return None
    images, pixels, _, size = x.shape
    of_batch = op == "batch_norm"
    if of_batch and pixels <= _SUMMED_IN_A_LOOP:
        return Rule(("xla",), f"sums over {_SUMMED_IN_A_LOOP} rows or fewer are faster in XLA")
    megabytes = math.prod(x.shape) * x.dtype.itemsize / 1e6
    small = 0.0 if of_batch and backward else _SMALL[op]
    if not of_batch and backward and images <= _FEW_IMAGES:
        small = _SMALL_OF_FEW_IMAGES
    elif not backward and size >= _WIDE_GROUP:
        small = _SMALL_OF_WIDE_GROUPS
    if megabytes <= small:
        return Rule(("xla",), f"XLA is faster up to {small} MB, and x has {megabytes:.2f}")
    return Rule(KERNELS, f"kernels are faster from {small} MB on, and x has {megabytes:.2f}")
