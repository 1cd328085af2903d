"""Runs the server of examples/lm under load for a while: `python -m benchmarks soak --seconds 600`.

Clients stream texts over real connections, and some of them misbehave: they disconnect, or send prompts
that are too long, or malformed JSON. Each text is compared with what the server answers to the same
request when it is alone. Memory, open files and compiled programs must not grow, and at the end all
pages must be free.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.report import results
from examples.errors import run_command
from examples.lm import loading, sizes
from examples.lm.engine import Engine
from examples.lm.model import LanguageModel
from examples.lm.serve import Server
from examples.lm.worker import Worker
from examples.packages import needed

NAME = "soak"
MARGIN = 0.5
"""Difference of two log-probabilities below which rounding may make either token the likeliest."""
MOST_GROWTH = 32.0
"""Largest accepted growth of the process's memory, in MB."""
_LENGTH, _CHUNK, _PAGE = 128, 32, 16
_PREFIXES, _PREFIX = 4, 32
"""Number of prefixes that prompts share, and tokens of each."""
_FIRST_SYMBOL = 0x4E00
_STDDEV, _SPREAD = 0.02, 3.6
"""Standard deviations of initial weights, and of logits as wide as a trained model's."""


class Symbols:
    """A tokenizer for random weights: each token is a character, so a text determines its tokens."""

    ends: frozenset[int] = frozenset()
    template = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) - _FIRST_SYMBOL for character in text]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        raise NotImplementedError("the clients ask for completions")

    def bytes_of(self, token: int) -> bytes:
        return chr(_FIRST_SYMBOL + token).encode()

    name_of = bytes_of


@dataclass
class Asked:
    """A request, and the server's answer to it without load."""

    body: dict[str, Any]
    text: str = ""
    margins: list[tuple[int, float]] = field(default_factory=list)
    """Each token's offset in the text, and how far its two largest log-probabilities differ."""

    @property
    def is_greedy(self) -> bool:
        return self.body["temperature"] == 0

    def is_near_tie(self, text: str) -> bool:
        """Returns whether the token at which `text` differs was almost as likely as another."""
        pairs = zip(self.text, text, strict=False)
        shorter = min(len(self.text), len(text))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        margins = [margin for start, margin in self.margins if start <= place]
        return bool(margins) and margins[-1] < MARGIN


@dataclass
class Counts:
    """Results of the clients' requests."""

    requests: Counter[str] = field(default_factory=Counter)
    events: int = 0
    """Pieces of text received from streams."""
    near_ties: int = 0
    drawn_otherwise: int = 0
    """Sampled texts that differ from those without load, as they may without `--batch-invariant`."""
    errors: list[str] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    """Seconds until the first piece of each stream."""


def main(arguments: Sequence[str]) -> int:
    """Runs the server under load; prints and saves the result; returns the exit status."""
    args = make_parser().parse_args(arguments)
    status = []
    run_command(lambda: status.append(_measured(args)))
    return status[0]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    loading.add_flags(parser)
    parser.set_defaults(format="float")
    parser.add_argument(
        "--shape", choices=sizes.MODELS, default="lm-byte", help="without --model (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="clients at once (%(default)s)")
    parser.add_argument(
        "--texts", type=int, default=24, help="different requests, each first alone (%(default)s)"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="see examples.lm.serve")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "serving")
    return parser


