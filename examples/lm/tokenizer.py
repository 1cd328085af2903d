"""Converts texts to tokens and back by the package tokenizers, with the model's chat template."""

import dataclasses
import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.errors import ExampleError
from examples.lm.data import START
from examples.packages import needed

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA_3, "qwen2": _LLAMA_3.replace("{1,3}", "")}
"""Regular expressions that cut a text into words, by tokenizer.ggml.pre of a GGUF file."""
NO_TEMPLATE = (
    "conversations need a model with a chat template, but this one has none; pass a plain text to go on"
    " with."
)
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>")
"""Control tokens that end a text, as in llama.cpp: older GGUF files name only one of a model's ends."""
_OF_TEMPLATES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of Python's that a template's expressions raise, besides those of Jinja."""
_CONTROL, _USERS = 3, 4
"""Values of a GGUF file's tokenizer.ggml.token_type for control and user-defined tokens."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A model's vocabulary, end tokens and chat template."""

    rules: Any
    """A `tokenizers.Tokenizer`."""
    ends: frozenset[int]
    """Tokens that end a text."""
    first: int | None = None
    """Token that `encode` puts before a text; None for none. Chat templates write their own."""
    template: str | None = None
    """Chat template, in Jinja; None if the model has none."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts of bos_token, eos_token and others, which templates read."""

    @classmethod
    def of_directory(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json, and the end tokens and chat template from the files next to it."""
        path = directory / "tokenizer.json"
        try:
            rules = needed("tokenizers").Tokenizer.from_file(str(path))
        except ExampleError:
            raise
        except Exception as error:  # The package tokenizers raises nothing more precise.
            raise ExampleError(
                f"a model's directory must hold a readable tokenizer.json, but {path} is not ({error});"
                " pass the directory of a downloaded checkpoint."
            ) from error
        # tokenizer.json may hold the truncation and padding of the last call before it was saved.
        rules.no_truncation()
        rules.no_padding()
        files = ("config.json", "generation_config.json", "tokenizer_config.json")
        config, generation, options = (_json(directory / name) for name in files)
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        ends = set(ends if isinstance(ends, list) else [ends]) - {None}
        names = dict(bos_token="", eos_token="") | {
            key: _text(token)
            for key, token in options.items()
            if key.endswith("_token") and isinstance(token, str | Mapping)
        }
        if names["eos_token"]:
            ends.add(rules.token_to_id(names["eos_token"]))
        template = options.get("chat_template")
        # The template named "default", of several, is for conversations without tools.
        if isinstance(template, list):
            template = {each["name"]: each["template"] for each in template}.get("default")
        if (path := directory / "chat_template.jinja").exists():
            template = path.read_text()
        return cls(rules, frozenset(ends), None, template, names)

    @classmethod
    def of_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Makes the tokenizer of a GGUF file's vocabulary.

        Raises:
          ExampleError: the vocabulary's rule for cutting a text into words is unknown.
        """
        fields = {name.removeprefix("ggml."): value for name, value in fields.items()}
        kind, pre = fields.get("model"), fields.get("pre", "default")
        if kind != "gpt2" or pre not in ("default", "gpt-2", "smollm", *_SPLITS):
            raise ExampleError(
                f"the vocabulary must be one of tokenizer.ggml.model 'gpt2' with pre 'default', 'gpt-2',"
                f" 'smollm', {', '.join(map(repr, _SPLITS))}, but it is {kind!r} with {pre!r}; pass the"
                " model's safetensors with its tokenizer.json."
            )
        library = needed("tokenizers")
        first, end = fields.get("bos_token_id"), fields.get("eos_token_id")
        try:
            tokens = fields["tokens"]
            merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
            vocabulary = {token: i for i, token in enumerate(tokens)}
            model = library.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
            names = {
                key: "" if i is None else tokens[i]
                for key, i in (("bos_token", first), ("eos_token", end))
            }
        except Exception as error:  # The package tokenizers raises nothing more precise.
            raise ExampleError(
                "the file must hold tokenizer.ggml.tokens, merges that are pairs of them, and numbers of"
                f" tokens as bos_token_id and eos_token_id, but: {error!r}; pass another file."
            ) from error
        rules = library.Tokenizer(model)
        byte_level = functools.partial(library.pre_tokenizers.ByteLevel, add_prefix_space=False)
        if pre in _SPLITS:
            split = library.pre_tokenizers.Split(library.Regex(_SPLITS[pre]), "isolated")
            steps = [split, byte_level(use_regex=False)]
        else:
            digits = library.pre_tokenizers.Digits(individual_digits=True)
            steps = [*([digits] if pre == "smollm" else []), byte_level()]
        rules.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
        rules.decoder = library.decoders.ByteLevel()
        kinds = fields.get("token_type", [])
        added = functools.partial(library.AddedToken, normalized=False)
        for number, add in ((_CONTROL, rules.add_special_tokens), (_USERS, rules.add_tokens)):
            add([added(t) for t, k in zip(tokens, kinds, strict=False) if k == number])
        ends = {end, fields.get("eot_token_id")} - {None}
        control = (i for i, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
        ends |= {i for i in control if tokens[i] in _ENDS}
        # Files of Llama 3 leave the key out; llama.cpp goes by the rule for words then.
        starts = first if fields.get("add_bos_token", pre == "llama-bpe") else None
        return cls(rules, frozenset(ends), starts, fields.get("chat_template"), names)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that is no conversation."""
        tokens = self.rules.encode(text).ids
        return tokens if self.first is None else [self.first, *tokens]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation, up to where the model's answer begins.

        Raises:
          ExampleError: the model has no chat template, or the template refuses this conversation.
        """
        if self.template is None:
            raise ExampleError(NO_TEMPLATE)
        try:
            # Templates ask whether tools and documents are None, as they are in transformers.
            text = self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.names,
            )
        except (needed("jinja2").TemplateError, *_OF_TEMPLATES) as error:
            raise ExampleError(
                f"the conversation must be one that the model's template accepts, but: {error}"
            ) from error
        return self.rules.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text; none for control tokens."""
        # The embedding may be padded: it then has more rows than the tokenizer has tokens.
        return self._bytes[token] if token < len(self._bytes) else b""

    def name_of(self, token: int) -> bytes:
        """Returns the bytes that stand for a token in a list of tokens: those of a control token too."""
        return self.bytes_of(token) or (self.rules.id_to_token(token) or "").encode()

    @functools.cached_property
    def _compiled(self) -> Any:
        sandbox = needed("jinja2.sandbox")
        extensions = needed("jinja2.ext")

        class Generation(extensions.Extension):
            """The tags around an answer, which mark what is trained; they write nothing."""

            tags = frozenset({"generation"})

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, extensions.loopcontrols],
        )
        # Jinja's own filter writes "<" and letters beyond ASCII as escapes.
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **dict(ensure_ascii=False) | options
        )

        def refuse(message: str) -> None:
            raise needed("jinja2").TemplateError(message)

        environment.globals |= dict(
            raise_exception=refuse, strftime_now=lambda form: dt.datetime.now().strftime(form)
        )
        return environment.from_string(self.template)

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        added = self.rules.get_added_tokens_decoder()
        decoder = json.loads(self.rules.to_str())["decoder"]
        of_token = _of_byte_level if "ByteLevel" in json.dumps(decoder) else _of_words
        result = []
        # Numbers may be left out, so the last one can be beyond the size of the vocabulary.
        for i in range(max(self.rules.get_vocab().values(), default=-1) + 1):
            if i in added:
                result.append(b"" if added[i].special else added[i].content.encode())
            else:
                result.append(of_token(self.rules.id_to_token(i) or ""))
        return result


class ByteTokenizer:
    """The tokens of `examples.lm.train`: bytes, and START before each document."""

    ends = frozenset({START})
    template = None

    def encode(self, text: str) -> list[int]:
        return [START, *text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        raise ExampleError(NO_TEMPLATE)

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < START else b""

    name_of = bytes_of


def _of_byte_level(token: str) -> bytes:
    """Returns the bytes of a token in GPT-2's byte-level alphabet, in which a blank is "Ġ"."""
    letters = _alphabet()
    if not letters.keys() >= set(token):
        return token.encode()  # as the package tokenizers decodes a token that has other characters
    return bytes(letters[character] for character in token)


@functools.cache
def _alphabet() -> dict[str, int]:
    """Returns the bytes of GPT-2's characters: printable ones, then the others from 256."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): b for i, b in enumerate(others)}


def _of_words(token: str) -> bytes:
    """Returns the bytes of a SentencePiece token: "▁" is a blank, "<0x0A>" one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _text(token: str | Mapping[str, Any]) -> str:
    """Returns the text of a token in tokenizer_config.json, which may be an object."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else token


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ExampleError(
            f"{path.name} must be readable JSON, but {path} is not ({error}); download it again."
        ) from error
    if not isinstance(found, dict):
        raise ExampleError(
            f"{path.name} must hold an object, but {path} holds a {type(found).__name__}; download it"
            " again."
        )
    return found
