"""The config of the kernel of dK and dV in backward_dkv.py, and the shared memory that it takes."""

from dataclasses import dataclass

from pallas_kernels.attention.memory import SWIZZLED_COLUMNS, WGMMA_ROWS, Columns
from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

PROBABILITY_SLOTS = 2
"""Pipeline stages of P^T, which one warpgroup passes to the other if `splits_roles`."""


@dataclass(frozen=True)
class KeyGradientConfig:
    """Division of the work: each warpgroup owns 64 keys of a tile and visits blocks of queries."""

    warpgroups: int = 2
    query_block: int = 64
    query_stages: int = 2
    """Pipeline stages of Q: blocks of queries that shared memory holds."""
    dout_stages: int = 2
    """Pipeline stages of dO: blocks of queries that shared memory holds."""
    splits_roles: bool = False
    """True if both warpgroups own the same keys; one computes dV, the other dK (for wide heads)."""
    tile_stages: int = 2
    """Pipeline stages of K and V, of one tile each. With 2, the next tile's K and V are copied while the
    current tile is computed."""
    heads_together: int = 4
    """Key heads whose tiles are scheduled together, so that Q and dO stay in the L2 cache."""
    multiplies_early: bool = True
    """True if dP^T is multiplied while the exponentials of P^T are computed. Otherwise it is multiplied
    afterwards, in the registers that S^T has left free, which allows blocks of more queries. Split
    roles do not use this option."""
    keeps_keys: bool = False
    """True if warpgroups load K into registers once a tile, and the products do not read it from shared
    memory. Needs heads of more than 64 (`loses_keys`). Split roles do not use this option."""
    own_lists: bool = False
    """True if each warpgroup visits its own range of a mask object's list of query blocks (`OwnLists`).
    Split roles do not use this option."""
    shares: int = 1
    """Shares into which the longest lists are divided, for different CTAs; needs `own_lists`."""

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups must be 1, 2 or 3, got {self.warpgroups}")
        if self.query_block % 16 or not 16 <= self.query_block <= 256:
            raise ValueError(
                f"query_block must be a multiple of 16 up to 256, got {self.query_block}"
            )
        if self.splits_roles and self.warpgroups != 2:
            raise ValueError(f"split roles are those of 2 warpgroups, got {self.warpgroups}")
        if self.splits_roles and (self.keeps_keys or not self.multiplies_early or self.own_lists):
            raise ValueError(
                "splits_roles needs keeps_keys and own_lists False, multiplies_early True"
            )

    @property
    def key_block(self) -> int:
        return WGMMA_ROWS if self.splits_roles else self.warpgroups * WGMMA_ROWS

    @property
    def key_parts(self) -> int:
        """Groups of 64 keys in a tile."""
        return self.key_block // WGMMA_ROWS

    @property
    def key_slots(self) -> int:
        """Slots of shared memory that each hold K and V of 64 keys."""
        return self.tile_stages * self.key_parts

    def columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q and K, and of V and dO."""
        lengths = (shape.query_count, shape.key_count)
        head, value = (
            Columns.of(size, lengths, self.query_block)
            for size in (shape.head_size, shape.value_size)
        )
        return head, value

    def shared_bytes(self, shape: Shape) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        head, value = self.columns(shape)
        rows, keys = self.query_block, self.key_slots * WGMMA_ROWS
        count = head.bytes(self.query_stages * rows) + value.bytes(self.dout_stages * rows)
        count += head.bytes(keys) + value.bytes(keys)
        # Log-sum-exp and its rest with Q, delta with dO.
        count += 4 * rows * (2 * self.query_stages + self.dout_stages)
        if self.splits_roles:
            count += 2 * PROBABILITY_SLOTS * WGMMA_ROWS * rows
        return count + BARRIER_BYTES

    def fits(self, shape: Shape) -> bool:
        return self.shared_bytes(shape) <= SHARED_MEMORY_BYTES and not self.loses_keys(shape)

    def loses_keys(self, shape: Shape) -> bool:
        """Returns whether the registers of K may be overwritten after a tile's first visit.

        With K of 64 columns ptxas (CUDA 13.0) puts dS^T into the same registers, although the next visit
        reads K from them, and both gradients are wrong (benchmarks/lab, 2026-11-29).
        """
        return self.keeps_keys and shape.head_size <= SWIZZLED_COLUMNS
