"""Rings of devices: rows travel from device to device while those that have arrived are multiplied.

Device i of n starts with its own rows. At hop s of a ring it has those of device i - s, and after n - 1
hops it has seen all. A sum for the rows travels with them: each device adds its part, and after one
more hop the sum is at home. Half of the rows go round the other way, so that one half's sums travel
while the other half is multiplied.

Results are lists by direction, then by hop. Rows are the axis before the last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Turns = list[list[Any]]
"""For each direction the rows, or what was made of them, at each hop."""

_SHIFTS = (1, -1)
"""How far a hop of each direction leads."""


def _passed(axis_name: str, shift: int, arrays: Any) -> Any:
    size = lax.axis_size(axis_name)
    return lax.ppermute(arrays, axis_name, [(i, (i + shift) % size) for i in range(size)])


def directions(rows: int) -> int:
    """Returns in how many directions a device's rows go round: odd ones have no halves."""
    return 2 if rows and rows % 2 == 0 else 1


def travelling(axis_name: str, own: jax.Array) -> Turns:
    """Returns the rows of each device at each hop. The sends wait for nothing but each other."""
    size = lax.axis_size(axis_name)
    turns = []
    halves = jnp.split(own, directions(own.shape[-2]), axis=-2)
    for rows, shift in zip(halves, _SHIFTS, strict=False):
        seen = [rows]
        while len(seen) < size:
            seen.append(_passed(axis_name, shift, seen[-1]))
        turns.append(seen)
    return turns


def _starts(axis_name: str, own_rows: int) -> Turns:
    """Returns the first of the rows, among those of all devices, at each hop."""
    size, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count = directions(own_rows)
    return [
        [(own - shift * hop) % size * own_rows + d * (own_rows // count) for hop in range(size)]
        for d, shift in enumerate(_SHIFTS[:count])
    ]


def standing(axis_name: str, every: jax.Array) -> Turns:
    """Returns rows that a device has of all devices, in the order in which `travelling` has them."""
    own_rows = every.shape[-2] // lax.axis_size(axis_name)
    length = own_rows // directions(own_rows)
    return [
        [lax.dynamic_slice_in_dim(every, start, length, axis=-2) for start in starts]
        for starts in _starts(axis_name, own_rows)
    ]


def in_order(axis_name: str, turns: Turns) -> jax.Array:
    """Returns the rows of all devices as one array, which `standing` takes apart."""
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
    axis_name: str,
    turns: Turns,
    step: Callable[[Any, Any], tuple[jax.Array, Any]],
    then: Any = None,
) -> tuple[jax.Array, Turns, Any]:
    """Returns the sums of a device's own rows over all devices, what `step` keeps, and `then`.

    Args:
      axis_name: the mesh axis.
      turns: from `travelling` or `standing`.
      step: (rows, the sum that arrives with them or None) -> (the sum that goes on, what to keep). What
        it computes before it reads the sum runs while the sum travels.
      then: arrays whose work is to begin after the last step, while the last sums travel home.
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


def _sent_beside(axis_name: str, d: int, total: jax.Array, others: Any) -> tuple[Any, jax.Array]:
    """Returns `others`, which wait until the sum is computed, not until it has arrived, and the sum."""
    others, total = lax.optimization_barrier((others, total))
    return others, _passed(axis_name, _SHIFTS[d], total)
