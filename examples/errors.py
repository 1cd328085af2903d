"""Errors that end an example. Worker processes import this file, so its imports are few."""

import contextlib
import os
import sys
from collections.abc import Callable


class ExampleError(Exception):
    """An error of the user's input; its message states the rule, the value received, and the remedy."""


class Stopped(Exception):
    """An early end that the user asked for; its message says what was saved and how to continue."""


def run_command(main: Callable[[], None]) -> None:
    """Runs `main` as a command: expected errors become one line and an exit code, no traceback."""
    # Python has None for a stream that the shell has closed.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has closed it: Python's flush at exit would raise BrokenPipeError again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(
            f"error: a file must be readable or writable, but {error}; make room or pass another path."
            " A run goes on from its newest checkpoint with --resume.",
            file=sys.stderr,
        )
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    except ExampleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
