"""Continuous batching with a paged cache: one program decodes a token of every running text.

A text is a request: a prompt and its answer. Texts with a common prefix share its pages, also with texts
that have ended. Prompts are prefilled in chunks of one size, with a decoding step between two chunks, so
that long prompts do not delay other texts. If the pool runs out of pages, the newest running text is
preempted: it frees its pages, and is prefilled again when enough are free.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.lm.model import LanguageModel
from examples.lm.steps import Sampling, State, programs

_LEAST_WIDTH = 512
"""Tokens that the narrowest page table covers; each wider table covers twice as many."""


@dataclass(eq=False)
class Text:
    """A request: a prompt and the tokens that are generated after it."""

    prompt: Sequence[int]
    most: int
    """Largest number of tokens to generate."""
    sampling: Sampling = field(default_factory=Sampling)
    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "cancelled"] | None = None
    known: int = 0
    """Tokens of the prompt that were not prefilled: other texts' pages held their keys and values."""
    has_log_probs: bool = False
    """True if the log-probabilities of its tokens are wanted."""
    log_probs: list["TokenLogProbs"] = field(default_factory=list)
    """Log-probabilities at each of `tokens`, if `has_log_probs`."""


class TokenLogProbs(NamedTuple):
    """Log-probabilities of one generated token, after logit_bias, before penalties and temperature."""

    chosen: float
    """Log-probability of the text's token."""
    top: list[float]
    """The `MOST_LOG_PROBS` largest log-probabilities."""
    top_tokens: list[int]
    """Tokens of the log-probabilities in `top`."""


@dataclass(eq=False)
class _Slot:
    """A running text; the allocator uses this object as the key of its pages."""

    text: Text
    number: int
    """Order of admission: a slot that starts later has a larger number."""
    begin: list[int]
    """Tokens to prefill: the prompt, and the tokens generated before the text was preempted."""
    shared: int = 0
    """Number of tokens that were in other texts' pages when this text got its own."""
    read: int = 0
    """Number of tokens whose keys and values are in the pages."""
    recorded: int = 0
    """Number of tokens that were reported to the allocator."""


class _Computed(NamedTuple):
    """Tokens that a launched program samples."""

    step: int
    """Number of the step that started the program."""
    tokens: jax.Array
    """Last token of each slot, [slots]."""
    log_probs: jaxfused.LogProbs | None
    """Log-probabilities of each slot's token, [slots, ...]; None if the program has none."""
    slots: list[tuple[int, _Slot]]
    """Slots with a new token, as (index, slot)."""


