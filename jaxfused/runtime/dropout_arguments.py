"""Checks of the dropout arguments of attention and of MLPs."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfused.runtime.checks import check_constant, said


def dropout_words(op: str, rate: float, key: jax.Array | None) -> jax.Array | None:
    """Returns the two random 32-bit words that seed `runtime.dropout.keep`, or None at rate 0."""
    check_constant(op, "dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"{op}: dropout_rate must be in the range [0, 1), as it is the fraction to"
            f" drop, but it is {rate}; pass a number from 0 up and below 1."
        )
    if rate == 0.0:
        return None
    if key is None:
        raise ValueError(
            f"{op}: dropout_rate is {rate}, but dropout_key is None; pass a key of jax.random."
        )
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except jax.errors.KeyReuseError:  # A TypeError, by which jax.debug_key_reuse finds mistakes.
        raise
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{op}: dropout_key is {said(key)}, but it is one key; pass jax.random.key(seed)."
        ) from error


def without_kernels(op: str, words: jax.Array | None) -> Mapping[str, str]:
    """Returns why each kernel of an operator cannot run with dropout; empty if there is no dropout."""
    if words is None:
        return {}
    return {
        "pallas": f"there is no Pallas kernel of {op} with dropout yet",
        "cuda": f"there is no CUDA kernel of {op} with dropout yet",
    }
