"""A thread that runs an `Engine` and passes tokens to the coroutines that wait for them."""

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from examples.errors import ExampleError
from examples.lm.engine import Engine, Text


class FullError(Exception):
    """Raised if too many texts are queued."""


class FailedError(Exception):
    """Raised after the engine has failed; no text continues."""


@dataclass(eq=False)
class _Ticket:
    """A coroutine that waits for the tokens of some texts."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[tuple[Text, int | None] | None] = field(default_factory=asyncio.Queue)
    """A text with its next token, or with None at its end; None if the engine has failed."""

    def put(self, event: tuple[Text, int | None] | None) -> None:
        """Queues an event for the coroutine; any thread may call it."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            return  # The event loop is closed, so no coroutine waits for the token.


class Worker:
    """Runs an engine in a thread until its `with` block ends.

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

    @property
    def error(self) -> Exception | None:
        """Returns why the engine has stopped; None while it runs."""
        return self._error

    @property
    def most(self) -> int:
        """Returns the largest number of texts that are queued or in progress."""
        return self._most

    async def tokens(
        self, texts: Sequence[Text], *, patience: float
    ) -> AsyncIterator[tuple[Text, int | None] | None]:
        """Yields each text with each of its tokens, and with None at its end.

        Yields None in place of a pair after each `patience` seconds without a token. A caller that stops
        early, or is cancelled, ends the texts; `end` ends one of them.

        Raises:
          FullError: there are too many texts.
          FailedError: the engine has failed.
        """
        if self._error is not None:
            raise FailedError(str(self._error))
        if len(self._tickets) + len(texts) > self._most:
            raise FullError(f"{len(self._tickets)} of {self._most} texts are in line or under way")
        ticket = _Ticket(asyncio.get_running_loop())
        for text in texts:
            self._tickets[text] = ticket
            self._calls.put(functools.partial(self._engine.submit, text))
        try:
            while any(text in self._tickets for text in texts):
                try:
                    event = await asyncio.wait_for(ticket.events.get(), patience)
                except TimeoutError:
                    # The engine may have failed just before these texts were added.
                    if self._error is not None:
                        raise FailedError(str(self._error)) from None
                    yield None
                    continue
                if event is None:
                    raise FailedError(str(self._error))
                text, token = event
                if text in self._tickets:
                    if token is None:
                        self.end(text)
                    yield event
        finally:
            for text in texts:
                self.end(text)

    def end(self, text: Text) -> None:
        """Ends a text, which frees its slot and pages for others."""
        if self._tickets.pop(text, None) is not None:
            self._calls.put(functools.partial(self._engine.cancel, text))

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
                        ticket.put((text, token))
                        if text.finish is not None:
                            ticket.put((text, None))
        except Exception as error:
            self._error = error
            raise
        finally:
            self._error = self._error or ExampleError("the server is stopping")
            for ticket in list(self._tickets.values()):
                ticket.put(None)
