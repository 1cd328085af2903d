"""Finds which axes of an array are its images, its pixels and its channels."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxfused.fusion.algebra import View
from jaxfused.fusion.frame import Layout
from jaxfused.fusion.graph import Value
from jaxfused.fusion.moments import Moments


@dataclass(frozen=True)
class Arrangement:
    """The roles (images, pixels, channels) of an array's axes in a norm of images."""

    layout: Layout
    images: tuple[int, ...]
    """Parts of the `Frame` that count images; each image has its own mean and variance."""
    pixels: Layout
    """Parts of each axis of pixels, over which the mean is taken."""
    channels: tuple[int, ...]
    """Parts of the channel axis: groups first, then the channels of a group."""
    groups: tuple[int, ...]

    @property
    def operand(self) -> Layout:
        """The frame's parts that make up each axis of the operator's operand [B, *pixels, C]."""
        return (self.images, *self.pixels, self.channels)

    @property
    def is_of_batch(self) -> bool:
        """True if each channel has a mean and variance over all images, as in BatchNorm."""
        if self.images or self.groups != self.channels:
            return False
        return self.layout[0] not in ((), self.channels)

    @property
    def is_last(self) -> bool:
        """True if `layout` has the axes in the order [B, *pixels, C], so that nothing is transposed."""
        parts = tuple(part for axis in self.operand for part in axis)
        return parts == tuple(part for axis in self.layout for part in axis)

    def of_channels(self, seen: View) -> Value | None:
        """Returns the view's array if it has one number for each channel, or None."""
        return _along(seen, self.channels)

    def of_images(self, seen: View) -> Value | None:
        """Returns the view's array if it is [B, C], or None."""
        return _along(seen, (*self.images, *self.channels)) if self.images else None


def _along(seen: View, parts: tuple[int, ...]) -> Value | None:
    found = tuple(part for axis in seen.axes for part in axis)
    return seen.base if found == parts and seen.base.is_floating else None


def arrangements(moments: Moments, layout: Layout) -> Iterator[Arrangement]:
    """Yields the possible roles of an array's axes; the last axis as channels comes first."""
    axes = [parts for parts in layout if parts]
    for last in reversed(range(len(axes))):
        channels = axes[last]
        groups = tuple(part for part in channels if part not in moments.reduced)
        if channels[: len(groups)] != groups:
            continue
        others = axes[:last] + axes[last + 1 :]
        images: tuple[int, ...] = ()
        while others and not moments.reduced & set(others[0]):
            images += others.pop(0)
        if all(moments.reduced >= set(parts) for parts in others):
            yield Arrangement(layout, images, tuple(others), channels, groups)


def is_of_rows(moments: Moments) -> bool:
    """Returns whether the mean and variance are taken over the last axis alone."""
    last = next((parts for parts in reversed(moments.frame.source.layout) if parts), ())
    return moments.reduced == set(last)


def why_no_channels_first(value: Value, axes: int) -> str:
    """Returns why images [B, C, H, W] are not transposed to [B, H, W, C] for an operator, or "".

    XLA's convolutions of 16-bit images store the channels as the contiguous axis whatever the order of
    the axes, so that the transposition copies nothing.
    """
    if value.dtype.itemsize == 2 and axes == 2:
        return ""
    return (
        f"the channels come first in {value.aval.str_short()}, and only 16-bit images of two axes are"
        " channels-last in memory"
    )
