"""An OpenAI-compatible server: `python -m examples.lm.serve --model PATH`, `--help` for the flags.

It has /v1/chat/completions, /v1/completions, /v1/models and /health. Requests run in one batch, as many
as there are slots and pages for; others are queued. A prefix that several share is prefilled once.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jax

from examples.errors import ExampleError, run_command
from examples.flags import whole
from examples.listening import listen, serve, url_of
from examples.lm import loading
from examples.lm.answers import Answer, Choice, Piece, error_of, texts_of
from examples.lm.engine import Engine, check_tokens
from examples.lm.requests import Request, read_request
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
      patience: seconds without a token after which a stream sends a comment. A client that does not
        read for four times as long is cut off.
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
        error = self._worker.error
        if error is not None:
            return self._failed(503, error)
        return self._responses.JSONResponse({"texts": self._worker.texts})

    async def _answer(self, request: Any, *, is_chat: bool) -> Any:
        try:
            body = await _body(request)
            asked = read_request(body, is_chat=is_chat, vocabulary=self._vocabulary)
            if asked.model != self._name:
                return self._no_model(asked.model)
            prompts = await needed("starlette.concurrency").run_in_threadpool(
                asked.tokens, self._tokenizer
            )
            texts = texts_of(asked, prompts, [self._most(prompt, asked) for prompt in prompts])
            if len(texts) > self._worker.most:
                raise ExampleError(
                    f"a request may ask for at most {self._worker.most} answers, but asks for"
                    f" {len(texts)}; send several."
                )
        except ExampleError as error:
            return self._error(400, str(error))
        choices = [Choice(i, text, asked, self._tokenizer) for i, text in enumerate(texts)]
        answer = Answer(asked, choices, self._name)
        pieces = self._pieces(choices)
        try:
            # A full queue or a bad prompt is answered by a status code, before the stream starts.
            first = await anext(pieces)
        except FullError as error:
            return self._error(429, f"{error}; try again", headers={"retry-after": "1"})
        except FailedError as error:
            return self._failed(503, error)
        except asyncio.CancelledError:
            return self._stopping()
        if asked.stream:
            events = answer.events(first, pieces)
            response = self._responses.StreamingResponse(
                events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
            return _closing(response, 4 * self._patience, events, pieces)
        parts = [first]
        try:
            async for piece in pieces:
                parts.append(piece)
                if await request.is_disconnected():
                    break
        except FailedError as error:
            return self._failed(500, error)
        except asyncio.CancelledError:
            return self._stopping()
        finally:
            await pieces.aclose()
        return self._responses.JSONResponse(answer.whole([part for part in parts if part]))

    def _most(self, prompt: Sequence[int], asked: Request) -> int:
        """Returns the largest number of tokens of an answer to a prompt."""
        check_tokens(prompt, self._vocabulary)
        room = self._worker.length - len(prompt)
        if room < 1 or (asked.most is not None and asked.most > room) or not prompt:
            raise ExampleError(
                f"a prompt and its answer must have at most {self._worker.length} tokens, and one each,"
                f" but the prompt has {len(prompt)} and max_tokens is {asked.most}; shorten one."
            )
        return room if asked.most is None else asked.most

    async def _pieces(self, choices: Sequence[Choice]) -> AsyncIterator[Piece | None]:
        """Yields the pieces of all choices, and None after `patience` seconds without a token."""
        of_text = {choice.text: choice for choice in choices}
        events = self._worker.tokens(list(of_text), patience=self._patience)
        try:
            async for event in events:
                if event is None:
                    yield None
                    continue
                text, token = event
                if token is not None and token < 0:
                    raise FailedError("its logits are not finite")
                piece = of_text[text].add(token)
                if piece.finish is not None:
                    self._worker.end(text)
                yield piece
        finally:
            await events.aclose()

    def _model(self) -> dict[str, Any]:
        created = self._created
        return dict(id=self._name, object="model", created=created, owned_by="jaxfused")

    def _no_model(self, name: str) -> Any:
        return self._error(
            404, f"the model is {self._name!r}, but {name!r} was asked for; pass it."
        )

    def _failed(self, status: int, error: Exception) -> Any:
        return self._error(status, f"the model failed ({error}); restart the server")

    def _stopping(self) -> Any:
        """Returns the answer to a request that uvicorn cancels when its grace is over."""
        return self._error(503, "the server is stopping; ask again when it runs")

    async def _no_route(self, request: Any, error: Any) -> Any:
        return self._error(error.status_code, f"there is no {request.method} {request.url.path}")

    def _error(self, status: int, message: str, headers: Any = None) -> Any:
        return self._responses.JSONResponse(
            {"error": error_of(status, message)}, status, headers=headers
        )


def _closing(response: Any, patience: float, *generators: Any) -> Any:
    """Returns the response, which closes the generators even if the client leaves.

    A client that does not read for `patience` seconds counts as one that has left.
    """

    async def send_and_close(scope: Any, receive: Any, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            await asyncio.wait_for(send(message), patience)

        try:
            await response(scope, receive, send_in_time)
        finally:
            for generator in generators:
                await generator.aclose()

    return send_and_close


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


def _name_of(path: Path | None) -> str:
    """Returns the name of a model for clients: that of its directory, or of its file without .gguf."""
    return "smollm2" if path is None else path.resolve().name.removesuffix(".gguf")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = make_parser().parse_args(argv)
    needed("uvicorn")
    listener = listen(args.host, args.port)
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
    name = args.name or _name_of(args.model)
    with Worker(engine, most=args.slots + args.queue) as worker:
        server = Server(worker, tokenizer, name=name, vocabulary=model.config.vocabulary)
        print(
            f"{name!r} on {jax.devices()[0].device_kind}: {args.slots} slots of {length} tokens at"
            f" {url_of(listener)}/v1",
            file=sys.stderr,
            flush=True,
        )
        serve(server.app, listener, grace=_GRACE)


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
