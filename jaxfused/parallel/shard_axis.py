"""Choice of the axis along which an array of an optimizer's state is split over devices."""

from collections.abc import Iterable
from typing import Any


def axis_to_share(
    shape: tuple[int, ...], size: int, shared: bool = True, spec: Iterable[Any] = ()
) -> int | None:
    """Returns the longest axis that `size` divides, the first of equally long ones.

    None if there is no such axis: the array, which is small, is then replicated.

    Args:
      shape: of the array.
      size: the number of devices.
      shared: whether to split at all.
      spec: PartitionSpec of the axes that are split already, which are not chosen.
    """
    taken = [*spec, *[None] * len(shape)]
    free = [
        (length, -axis)
        for axis, length in enumerate(shape)
        if shared and length and length % size == 0 and taken[axis] is None
    ]
    return -max(free)[1] if free else None