class Engine:
    """Generates text by continuous batching.

    Args:
      model: the language model.
      ends: tokens after which a text is over.
      slots: largest number of texts that run at once; others wait.
      length: largest number of tokens of a prompt and its answer; fewer if the pool is smaller.
      chunk: tokens of a prompt that are prefilled at once.
      pages: pages of the pool; None for as many as `slots` texts of `length` tokens fill.
      page_size: tokens of a page.
      batch_invariant: whether a text's tokens are bit for bit those that it gets in a batch of its own.
        Pages for a whole text are then reserved at its start, so that it is never preempted. Only whole
        chunks of prompts are shared, attention does not divide a head's keys among SMs, and every step
        computes penalties and log-probabilities, so that there is one program. Other `slots` or another
        `chunk` may give other bits.
    """

    def __init__(
        self,
        model: LanguageModel,
        ends: Sequence[int],
        *,
        slots: int,
        length: int,
        chunk: int = 64,
        pages: int | None = None,
        page_size: int = 16,
        batch_invariant: bool = False,
    ):
        self._ends = frozenset(ends)
        self._vocabulary = model.config.vocabulary
        self._chunk = chunk
        self._batch_invariant = batch_invariant
        pages = slots * -(-length // page_size) if pages is None else pages
        self.length = length = min(length, pages * page_size)
        self._width = -(-length // page_size)
        graphdef, params = nnx.split(model)
        self._params, tree = jax.tree.flatten(nnx.to_pure_dict(params))
        self._prefill, self._decode = programs(graphdef, tree, batch_invariant=batch_invariant)
        self._state = State.zeros(
            model, slots=slots, length=length, pages=pages, page_size=page_size
        )
        self._allocator = jaxfused.PageAllocator(pages, page_size)
        self._slots: list[_Slot | None] = [None] * slots
        self._waiting: collections.deque[Text] = collections.deque()
        self._numbers = itertools.count()
        self._steps = 0
        self._computed: collections.deque[_Computed] = collections.deque()
        self._events: list[tuple[Text, int]] = []

    @property
    def is_busy(self) -> bool:
        """True if a text is waiting or in a slot, or a sampled token is not read yet."""
        return bool(self._waiting or self._computed or any(self._slots))

    @property
    def free_pages(self) -> int:
        """Returns the number of pages that no text in a slot holds."""
        return self._allocator.available

    def submit(self, text: Text) -> None:
        """Queues a text.

        Raises:
          ExampleError: the text has no token, does not fit, or has a token that the model lacks.
        """
        if not text.prompt or text.most < 1:
            raise ExampleError(
                f"a prompt and its answer need a token each, but there are {len(text.prompt)} and"
                f" {text.most}; pass more."
            )
        if len(text.prompt) + text.most > self.length:
            raise ExampleError(
                f"a prompt and its answer must have at most {self.length} tokens, but they have"
                f" {len(text.prompt)} and {text.most}; shorten the prompt, or ask for fewer tokens."
            )
        check_tokens(text.prompt, self._vocabulary)
        self._waiting.append(text)

    def cancel(self, text: Text) -> None:
        """Ends a text and frees its slot and pages at once."""
        if text.finish is None:
            text.finish = "cancelled"
        self._release(text)

    def step(self) -> list[tuple[Text, int]]:
        """Prefills a chunk of a prompt, decodes a token of each text, and returns (text, token) pairs.

        The tokens are those of the previous step, so that the host reads them while the device computes.
        """
        self._steps += 1
        self._admit()
        ready = [
            (i, slot)
            for i, slot in enumerate(self._slots)
            if slot is not None and slot.read >= len(slot.begin)
        ]
        self._read_chunk()
        self._make_room(ready)
        # Some of these texts may have ended or been preempted.
        self._decode_all([(i, slot) for i, slot in ready if self._slots[i] is slot])
        is_new = bool(self._computed) and self._computed[-1].step == self._steps
        while self._computed and not (is_new and self._computed[0].step == self._steps):
            self._take()
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Gives free slots to the texts that have waited longest, while there are enough pages."""
        for i, held in enumerate(self._slots):
            if held is None and self._waiting:
                slot = self._started(self._waiting[0])
                if slot is None:
                    return
                text = self._waiting.popleft()
                self._slots[i] = slot
                self._state = self._state.admitted(
                    i, slot.begin, answers=len(text.tokens), sampling=text.sampling
                )

    def _started(self, text: Text) -> _Slot | None:
        """Returns a slot for a text, with the pages for its prefill; None if there are too few pages."""
        slot = _Slot(text, next(self._numbers), [*text.prompt, *text.tokens])
        others = sum(held is not None for held in self._slots)
        try:
            self._find_pages(slot)
        except jaxfused.OutOfPages:
            self._allocator.free(slot)
            return None
        # Each running text may need a page for its next token; were none free, this newest text would
        # be preempted.
        if self._allocator.available < others and not self._batch_invariant:
            self._allocator.free(slot)
            return None
        return slot

    def _find_pages(self, slot: _Slot) -> None:
        """Gives a slot the pages for its prefill; pages of texts with the same prefix are shared."""
        text = slot.text
        known = self._allocator.start(slot, slot.begin)
        whole = len(slot.begin)
        if self._batch_invariant:
            # The bits of a token's keys and values depend on the chunk that prefilled it, so only
            # whole chunks (and pages) of a prefix are shared.
            unit = math.lcm(self._chunk, self._allocator.page_size)
            self._allocator.free(slot)
            known = self._allocator.start(slot, slot.begin[: known // unit * unit + 1])
            whole = len(text.prompt) + text.most
        self._allocator.reserve(slot, whole - known)
        slot.shared = slot.read = slot.recorded = known
        if not text.tokens:
            text.known = known

    def _read_chunk(self) -> None:
        """Prefills the next chunk of the oldest text whose prefill is not complete."""
        unread = [
            (i, slot)
            for i, slot in enumerate(self._slots)
            if slot is not None and slot.read < len(slot.begin)
        ]
        if not unread:
            return
        i, slot = min(unread, key=lambda each: each[1].number)
        if slot.read == slot.shared:
            # Texts admitted at the same time, such as several answers to one prompt, may meanwhile have
            # filled pages that this slot can share.
            self._allocator.free(slot)
            self._find_pages(slot)
        part = np.asarray(slot.begin[slot.read : slot.read + self._chunk], np.int32)
        before = slot.read
        slot.read += len(part)
        is_last = slot.read == len(slot.begin)
        self._state, *drawn = self._prefill(
            self._params,
            self._state,
            self._table([slot]),
            np.pad(part, (0, self._chunk - len(part))),
            np.int32(i),
            np.int32(before),
            np.int32(len(part)),
            is_last,
            **self._wanted([slot]),
        )
        self._record(slot)
        if is_last:
            self._computed.append(_Computed(self._steps, *drawn, [(i, slot)]))

    def _make_room(self, ready: Sequence[tuple[int, _Slot]]) -> None:
        """Reserves pages for each text's next token; if none is free, preempts the newest texts."""
        for i, slot in ready:
            while self._slots[i] is slot and not self._reserve_next(slot):
                if self._computed:
                    self._take()  # A text may end, which frees pages.
                    continue
                last = max(filter(None, self._slots), key=lambda held: held.number)
                self._release(last.text)
                self._waiting.appendleft(last.text)

    def _reserve_next(self, slot: _Slot) -> bool:
        """Reserves a page for a slot's next token if needed; returns False if none is free."""
        try:
            self._allocator.reserve(slot, slot.read + 1 - slot.recorded)
        except jaxfused.OutOfPages:
            return False
        return True

    def _decode_all(self, ready: list[tuple[int, _Slot]]) -> None:
        """Decodes one step of these slots: feeds in their last tokens and samples the next."""
        if not ready:
            return
        lengths = np.zeros(len(self._slots), np.int32)
        names: list[_Slot | None] = [None] * len(self._slots)
        for i, slot in ready:
            slot.read += 1
            lengths[i], names[i] = slot.read, slot
        self._state, *drawn = self._decode(
            self._params,
            self._state,
            self._table(names),
            lengths,
            **self._wanted([slot for _, slot in ready]),
        )
        self._computed.append(_Computed(self._steps, *drawn, ready))

    def _table(self, names: Sequence[_Slot | None]) -> np.ndarray:
        """Returns the page table [slots, width], of one of a few widths: few programs compile."""
        table = self._allocator.table(names)
        width = self._width
        if not self._batch_invariant:
            least = -(-_LEAST_WIDTH // self._allocator.page_size)
            needed = -(-max(table.shape[1], 1) // least)
            width = min(width, least * 2 ** (needed - 1).bit_length())
        return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)

    def _wanted(self, slots: Sequence[_Slot]) -> dict[str, bool]:
        """Returns flags of a program: whether a slot changes logits or asks for log-probabilities."""
        # Other flags select another compiled program, whose results may differ in the last bits: batch
        # invariance needs the same program in every step.
        is_fixed = self._batch_invariant
        return dict(
            changes_logits=is_fixed or any(slot.text.sampling.changes_logits for slot in slots),
            log_probs=is_fixed or any(slot.text.has_log_probs for slot in slots),
        )

    def _take(self) -> None:
        """Adds the oldest computed tokens to their texts, and ends the texts that are complete."""
        _, tokens, log_probs, slots = self._computed.popleft()
        drawn = np.asarray(tokens)
        if any(slot.text.has_log_probs for _, slot in slots):
            log_probs = jax.device_get(log_probs)
        for i, slot in slots:
            text, token = slot.text, int(drawn[i])
            if text.finish is not None:
                continue
            if text.has_log_probs:
                text.log_probs.append(TokenLogProbs(*(part[i].tolist() for part in log_probs)))
            text.tokens.append(token)
            self._events.append((text, token))
            if token in self._ends or token < 0:
                text.finish = "stop"
            elif len(text.tokens) == text.most:
                text.finish = "length"
            self._record(slot)
            if text.finish is not None:
                self._release(text)

    def _record(self, slot: _Slot) -> None:
        """Reports to the allocator the tokens in a slot's pages, as far as the host has read them."""
        text, done = slot.text, slot.recorded
        start = len(text.prompt)
        answered = text.tokens[max(done - start, 0) : max(slot.read - start, 0)]
        if self._batch_invariant:
            # Decoded keys differ in the last bits from prefilled ones, so no prompt may share them: -1
            # equals no token of a prompt.
            answered = [-1] * len(answered)
        tokens = [*text.prompt[done : slot.read], *answered]
        self._allocator.written(slot, tokens)
        slot.recorded += len(tokens)

    def _release(self, text: Text) -> None:
        for i, slot in enumerate(self._slots):
            if slot is not None and slot.text is text:
                self._slots[i] = None
                self._allocator.free(slot)
        if text in self._waiting:
            self._waiting.remove(text)


def check_tokens(prompt: Sequence[int], vocabulary: int) -> None:
    """Checks that a model of this vocabulary has all tokens of a prompt.

    Raises:
      ExampleError: a token is negative or not below `vocabulary`.
    """
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ExampleError(
            f"a prompt's tokens must be from 0 to {vocabulary - 1}, as the model has them, but are from"
            f" {min(prompt)} to {max(prompt)}; pass the model with its own tokenizer."
        )
