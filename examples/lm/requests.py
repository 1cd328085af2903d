"""Requests that a client of an OpenAI-compatible server may send, checked field by field.

Source: https://platform.openai.com/docs/api-reference, as the package openai 3.51.0 sends it.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.errors import ExampleError
from examples.lm.steps import MOST_BIASES, MOST_LOG_PROBS, Sampling
from examples.lm.tokenizer import Tokenizer

_NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
_DEFAULTS = {"temperature": 1.0}
_CHAT = frozenset({"messages", "top_logprobs"})
_COMPLETION = frozenset({"best_of", "echo", "prompt"})
_ALL = frozenset(
    {*_NUMBERS, "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "model", "n"}
    | {"seed", "stop", "stream", "stream_options", "top_k"}
)
_HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
    | {"store", "user"}
)
"""Fields that do not change the answer."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields for which this server supports only these values, besides null."""
_MOST_STOPS = 16
_MOST_ANSWERS = 128
_OF_MESSAGES = frozenset({"content", "name", "role"})
"""Fields of a message; "name" is accepted and not read."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Request:
    """A request whose fields are checked."""

    model: str
    messages: list[dict[str, str]] | None
    """Messages of a conversation."""
    prompts: list[str | list[int]]
    """Texts to continue, or the tokens of each."""
    answers: int
    """Number of answers to each prompt."""
    most: int | None
    """Largest number of tokens of an answer; None for as many as fit."""
    sampling: Sampling
    """Options of each prompt's first answer; later answers add their index to the seed."""
    log_probs: int | None
    """Number of likeliest tokens whose log-probabilities are wanted; None for no log-probabilities."""
    echo: bool
    """True if the answer begins with the prompt."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    def tokens(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the tokens of each prompt."""
        if self.messages is not None:
            return [tokenizer.encode_chat(self.messages)]
        return [p if isinstance(p, list) else tokenizer.encode(p) for p in self.prompts]


def read_request(body: Any, *, is_chat: bool, vocabulary: int) -> Request:
    """Returns a request from its JSON.

    Raises:
      ExampleError: a field is missing, unknown or wrong.
    """
    if not isinstance(body, dict):
        raise ExampleError(
            f"the body must be a JSON object, but is a {type(body).__name__}; send one."
        )
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, _ALL | (_CHAT if is_chat else _COMPLETION))
    numbers = {name: _number(given, name) for name in _NUMBERS if name in given}
    seed = given.get("seed")
    sampling = Sampling(
        **(_DEFAULTS | numbers),
        top_k=_whole(given, "top_k", 0) or 0,
        seed=secrets.randbits(32) if seed is None else _whole(given, "seed") % 2**32,
        bias=_biases(given.get("logit_bias", {}), vocabulary),
    )
    limits = {_whole(given, name, 1) for name in ("max_completion_tokens", "max_tokens")} - {None}
    if len(limits) > 1:
        raise ExampleError(
            f"max_completion_tokens is {given['max_completion_tokens']} and max_tokens is"
            f" {given['max_tokens']}, but both are the answer's most tokens; send one of them."
        )
    most = limits.pop() if limits else None
    answers = _whole(given, "n", 1, _MOST_ANSWERS) or 1
    if given.get("best_of", answers) != answers:
        raise ExampleError(
            f"best_of is {given['best_of']!r}, but this server returns every answer that it makes, and n"
            f" is {answers}; leave best_of out."
        )
    stream, echo = _flag(given, "stream"), _flag(given, "echo")
    log_probs = _log_probs_of_chat(given) if is_chat else _whole(given, "logprobs", 0, 5)
    if echo and log_probs is not None:
        raise ExampleError(
            "echo and logprobs ask for the log-probabilities of the prompt, which this server does not"
            " compute; leave one of them out."
        )
    return Request(
        model=_text("model", given.get("model", "")),
        messages=_messages(given.get("messages")) if is_chat else None,
        prompts=[] if is_chat else _prompts(given.get("prompt"), vocabulary),
        answers=answers,
        # /v1/completions stops after 16 tokens by default.
        most=16 if most is None and not is_chat else most,
        sampling=sampling,
        log_probs=log_probs,
        echo=echo,
        stops=_stops(given.get("stop", [])),
        stream=stream,
        include_usage=_includes_usage(given, stream),
    )


