"""Log-probabilities of the likeliest tokens by the kernel of ffi/sampling/top_log_probs.cu."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MOST = 64
"""Largest number of likeliest tokens that the kernel finds, in one pass over the row for each."""


def forward(
    logits: jax.Array, tokens: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities of tokens [M] and of the likeliest [M, count], and the latter's ids."""
    cuda_library.register()
    rows = logits.shape[0]
    call = jax.ffi.ffi_call(
        "jaxfused_top_log_probs",
        (
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
            jax.ShapeDtypeStruct((rows, count), jnp.int32),
        ),
    )
    chosen, top, top_tokens = call(logits, tokens, count=np.int64(count))
    return chosen, top, top_tokens
