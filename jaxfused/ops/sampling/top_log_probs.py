"""Log-probabilities of drawn tokens and of the most likely ones: choice of implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.sampling import sample_cuda, top_log_probs_cuda
from jaxfused.ops.sampling.top_log_probs_xla import top_log_probs
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.runner import ROWS, Axes, Operands, Results, Runner, batched_rows
from jaxfused.runtime.serialization import exportable

NO_PALLAS = "there is no Pallas kernel of sample"


@exportable
class LogProbs(NamedTuple):
    """Log-probabilities of tokens, without penalties and temperature, in float32 (or float64)."""

    chosen: jax.Array
    """Log-probabilities of the drawn tokens [...]; NaN where there is none."""
    top: jax.Array
    """Largest log-probabilities of each row, in falling order, [..., n]."""
    top_tokens: jax.Array
    """Tokens of the largest ones, int32 [..., n]; of equal ones the lower token comes first."""


def log_probs(
    logits: jax.Array, tokens: jax.Array, count: int, implementation: str | None
) -> LogProbs:
    """Returns log-probabilities of tokens int32 [...] and of the `count` likeliest ones."""
    words = logits.shape[-1]
    if not 0 <= count <= words:
        raise ValueError(
            f"sample: logprobs is {count}, but there are {words} words; pass a number from 0 to {words}."
        )
    letters = sharding.leading_axes(logits.ndim - 1, "v")
    operands: Any = sharding.align(
        (logits, tokens), operand_axes=(letters + "v", letters), whole="v"
    )
    device = dispatch.current_device(logits)
    missing = {"pallas": NO_PALLAS}
    # XLA computes more than MOST log-probabilities, even if the caller names a kernel.
    named = None if count > top_log_probs_cuda.MOST or count == 0 else implementation
    if count == 0 or takes_reference("sample", named, device, logits, missing=missing):
        return LogProbs(*top_log_probs(*operands, count=count))
    return LogProbs(*Runner(named, device)(_TopLogProbs(count), *operands))


@dataclass(frozen=True)
class _TopLogProbs:
    """Computes LogProbs of logits [M, V] and tokens int32 [M]."""

    count: int

    @property
    def name(self) -> str:
        return "sample log_probs"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "v", ROWS), (ROWS, ROWS + "n", ROWS + "n"), whole="v")

    def why_not(self, device, logits, tokens) -> Mapping[str, str | None]:
        del tokens
        rows, words = logits.shape
        of_cuda = sample_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            rows=rows,
            words=words,
            dtype=logits.dtype,
        )
        if of_cuda is None and self.count > top_log_probs_cuda.MOST:
            of_cuda = f"it finds at most {top_log_probs_cuda.MOST} words, not {self.count}"
        return {"pallas": NO_PALLAS, "xla": None, "cuda": of_cuda}

    def estimate(self, device, able, logits, tokens) -> Estimate:
        del device, able, logits, tokens
        return Rule(("cuda",), "CUDA C passes over a row on the chip, and XLA sorts parts of it")

    def examples(self, random, device, logits, tokens) -> Operands:
        del device
        return random(logits), jnp.zeros(tokens.shape, tokens.dtype)

    def run(self, implementation, device, logits, tokens) -> Results:
        del device
        run = top_log_probs_cuda.forward if implementation == "cuda" else top_log_probs
        return run(logits, tokens, count=self.count)

    batched = batched_rows
