"""Continuous batching: one program decodes a token of every text, and texts come and go.

The cache has a slot for each text. A prompt is read into its slot in chunks of one size, with a decoded
token between two chunks, so that long prompts do not delay other texts. All shapes are fixed, so nothing
is compiled again, and a text's tokens do not depend on what is in the other slots.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfused
from examples.errors import ExampleError
from examples.lm.model import Cache, LanguageModel


@dataclass(frozen=True)
class Sampling:
    """Options of a draw of tokens; the defaults take the likeliest one. See `jaxfused.sample`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


@dataclass(eq=False)
class Text:
    """A prompt and the tokens that follow it."""

    prompt: Sequence[int]
    most: int
    """Largest number of tokens that may follow."""
    sampling: Sampling = Sampling()
    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length", "cancelled"] | None = None
    read: int = 0
    """Number of the prompt's tokens that have been read."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """State of all slots, which the programs keep on the device."""

    cache: Cache
    last: jax.Array
    """Last token of each text, [slots], which has not been read yet."""
    history: jax.Array
    """Prompt and answer so far, [slots, length]; -1 in unused places."""
    answers: jax.Array
    """Number of answered tokens in the history, [slots]."""
    options: dict[str, jax.Array]
    """Fields of `Sampling`, [slots] each."""

    @property
    def lengths(self) -> jax.Array:
        """Number of tokens of each slot that have been read, [slots]."""
        return self.cache[0].lengths

    @classmethod
    def zeros(cls, model: LanguageModel, *, slots: int, length: int, chunk: int) -> "_State":
        return cls(
            cache=model.empty_cache(batch=slots, length=length, chunk=chunk),
            last=jnp.zeros(slots, jnp.int32),
            history=jnp.full((slots, length), -1, jnp.int32),
            answers=jnp.zeros(slots, jnp.int32),
            options={
                name: jnp.zeros(slots, jnp.uint32 if name == "seed" else type(value))
                for name, value in vars(Sampling()).items()
            },
        )


class Engine:
    """Continues texts by a model.

    Args:
      model: the model.
      ends: tokens after which a text is over.
      slots: texts that are continued at once; others wait.
      length: tokens of a prompt and its answer, at most.
      chunk: tokens of a prompt that are read at once.
    """

    def __init__(
        self, model: LanguageModel, ends: Sequence[int], *, slots: int, length: int, chunk: int = 64
    ):
        self.length = length
        self._ends = frozenset(ends)
        self._chunk = chunk
        graphdef, params = nnx.split(model)
        self._prefill, self._decode = _programs(graphdef)
        self._params = nnx.to_pure_dict(params)
        self._state = _State.zeros(model, slots=slots, length=length, chunk=chunk)
        self._slots: list[Text | None] = [None] * slots
        self._waiting: collections.deque[Text] = collections.deque()
        self._computed: collections.deque[tuple[jax.Array, list[tuple[int, Text]]]] = (
            collections.deque()
        )

    @property
    def is_busy(self) -> bool:
        """True if a text is waiting or in a slot."""
        return bool(self._waiting or self._computed or any(self._slots))

    def submit(self, text: Text) -> None:
        """Queues a text.

        Raises:
          ExampleError: the text has no token, or does not fit.
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
        self._waiting.append(text)

    def cancel(self, text: Text) -> None:
        """Ends a text and frees its slot at once."""
        if text.finish is None:
            text.finish = "cancelled"
        self._release(text)

    def step(self) -> list[tuple[Text, int]]:
        """Reads a chunk of a prompt, decodes a token of each text, and returns tokens as (text, token).

        The tokens are those of the previous step, so that the device computes while the host reads
        them.
        """
        for slot, held in enumerate(self._slots):
            if held is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()
                options = {
                    name: np.asarray(value, self._state.options[name].dtype)
                    for name, value in vars(self._slots[slot].sampling).items()
                }
                self._state = _admit(self._state, np.int32(slot), options)
        ready = [
            (i, text)
            for i, text in enumerate(self._slots)
            if text is not None and text.read == len(text.prompt)
        ]
        behind = len(self._computed)
        self._read_chunk()
        if ready:
            active = np.zeros(len(self._slots), bool)
            active[[slot for slot, _ in ready]] = True
            penalties = any(text.sampling.has_penalties for _, text in ready)
            self._state, tokens = self._decode(
                self._params, self._state, active, penalties=penalties
            )
            self._computed.append((tokens, ready))
        events = []
        for _ in range(behind if len(self._computed) > behind else len(self._computed)):
            tokens, texts = self._computed.popleft()
            tokens = np.asarray(tokens)
            events += [(t, int(tokens[i])) for i, t in texts if self._take(t, int(tokens[i]))]
        return events

    def _read_chunk(self) -> None:
        """Reads the next chunk of the prompt that has waited longest."""
        unread = [
            (i, text)
            for i, text in enumerate(self._slots)
            if text is not None and text.read < len(text.prompt)
        ]
        if not unread:
            return
        # A text whose prompt is partly read comes before texts whose prompt is unread.
        slot, text = max(unread, key=lambda each: each[1].read)
        part = np.asarray(text.prompt[text.read : text.read + self._chunk], np.int32)
        text.read += len(part)
        is_last = text.read == len(text.prompt)
        self._state, tokens = self._prefill(
            self._params,
            self._state,
            np.pad(part, (0, self._chunk - len(part))),
            np.int32(slot),
            np.int32(len(part)),
            is_last,
            penalties=text.sampling.has_penalties,
        )
        if is_last:
            self._computed.append((tokens, [(slot, text)]))

    def _take(self, text: Text, token: int) -> bool:
        """Adds a token to its text; returns False if the text has already ended."""
        if text.finish is not None:
            return False
        text.tokens.append(token)
        if token in self._ends or token < 0:
            text.finish = "stop"
        elif len(text.tokens) == text.most:
            text.finish = "length"
        if text.finish is not None:
            self._release(text)
        return True

    def _release(self, text: Text) -> None:
        self._slots = [None if held is text else held for held in self._slots]
        if text in self._waiting:
            self._waiting.remove(text)


