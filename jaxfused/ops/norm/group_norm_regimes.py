"""Rules for where XLA's norms over images are faster than the CUDA kernels, by the megabytes of x.

The thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

import math
from collections.abc import Collection
from typing import Any

from jaxfused.runtime.estimate import KERNELS, MEGABYTE, Rule

_SUMMED_IN_A_LOOP = 128
"""Rows [rows, C] of a batch_norm up to which XLA is faster, forward and backward, because a few of its
threads sum each channel in a loop."""
_SMALL = {"group_norm": 0.5, "batch_norm": 0.35}
"""Megabytes of x up to which XLA is faster than the CUDA kernels, because its kernels start sooner."""
_RATHER_SMALL, _WIDE_GROUP, _FEW_IMAGES = 3.2, 256, 4
"""Megabytes of x up to which XLA is faster: in the forward of groups of at least _WIDE_GROUP channels,
and in group_norm's backward of at most _FEW_IMAGES images, whose sums CUDA C has to merge."""


def rule(op: str, able: Collection[str], x: Any, *, backward: bool) -> Rule | None:
    """Returns which implementations to prefer for x [B, pixels, groups, channels], or None."""
    if "cuda" not in able:
        return None
    images, pixels, _, size = x.shape
    of_batch = op == "batch_norm"
    if of_batch and pixels <= _SUMMED_IN_A_LOOP:
        return Rule(("xla",), f"sums over {_SUMMED_IN_A_LOOP} rows or fewer are faster in XLA")
    megabytes = math.prod(x.shape) * x.dtype.itemsize / MEGABYTE
    small = 0.0 if of_batch and backward else _SMALL[op]
    if (not of_batch and backward and images <= _FEW_IMAGES) or (
        not backward and size >= _WIDE_GROUP
    ):
        small = _RATHER_SMALL
    if megabytes <= small:
        return Rule(("xla",), f"XLA is faster up to {small} MB, and x has {megabytes:.2f}")
    return Rule(KERNELS, f"kernels are faster from {small} MB on, and x has {megabytes:.2f}")
