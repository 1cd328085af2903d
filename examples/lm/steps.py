"""The two programs of an engine: one prefills a chunk of a prompt, one decodes a token of every text.

Few programs are compiled: the width of the page table grows by factors of two, and all other shapes are
fixed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfused
from examples.lm.model import LanguageModel
from examples.lm.pages import Pages, Rows

MOST_LOG_PROBS = 20
"""Largest number of likeliest tokens whose log-probabilities a request may ask for."""
MOST_BIASES = 300
"""Largest number of tokens that a text may have a bias for."""


@dataclass(frozen=True)
class Sampling:
    """Options of sampling; the defaults take the likeliest token. See `jaxfused.sample`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers added to the logits, by token, before penalties."""

    @property
    def changes_logits(self) -> bool:
        """True if there is a penalty or a bias."""
        penalties = self.presence_penalty or self.frequency_penalty
        return bool(self.repetition_penalty != 1 or penalties or self.bias)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the options as arrays of fixed shapes, by name."""
        numbers = {name: value for name, value in vars(self).items() if name != "bias"}
        # Unused entries hold a token outside of the vocabulary, which the scatter drops.
        tokens = np.full(MOST_BIASES, np.iinfo(np.int32).max, np.int32)
        biases = np.zeros(MOST_BIASES, np.float32)
        tokens[: len(self.bias)], biases[: len(self.bias)] = [*self.bias], [*self.bias.values()]
        dtypes = {int: np.int32, float: np.float32}
        return dict(biased=tokens, biases=biases) | {
            name: np.asarray(value, np.uint32 if name == "seed" else dtypes[type(value)])
            for name, value in numbers.items()
        }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """State of all slots, which the programs keep on the device."""

    pages: tuple[Pages, ...]
    """Keys and values of each layer."""
    last: jax.Array
    """Last token of each text, [slots], whose keys and values are not in the pages yet."""
    history: jax.Array
    """Tokens of prompt and answer so far, [slots, length]; -1 after them."""
    answers: jax.Array
    """Number of tokens in the history that belong to the answer, [slots]."""
    options: dict[str, jax.Array]
    """Arrays of `Sampling`, [slots, ...] each, by name."""

    @classmethod
    def zeros(
        cls, model: LanguageModel, *, slots: int, length: int, pages: int, page_size: int
    ) -> "State":
        return cls(
            pages=model.empty_pages(pages=pages, page_size=page_size),
            last=jnp.zeros(slots, jnp.int32),
            history=jnp.full((slots, length), -1, jnp.int32),
            answers=jnp.zeros(slots, jnp.int32),
            options={
                name: jnp.zeros((slots, *array.shape), array.dtype)
                for name, array in Sampling().arrays().items()
            },
        )

    def admitted(
        self, slot: int, tokens: Sequence[int], *, answers: int, sampling: Sampling
    ) -> "State":
        """Returns the state with a text in a slot; the last `answers` of its tokens are its answer."""
        history = np.full(self.history.shape[1], -1, np.int32)
        history[: len(tokens)] = tokens
        return _admit(self, np.int32(slot), history, np.int32(answers), sampling.arrays())


