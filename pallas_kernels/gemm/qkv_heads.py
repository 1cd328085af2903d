"""Description of a projection to queries, keys and values: its outputs, head norms and rope."""

from dataclasses import dataclass

STRIP = 32
"""Features of either half of a head that the epilogue processes at a time if `Heads.splits`."""
VALUES = 2
"""Index among the outputs of the values, which have no norm and no rotation."""


@dataclass(frozen=True)
class Heads:
    """The outputs of a projection, and the norm and the rotation of their heads."""

    widths: tuple[int, ...]
    """Columns of queries, keys and values."""
    size: int
    """Features of a head."""
    has_norms: tuple[bool, ...]
    """Whether the heads of queries, and whether those of keys, have a norm."""
    rotary_dim: int
    """Features of a head that are rotated, the first ones."""
    interleaved: bool
    """True if rope pairs features 2 i and 2 i + 1 of a head, else features i of both halves."""

    @property
    def norm(self) -> bool:
        return any(self.has_norms)

    @property
    def finishes(self) -> bool:
        """True if heads of queries or keys have a norm or a rotation (rope)."""
        return self.norm or self.rotary_dim > 0

    @property
    def plain(self) -> tuple[int, ...]:
        """Indices of the outputs without a norm."""
        return VALUES, *(index for index, has in enumerate(self.has_norms) if not has)

    @property
    def splits(self) -> bool:
        """True if the epilogue processes parts of heads: strips of both halves, or 64 adjacent features.

        Tiles of 192 columns hold such parts, but no whole number of heads of 128. x of 32768 x 4096 to
        48 heads takes 2.06 ms (H200); with whole heads 2.24 in tiles of 128 columns, 2.12 of 256.
        """
        unit = 2 * STRIP
        return not self.norm and self.size == self.rotary_dim > unit and self.size % unit == 0

    @property
    def reorders(self) -> bool:
        """True if the weights' columns are reordered, so that those of a unit are adjacent."""
        return self.splits and not self.interleaved

    @property
    def unit(self) -> int:
        """Number of columns that the epilogue normalises and rotates together."""
        return 2 * STRIP if self.splits else self.size
