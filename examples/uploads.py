"""Reads the bodies of requests, for the servers of these examples."""

from typing import Any

from examples.errors import ExampleError
from examples.packages import needed


async def body_of(request: Any, what: str, most: int) -> bytes:
    """Returns the body of a request.

    Args:
      request: a request of starlette.
      what: the word for the body in errors.
      most: largest number of bytes of the body.

    Raises:
      ExampleError: the body is larger, or incomplete.
    """
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > most:
                raise ExampleError(f"a {what} must have at most {most} bytes; send a smaller one.")
    except needed("starlette.requests").ClientDisconnect as error:
        raise ExampleError(f"the {what} must come whole, but the client has gone.") from error
    return bytes(data)
