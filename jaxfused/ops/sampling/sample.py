"""sample: checks the arguments, and chooses the implementation that draws tokens from logits.

The kernel is CUDA C: its blocks share a row through their clusters' shared memory in passes whose number
depends on the row, and add up weights in a fixed order. Pallas can express neither.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.sampling import penalties as penalties_of
from jaxfused.ops.sampling import sample_cuda, sample_xla
from jaxfused.ops.sampling.row_options import filters_of, of_rows, seeds_of
from jaxfused.ops.sampling.top_log_probs import NO_PALLAS, LogProbs, log_probs
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.runner import ROWS, Axes, Operands, Results, Runner, batched_rows


@python_numbers
def sample(
    logits: jax.Array,
    key: jax.Array | int | None = None,
    *,
    position: jax.Array | int = 0,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    tokens: jax.Array | None = None,
    prompt: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    logprobs: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, LogProbs]:
    r"""Draws a token from each row of logits, without sorting the vocabulary.

    .. math::
        z'_v &= \text{penalized}(z_v) / \text{temperature} \\
        p_v &\propto e^{z'_v} \text{ over the words that top\_k, top\_p and min\_p keep} \\
        \text{token} &= \operatorname{argmax}_v z'_v + g_v
            \text{ over these words, with Gumbel noise } g

    The order is that of transformers: penalties, temperature, top_k, top_p of what top_k keeps, min_p.
    Arithmetic and noise are in float32 whatever the logits' dtype is (float64 logits keep theirs).

    Each option is one number for all rows, or an array over the first axes of the rows, known or traced.
    A row's token depends on its own logits, key, position and options, and on nothing else in the batch.

    Args:
      logits: [..., V], any float dtype; V at least 1. -inf excludes a word.
      key: a key of `jax.random.key` or an integer seed, for all rows or an array over their first
        axes. Rows that share a key get different noise, by their index among these rows. None where
        every temperature is known to be 0.
      position: the token's index in its sequence, or the number of the step. With one key, each
        position has its own noise.
      temperature: 0 takes the largest logit, of equal ones the lower token, without noise.
      top_k: keeps the k largest logits, of equal ones the lower tokens. 0 and None keep all; so does
        a k above V. (In transformers None stands for 50.)
      top_p: keeps the fewest words, from the largest on, whose probabilities add up to top_p or more.
        At least one is kept; 1 and None keep all. A sum that is smaller by a relative 5e-7, as by
        rounding, counts as top_p.
      min_p: keeps words with at least min_p times the largest probability. 0 and None keep all.
      tokens: integers [..., L], the tokens so far, for the penalties. Numbers outside 0 to V - 1,
        such as padding by -1, are skipped, so that an array of fixed size serves a growing sequence.
      prompt: integers [..., P], further tokens, for the repetition penalty alone.
      repetition_penalty: divides positive and multiplies negative logits of tokens in `tokens` or
        `prompt`.
      presence_penalty: is subtracted from the logit of each token that occurs in `tokens`.
      frequency_penalty: is subtracted from a token's logit as often as it occurs in `tokens`.
      logprobs: also return the log-probability of the chosen token and the `logprobs` largest ones.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      The tokens, int32 [...]; with `logprobs` also `LogProbs`. They have no gradient. A row with a NaN,
      or with -inf alone, has no distribution: its token is -1. Several logits of infinity are equally
      likely.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.
        Options that are traced cannot raise: numbers out of range then act as the nearest one within.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
      >>> jaxfused.sample(logits, temperature=0.0).tolist()
      [0, 2]
      >>> keys = jax.vmap(jax.random.key)(jnp.array([7, 8]))  # one for each sequence
      >>> tokens = jaxfused.sample(logits, keys, position=5, top_p=jnp.array([0.9, 0.5]))
      >>> tokens.shape, int(tokens[1])
      ((2,), 2)

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p),
    https://arxiv.org/abs/1904.09751; Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024,
    https://arxiv.org/abs/2407.01082; Keskar et al., "CTRL", 2019 (repetition penalty),
    https://arxiv.org/abs/1909.05858; Maddison et al., "A* Sampling", 2014 (Gumbel noise),
    https://arxiv.org/abs/1411.0030
    """
    op = "sample"
    (logits,) = as_arrays(logits)
    check_floating(op, dict(logits=logits))
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}, but the last axis holds the vocabulary;"
            " pass logits of shape [..., vocabulary]."
        )
    rows = logits.shape[:-1]
    logits = lax.stop_gradient(logits)
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    penalized = penalties_of.penalized(op, logits, tokens, prompt, *penalties)
    temperature = of_rows(op, "temperature", temperature, rows, 0.0, math.inf)
    filters, is_filtered = filters_of(op, logits, temperature, top_k, top_p, min_p)
    seeds = seeds_of(op, key, position, temperature, rows)
    token = _drawn(penalized, seeds, filters, is_filtered, implementation)
    if logprobs is None:
        return token
    return token, log_probs(logits, token, logprobs, implementation)


def _drawn(
    logits: jax.Array,
    seeds: jax.Array,
    filters: jax.Array,
    is_filtered: bool,
    implementation: str | None,
) -> jax.Array:
    """Returns the tokens of rows, by the fastest implementation or the named one."""
    letters = sharding.leading_axes(logits.ndim - 1, "vsf")
    axes = tuple(letters + letter for letter in "vsf")
    operands: Any = sharding.align((logits, seeds, filters), operand_axes=axes, whole="vsf")
    device = dispatch.current_device(logits)
    missing = {"pallas": NO_PALLAS}
    if takes_reference("sample", implementation, device, logits, missing=missing):
        return sample_xla.sample(*operands, is_filtered=is_filtered)
    return Runner(implementation, device)(_Draw(is_filtered), *operands)[0]


@dataclass(frozen=True)
class _Draw:
    """Draws tokens int32 [M] from logits [M, V], seeds uint32 [M, 2] and filters float32 [M, 4]."""

    is_filtered: bool
    """False if top_k, top_p and min_p keep all words."""

    @property
    def name(self) -> str:
        return "sample forward"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "v", ROWS + "s", ROWS + "f"), (ROWS,), whole="vsf")

    def why_not(self, device, logits, seeds, filters) -> Mapping[str, str | None]:
        del seeds, filters
        rows, words = logits.shape
        of_cuda = sample_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            rows=rows,
            words=words,
            dtype=logits.dtype,
        )
        return {"pallas": NO_PALLAS, "xla": None, "cuda": of_cuda}

    def estimate(self, device, able, logits, seeds, filters) -> Estimate:
        del device, able, logits, seeds, filters
        return Rule(("cuda",), "CUDA C reads the logits once, and XLA once for each test of a word")

    def examples(self, random, device, logits, seeds, filters) -> Operands:
        del device
        nucleus = jnp.asarray([1.0, 0.9, -1.0 / jnp.finfo(jnp.float32).tiny, logits.shape[-1]])
        bits = jax.random.bits(jax.random.key(0), seeds.shape, seeds.dtype)
        return random(logits), bits, jnp.broadcast_to(nucleus, filters.shape)

    def run(self, implementation, device, logits, seeds, filters) -> Results:
        del device
        run = sample_cuda.forward if implementation == "cuda" else sample_xla.sample
        return (run(logits, seeds, filters, is_filtered=self.is_filtered),)

    batched = batched_rows
