"""Coordinates the processes of one run: one of them writes files, and all stop before the same step.

A process that stopped alone would leave the others waiting for it. A run of one process skips all this.
"""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.errors import ExampleError, Stopped
from examples.images import Batch


def is_first() -> bool:
    """Returns whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Waits at the block's end until all processes arrive; an ExampleError in one is raised in all."""
    error = None
    try:
        yield
    except ExampleError as raised:
        error = raised
    _go_on(error, _votes(error))


def in_step(
    batches: Iterator[Batch], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Batch]:
    """Yields `batches` while every process has its next one and none was told to stop.

    Args:
      batches: this process's part of each batch.
      stopped: whether this process was told to stop.

    Raises:
      ExampleError: a process cannot make its part of the next batch.
      Stopped: a process was told to stop.
    """

    def prepared() -> Iterator[tuple[Batch | ExampleError | Stopped | None, jax.Array | None]]:
        while True:
            try:
                outcome = Stopped("Stopped.") if stopped() else next(batches, None)
            except ExampleError as error:
                outcome = error
            yield outcome, _votes(outcome)

    pairs = prepared()
    # Several processes prepare one batch ahead and vote on it (ready, stopped or failed), so that
    # gathering the votes overlaps with the previous step on the devices.
    ahead = collections.deque(itertools.islice(pairs, int(jax.process_count() > 1)))
    for pair in pairs:
        ahead.append(pair)
        outcome, votes = ahead.popleft()
        _go_on(outcome, votes)
        if outcome is None:
            return
        yield outcome


_READY, _STOPPED, _FAILED = range(3)


def _votes(outcome: object) -> jax.Array | None:
    """Returns the votes [devices] of all processes (ready, stopped or failed); this one's is `outcome`.

    A single process gets None. The call is a collective: all processes must make it the same number of
    times. The call does not wait for other processes; reading the returned array does.
    """
    if jax.process_count() == 1:
        return None
    vote = {Stopped: _STOPPED, ExampleError: _FAILED}.get(type(outcome), _READY)
    mesh = Mesh(jax.devices(), "devices")
    votes = jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("devices")), np.full(jax.local_device_count(), vote, np.int32)
    )
    return jax.jit(_same, out_shardings=NamedSharding(mesh, P()))(votes)


def _same(x: jax.Array) -> jax.Array:
    return x


def _go_on(outcome: object, votes: jax.Array | None) -> None:
    """Raises this process's own error, or the error that another process's votes report."""
    if isinstance(outcome, Exception):
        raise outcome
    if votes is None:
        return
    votes = np.asarray(votes)
    other = jax.devices()[votes.argmax()].process_index
    if votes.max() == _FAILED:
        raise ExampleError(
            f"all processes must be able to go on, but process {other} is not; see what it printed."
        )
    if votes.max() == _STOPPED:
        raise Stopped(f"Process {other} was stopped.")
