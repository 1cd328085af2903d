"""The errors that end an example. Worker processes import this file, so it imports little."""

import sys
from collections.abc import Callable


class ExampleError(Exception):
    """The user's input is at fault; the message states the rule, the value received, and the remedy."""


class Stopped(Exception):
    """The user ended the run early; the message says what was saved and how to go on."""


def run_command(main: Callable[[], None]) -> None:
    """Runs `main` as a command: expected errors become one line and an exit code, no traceback."""
    try:
        main()
    except ExampleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
