"""Log-probabilities of the likeliest tokens by the kernel of ffi/sampling/top_log_probs.cu."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MOST = 64
"""Largest count for which one pass over the row for each token is fast enough."""


def forward(
    logits: jax.Array, tokens: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what top_log_probs_xla.top_log_probs does, for logits [M, V] and tokens [M]."""
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
