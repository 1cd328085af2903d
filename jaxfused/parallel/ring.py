"""Rings of devices: rows are sent from device to device while those that have arrived are multiplied.

Device i of n starts with its own rows. At hop s of a ring it has those of device i - s, and after n - 1
hops it has had all. A sum for the rows is sent with them: each device adds its part, and one more hop
brings the sum to the rows' device. Half of the rows go the other way, so that one half's sums are sent
while the other half is multiplied.

Results are lists by direction, then by hop. Rows are the axis before the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.runtime.sharding import AxisName

Turns = list[list[Any]]
"""A list for each direction with an entry for each hop: rows, or what was computed from them."""

_SHIFTS = (1, -1)
"""Steps that a hop adds to a device's index, for each direction."""


def _passed(axis_name: AxisName, shift: int, arrays: Any) -> Any:
    size = lax.axis_size(axis_name)
    return lax.ppermute(arrays, axis_name, [(i, (i + shift) % size) for i in range(size)])


def directions(rows: int) -> int:
    """Returns the number of directions in which rows are sent: 2, or 1 if their number is odd."""
    return 2 if rows and rows % 2 == 0 else 1


def travelling(axis_name: AxisName, own: jax.Array) -> Turns:
    """Returns the rows that arrive at each hop. The sends wait for nothing but each other."""
    size = lax.axis_size(axis_name)
    turns = []
    halves = jnp.split(own, directions(own.shape[-2]), axis=-2)
    for rows, shift in zip(halves, _SHIFTS, strict=False):
        seen = [rows]
        while len(seen) < size:
            seen.append(_passed(axis_name, shift, seen[-1]))
        turns.append(seen)
    return turns


def _starts(axis_name: AxisName, own_rows: int) -> Turns:
    """Returns the index, among the rows of all devices, of the first row at each hop."""
    size, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count = directions(own_rows)
    return [
        [(own - shift * hop) % size * own_rows + d * (own_rows // count) for hop in range(size)]
        for d, shift in enumerate(_SHIFTS[:count])
    ]


def standing(axis_name: AxisName, every: jax.Array) -> Turns:
    """Cuts the rows of all devices into parts, in the order in which `travelling` receives them."""
    own_rows = every.shape[-2] // lax.axis_size(axis_name)
    length = own_rows // directions(own_rows)
    return [
        [lax.dynamic_slice_in_dim(every, start, length, axis=-2) for start in starts]
        for starts in _starts(axis_name, own_rows)
    ]


def in_order(axis_name: AxisName, turns: Turns) -> jax.Array:
    """Returns the rows of all devices as one array: the inverse of `standing`."""
    length = turns[0][0].shape[-2]
    starts = _starts(axis_name, length * len(turns))
    first = turns[0][0]
    size = lax.axis_size(axis_name)
    shape = (*first.shape[:-2], length * len(turns) * size, first.shape[-1])
    every = jnp.zeros_like(first, shape=shape) + first[..., :1, :1] * 0
    for rows, places in zip(turns, starts, strict=True):
        for part, start in zip(rows, places, strict=True):
            every = lax.dynamic_update_slice_in_dim(every, part, start, axis=-2)
    return every


def summed(
    axis_name: AxisName,
    turns: Turns,
    step: Callable[[Any, Any], tuple[jax.Array, Any]],
    then: Any = None,
) -> tuple[jax.Array, Turns, Any]:
    """Returns the sums over devices for a device's own rows, the second results of `step`, and `then`.

    Args:
      axis_name: the mesh axis.
      turns: from `travelling` or `standing`.
      step: (rows, the sum that arrives with them or None) -> (the sum to send on, a second result). What
        it computes before it reads the sum overlaps the sending of the sum.
      then: arrays to be used after the last step only, while the last sums are sent.
    """
    size = lax.axis_size(axis_name)
    kept: Turns = [[] for _ in turns]
    sums: list[Any] = [None] * len(turns)
    waiting = None
    for hop in range(size):
        for d, rows in enumerate(turns):
            here = rows[hop]
            if waiting is not None:
                # A step starts after the one before it, whose sum is sent while the step computes.
                here, sums[waiting] = _sent_beside(axis_name, waiting, sums[waiting], here)
            sums[d], keep = step(here, sums[d])
            kept[d].append(keep)
            waiting = d
    assert waiting is not None
    (kept, then), sums[waiting] = _sent_beside(axis_name, waiting, sums[waiting], (kept, then))
    return jnp.concatenate(sums, axis=-2), kept, then


def _sent_beside(
    axis_name: AxisName, d: int, total: jax.Array, others: Any
) -> tuple[Any, jax.Array]:
    """Sends a sum to the next device. Returns (others, sum); `others` wait until it is computed."""
    others, total = lax.optimization_barrier((others, total))
    return others, _passed(axis_name, _SHIFTS[d], total)
