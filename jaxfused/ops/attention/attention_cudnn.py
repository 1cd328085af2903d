"""dot_product_attention by cuDNN, which `jax.nn.dot_product_attention` calls."""

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention as jax_dot_product_attention

from jaxfused.ops.attention.mask import Mask


def why_unsupported(device, query, key, value, mask: Mask, used) -> str | None:
    """Returns the exceeded limit of jax.nn.dot_product_attention(implementation="cudnn"), or None.

    `used` names the given optional arguments that cuDNN lacks, or whose gradient it lacks.
    """
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return "cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or later"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {query.dtype}"
    largest = 256 if capability >= (9, 0) else 128
    (_, query_length, _, head_size), key_length = query.shape, key.shape[1]
    if head_size % 8 or head_size > largest:
        return f"cuDNN needs a head size that is a multiple of 8 up to {largest}, not {head_size}"
    if value.shape[-1] != head_size:
        return f"cuDNN is called with one head size, not {head_size} and {value.shape[-1]}"
    if 0 in (query.size, key_length):
        return "there must be queries and keys"
    # cuDNN computed a wrong gradient of the queries at 198 tokens (H200, jax 0.11.2).
    if query_length % 32 or key_length % 32:
        return (
            "cuDNN's gradient is trusted at lengths that are multiples of 32,"
            f" not {query_length} queries and {key_length} keys"
        )
    if mask.window is not None:
        right = mask.window[1]
        if right != 0 and not mask.is_causal:
            return f"cuDNN has no window to the right without is_causal, and {right} was passed"
        if query_length > key_length or mask.key_lengths is not None:
            return "cuDNN's window may leave queries without keys where there are fewer keys"
    if used:
        return f"cuDNN's attention does not have {' and '.join(used)}, or not its gradient"
    return None


def attend(query, key, value, bias, mask: Mask, scale) -> jax.Array:
    """Calls cuDNN with a key for every query, and writes 0 where a query attends to nothing.

    For such a query cuDNN would return the mean of the values or NaN, and non-finite gradients. So such
    a query attends to any keys that the other conditions allow; its result is not used and has cotangent
    0. `why_unsupported` refuses windows that leave queries no key.
    """
    mask = mask.without_pattern()
    is_causal, window = mask.is_causal, mask.window
    if window is not None:
        # A causal mask is a window that ends at the query itself; cuDNN has no other windows.
        is_causal, window = True, (window[0], 0)
    logits_shape = (query.shape[1], key.shape[1])
    allowed = mask.allowed(*logits_shape)
    if bias is not None:
        bias = jnp.broadcast_to(bias, bias.shape[:2] + logits_shape).astype(query.dtype)
        allowed = allowed & (bias > -jnp.inf)
    attends = jnp.any(allowed, axis=-1, keepdims=True)
    if bias is not None:
        bias = jnp.where(attends, bias, jnp.zeros_like(bias))
    explicit = mask.explicit
    if explicit is not None:
        explicit = explicit | ~attends
        explicit = jnp.broadcast_to(explicit, explicit.shape[:2] + logits_shape)
    key_lengths = mask.key_lengths
    output = jax_dot_product_attention(
        query,
        key,
        value,
        bias,
        explicit,
        scale=scale,
        is_causal=is_causal,
        key_value_seq_lengths=None if key_lengths is None else jnp.maximum(key_lengths, 1),
        local_window_size=window,
        implementation="cudnn",
    )
    return jnp.where(attends.swapaxes(1, 2), output, 0)
