"""Requests that a client of an OpenAI-compatible server may send, checked field by field.

Source: https://platform.openai.com/docs/api-reference, as the package openai 3.51.0 sends it.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.errors import ExampleError
from examples.lm.steps import Sampling
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
_CHAT, _COMPLETION = frozenset({"messages"}), frozenset({"prompt"})
_ALL = frozenset(
    {*_NUMBERS, "max_completion_tokens", "max_tokens", "model", "seed", "stop", "stream"}
    | {"stream_options", "top_k"}
)
_HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that do not change the answer."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields for which this server supports only these values, besides null."""
_MOST_STOPS = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Request:
    """A request whose fields are checked."""

    model: str
    messages: list[dict[str, str]] | None
    """Messages of a conversation."""
    prompt: str | list[int] | None
    """Text to continue, or its tokens."""
    most: int | None
    """Largest number of tokens of the answer; None for as many as fit."""
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the prompt's tokens."""
        if self.messages is not None:
            return tokenizer.encode_chat(self.messages)
        return self.prompt if isinstance(self.prompt, list) else tokenizer.encode(self.prompt)


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
    )
    most = _whole(given, "max_completion_tokens", 1)
    most = _whole(given, "max_tokens", 1) if most is None else most
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(given.get("stream", False), bool):
        raise ExampleError("stream must be a bool and stream_options an object; send such ones.")
    return Request(
        model=_text("model", given.get("model", "")),
        messages=_messages(given.get("messages")) if is_chat else None,
        prompt=None if is_chat else _prompt(given.get("prompt"), vocabulary),
        # The older interface stops after 16 tokens.
        most=16 if most is None and not is_chat else most,
        sampling=sampling,
        stops=_stops(given.get("stop", [])),
        stream=given.get("stream", False),
        include_usage=bool(options.get("include_usage")),
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
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise ExampleError(f"{name} must be a number from {least} to {most}, but is {value!r}.")
    return float(value)


def _whole(given: Mapping[str, Any], name: str, least: int | None = None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ExampleError(f"{name} must be an integer of 64 bits, but is {value!r}.")
    if least is not None and value < least:
        raise ExampleError(f"{name} must be at least {least}, but is {value}.")
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


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ExampleError("messages must be a list of one message or more; send them.")
    messages = []
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise ExampleError(
                f"messages[{i}] must be an object whose role is one of {', '.join(_ROLES)}, but is"
                f" {str(message)[:80]}."
            )
        content = message.get("content")
        parts = content if isinstance(content, list) else [dict(type="text", text=content)]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ExampleError(f"messages[{i}].content must be text, but is {str(part)[:80]}.")
        texts = [_text(f"messages[{i}].content", part.get("text")) for part in parts]
        messages.append(dict(role=_ROLES[role], content="".join(texts)))
    return messages


def _prompt(value: Any, vocabulary: int) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        (value,) = value
    if isinstance(value, list):
        if not all(type(token) is int and 0 <= token < vocabulary for token in value):
            raise ExampleError(
                f"prompt must be one text, or the tokens of one, from 0 to {vocabulary - 1}; send one"
                " request for each text."
            )
        return value
    return _text("prompt", value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = value if isinstance(value, list) else [value]
    if len(stops) > _MOST_STOPS:
        raise ExampleError(f"stop must have at most {_MOST_STOPS} strings, but has {len(stops)}.")
    return tuple(_text("stop", stop) for stop in stops)
