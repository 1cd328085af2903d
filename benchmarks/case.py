"""What an operator's file hands to the runner: cases, implementations, and the bars to meet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

Arrays = tuple[jax.Array, ...]
Function = Callable[..., Any]

OURS = ("pallas", "cuda", "reference")
"""Our implementations; "reference" is implementation="xla", named so that "xla" can be the peer."""

LABELS = {
    "pallas": "jaxfused pallas",
    "cuda": "jaxfused cuda",
    "reference": "jaxfused xla",
    "xla": "stock XLA",
    "torch_compile": "torch.compile",
    "liger": "Liger",
    "tokamax": "tokamax",
}

BEST_PEER = "best peer"
BULK_COPY = "bulk copy"
DEFAULT = "default"


@dataclass(frozen=True)
class Bar:
    """`ours` must be `must` times as fast as `against`; `aim` is what we hope for.

    `ours` is an implementation or DEFAULT, the one that implementation=None takes. `against` is an
    implementation, BEST_PEER, or BULK_COPY (then the ratio is the share of that kernel's rate).
    """

    against: str
    must: float | None = None
    aim: float | None = None
    ours: str = DEFAULT


@dataclass(frozen=True)
class Case:
    """One operation at one shape."""

    name: str
    shape: tuple[int, ...]
    make_inputs: Callable[[jax.Array], Arrays]
    """Random inputs from a key; every implementation takes them in this order."""
    truth: Function
    """The reference; it is run in float64."""
    jax: Mapping[str, Function]
    """Ours and the peers in JAX, by name; each returns what `truth` returns."""
    torch: Mapping[str, Callable[[], Function]]
    """Peers in torch: a function that imports what it needs and returns the implementation."""
    bytes: int
    """Fewest bytes through device memory: every operand of every pass once."""
    flops: int = 0
    """Where it is not 0 the case is judged by arithmetic, else by bytes."""
    default: str = "reference"
    """Which of OURS runs here with implementation=None."""
    bars: tuple[Bar, ...] = field(default=())
    dtype: str = "bfloat16"
    differentiable: int = 0
    """How many leading inputs need a gradient in torch; 0 where only the forward is measured."""


def gradient_in_jax(forward: Function, differentiable: int, cotangents: int) -> Function:
    """Forward and backward as one function: (*operands, *dys) to (*outputs, *gradients).

    The gradients are those of the first `differentiable` operands. All are returned, so that XLA
    has nothing to leave out.
    """

    def run(*args: jax.Array) -> Arrays:
        operands, dys = args[:-cotangents], args[-cotangents:]
        outputs, pullback = jax.vjp(
            lambda *moving: forward(*moving, *operands[differentiable:]),
            *operands[:differentiable],
        )
        gradients = pullback(dys if isinstance(outputs, tuple) else dys[0])
        return (*_as_tuple(outputs), *gradients)

    return run


def gradient_in_torch(forward: Function, differentiable: int, cotangents: int) -> Function:
    """`gradient_in_jax` for a function of torch tensors."""
    import torch

    def run(*args: Any) -> tuple[Any, ...]:
        operands, dys = args[:-cotangents], args[-cotangents:]
        outputs = _as_tuple(forward(*operands))
        gradients = torch.autograd.grad(outputs, operands[:differentiable], dys)
        return (*(output.detach() for output in outputs), *gradients)

    return run


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
