"""Connects the processes of a run to each other and to their devices, from arguments alone.

JAX's coordination service, in process 0, gets a heartbeat from every process. When one is missing, JAX
aborts the others, whose collectives would never end. `start` makes them print an explanation first.
"""

import argparse
import faulthandler
import os
import socket
import subprocess
import sys
import time
import traceback
from types import TracebackType

import jax

from examples.errors import ExampleError
from examples.flags import whole

_SECONDS = 120
"""Seconds that a process waits for the others at the start."""
HEARTBEAT_SECONDS = 30
"""Seconds without a heartbeat after which a process counts as dead. JAX takes up to as long again to
notify the others, so that they end within a minute."""
LOST = (
    "error: the processes of a run go on together, but another one has ended or does not answer (what"
    " it printed, and the lines above, may say why); start all of them again with --resume, or fewer of"
    " them with another --processes and --mesh."
)
_COLLECTIVES = ("gloo", "nccl", "coordination service")
"""Words in the error message of a collective after another process has ended."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` reads."""
    group = parser.add_argument_group(
        "processes",
        "One process drives all GPUs of its host. For several hosts, start the same command on each"
        " with all three flags; --out must be on a disk that they share.",
    )
    group.add_argument(
        "--coordinator",
        type=_address,
        metavar="HOST:PORT",
        help="where process 0 listens for the others",
    )
    group.add_argument("--processes", type=whole(1), metavar="N", help="how many there are")
    group.add_argument("--process-id", type=whole(0), metavar="I", help="which this is, from 0")
    group.add_argument(
        "--cpu-devices",
        type=whole(1),
        metavar="N",
        help="for a trial without GPUs: take this process's CPU for so many devices",
    )


def start(args: argparse.Namespace) -> None:
    """Sets JAX up as the flags say; must be called before JAX lists its devices.

    Raises:
      ExampleError: the flags contradict each other, or the processes do not find each other.
    """
    if args.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    given = (args.coordinator, args.processes, args.process_id)
    if given == (None, None, None):
        return
    if None in given or args.process_id >= args.processes:
        raise ExampleError(
            "several processes need --coordinator, --processes N and a --process-id below N each,"
            f" but got {', '.join(str(flag) for flag in given)}; pass all three."
        )
    host, port = args.coordinator.rsplit(":", 1)
    # If these checks failed inside JAX, it would abort the process with a C++ stack trace.
    if args.process_id == 0:
        _check_free(int(port))
        print(
            f"waiting at {args.coordinator} up to {_SECONDS} seconds for {args.processes}"
            " processes",
            file=sys.stderr,
        )
    else:
        _wait_for(host, int(port))
    jax.distributed.initialize(
        *given, initialization_timeout=_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    _explain_aborts()
    sys.excepthook = _end_at_once


_WATCHER = """
import sys
if b"Aborted" in sys.stdin.buffer.read():
    print(sys.argv[1], file=sys.stderr)
"""


def _explain_aborts() -> None:
    """Starts a watcher process that prints an explanation if JAX aborts this process.

    Python's faulthandler writes to the watcher only when this process crashes, not when it exits.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCHER, LOST], stdin=subprocess.PIPE, start_new_session=True
    )
    assert watcher.stdin is not None
    faulthandler.enable(watcher.stdin, all_threads=False)


def _end_at_once(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an uncaught error and ends the process, so that the other processes notice at once.

    Without `os._exit`, Python would first wait for the other processes at exit.
    """
    if any(word in str(error).lower() for word in _COLLECTIVES):
        print(f"{kind.__name__}: {' '.join(str(error).split())[:300]}\n{LOST}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, but is {text!r}")
    return text


def _check_free(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        raise ExampleError(
            f"process 0 must be able to listen at its --coordinator, but port {port} is not free"
            f" ({error}); pass another port to all processes."
        ) from error


def _wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline:
                raise ExampleError(
                    f"process 0 must listen at its --coordinator, but after {_SECONDS} seconds"
                    f" nothing does at {host}:{port} ({error}); start process 0, and pass its"
                    " address to all."
                ) from error
        time.sleep(0.2)