def _check_names(given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in given.items():
        if name in _ONLY:
            if not any(value == one and type(value) is type(one) for one in _ONLY[name]):
                raise ExampleError(
                    f"{name} is {value!r}, which this server does not do; leave it out."
                )
        elif name not in known | _HARMLESS:
            raise ExampleError(f"{name!r} is no field that this server knows; leave it out.")


def _number(given: Mapping[str, Any], name: str) -> float:
    least, most = _NUMBERS[name]
    value = given[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ExampleError(f"{name} must be a number from {least} to {most}, but is {value!r:.80}.")
    return float(value)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ExampleError(f"{name} must be a bool, but is {value!r}.")
    return value


def _whole(
    given: Mapping[str, Any], name: str, least: int | None = None, most: int | None = None
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ExampleError(f"{name} must be an integer of 64 bits, but is {value!r}.")
    if least is not None and value < least:
        raise ExampleError(f"{name} must be at least {least}, but is {value}.")
    if most is not None and value > most:
        raise ExampleError(f"{name} must be at most {most}, but is {value}.")
    return min(value, 2**31 - 1) if least is not None else value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ExampleError(f"{name} must be a string, but is a {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ExampleError(
            f"{name} must be Unicode, but has half of a surrogate pair at {error.start}."
        ) from error
    return value


def _log_probs_of_chat(given: Mapping[str, Any]) -> int | None:
    top = _whole(given, "top_logprobs", 0, MOST_LOG_PROBS)
    if _flag(given, "logprobs"):
        return top or 0
    if top:
        raise ExampleError(f"top_logprobs is {top}, but logprobs is not true; set it.")
    return None


def _biases(value: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise ExampleError(
            f"logit_bias must be an object of at most {MOST_BIASES} tokens with their biases, but is"
            f" {str(value)[:80]}."
        )
    biases = {}
    for name, bias in value.items():
        is_token = name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_token or not is_number or not -100 <= bias <= 100:
            raise ExampleError(
                f"logit_bias must have tokens from 0 to {vocabulary - 1} with numbers from -100 to 100,"
                f" but has {name[:80]!r}: {str(bias)[:80]}."
            )
        biases[int(name)] = float(bias)
    return biases


def _includes_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ExampleError(f"stream_options must be an object, but is a {type(options).__name__}.")
    if options and not stream:
        raise ExampleError(
            "stream_options are for streams, but stream is not true; leave them out."
        )
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ExampleError(f"{unknown[0]!r} is no field of stream_options; leave it out.")
    return _flag({k: v for k, v in options.items() if v is not None}, "include_usage")


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ExampleError("messages must be a list of one message or more; send them.")
    messages = []
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise ExampleError(
                f"messages[{i}] must be an object whose role is one of {', '.join(_ROLES)}, but is"
                f" {str(message)[:80]}."
            )
        # Earlier answers that a client sends back have further fields, which are empty.
        if others := sorted(k for k in message.keys() - _OF_MESSAGES if message[k]):
            raise ExampleError(
                f"messages[{i}] has {others[0]!r}, which this server does not do; leave it out."
            )
        content = message.get("content")
        parts = content if isinstance(content, list) else [dict(type="text", text=content)]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ExampleError(f"messages[{i}].content must be text, but is {str(part)[:80]}.")
        texts = [_text(f"messages[{i}].content", part.get("text")) for part in parts]
        messages.append(dict(role=_ROLES[role], content="".join(texts)))
    return messages


def _prompts(value: Any, vocabulary: int) -> list[str | list[int]]:
    """Returns the prompts of a field that holds one or several, each a text or its tokens."""
    is_list = isinstance(value, list) and bool(value)
    prompts = value if is_list and not isinstance(value[0], int) else [value]
    if len(prompts) > _MOST_ANSWERS:
        raise ExampleError(f"prompt must be at most {_MOST_ANSWERS} texts, but is {len(prompts)}.")
    for prompt in prompts:
        if not isinstance(prompt, list):
            _text("prompt", prompt)
        elif not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            raise ExampleError(
                "prompt must be a text, the tokens of one, or a list of either; tokens are integers from"
                f" 0 to {vocabulary - 1}."
            )
    return prompts


def _stops(value: Any) -> tuple[str, ...]:
    stops = value if isinstance(value, list) else [value]
    if len(stops) > _MOST_STOPS:
        raise ExampleError(f"stop must have at most {_MOST_STOPS} strings, but has {len(stops)}.")
    return tuple(_text("stop", stop) for stop in stops)