@functools.cache
def programs(
    graphdef: nnx.GraphDef, tree: Any, *, batch_invariant: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the compiled `_prefill` and `_decode` of models of this structure.

    `tree` is that of the parameters, of which the programs take the list of arrays. Both are bound by
    `partial`: to hash a structure or to flatten parameters at every call takes longer than a step of a
    small model.
    """
    options = dict(donate_argnums=1, static_argnames=("changes_logits", "log_probs"))
    return tuple(
        jax.jit(functools.partial(f, graphdef, tree, batch_invariant), **options)
        for f in (_prefill, _decode)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _admit(
    state: State,
    slot: jax.Array,
    history: jax.Array,
    answers: jax.Array,
    options: dict[str, jax.Array],
) -> State:
    return State(
        state.pages,
        state.last,
        state.history.at[slot].set(history),
        state.answers.at[slot].set(answers),
        {name: array.at[slot].set(options[name]) for name, array in state.options.items()},
    )


def _prefill(
    graphdef: nnx.GraphDef,
    tree: Any,
    batch_invariant: bool,
    params: Sequence[jax.Array],
    state: State,
    table: jax.Array,
    tokens: jax.Array,
    slot: jax.Array,
    before: jax.Array,
    count: jax.Array,
    is_last: jax.Array,
    *,
    changes_logits: bool,
    log_probs: bool,
) -> tuple[State, jax.Array, jaxfused.LogProbs | None]:
    """Prefills `count` tokens of a text after its first `before`; the last chunk samples the next."""
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, params))
    end = before + count
    rows = Rows(
        table,
        end[None],
        jnp.stack([jnp.zeros_like(count), count]),
        before + jnp.arange(len(tokens), dtype=jnp.int32),
        batch_invariant,
    )
    features, pages = model(tokens[None], cache=state.pages, rows=rows)
    logits = model.logits(features[0, count - 1])
    state = replace(state, pages=pages)
    row = jax.tree.map(lambda a: a[slot], replace(state, pages=()))
    drawn, scores = _draw(row, logits, changes_logits, log_probs)
    slots = len(state.last)
    # The host reads row `slot` of the scores, as after `_decode`, so this text's scores are repeated
    # for all slots.
    scores = jax.tree.map(lambda a: jnp.broadcast_to(a, (slots, *a.shape)), scores)
    return *_with_tokens(state, slot, drawn, is_last, end), scores


def _decode(
    graphdef: nnx.GraphDef,
    tree: Any,
    batch_invariant: bool,
    params: Sequence[jax.Array],
    state: State,
    table: jax.Array,
    lengths: jax.Array,
    *,
    changes_logits: bool,
    log_probs: bool,
) -> tuple[State, jax.Array, jaxfused.LogProbs | None]:
    """Feeds in each slot's last token and samples the next.

    `lengths` [slots] count the tokens of each text, the last one included; 0 in idle slots.
    """
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, params))
    slots = jnp.arange(len(lengths), dtype=jnp.int32)
    starts = jnp.arange(len(lengths) + 1, dtype=jnp.int32)
    rows = Rows(table, lengths, starts, jnp.maximum(lengths - 1, 0), batch_invariant)
    features, pages = model(state.last[None], cache=state.pages, rows=rows)
    drawn, scores = _draw(state, model.logits(features[0]), changes_logits, log_probs)
    state = replace(state, pages=pages)
    return *_with_tokens(state, slots, drawn, lengths > 0, lengths), scores


def _with_tokens(
    state: State, slot: jax.Array, drawn: jax.Array, active: jax.Array, place: jax.Array
) -> tuple[State, jax.Array]:
    """Adds sampled tokens to one slot, or to all active slots; returns (state, last tokens).

    The last tokens are returned apart from the state, which is donated to the next program.
    """
    place = jnp.where(active, place, state.history.shape[1])
    last = state.last.at[slot].set(jnp.where(active, drawn, state.last[slot]))
    history = state.history.at[slot, place].set(drawn, mode="drop")
    answers = state.answers.at[slot].add(jnp.where(active, 1, 0))
    return replace(state, last=last, history=history, answers=answers), last


def _draw(
    state: State, logits: jax.Array, changes_logits: bool, log_probs: bool
) -> tuple[jax.Array, jaxfused.LogProbs | None]:
    """Returns the next token of each row of logits [..., vocabulary], and its log-probabilities."""
    options = dict(state.options)
    seeds = options.pop("seed")
    key = jax.random.key(seeds) if seeds.ndim == 0 else jax.vmap(jax.random.key)(seeds)
    biased, biases = options.pop("biased"), options.pop("biases")
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: options.pop(name) for name in names}
    if changes_logits:
        rows = [jnp.arange(len(logits))[:, None]] if logits.ndim > 1 else []
        logits = logits.at[*rows, biased].add(biases, mode="drop")
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
    if not log_probs:
        return jaxfused.sample(logits, key, position=state.answers, **options, **given), None
    most = min(MOST_LOG_PROBS, logits.shape[-1])
    return jaxfused.sample(logits, key, position=state.answers, logprobs=most, **options, **given)
