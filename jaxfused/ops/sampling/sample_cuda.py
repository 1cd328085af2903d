"""Tokens drawn from rows of logits by the kernel of ffi/sampling/sample.cu."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import cuda_library

_MOST_ROWS = 2**27
_MOST_WORDS = 2**24
"""Largest vocabulary, and so largest top_k, which is passed in float32: integers are exact up to it."""


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, rows: int, words: int, dtype: Any
) -> str | None:
    """Returns None if tokens can be drawn from logits [rows, words] of a dtype, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, whose="logits have"):
        return reason
    if rows > _MOST_ROWS or words > _MOST_WORDS:
        return (
            f"it takes at most {_MOST_ROWS} rows of {_MOST_WORDS} words, and logits have"
            f" {rows} of {words}"
        )
    return cuda_library.why_unavailable()


def forward(
    logits: jax.Array, seeds: jax.Array, filters: jax.Array, *, is_filtered: bool
) -> jax.Array:
    """Returns tokens int32 [M] from logits [M, V]; the other operands are those of sample_xla.sample."""
    cuda_library.register()
    call = jax.ffi.ffi_call("jaxfused_sample", jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32))
    return call(logits, seeds, filters, is_filtered=is_filtered)
