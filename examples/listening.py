"""Runs the servers of these examples on a socket that is opened before their models are loaded."""

import socket
from typing import Any

from examples.errors import ExampleError
from examples.packages import needed


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at the address; port 0 means any free one.

    Raises:
      ExampleError: the address is not free, or none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ExampleError(
            f"--host and --port must be a free address of this machine, but {host}:{port} is not"
            f" ({str(error.strerror).partition(' (')[0]}); pass another."
        ) from error


def url_of(listener: socket.socket) -> str:
    """Returns the address of a socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Any, listener: socket.socket, *, grace: int | None = None) -> None:
    """Answers requests until Ctrl-C; `grace` is how many seconds unfinished answers then have."""
    uvicorn = needed("uvicorn")
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace)
    uvicorn.Server(config).run(sockets=[listener])
