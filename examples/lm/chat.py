"""Answers questions on the terminal: `python -m examples.lm.chat "What is a GPU?"`, `--help` for flags.

Without a question it reads questions from the terminal, and remembers the conversation. A model without
a chat template continues the text instead.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from examples.errors import ExampleError, run_command
from examples.flags import number, whole
from examples.lm import loading
from examples.lm.engine import Engine, Text
from examples.lm.steps import Sampling
from examples.lm.stream import Stream
from examples.lm.tokenizer import Tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` replaces the command line."""
    args = make_parser().parse_args(argv)
    begin = time.perf_counter()
    model, tokenizer = loading.load(args)
    count, size = loading.size_of(model)
    print(
        f"{count / 1e6:,.0f} million parameters in {size / 1e6:,.0f} MB ({args.format}) on"
        f" {jax.devices()[0].device_kind}, read in {time.perf_counter() - begin:.1f} s",
        file=sys.stderr,
    )
    engine = Engine(
        model, tokenizer.ends, slots=1, length=min(args.length, model.config.max_length)
    )
    messages = []
    for question in [args.question] if args.question else questions():
        messages.append(dict(role="user", content=question))
        answer = say(engine, tokenizer, messages, args)
        messages.append(dict(role="assistant", content=answer))


def questions() -> Iterator[str]:
    """Yields what the user types, until the end of the input."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if question:
            yield question


def say(
    engine: Engine, tokenizer: Tokenizer, messages: Sequence[dict], args: argparse.Namespace
) -> str:
    """Prints the answer to the last message token by token, then its speed; returns the answer."""
    if tokenizer.template is None:  # A model without a chat template continues the text.
        prompt = tokenizer.encode(messages[-1]["content"])
    else:
        prompt = tokenizer.encode_chat(messages)
    most = min(args.most, engine.length - len(prompt))
    if most < 1:
        raise ExampleError(
            f"the conversation must leave room for an answer, but it has {len(prompt)} tokens and"
            f" --length is {engine.length}; pass a larger --length, or start again."
        )
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    text, stream, answer = Text(prompt, most, sampling), Stream(), []
    begin = time.perf_counter()
    times = []
    engine.submit(text)
    while engine.is_busy:
        for _, token in engine.step():
            if token < 0:
                raise ExampleError(
                    "the model's logits must be finite, but those after"
                    f" {len(prompt) + len(times)} tokens are not; pass another --dtype or --model."
                )
            times.append(time.perf_counter())
            answer.append(stream.add(tokenizer.bytes_of(token)))
            print(answer[-1], end="", flush=True)
    answer.append(stream.end())
    print(answer[-1])
    # The rate leaves out the first two tokens, whose times include compiling prefill and decode.
    rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else 0
    print(
        f"{len(prompt)} tokens read and {len(times)} written, the first after {times[0] - begin:.2f} s,"
        f" then {rate:.1f} tokens/s",
        file=sys.stderr,
    )
    return "".join(answer)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.lm.chat", description="Answers questions by a language model."
    )
    parser.add_argument("question", nargs="?", help="by default it asks for one after the other")
    loading.add_flags(parser)
    parser.add_argument(
        "--length",
        type=whole(1),
        default=2048,
        metavar="TOKENS",
        help="of a conversation (%(default)s)",
    )
    parser.add_argument(
        "--most", type=whole(1), default=256, metavar="TOKENS", help="of an answer (%(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=number(least=0),
        default=0.0,
        help="0 takes the likeliest (%(default)s)",
    )
    parser.add_argument("--top-p", type=number(above=0), default=1.0, help="(%(default)s)")
    parser.add_argument("--seed", type=whole(0, most=2**32 - 1), default=0)
    return parser


if __name__ == "__main__":
    run_command(main)
