"""Converts tokens to text as they arrive, in whole characters and without stop strings."""

import codecs
from collections.abc import Sequence


class Stream:
    r"""Turns the bytes of tokens into text.

    Text that may begin a stop string is held back until later bytes decide. An incomplete UTF-8
    character at the end of the text becomes U+FFFD.

    Args:
      stops: strings at which the text ends; they are no part of it.

    Example:
      >>> from examples.lm.stream import Stream
      >>> stream = Stream(["END"])
      >>> [stream.add(data) for data in (b"caf\xc3", b"\xa9 E", b"N", b"ough ENDless")]
      ['caf', 'é ', '', 'ENough ']
      >>> stream.is_stopped
      True
    """

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = tuple(stop for stop in stops if stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.is_stopped = False
        self.length = 0
        """Number of characters returned so far."""

    @property
    def held(self) -> int:
        """Returns the number of characters that are held back."""
        return len(self._held)

    def add(self, data: bytes) -> str:
        """Returns the text that became final with these bytes."""
        return self._text(self._decoder.decode(data), is_last=False)

    def end(self) -> str:
        """Returns the rest of the text after the last token."""
        return self._text(self._decoder.decode(b"", final=True), is_last=True)

    def _text(self, new: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            self.length += min(found)
            return text[: min(found)]
        held = 0 if is_last else self._length_of_beginning(text)
        self._held = text[len(text) - held :]
        self.length += len(text) - held
        return text[: len(text) - held]

    def _length_of_beginning(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0