def _measured(args: argparse.Namespace) -> int:
    row = soak(args)
    section = {
        "date": results.now(),
        "commit": results.commit(),
        "machine": {"versions": results.versions()},
        "row": row,
    }
    name = NAME + (", batch_invariant" if args.batch_invariant else "")
    path = results.save_section(args.out, jax.devices()[0].device_kind, name, section)
    print(report(row) + f"; {path}")
    for problem in row["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if row["problems"] else 0


def report(row: dict[str, Any]) -> str:
    """Formats a run's results as a line of text."""
    memory, first = row["memory_mb"], row["first_token_ms"]
    return (
        f"{row['streams']} streams for {row['seconds']:.0f} s"
        f"{', batch_invariant' if row['batch_invariant'] else ''}: {row['requests']['stream']:,} whole"
        f" texts, {row['tokens_per_second']:,.0f} tokens/s, first token after {first['median']:.0f} ms"
        f" (99 %: {first['percentile_99']:.0f}); {len(row['problems'])} problems, {row['near_ties']}"
        f" near ties; memory {memory['begin']:.0f} MB, then {memory['end']:.0f}; open files"
        f" {row['files']['begin']}, then {row['files']['end']}; {row['compiled']} programs compiled;"
        f" {row['pages']['free']} of {row['pages']['all']} pages free"
    )


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Serves clients for `args.seconds`; returns rates, growth of memory and files, and problems."""
    model: LanguageModel
    tokenizer: Any = Symbols()
    if args.model is None:
        model = random_model(args)
    else:
        model, tokenizer = loading.load(args)
    # The KV cache has too few pages for all texts at their longest, so that some wait or are preempted.
    pages = max(args.streams * _LENGTH // _PAGE * 2 // 3, _LENGTH // _PAGE)
    engine = Engine(
        model,
        tokenizer.ends,
        slots=args.streams,
        length=_LENGTH,
        chunk=_CHUNK,
        pages=pages,
        page_size=_PAGE,
        batch_invariant=args.batch_invariant,
    )
    asked = requests(args, vocabulary=min(model.config.vocabulary, 256))
    with Worker(engine, most=2 * args.streams) as worker:
        server = Server(worker, tokenizer, name="soak", vocabulary=model.config.vocabulary)
        with _listening(server.app) as port, _counted() as compiled:
            row = asyncio.run(_clients(args, port, asked, worker, compiled))
            row["pages"] = dict(free=engine.free_pages, all=pages)
    if engine.free_pages != pages:
        row["problems"].append(f"{pages - engine.free_pages} pages did not come back")
    return row


def random_model(args: argparse.Namespace) -> LanguageModel:
    """Returns a model of random weights whose logits spread as widely as a trained model's."""
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = LanguageModel(sizes.MODELS[args.shape], dtype=dtype, rngs=nnx.Rngs(args.seed))
    unit = _STDDEV * model.config.width**0.5
    for path, parameter in nnx.iter_graph(model):
        if isinstance(parameter, nnx.Param) and path[-1] == "kernel":
            parameter[...] = parameter[...] * (_SPREAD if path[0] == "head" else 1) / unit
    return model


def requests(args: argparse.Namespace, *, vocabulary: int) -> list[Asked]:
    """Returns requests of unequal lengths and options; prompts share a few prefixes."""
    draw = random.Random(args.seed)
    prefixes = [[draw.randrange(vocabulary) for _ in range(_PREFIX)] for _ in range(_PREFIXES)]
    made = []
    for i in range(args.texts):
        own = [draw.randrange(vocabulary) for _ in range(draw.randrange(1, 48))]
        options: dict[str, Any] = dict(temperature=0)
        if i % 2:
            options = dict(temperature=1.0, top_p=0.95, seed=i)
            options |= dict(frequency_penalty=0.5) if i % 4 == 1 else {}
        prompt = [*draw.choice([[], *prefixes]), *own]
        options["max_tokens"] = draw.randrange(4, 48)
        made.append(Asked(dict(model="soak", prompt=prompt, stream=True, **options)))
    return made


async def _clients(
    args: argparse.Namespace, port: int, asked: list[Asked], worker: Worker, compiled: list[str]
) -> dict[str, Any]:
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {what}", flush=True)

    for number, each in enumerate(asked):
        # The first two always ask for log-probabilities, so that no program compiles under load.
        judged = each.is_greedy and not args.batch_invariant
        await _alone(port, each, with_margins=number < 2 or judged)
        if number < 2 or number + 1 == len(asked):
            say(f"{number + 1} of {len(asked)} texts answered alone, {len(compiled)} programs")
    counts, samples = Counts(), list[tuple[float, int]]()
    await _crowd(args, port, asked, Counts(), seconds=min(2.0, args.seconds))
    await _settled(worker)
    programs, files, begin = len(compiled), _open_files(), time.monotonic()
    watch = asyncio.create_task(_watch(samples, begin, counts, say))
    await _crowd(args, port, asked, counts, seconds=args.seconds)
    seconds = time.monotonic() - begin
    watch.cancel()
    await _settled(worker)
    first, last = _quarters(samples)
    row: dict[str, Any] = dict(
        seconds=seconds,
        streams=args.streams,
        batch_invariant=args.batch_invariant,
        requests=dict(counts.requests),
        tokens_per_second=counts.events / seconds,
        first_token_ms=_quantiles([1e3 * s for s in counts.first_seconds]),
        near_ties=counts.near_ties,
        drawn_otherwise=counts.drawn_otherwise,
        memory_mb=dict(begin=first, end=last),
        files=dict(begin=files, end=_open_files()),
        compiled=len(compiled) - programs,
        problems=counts.errors,
    )
    if last - first > MOST_GROWTH:
        row["problems"].append(f"memory grew from {first:.0f} to {last:.0f} MB")
    if row["files"]["end"] > files:
        row["problems"].append(f"{row['files']['end'] - files} files were left open")
    if row["compiled"]:
        row["problems"].append(f"{row['compiled']} programs were compiled: {compiled[programs:]}")
    if worker.texts:
        row["problems"].append(f"{worker.texts} texts were left")
    return row


async def _crowd(
    args: argparse.Namespace, port: int, asked: list[Asked], counts: Counts, *, seconds: float
) -> None:
    """Runs all clients for some seconds, and until each has its last answer."""
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        draw = random.Random(args.seed * 1000 + number)
        # Clients begin with different requests, so that even a short run sends all of them.
        turn = number
        while time.monotonic() < end:
            kind = draw.choices(_KINDS, _WEIGHTS)[0]
            try:
                await _client(kind, port, asked[turn % len(asked)], draw, args, counts)
            except Exception as error:
                counts.errors.append(f"{kind}: {type(error).__name__}: {error}")
            counts.requests[kind] += 1
            turn += draw.randrange(1, len(asked) + 1)

    await asyncio.gather(*map(client, range(args.streams)))


_KINDS = ("stream", "leave", "several", "too long", "no JSON", "unknown field")
_WEIGHTS = (80, 8, 4, 3, 3, 2)


async def _client(
    kind: str, port: int, asked: Asked, draw: random.Random, args: Any, counts: Counts
) -> None:
    """Sends one request of a kind, and checks the answer."""
    if kind in ("too long", "no JSON", "unknown field"):
        wrong = {
            "too long": json.dumps(asked.body | dict(prompt=[1] * (_LENGTH + 1))).encode(),
            "no JSON": json.dumps(asked.body).encode()[:-1],
            "unknown field": json.dumps(asked.body | dict(colour=1)).encode(),
        }
        status, answer = await _whole(port, wrong[kind])
        if status != 400 or not answer["error"]["message"]:
            raise ValueError(f"the answer is {status}: {answer}")
    elif kind == "several":
        body = asked.body | dict(n=2, stream=False, logprobs=2)
        status, answer = await _whole(port, json.dumps(body).encode())
        if status != 200:
            raise ValueError(f"the answer is {status}: {answer}")
        _compare(asked, answer["choices"][0]["text"], args, counts)
    else:
        leave = draw.randrange(1, 20) if kind == "leave" else None
        begin, pieces = time.monotonic(), list[str]()
        async for piece in _streamed(port, asked.body, leave_after=leave):
            if not pieces:
                counts.first_seconds.append(time.monotonic() - begin)
            pieces.append(piece)
        counts.events += len(pieces)
        if leave is None:
            _compare(asked, "".join(pieces), args, counts)


def _compare(asked: Asked, text: str, args: argparse.Namespace, counts: Counts) -> None:
    """Compares a text with the server's answer to the same request without load."""
    if text == asked.text:
        return
    if args.batch_invariant:
        raise ValueError(f"{text!r} was {asked.text!r} alone")
    if not asked.is_greedy:
        counts.drawn_otherwise += 1
    elif asked.is_near_tie(text):
        counts.near_ties += 1
    else:
        raise ValueError(f"{text!r} was {asked.text!r} alone, and that was no near tie")


async def _alone(port: int, asked: Asked, *, with_margins: bool) -> None:
    """Stores the answer to a request sent without load, and if asked, its tokens' `margins`."""
    asked.text = "".join([piece async for piece in _streamed(port, asked.body)])
    if not with_margins:
        return
    body = asked.body | dict(stream=False, logprobs=2)
    _, answer = await _whole(port, json.dumps(body).encode())
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    for start, top in zip(found["text_offset"], found["top_logprobs"], strict=True):
        best = sorted(top.values(), reverse=True)
        asked.margins.append((start, best[0] - best[1] if len(best) > 1 else 0.0))
    if choice["text"] != asked.text:
        raise ValueError(f"{choice['text']!r} was {asked.text!r} without log-probabilities")


# --- connections ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _posted(port: int, body: bytes) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Sends an HTTP 1.0 request, whose answer ends with the connection; yields (status, reader)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        yield int(answer.split()[1]), reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _whole(port: int, body: bytes) -> tuple[int, dict[str, Any]]:
    async with _posted(port, body) as (status, reader):
        return status, json.loads(await reader.read())


async def _streamed(
    port: int, body: dict[str, Any], *, leave_after: int | None = None
) -> AsyncIterator[str]:
    """Yields the pieces of a stream; disconnects after `leave_after` of them, if given.

    Raises:
      ValueError: the stream is not complete.
    """
    async with _posted(port, json.dumps(body).encode()) as (status, reader):
        if status != 200:
            raise ValueError(f"the answer is {status}: {await reader.read()!r}")
        count, finish = 0, None
        while (event := await reader.readuntil(b"\n\n")) != b"data: [DONE]\n\n":
            if event.startswith(b":"):
                continue
            (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
            finish = choice["finish_reason"]
            if choice["text"]:
                count += 1
                yield choice["text"]
            if count == leave_after:
                return
        if finish is None or await reader.read():
            raise ValueError("the stream has no finish_reason, or goes on after its end")


@contextlib.contextmanager
def _listening(app: Any) -> Iterator[int]:
    """Runs the application in a thread, and yields its port."""
    uvicorn = needed("uvicorn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, kwargs=dict(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join()
        listener.close()


# --- memory, open files and compiled programs -----------------------------------------------------


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """Yields a list that gets an entry for each program that JAX lowers in this block."""
    names = list[str]()

    def note(event: str, seconds: float, **facts: Any) -> None:
        del seconds
        if event.endswith("jaxpr_to_mlir_module_duration"):
            names.append(str(facts.get("fun_name", "a program")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


async def _watch(
    samples: list[tuple[float, int]], begin: float, counts: Counts, say: Callable[[str], None]
) -> None:
    """Appends (seconds, resident memory in the system's pages) to `samples` every half second.

    Says every ten seconds what there is so far, for a run that is stopped.
    """
    while True:
        memory = int(Path("/proc/self/statm").read_text().split()[1])
        samples.append((time.monotonic() - begin, memory))
        if len(samples) % 20 == 0:
            size = memory * os.sysconf("SC_PAGE_SIZE") / 1e6
            texts = counts.requests["stream"]
            say(f"{texts} texts, {len(counts.errors)} problems, memory {size:.0f} MB")
        await asyncio.sleep(0.5)


def _quarters(samples: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Returns the median memory in MB of the second and of the last quarter of a run."""
    size = os.sysconf("SC_PAGE_SIZE") / 1e6
    memory = [pages * size for _, pages in samples]
    quarter = max(len(memory) // 4, 1)
    begin = memory[quarter : 2 * quarter] or memory
    return statistics.median(begin), statistics.median(memory[-quarter:])


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _settled(worker: Worker) -> None:
    """Waits until the server has noticed that its clients have gone, and has closed the connections."""
    for _ in range(3000):
        if not worker.texts:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return dict.fromkeys(("median", "percentile_99"), values[0] if values else 0.0)
    return dict(
        median=statistics.median(values), percentile_99=statistics.quantiles(values, n=100)[98]
    )
