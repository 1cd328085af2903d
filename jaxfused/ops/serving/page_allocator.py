"""PageAllocator: which pages of a pool belong to which sequence, tracked on the host."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from jaxfused.runtime.checks import check_count


class OutOfPages(RuntimeError):
    """Raised where a pool has too few free pages; nothing was taken. Queue or preempt a sequence."""


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    written: int = 0
    """Number of tokens written to the pages."""
    prefix: int = 0
    """Id of the prefix that ends with the last full page; 0 for none."""
    tail: list[int] = field(default_factory=list)
    """Ids of the tokens in the last page while it is not full."""


class PageAllocator:
    """Assigns the pages of a pool to sequences, and finds pages that already hold a prompt's beginning.

    It has no arrays on the device: it tracks which pages a sequence has, and `append_to_pages`,
    `paged_attention` and `ragged_paged_attention` write and read them. For each request

        known = allocator.start(name, prompt)        # tokens that lie in pages of earlier requests
        allocator.reserve(name, count)               # room for the next step's tokens
        ... the step, with allocator.table([name, ...], width) ...
        allocator.written(name, tokens)              # tokens that the step has appended
        allocator.free(name)

    Full pages can be found by later prompts after `free`, until they are needed for other tokens; those
    unused for longest are evicted first. Only full pages are shared, so that no shared page is written.

    Args:
      pages: how many pages the pool has.
      page_size: the tokens of a page.

    Attributes:
      available: the pages that can be given out now.

    Raises:
      OutOfPages: by `reserve`, where too few pages are available.
      ValueError: for unknown names, and tokens for which there is no room.

    Example:
      >>> import jaxfused
      >>> allocator = jaxfused.PageAllocator(pages=4, page_size=2)
      >>> allocator.start("first", [5, 6, 7])
      0
      >>> allocator.reserve("first", 3)
      >>> allocator.written("first", [5, 6, 7])
      >>> allocator.table(["first"], 3)
      array([[ 0,  1, -1]], dtype=int32)
      >>> allocator.start("second", [5, 6, 8])
      2
      >>> allocator.reserve("second", 1)
      >>> allocator.table(["second"], 3), allocator.available
      (array([[ 0,  2, -1]], dtype=int32), 1)

    Source: Kwon et al., "PagedAttention", 2023, https://arxiv.org/abs/2309.06180
    """

    def __init__(self, pages: int, page_size: int):
        check_count("PageAllocator", "pages", pages)
        check_count("PageAllocator", "page_size", page_size)
        self.pages, self.page_size = int(pages), int(page_size)
        self._sequences: dict[Hashable, _Sequence] = {}
        self._users = [0] * self.pages
        self._empty = list(range(self.pages - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Pages of no sequence, whose tokens a new sequence may still reuse; the longest unused
        first."""
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        """Maps (id of a prefix, ids of the next page's tokens) to (that page, id of the prefix that
        it ends)."""
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._prefixes = 0

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._unused)

    def start(self, name: Hashable, tokens: Sequence[int] = ()) -> int:
        """Adds a sequence, and returns how many of its first tokens are in its pages already.

        The result is a multiple of the page size, and less than the number of tokens: the last token has
        to be computed again for its logits.
        """
        if name is None or not _is_hashable(name):
            raise ValueError(
                f"PageAllocator.start: name is {name!r}, but sequences are found by their names, and"
                " None is a row without one; pass a str, an int or another hashable name."
            )
        tokens = _numbers("start", tokens)
        if name in self._sequences:
            raise ValueError(
                f"PageAllocator.start: {name!r} has been started; free it, or pass another name."
            )
        sequence = self._sequences[name] = _Sequence()
        while sequence.written + self.page_size < len(tokens):
            next_page = tokens[sequence.written : sequence.written + self.page_size]
            found = self._known.get((sequence.prefix, tuple(next_page)))
            if found is None:
                break
            page, sequence.prefix = found
            self._unused.pop(page, None)
            self._users[page] += 1
            sequence.pages.append(page)
            sequence.written += self.page_size
        return sequence.written

    def reserve(self, name: Hashable, count: int) -> None:
        """Gives a sequence pages for `count` tokens after those that are written."""
        sequence = self._of("reserve", name)
        _check_number("reserve", "count", count, "tokens")
        wanted = -(-(sequence.written + int(count)) // self.page_size) - len(sequence.pages)
        if wanted > self.available:
            raise OutOfPages(
                f"PageAllocator.reserve: {count} tokens of {name!r} need {wanted} more pages, but"
                f" {self.available} of {self.pages} are free; free a sequence, or wait until one ends."
            )
        for _ in range(wanted):
            page = self._empty.pop() if self._empty else self._evicted()
            self._users[page] = 1
            sequence.pages.append(page)

    def written(self, name: Hashable, tokens: Sequence[int]) -> None:
        """Records that a sequence's next tokens are written; full pages can be found from now on."""
        sequence, tokens = self._of("written", name), _numbers("written", tokens)
        room = len(sequence.pages) * self.page_size - sequence.written
        if len(tokens) > room:
            raise ValueError(
                f"PageAllocator.written: {len(tokens)} tokens of {name!r} were written, but its pages"
                f" have room for {room}; reserve it first."
            )
        for token in tokens:
            sequence.tail.append(token)
            sequence.written += 1
            if len(sequence.tail) == self.page_size:
                self._remember(sequence)

    def free(self, name: Hashable) -> None:
        """Ends a sequence; its pages can be given out again, the last ones first."""
        sequence = self._of("free", name)
        del self._sequences[name]
        for page in reversed(sequence.pages):
            self._users[page] -= 1
            if self._users[page] == 0 and page in self._key_of:
                self._unused[page] = None
            elif self._users[page] == 0:
                self._empty.append(page)

    def table(self, names: Sequence[Hashable], width: int | None = None) -> np.ndarray:
        """Returns the pages of sequences, [len(names), width] int32, with -1 where there are none.

        Args:
          names: of sequences; None for a row without pages, to fill a batch of fixed size.
          width: pages a row; of fixed width, steps are not compiled again. None for the most needed.
        """
        if isinstance(names, str):
            raise ValueError(
                f"PageAllocator.table: names is {names!r}, but it is a sequence of names; pass"
                f" [{names!r}]."
            )
        rows = [[] if name is None else self._of("table", name).pages for name in names]
        longest = max(map(len, rows), default=0)
        if width is None:
            width = longest
        _check_number("table", "width", width, "pages")
        if longest > width:
            raise ValueError(
                f"PageAllocator.table: width is {width}, but a sequence has {longest} pages; pass a"
                f" width of at least {longest}."
            )
        table = np.full((len(rows), width), -1, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table

    def _of(self, method: str, name: Hashable) -> _Sequence:
        if not _is_hashable(name) or name not in self._sequences:
            raise ValueError(f"PageAllocator.{method}: there is no {name!r}; start it first.")
        return self._sequences[name]

    def _remember(self, sequence: _Sequence) -> None:
        """Registers the page that has become full, unless a page with the same prefix is registered."""
        page = sequence.pages[sequence.written // self.page_size - 1]
        key = (sequence.prefix, tuple(sequence.tail))
        if key not in self._known:
            self._prefixes += 1
            self._known[key] = (page, self._prefixes)
            self._key_of[page] = key
        sequence.prefix, sequence.tail = self._known[key][1], []

    def _evicted(self) -> int:
        """Evicts and returns the page unused for longest; its tokens can then no longer be found."""
        page, _ = self._unused.popitem(last=False)
        del self._known[self._key_of.pop(page)]
        return page


def _is_hashable(name: object) -> bool:
    try:
        hash(name)
    except TypeError:
        return False
    return True


def _check_number(method: str, name: str, value: object, what: str) -> None:
    """Checks that `value` is a whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ValueError(
            f"PageAllocator.{method}: {name} is {value!r}, but it counts {what}; pass an int of 0 or"
            " more."
        )


def _numbers(method: str, tokens: Any) -> list[int]:
    """Returns the ids of tokens as Python's numbers, which compare equal for lists and arrays."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"PageAllocator.{method}: tokens have dtype {ids.dtype} and shape {ids.shape}, but they are"
            " the ids of tokens in order; pass a list of ints, or an array of them with one axis."
        )
    return ids.tolist()
