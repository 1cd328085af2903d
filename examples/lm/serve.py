"""An OpenAI-compatible server: `python -m examples.lm.serve --model PATH`, `--help` for the flags.

It has /v1/chat/completions, /v1/completions, /v1/models and /health. Requests run in one batch, as many
as there are slots and pages for; others are queued. A prefix that several share is prefilled once.
"""

import argparse
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jax

from examples.errors import ExampleError, run_command
from examples.flags import whole
from examples.lm import loading
from examples.lm.engine import Engine, Text
from examples.lm.requests import Request, read_request
from examples.lm.stream import Stream
from examples.lm.tokenizer import Tokenizer
from examples.lm.worker import FailedError, FullError, Worker
from examples.packages import needed
from examples.uploads import body_of

_LARGEST_BODY = 4 * 2**20
_PATIENCE = 15.0
"""Seconds after which an idle stream sends a comment, so that no client times out."""
_GRACE = 5
"""Seconds that unfinished answers have to end after Ctrl-C."""


class Server:
    """The routes, as an ASGI application: `Server(...).app`.

    Args:
      worker: generates the answers.
      tokenizer: the model's tokenizer.
      name: name of the model in requests and answers.
      patience: seconds without a token after which a stream sends a comment.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        *,
        name: str,
        vocabulary: int,
        patience=_PATIENCE,
    ):
        routing, applications = needed("starlette.routing"), needed("starlette.applications")
        self._responses = needed("starlette.responses")
        self._worker, self._tokenizer = worker, tokenizer
        self._name, self._vocabulary, self._patience = name, vocabulary, patience
        self._created = int(time.time())
        route = routing.Route
        self.app = applications.Starlette(
            routes=[
                route("/v1/chat/completions", self.chat, methods=["POST"]),
                route("/v1/completions", self.complete, methods=["POST"]),
                route("/v1/models", self.models),
                route("/v1/models/{name:path}", self.model),
                route("/health", self.health),
            ],
            exception_handlers={404: self._no_route, 405: self._no_route},
        )

    async def chat(self, request: Any) -> Any:
        return await self._answer(request, is_chat=True)

    async def complete(self, request: Any) -> Any:
        return await self._answer(request, is_chat=False)

    async def models(self, request: Any) -> Any:
        return self._responses.JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Any) -> Any:
        name = request.path_params["name"]
        return (
            self._responses.JSONResponse(self._model())
            if name == self._name
            else self._no_model(name)
        )

    async def health(self, request: Any) -> Any:
        return self._responses.JSONResponse({"texts": self._worker.texts})

    async def _answer(self, request: Any, *, is_chat: bool) -> Any:
        try:
            body = await _body(request)
            asked = read_request(body, is_chat=is_chat, vocabulary=self._vocabulary)
            if asked.model != self._name:
                return self._no_model(asked.model)
            prompt = await needed("starlette.concurrency").run_in_threadpool(
                asked.tokens, self._tokenizer
            )
            text = self._text(prompt, asked)
        except ExampleError as error:
            return self._error(400, str(error))
        answer = _Answer(asked, text, self._name, is_chat=is_chat)
        pieces = self._pieces(text, asked)
        try:
            # A full queue or a bad prompt is answered by a status code, before the stream starts.
            first = await anext(pieces, None)
        except FullError as error:
            return self._error(429, f"{error}; try again", headers={"retry-after": "1"})
        except FailedError as error:
            return self._error(503, f"the model failed ({error}); restart the server")
        if asked.stream:
            events = answer.events(first, pieces)
            response = self._responses.StreamingResponse(
                events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
            return _closing(response, events, pieces)
        try:
            parts = [first or ""]
            async for piece in pieces:
                parts.append(piece or "")
                if await request.is_disconnected():
                    break
        except FailedError as error:
            return self._error(500, f"the model failed ({error}); restart the server")
        finally:
            await pieces.aclose()
        return self._responses.JSONResponse(answer.whole("".join(parts)))

    def _text(self, prompt: list[int], asked: Request) -> Text:
        room = self._worker.length - len(prompt)
        if room < 1 or (asked.most is not None and asked.most > room) or not prompt:
            raise ExampleError(
                f"a prompt and its answer must have at most {self._worker.length} tokens, and one each,"
                f" but the prompt has {len(prompt)} and max_tokens is {asked.most}; shorten one."
            )
        return Text(prompt, room if asked.most is None else asked.most, asked.sampling)

    async def _pieces(self, text: Text, asked: Request) -> AsyncIterator[str | None]:
        """Yields the answer in pieces, and None when a stream should send a comment."""
        stream = Stream(asked.stops)
        tokens = self._worker.tokens(text, patience=self._patience)
        try:
            async for token in tokens:
                if token is None:
                    yield None
                    continue
                if token < 0:
                    raise FailedError("its logits are not finite")
                if token not in self._tokenizer.ends:
                    yield stream.add(self._tokenizer.bytes_of(token))
                if stream.is_stopped:
                    text.finish = "stop"
                    return
            yield stream.end()
        finally:
            await tokens.aclose()

    def _model(self) -> dict[str, Any]:
        created = self._created
        return dict(id=self._name, object="model", created=created, owned_by="jaxfused")

    def _no_model(self, name: str) -> Any:
        return self._error(
            404, f"the model is {self._name!r}, but {name!r} was asked for; pass it."
        )

    async def _no_route(self, request: Any, error: Any) -> Any:
        return self._error(error.status_code, f"there is no {request.method} {request.url.path}")

    def _error(self, status: int, message: str, headers: Any = None) -> Any:
        return self._responses.JSONResponse(
            {"error": _error_of(status, message)}, status, headers=headers
        )


def _closing(response: Any, *generators: Any) -> Any:
    """Returns the response, which closes the generators even if the client stops reading early."""

    async def send_and_close(scope: Any, receive: Any, send: Any) -> None:
        try:
            await response(scope, receive, send)
        finally:
            for generator in generators:
                await generator.aclose()

    return send_and_close


def _error_of(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return dict(message=message, type=kind, param=None, code=status)


async def _body(request: Any) -> Any:
    """Returns the JSON of a request.

    Raises:
      ExampleError: the body is no JSON, or too large.
    """
    data = await body_of(request, "body", _LARGEST_BODY)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ExampleError(f"the body must be JSON, but is not: {error}") from error


class _Answer:
    """Formats an answer as one JSON object or as a stream of events."""

    def __init__(self, asked: Request, text: Text, name: str, *, is_chat: bool):
        self._asked, self._text, self._is_chat = asked, text, is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._head = dict(
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=name,
            object=kind,
        )

    def whole(self, answer: str) -> dict[str, Any]:
        """Returns the answer as one object."""
        content = (
            dict(message=dict(role="assistant", content=answer, refusal=None))
            if self._is_chat
            else dict(text=answer)
        )
        choice = dict(index=0, **content, logprobs=None, finish_reason=self._finish())
        return self._head | dict(choices=[choice], usage=self._usage())

    async def events(self, first: str | None, rest: Any) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events.

        An error is sent as an event, and the connection is then aborted, so that no client takes the
        text as complete.
        """
        try:
            if self._is_chat:
                yield self._chunk(delta=dict(role="assistant", content=""))
            for piece in [first]:
                if piece:
                    yield self._piece(piece)
            async for piece in rest:
                if piece:
                    yield self._piece(piece)
                elif piece is None:
                    yield b": ping\n\n"
            yield self._piece("", finish=self._finish())
            if self._asked.include_usage:
                yield _event(self._chunk_of([]) | dict(usage=self._usage()))
            yield b"data: [DONE]\n\n"
        except FailedError as error:
            yield _event({"error": _error_of(500, f"the model failed: {error}")})
            raise

    def _piece(self, piece: str, finish: str | None = None) -> bytes:
        if not self._is_chat:
            return self._chunk(text=piece, finish=finish)
        return self._chunk(delta=dict(content=piece) if piece else {}, finish=finish)

    def _chunk(self, finish: str | None = None, **content: Any) -> bytes:
        choice = dict(index=0, **content, logprobs=None, finish_reason=finish)
        return _event(self._chunk_of([choice]))

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | dict(object=kind, choices=choices)

    def _finish(self) -> str:
        return "length" if self._text.finish == "length" else "stop"

    def _usage(self) -> dict[str, int]:
        read, written = len(self._text.prompt), len(self._text.tokens)
        return dict(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=dict(cached_tokens=self._text.known),
        )


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = make_parser().parse_args(argv)
    uvicorn = needed("uvicorn")
    model, tokenizer = loading.load(args)
    length = min(args.length, model.config.max_length)
    engine = Engine(
        model,
        tokenizer.ends,
        slots=args.slots,
        length=length,
        chunk=args.chunk,
        pages=args.pages,
        page_size=args.page_size,
        batch_invariant=args.batch_invariant,
    )
    name = args.name or ("smollm2" if args.model is None else args.model.stem)
    with Worker(engine, most=args.slots + args.queue) as worker:
        server = Server(worker, tokenizer, name=name, vocabulary=model.config.vocabulary)
        print(
            f"{name!r} on {jax.devices()[0].device_kind}: {args.slots} slots of {length} tokens at"
            f" http://{args.host}:{args.port}/v1",
            file=sys.stderr,
        )
        uvicorn.run(
            server.app,
            host=args.host,
            port=args.port,
            log_level="warning",
            timeout_graceful_shutdown=_GRACE,
        )


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.lm.serve", description="An OpenAI-compatible server."
    )
    loading.add_flags(parser)
    parser.add_argument("--name", help="of the model, for clients (that of the file)")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=whole(0, most=65535), default=8000, help="(%(default)s)")
    parser.add_argument(
        "--slots", type=whole(1), default=16, metavar="N", help="texts at once (%(default)s)"
    )
    parser.add_argument(
        "--queue", type=whole(0), default=256, metavar="N", help="texts in line (%(default)s)"
    )
    parser.add_argument(
        "--length", type=whole(2), default=4096, metavar="TOKENS", help="of a text (%(default)s)"
    )
    parser.add_argument(
        "--chunk",
        type=whole(1),
        default=256,
        metavar="TOKENS",
        help="of a prompt that are read at once (%(default)s)",
    )
    parser.add_argument(
        "--pages",
        type=whole(1),
        metavar="N",
        help="of keys and values, for all texts together (as many as --slots of --length fill)",
    )
    parser.add_argument(
        "--page-size", type=whole(1), default=16, metavar="TOKENS", help="of a page (%(default)s)"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="a text's tokens are bit for bit those that it has alone, at the price of speed",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
