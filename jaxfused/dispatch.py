"""Which implementation of an operator runs, and the reason why another one does not.

An operator hands `choose` one reason per implementation, in order of preference: None where the
implementation can run, a sentence where it cannot. Nothing else decides: no environment variable, no
registry, no state.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

Implementation = Literal["pallas", "cuda", "xla"]


@dataclass(frozen=True)
class Device:
    """What an operator needs to know of the device that it will run on."""

    platform: str
    name: str
    compute_capability: tuple[int, int] | None
    """(major, minor) of an NVIDIA GPU, None for everything else."""
    multiprocessors: int
    """Streaming multiprocessors of a GPU, 0 elsewhere."""


_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Inside of it operators are traced as for `device`, which need not be there."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def current_device(*arrays: object) -> Device:
    """The device on which an operation over `arrays` will run.

    Concrete arrays say where they are. Under a transformation they do not, and JAX's default device
    (`jax.default_device`, then the default backend) is taken.
    """
    assumed = _assumed.get()
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


def preferring(first: str, reasons: Mapping[str, str | None]) -> dict[str, str | None]:
    """The reasons with one implementation ahead of the others."""
    return {first: reasons[first], **reasons}


def choose(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> str:
    """The implementation to run: the named one, or the first of `reasons` that can.

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


# --- what was chosen ------------------------------------------------------------------------------


class Choice(NamedTuple):
    """Which implementation runs a stage of an operator at one place of a program."""

    stage: str
    """The operator and its stage: "layer_norm forward"."""
    operands: Sequence[jax.ShapeDtypeStruct | None]
    """As the kernel sees them: after `jax.vmap`, on the shard."""
    implementation: str
    reasons: Mapping[str, str | None]
    """For each implementation, fastest first, None or why it cannot run."""
    by_partitioner: bool = False
    """Whether XLA asked, for a shard of an operation that it has partitioned."""


class Fallback(NamedTuple):
    """A call of a module that Flax's own code serves at one place of a program."""

    module: str
    """The module's public name: "jaxfused.nnx.LayerNorm"."""
    reason: str
    """Which argument no operator can serve: "a mask is given"."""

    def __str__(self) -> str:
        return f"{self.module} runs Flax's own code because {self.reason}"


_recordings: list[list[Choice]] = []
_fallback_recordings: list[list[Fallback]] = []


def record(choice: Choice) -> None:
    """Tells those who listen what was chosen; see `recorded`."""
    for recording in _recordings:
        recording.append(choice)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Inside of it the list fills with the choices of all that is traced."""
    recording: list[Choice] = []
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)


def note_fallback(module: str, reason: str) -> None:
    """Tells those who listen that Flax's own code serves a call; see `recorded_fallbacks`."""
    for recording in _fallback_recordings:
        recording.append(Fallback(module, reason))


@contextlib.contextmanager
def recorded_fallbacks() -> Iterator[list[Fallback]]:
    """Inside of it the list fills with the modules' calls that Flax's own code serves."""
    recording: list[Fallback] = []
    _fallback_recordings.append(recording)
    try:
        yield recording
    finally:
        _fallback_recordings[:] = [r for r in _fallback_recordings if r is not recording]
