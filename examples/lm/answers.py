"""Answers as a client of an OpenAI-compatible server reads them: one object, or a stream of events."""

import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from examples.lm.engine import Text, TokenLogProbs
from examples.lm.requests import Request
from examples.lm.stream import Stream
from examples.lm.tokenizer import ByteTokenizer, Tokenizer
from examples.lm.worker import FailedError

_LEAST_LOG_PROB = -9999.0
"""Log-probability that is sent for minus infinity, which JSON lacks."""


class _Token(NamedTuple):
    """A token with its log-probabilities."""

    data: bytes
    """Bytes that stand for the token in the list; of a control token, none are in the text."""
    start: int
    """Number of characters of the answer before the token."""
    log_prob: float
    top: list[tuple[bytes, float]]
    """The likeliest tokens, as many as the request asks for."""


class Piece(NamedTuple):
    """The next part of a choice, which is one of the answers to a request."""

    index: int
    """Number of the choice."""
    text: str
    tokens: list[_Token]
    """Tokens whose text is sent with this piece, if log-probabilities are wanted."""
    finish: str | None
    """Why the choice ends with this piece; None if it does not."""


class Choice:
    """One of the answers to a request: makes pieces of its tokens.

    Args:
      index: number of the choice.
      text: the text that the engine generates.
      asked: the request.
      tokenizer: the model's tokenizer.
    """

    def __init__(
        self, index: int, text: Text, asked: Request, tokenizer: Tokenizer | ByteTokenizer
    ):
        self.index, self.text = index, text
        self._asked, self._tokenizer = asked, tokenizer
        self._stream = Stream(asked.stops)
        prompt = asked.prompts[index // asked.answers] if asked.echo else ""
        if not isinstance(prompt, str):
            prompt = b"".join(map(tokenizer.bytes_of, prompt)).decode(errors="replace")
        self._unsent = prompt
        self._begin = len(self._unsent)
        self.count = 0
        """Number of tokens passed to `add`; after a stop string, `text.tokens` may hold more."""
        self._held: deque[_Token] = deque()

    def add(self, token: int | None) -> Piece:
        """Returns the text and tokens that `token` makes final; None stands for the end of the text."""
        stream = self._stream
        if token is None:
            new = stream.end()
        elif token in self._tokenizer.ends:
            new = ""
        else:
            data = self._tokenizer.bytes_of(token)
            if self._asked.log_probs is not None:
                name = self._tokenizer.name_of(token)
                self._held.append(self._with_log_probs(name, self.text.log_probs[self.count]))
            new = stream.add(data)
        self.count += token is not None
        is_over = token is None or stream.is_stopped
        tokens = []
        while self._held and (token is None or self._held[0].start < self._begin + stream.length):
            tokens.append(self._held.popleft())
        text, self._unsent = self._unsent + new, ""
        return Piece(self.index, text, tokens, self._finish() if is_over else None)

    def _with_log_probs(self, data: bytes, found: TokenLogProbs) -> _Token:
        start = self._begin + self._stream.length + self._stream.held
        pairs = zip(found.top_tokens, found.top, strict=True)
        top = [(self._tokenizer.name_of(token), _finite(value)) for token, value in pairs]
        return _Token(data, start, _finite(found.chosen), top[: self._asked.log_probs])

    def _finish(self) -> str:
        is_cut = self.text.finish == "length" and not self._stream.is_stopped
        return "length" if is_cut else "stop"


@dataclass
class _Said:
    """Text, tokens and finish reason of a choice, collected from its pieces."""

    text: str = ""
    tokens: list[_Token] = field(default_factory=list)
    finish: str = "stop"


class Answer:
    """Formats the pieces of all choices as OpenAI's API does."""

    def __init__(self, asked: Request, choices: Sequence[Choice], name: str):
        self._asked, self._choices = asked, choices
        self._is_chat = asked.messages is not None
        self._head = dict(
            id=f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=name,
            object="chat.completion" if self._is_chat else "text_completion",
        )

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the response object with the whole text of each choice."""
        said = [_Said() for _ in self._choices]
        for piece in pieces:
            one = said[piece.index]
            one.text += piece.text
            one.tokens += piece.tokens
            one.finish = piece.finish or one.finish
        choices = [
            self._choice(
                Piece(i, one.text, one.tokens, one.finish),
                message=dict(role="assistant", content=one.text, refusal=None),
            )
            for i, one in enumerate(said)
        ]
        return self._head | dict(choices=choices, usage=self._usage())

    async def events(
        self, first: Piece | None, rest: AsyncIterator[Piece | None]
    ) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events; a piece that is None becomes the comment ": ping".

        An error is sent as an event, and the connection is then aborted, so that no client takes the
        text as complete.
        """
        try:
            # OpenAI's client requires that the first events of the choices come in order of index.
            if self._is_chat:
                for choice in self._choices:
                    empty = Piece(choice.index, "", [], None)
                    yield self._chunk(empty, delta=dict(role="assistant", content=""))
            for event in self._of(first):
                yield event
            async for piece in rest:
                for event in self._of(piece):
                    yield event
            if self._asked.include_usage:
                yield _event(self._chunk_of([]) | dict(usage=self._usage()))
            yield b"data: [DONE]\n\n"
        except FailedError as error:
            yield _event({"error": error_of(500, f"the model failed: {error}")})
            raise

    def _of(self, piece: Piece | None) -> list[bytes]:
        """Returns the server-sent events of a piece; its finish reason is an event of its own."""
        if piece is None:
            return [b": ping\n\n"]
        events = []
        if piece.text or piece.tokens:
            part = piece._replace(finish=None)
            events.append(self._chunk(part, delta=dict(content=piece.text)))
        if piece.finish is not None:
            events.append(self._chunk(piece._replace(text="", tokens=[]), delta={}))
        return events

    def _chunk(self, piece: Piece, **content: Any) -> bytes:
        return _event(self._chunk_of([self._choice(piece, **content)]))

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = dict(usage=None) if self._asked.include_usage else {}
        return self._head | dict(object=kind, choices=choices) | usage

    def _choice(self, piece: Piece, **content: Any) -> dict[str, Any]:
        """Returns a choice's JSON object: it holds `content` in a chat, else the piece's text."""
        log_probs = None
        if self._asked.log_probs is not None and (piece.tokens or piece.finish is None):
            log_probs = (_of_chat if self._is_chat else _of_completion)(piece.tokens)
        content = content if self._is_chat else dict(text=piece.text)
        return dict(index=piece.index, **content, logprobs=log_probs, finish_reason=piece.finish)

    def _usage(self) -> dict[str, Any]:
        texts = [choice.text for choice in self._choices]
        prompts = texts[:: self._asked.answers]
        read = sum(len(text.prompt) for text in prompts)
        written = sum(choice.count for choice in self._choices)
        return dict(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=dict(cached_tokens=sum(text.known for text in prompts)),
        )


def texts_of(asked: Request, prompts: Sequence[Sequence[int]], most: Sequence[int]) -> list[Text]:
    """Returns the texts that answer a request, those of a prompt one after another.

    Args:
      asked: the request.
      prompts: the tokens of each prompt.
      most: largest number of tokens of an answer to each prompt.
    """
    return [
        Text(
            prompt,
            count,
            replace(asked.sampling, seed=(asked.sampling.seed + number) % 2**32),
            has_log_probs=asked.log_probs is not None,
        )
        for prompt, count in zip(prompts, most, strict=True)
        for number in range(asked.answers)
    ]


def error_of(status: int, message: str) -> dict[str, Any]:
    """Returns the error object of OpenAI's API for an HTTP status."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return dict(message=message, type=kind, param=None, code=status)


def _of_chat(tokens: Sequence[_Token]) -> dict[str, Any]:
    def entry(data: bytes, log_prob: float) -> dict[str, Any]:
        return dict(token=data.decode(errors="replace"), logprob=log_prob, bytes=[*data])

    return dict(
        content=[
            entry(token.data, token.log_prob)
            | dict(top_logprobs=[entry(*other) for other in token.top])
            for token in tokens
        ],
        refusal=None,
    )


def _of_completion(tokens: Sequence[_Token]) -> dict[str, Any]:
    def name(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return dict(
        tokens=[name(token.data) for token in tokens],
        token_logprobs=[token.log_prob for token in tokens],
        # The chosen token is always listed, however unlikely it is.
        top_logprobs=[
            {name(data): value for data, value in [*token.top, (token.data, token.log_prob)]}
            for token in tokens
        ],
        text_offset=[token.start for token in tokens],
    )


def _finite(log_prob: float) -> float:
    return max(log_prob, _LEAST_LOG_PROB)


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
