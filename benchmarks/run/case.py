"""Cases, their implementations, and bars (target ratios), as benchmarks/cases define them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

Arrays = tuple[jax.Array, ...]
Function = Callable[..., Any]

_IMPLEMENTATIONS = {"pallas": "pallas", "cuda": "cuda", "reference": "xla"}

MIXED = "mixed"
"""Name of our default, implementation=None, which chooses an implementation for each kernel call."""

OURS = (MIXED, *_IMPLEMENTATIONS)
"""Our implementations; "reference" is implementation="xla", named so that "xla" can be the peer."""

BARE = "bare"
"""Name of the matrix product alone, in XLA."""
UNROTATED = "unrotated"
"""Name of qkv_projection without rope, by the default implementation."""
ONE_DRAW = "torchvision"
"""Name of torchvision's transforms of a batch, which draw once for all of its images."""

CONTIGUOUS = "contiguous"
"""Name of decode with our default implementation over a contiguous cache, beside pages."""
FLOAT_CACHE = "float_cache"
"""Name of decode with our default implementation over a bfloat16 cache, beside one of 8 bits."""
EVEN_LENGTHS = "even_lengths"
"""Name of decode with our default implementation where all sequences have the mean length."""
WHOLE_SEQUENCES = "whole_sequences"
"""Name of decode over pages whose shared ones are read for each sequence, by the default."""
TWO_CALLS = "two_calls"
"""Name of decodes and a chunk of a prompt in a call each."""
WITHOUT_OFFSET = "without_offset"
"""Name of attention without query_offset, by the default implementation."""

LESS = (BARE, UNROTATED, ONE_DRAW, CONTIGUOUS, FLOAT_CACHE, EVEN_LENGTHS, TWO_CALLS, WITHOUT_OFFSET)
"""Names of programs that compute less or something else; their results are not compared."""

LABELS = {
    MIXED: "jaxfused",
    "pallas": "jaxfused pallas",
    "cuda": "jaxfused cuda",
    "reference": "jaxfused xla",
    "xla": "stock XLA",
    "cudnn": "cuDNN, jax.nn",
    "cudnn_padded": "cuDNN, padded",
    "jax_pages": "JAX's pages",
    "jax_csr": "JAX's BCSR",
    "dense": "dense product",
    "dense_tf32": "dense, TF32",
    "cusparse": "cuSPARSE, torch",
    "flash_attn3": "FA3",
    "torch_compile": "torch.compile",
    "torch_cudnn": "cuDNN, torch",
    "torch_flash": "torch flash",
    "liger": "Liger",
    "kornia": "kornia, compiled",
    ONE_DRAW: "torchvision, one draw",
    "tokamax": "tokamax",
    "tokamax_triton": "tokamax Triton",
    "tokamax_tiles": "tokamax 128 x 64",
    "torch_grouped": "torch grouped",
    "jla": "jax-linear-attention",
    BARE: "bare product",
    UNROTATED: "without rope",
    CONTIGUOUS: "contiguous cache",
    FLOAT_CACHE: "bfloat16 cache",
    EVEN_LENGTHS: "even lengths",
    WHOLE_SEQUENCES: "whole sequences",
    TWO_CALLS: "two calls",
    WITHOUT_OFFSET: "without offset",
}

BEST_PEER = "best peer"
BULK_COPY, BULK_READ = "bulk copy", "bulk read"
TERAFLOPS, GIGABYTES = "TFLOP/s", "GB/s"
DEFAULT = "default"


