"""Which axis of an array the devices share that each keep a part of an optimizer's state."""

from collections.abc import Iterable
from typing import Any


def axis_to_share(
    shape: tuple[int, ...], size: int, shared: bool = True, spec: Iterable[Any] = ()
) -> int | None:
    """Returns the longest axis that `size` devices can share evenly, the first of several.

    None if there is no such axis: then each device keeps the whole array, which is small.

    Args:
      shape: of the array.
      size: the number of devices.
      shared: whether devices share anything.
      spec: which axes are split already, as a PartitionSpec; those are left alone.
    """
    taken = [*spec, *[None] * len(shape)]
    free = [
        (length, -axis)
        for axis, length in enumerate(shape)
        if shared and length and length % size == 0 and taken[axis] is None
    ]
    return -max(free)[1] if free else None
