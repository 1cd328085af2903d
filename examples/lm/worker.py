"""A thread that runs an `Engine` and passes tokens to the coroutines that wait for them."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from examples.errors import ExampleError
from examples.lm.engine import Engine, Text


class FullError(Exception):
    """Raised if too many texts are queued."""


class FailedError(Exception):
    """Raised after the engine has failed; no text continues."""


@dataclass(eq=False)
class _Ticket:
    """A text and the coroutine that waits for its tokens."""

    text: Text
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    def put(self, token: int | None) -> None:
        """Queues a token for the coroutine, or None at the end; any thread may call it."""
        try:
            self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)
        except RuntimeError:
            return  # The loop is closed, so nothing waits for the token.


class Worker:
    """Runs an engine in a thread, from `with` to the end of its block.

    Args:
      engine: generates the texts; no other code may call it.
      most: largest number of texts that are queued or in progress.
    """

    def __init__(self, engine: Engine, *, most: int):
        self.length = engine.length
        self._engine = engine
        self._most = most
        self._tickets: dict[Text, _Ticket] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.put(None)
        self._thread.join()

    @property
    def texts(self) -> int:
        """Returns the number of texts queued or in progress."""
        return len(self._tickets)

    async def tokens(self, text: Text, *, patience: float) -> AsyncIterator[int | None]:
        """Yields the tokens that follow a text, and None whenever none came for `patience` seconds.

        A caller that stops early, or is cancelled, ends the text.

        Raises:
          FullError: there are too many texts.
          FailedError: the engine has failed.
        """
        if self._error is not None:
            raise FailedError(str(self._error))
        if len(self._tickets) >= self._most:
            raise FullError(f"{self._most} texts are in line or under way")
        ticket = self._tickets[text] = _Ticket(text, asyncio.get_running_loop())
        self._calls.put(lambda: self._engine.submit(text))
        try:
            while True:
                try:
                    token = await asyncio.wait_for(ticket.tokens.get(), patience)
                except TimeoutError:
                    yield None
                    continue
                if token is None:
                    break
                yield token
            if self._error is not None:
                raise FailedError(str(self._error))
        finally:
            del self._tickets[text]
            self._calls.put(lambda: self._engine.cancel(text))

    def _run(self) -> None:
        try:
            while True:
                # While there is no text, the thread waits for the next call.
                while not self._calls.empty() or not self._engine.is_busy:
                    call = self._calls.get()
                    if call is None:
                        return
                    call()
                for text, token in self._engine.step():
                    if (ticket := self._tickets.get(text)) is not None:
                        ticket.put(token)
                        if text.finish is not None:
                            ticket.put(None)
        except Exception as error:
            self._error = error
            raise
        finally:
            self._error = self._error or ExampleError("the server is stopping")
            for ticket in list(self._tickets.values()):
                ticket.put(None)