@dataclass(frozen=True)
class Bar:
    """Target: `ours` must be `must` times as fast as `against`; `aim` is a further goal.

    `ours` is an implementation or DEFAULT, the one that implementation=None selects. `against` is an
    implementation, BEST_PEER, BULK_COPY or BULK_READ (then the ratio is the share of that kernel's
    rate), or TERAFLOPS or GIGABYTES (then it is the rate itself).
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
    """Function of a key that returns random inputs, in the order of every implementation's arguments."""
    truth: Function
    """Reference function, which is run in float64."""
    jax: Mapping[str, Function]
    """Functions of this package and of JAX peers, by name; each returns what `truth` returns."""
    torch: Mapping[str, Callable[[], Function]]
    """Functions that import a torch peer's packages and return its function, by name."""
    bytes: int
    """Fewest bytes through device memory: every operand of every pass once."""
    flops: int = 0
    """Floating-point operations; the case is judged by them if not 0, else by bytes."""
    default: str = MIXED
    """Implementation among OURS that a user gets by default."""
    bars: tuple[Bar, ...] = field(default=())
    dtype: str = "bfloat16"
    differentiable: int = 0
    """Number of leading inputs with a gradient in torch; 0 if only the forward is measured."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reasons for not running an implementation at this shape, by name."""
    in_place: int = 0
    """Number of leading inputs that the function writes in place and returns, and nothing else."""
    sets: int | None = None
    """Number of input sets in turn, where a large input that not every row reads would make it small."""
    error_limit: float = 1e-2
    """Largest relative error of a row that counts as right: twice that of two roundings to bfloat16."""


def functions(
    ours: Function,
    peers: Mapping[str, Function],
    torch: Mapping[str, Callable[[], Function]],
    *,
    differentiable: int,
    cotangents: int,
    truth: Function | None = None,
) -> dict[str, Any]:
    """Returns `truth`, `jax`, `torch` and `differentiable` of a Case, from functions of a forward pass.

    Args:
      ours: has the keyword implementation= as well.
      differentiable: how many leading operands have a gradient.
      cotangents: how many of the last inputs are cotangents (dy); 0 measures the forward alone.
      truth: by default our implementation "xla".
    """

    def whole(forward: Function) -> Function:
        return gradient_in_jax(forward, differentiable, cotangents) if cotangents else forward

    def whole_in_torch(build: Callable[[], Function]) -> Function:
        return gradient_in_torch(build(), differentiable, cotangents) if cotangents else build()

    named = {MIXED: None} | _IMPLEMENTATIONS
    in_jax = {n: partial(ours, implementation=i) for n, i in named.items()} | peers
    return {
        "truth": whole(truth or in_jax["reference"]),
        "jax": {name: whole(forward) for name, forward in in_jax.items()},
        "torch": {name: partial(whole_in_torch, build) for name, build in torch.items()},
        "differentiable": differentiable if cotangents else 0,
    }


def torch_compiled(forward: Function) -> Function:
    import torch

    torch.compiler.reset()
    return torch.compile(forward, dynamic=False)


def gradient_in_jax(forward: Function, differentiable: int, cotangents: int) -> Function:
    """Returns forward and backward as one function of (*operands, *dys) to (*outputs, *gradients).

    The gradients are those of the first `differentiable` operands. All are returned, so that XLA can
    drop none. The cotangents depend on the outputs by a barrier, as in a network, where the loss lies in
    between: otherwise XLA merges an activation with its gradient into one pass over its operand, which
    no training step can.
    """

    def run(*args: jax.Array) -> Arrays:
        operands, dys = args[:-cotangents], args[-cotangents:]
        outputs, pullback = jax.vjp(
            lambda *moving: forward(*moving, *operands[differentiable:]),
            *operands[:differentiable],
        )
        outputs, dys = jax.lax.optimization_barrier((outputs, dys))
        gradients = pullback(dys if isinstance(outputs, tuple) else dys[0])
        return (*_as_tuple(outputs), *gradients)

    return run


def gradient_in_torch(forward: Function, differentiable: int, cotangents: int) -> Function:
    """Returns forward and backward of a torch function as one, like `gradient_in_jax`."""
    import torch

    def run(*args: Any) -> tuple[Any, ...]:
        operands, dys = args[:-cotangents], args[-cotangents:]
        outputs = _as_tuple(forward(*operands))
        gradients = torch.autograd.grad(outputs, operands[:differentiable], dys)
        return (*(output.detach() for output in outputs), *gradients)

    return run


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
