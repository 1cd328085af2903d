"""Chooses an operator's implementation, and says why others cannot run.

An operator gives `choose` one reason for each implementation, in order of preference: None if the
implementation can run, or a sentence that says why it cannot. The autotuning table's choice takes
precedence (`jaxfused.runtime.runner` looks it up in `jaxfused.runtime.table`). Nothing else decides.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from jaxfused.runtime.estimate import Estimate

Implementation = Literal["pallas", "cuda", "xla"]


@dataclass(frozen=True)
class Device:
    """The properties of a device on which an operator's choices depend."""

    platform: str
    name: str
    compute_capability: tuple[int, int] | None
    """(major, minor) of an NVIDIA GPU, None for everything else."""
    multiprocessors: int
    """Number of SMs of a GPU, or 0 for other devices."""


_assumed = jax.make_user_context(default_value=None)
"""The `Device` of `assume`; JAX's caches of traced and compiled programs depend on it."""


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Traces the operators in this context as for `device`, which need not be present."""
    with _assumed(device):
        yield


def current_device(*arrays: object) -> Device:
    """Returns the device on which an operation over `arrays` will run.

    Concrete arrays are on a known device. For traced arrays it is JAX's default device
    (`jax.default_device`, then the default backend).
    """
    assumed = _assumed.value
    if assumed is not None:
        return assumed
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return _describe(next(iter(array.devices())))
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return _describe(default)
    return _describe(jax.local_devices(backend=default)[0])


def _describe(device: jax.Device) -> Device:
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None or "." not in str(capability):
        return Device(device.platform, device.device_kind, None, 0)
    major, minor = str(capability).split(".")
    return Device(device.platform, device.device_kind, (int(major), int(minor)), device.core_count)


def choose(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> str:
    """Returns the implementation to run: the named one, or the first of `reasons` that can run.

    Args:
      op: the operator's public name, for the message.
      implementation: what the caller named, or None for the fastest one that can run.
      reasons: for each implementation, fastest first, None or why it cannot run.

    Raises:
      ValueError: the named implementation does not exist or cannot run; the message says why.
    """
    if implementation is None:
        return next(name for name, reason in reasons.items() if reason is None)
    if implementation not in reasons:
        names = ", ".join(repr(name) for name in reasons)
        raise ValueError(
            f"{op}: implementation must be None or one of {names}, but {implementation!r} was passed;"
            " pass None for the fastest one that can run."
        )
    reason = reasons[implementation]
    if reason is not None:
        raise ValueError(
            f"{op}: implementation={implementation!r} cannot run here: {reason}."
            " Pass implementation=None for the fastest one that can."
        )
    return implementation


# --- records of choices ---------------------------------------------------------------------------


class Choice(NamedTuple):
    """The implementation chosen for one kernel of an operator, at one place of a program."""

    stage: str
    """The operator and its kernel's work, such as "layer_norm forward"."""
    operands: Sequence[jax.ShapeDtypeStruct | None]
    """Shapes and dtypes of the operands as the kernel sees them: after `jax.vmap`, of one shard."""
    implementation: str
    reasons: Mapping[str, str | None]
    """The implementations, fastest first, each with None or why it cannot run."""
    by_partitioner: bool = False
    """True if the choice was made for one shard while XLA partitioned the operation."""
    source: Literal["named", "model", "table", "neighbour"] | None = None
    """The basis of the choice: the caller's name, the operator's rule ("model"), or the autotuning table
    at these shapes ("table") or at near ones ("neighbour"). None if the choice depends on no shapes."""
    config: Any = None
    """The config from the autotuning table, or None for the implementation's default."""
    kernel: Any = None
    """The `jaxfused.runtime.runner.Stage` that runs, or None if the call is plain jax.numpy."""
    estimate: Estimate = None
    """The rule that orders the implementations where no times were measured."""
    measured: Any = None
    """The measured times that decided, a `jaxfused.runtime.table.Found`; None if the rule did."""
    stages: "Sequence[Choice]" = ()
    """Implementations of the kernels that would run if the operator had not left the call to XLA."""


class Fallback(NamedTuple):
    """A call of a module, at one place of a program, that runs Flax's own code."""

    module: str
    """The module's public name, such as "jaxfused.nnx.LayerNorm"."""
    reason: str
    """The argument that no operator supports, such as "a mask is given"."""

    def __str__(self) -> str:
        return f"{self.module} runs Flax's own code because {self.reason}"


_recordings: list[list[Choice]] = []
_fallback_recordings: list[list[Fallback]] = []
_alone: contextvars.ContextVar[list[list[Choice]] | None] = contextvars.ContextVar(
    "alone", default=None
)
"""Recordings that replace `_recordings` in this thread within `recorded(alone=True)`; else None."""


def _active() -> list[list[Choice]]:
    alone = _alone.get()
    return _recordings if alone is None else alone


def is_recorded() -> bool:
    """Returns whether any `recorded` context is active."""
    return bool(_active())


def record(choice: Choice) -> None:
    """Adds a choice to the list of every active `recorded` context."""
    for recording in _active():
        recording.append(choice)


@contextlib.contextmanager
def recorded(*, alone: bool = False) -> Iterator[list[Choice]]:
    """Yields a list, to which each `Choice` made while tracing in this context is added.

    With `alone`, as for a trial, these choices are not added to the lists of outer contexts, nor those
    of other threads to this list.
    """
    recording: list[Choice] = []
    if alone:
        token = _alone.set([recording])
        try:
            yield recording
        finally:
            _alone.reset(token)
        return
    active = _active()
    active.append(recording)
    try:
        yield recording
    finally:
        active[:] = [r for r in active if r is not recording]


def note_fallback(module: str, reason: str) -> None:
    """Adds a call that runs Flax's own code to the list of every active `recorded_fallbacks`."""
    for recording in _fallback_recordings:
        recording.append(Fallback(module, reason))


@contextlib.contextmanager
def recorded_fallbacks() -> Iterator[list[Fallback]]:
    """Yields a list, to which module calls in this context that run Flax's own code are added."""
    recording: list[Fallback] = []
    _fallback_recordings.append(recording)
    try:
        yield recording
    finally:
        _fallback_recordings[:] = [r for r in _fallback_recordings if r is not recording]