@functools.cache
def _programs(graphdef: nnx.GraphDef) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the compiled `_prefill` and `_decode` of models of this structure.

    The structure is no argument of the programs, because hashing it would take longer than a step of a
    small model.
    """
    options = dict(donate_argnums=1, static_argnames="penalties")
    return tuple(jax.jit(functools.partial(f, graphdef), **options) for f in (_prefill, _decode))


@functools.partial(jax.jit, donate_argnums=0)
def _admit(state: _State, slot: jax.Array, sampling: dict[str, jax.Array]) -> _State:
    """Returns the state with an empty text in a slot."""
    cache = tuple(replace(layer, lengths=layer.lengths.at[slot].set(0)) for layer in state.cache)
    options = {name: a.at[slot].set(sampling[name]) for name, a in state.options.items()}
    return _State(
        cache,
        state.last,
        state.history.at[slot].set(-1),
        state.answers.at[slot].set(0),
        options,
    )


def _prefill(
    graphdef: nnx.GraphDef,
    params: Any,
    state: _State,
    tokens: jax.Array,
    slot: jax.Array,
    count: jax.Array,
    is_last: jax.Array,
    *,
    penalties: bool,
) -> tuple[_State, jax.Array]:
    """Reads a chunk of a prompt with `count` real tokens; the last chunk draws the next token."""
    model = nnx.merge(graphdef, params)
    at = state.lengths[slot] + jnp.arange(len(tokens))
    written = jnp.where(jnp.arange(len(tokens)) < count, tokens, -1)
    history = state.history.at[slot, at].set(written, mode="drop")
    features, cache = model(
        tokens[None], cache=state.cache, counts=count[None], sequences=slot[None]
    )
    logits = model.logits(features[0, count - 1])
    state = replace(state, history=history, cache=cache)
    row = jax.tree.map(lambda a: a[slot], replace(state, cache=()))
    drawn = _draw(row, logits, penalties)
    return _with_tokens(state, slot, drawn, is_last)


def _decode(
    graphdef: nnx.GraphDef,
    params: Any,
    state: _State,
    active: jax.Array,
    *,
    penalties: bool,
) -> tuple[_State, jax.Array]:
    """Reads the last token of each active slot, and draws the next."""
    model = nnx.merge(graphdef, params)
    features, cache = model(state.last[:, None], cache=state.cache, counts=active.astype(jnp.int32))
    drawn = _draw(state, model.logits(features[:, 0]), penalties)
    state = replace(state, cache=cache)
    return _with_tokens(state, jnp.arange(len(active)), drawn, active)


def _with_tokens(
    state: _State, slot: jax.Array, drawn: jax.Array, active: jax.Array
) -> tuple[_State, jax.Array]:
    """Returns the state with drawn tokens in one slot, or in all slots, where they are active.

    The last tokens are returned too, since the state itself is donated to the next program.
    """
    place = jnp.where(active, state.lengths[slot], state.history.shape[1])
    last = state.last.at[slot].set(jnp.where(active, drawn, state.last[slot]))
    history = state.history.at[slot, place].set(drawn, mode="drop")
    answers = state.answers.at[slot].add(jnp.where(active, 1, 0))
    return replace(state, last=last, history=history, answers=answers), last


def _draw(state: _State, logits: jax.Array, penalties: bool) -> jax.Array:
    """Returns the next token of each row of logits [..., vocabulary]."""
    options = dict(state.options)
    seeds = options.pop("seed")
    key = jax.random.key(seeds) if seeds.ndim == 0 else jax.vmap(jax.random.key)(seeds)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: options.pop(name) for name in names}
    if penalties:
        place = jnp.arange(state.history.shape[-1])
        # Presence and frequency penalties count the answer alone; repetition penalties count the prompt
        # too.
        length = (state.history >= 0).sum(-1, keepdims=True)
        is_prompt = place < length - state.answers[..., None]
        given |= dict(
            tokens=jnp.where(is_prompt, -1, state.history),
            prompt=jnp.where(is_prompt, state.history, -1),
        )
    else:
        given = {}
    return jaxfused.sample(logits, key, position=state.answers, **options, **given)
