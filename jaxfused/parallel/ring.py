"""Rings of devices: rows are sent from device to device while those that have arrived are multiplied.

Device i of n starts with its own rows. At hop s of a ring it has those of device i - s, and after n -
1 hops it has had all. A sum for the rows is sent with them: each device adds its products, and one
more hop brings the sum to the device of the rows. Half of the rows go round in the other direction,
so that the sums of one half are sent while the other half is multiplied.

Results are lists by direction, then by hop. Rows are the axis before the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.runtime.sharding import AxisName

Turns = list[list[Any]]
"""For each direction, an entry for each hop: rows, or an array computed from them."""

_SHIFTS = (1, -1)
"""Number added to a device's index to get the next device, for each direction."""


def _passed(axis_name: AxisName, shift: int, arrays: Any) -> Any:
    size = lax.axis_size(axis_name)
    return lax.ppermute(arrays, axis_name, [(i, (i + shift) % size) for i in range(size)])


def directions(rows: int) -> int:
    """Returns the number of directions in which rows are sent: 2, or 1 for an odd number of rows."""
    return 2 if rows and rows % 2 == 0 else 1


def travelling(axis_name: AxisName, own: jax.Array) -> Turns:
    """Returns the rows that arrive at each hop. A send waits for the send before it only."""
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
    """Returns, for each direction and hop, the first row's index among the rows of all devices."""
    size, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count = directions(own_rows)
    return [
        [(own - shift * hop) % size * own_rows + d * (own_rows // count) for hop in range(size)]
        for d, shift in enumerate(_SHIFTS[:count])
    ]


def standing(axis_name: AxisName, every: jax.Array) -> Turns:
    """Cuts the rows of all devices into a list for each direction and hop, as `travelling` has them."""
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


def each(turns: Turns, f: Callable[[Any], Any]) -> Turns:
    """Returns `f(rows)` for each direction and hop, one after the other.

    Without that order XLA would merge products by one weight, or sums, into one, which would wait for
    later hops.
    """
    results: Turns = [[] for _ in turns]
    last: list[Any] = []
    for at_hop in zip(*turns, strict=True):
        for d, rows in enumerate(at_hop):
            if last:
                last[-1], rows = lax.optimization_barrier((last[-1], rows))
            results[d].append(f(rows))
            last = results[d]
    return results


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
      step: (rows, the sum that arrives with them or None) -> (the sum to send on, a second result). The
        part of it that does not read the sum runs while the sum is sent.
      then: arrays that the caller uses after the last step only, while the last sums are sent.
    """
    size = lax.axis_size(axis_name)
    kept: Turns = [[] for _ in turns]
    sums: list[Any] = [None] * len(turns)
    waiting = None
    for hop in range(size):
        for d, rows in enumerate(turns):
            here = rows[hop]
            if waiting is not None:
                # A step starts after the step before it, whose sum is sent during this one.
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
    """Sends a sum to the next device. Returns (others, sum); `others` wait for the sum's computation."""
    others, total = lax.optimization_barrier((others, total))
    return others, _passed(axis_name, _SHIFTS[d], total)
