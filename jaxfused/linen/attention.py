"""Multi-head attention for Flax Linen: Flax's own module around this package's operator."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import attention
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike

from jaxfused.modules.attention import attend, attention_weights, check_rate, run_flax, why_flax
from jaxfused.ops.attention import AttentionImplementation
from jaxfused.reference.promotion import common_dtype


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: linen.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    r"""`flax.linen.dot_product_attention` in one kernel: for the hook of Flax's own modules.

    .. math:: O = \text{dropout}(\text{softmax}(Q K^T / \sqrt{H} + \text{bias})) V

    over the keys that the mask allows. Differences from Flax:

    - The output of a query that may attend to nothing is 0, not the mean of the values, and so are
      its weights.
    - The softmax is always in float32; `force_fp32_for_softmax` makes the result float32 too, as in
      Flax.
    - Which weights dropout drops depends on `dropout_rng` in another way. `broadcast_dropout`, which
      is Flax's default and drops the same weights in every head and batch element, runs Flax's code;
      pass False for the kernel's dropout.
    - A `precision` other than the default, products other than Flax's and complex numbers run Flax's
      code, and `jaxfused.explain` lists the call. Together with a named kernel such a call raises an
      error.
    - Weights that are sown (`module`) are computed beside the kernel, by XLA.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H]; N is a multiple of K.
      value: [..., S, K, V].
      bias: is added to the logits; broadcasts to [..., N, T, S].
      mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S].
      broadcast_dropout: see above.
      dropout_rng: a key of `jax.random`, needed where weights are dropped.
      dropout_rate: the fraction of weights to drop.
      deterministic: whether nothing is dropped.
      dtype: of the computation; None for what query, key and value promote to.
      precision: as in Flax.
      module: the module to sow the weights into, as in Flax.
      force_fp32_for_softmax: see above.
      einsum_dot_general: as in Flax.
      qk_attn_weights_einsum: as in Flax.
      attn_weights_value_einsum: as in Flax.
      is_causal: whether query t attends to keys s <= t alone. Flax's module does not pass it.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla", "cudnn".

    Returns:
      [..., T, N, V].

    Raises:
      ValueError: shapes or dtypes do not fit, or a named kernel cannot serve the call.

    Example:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen
      >>> import jaxfused.linen
      >>> causal = functools.partial(jaxfused.linen.attention_fn, is_causal=True)
      >>> layer = linen.MultiHeadAttention(4, attention_fn=causal)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 32)

    Source: `jaxfused.dot_product_attention`.
    """
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    check_rate("jaxfused.linen.attention_fn", dropout_rate)
    drops = dropout_rate > 0.0 and not deterministic
    reason = why_flax(
        query.dtype,
        precision=precision,
        dropout_is_active=drops,
        broadcast_dropout=broadcast_dropout,
    )
    has_own_product = einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum
    if has_own_product:
        reason = "the caller's own product is given"
    wide = common_dtype(query.dtype, jnp.float32) if force_fp32_for_softmax else query.dtype
    can_weigh = not has_own_product and why_flax(query.dtype, precision=precision) is None
    if module is not None and can_weigh:
        weights = attention_weights(query, key, bias, mask, is_causal=is_causal)
        module.sow("intermediates", "attention_weights", weights.astype(wide))
        module = None
    if reason is not None:
        if is_causal:
            causal = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
            causal = causal.reshape((1,) * (query.ndim - 3 + 1) + causal.shape)
            mask = causal if mask is None else causal & mask.astype(bool)
        return run_flax(
            "jaxfused.linen.attention_fn",
            reason,
            lambda: attention.dot_product_attention(
                query,
                key,
                value,
                bias,
                mask,
                broadcast_dropout,
                dropout_rng,
                dropout_rate,
                deterministic,
                dtype,
                precision,
                module,
                force_fp32_for_softmax,
                einsum_dot_general,
                qk_attn_weights_einsum,
                attn_weights_value_einsum,
            ),
            mask,
            is_causal=False,  # The mask contains it.
            implementation=implementation,
        )
    output = attend(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate if drops else 0.0,
        dropout_key=dropout_rng,
        implementation=implementation,
    )
    return output.astype(wide)


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with `jaxfused.linen.attention_fn` by default.

    Everything else is Flax's, including decoding with a cache. A checkpoint of one loads into the other
    and gives the same output, except for the differences of `attention_fn`. To name an implementation,
    pass `attention_fn=functools.partial(jaxfused.linen.attention_fn, implementation="cudnn")`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.MultiHeadDotProductAttention(4)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 32)

    Source: `jaxfused.dot_product_attention`.
    """

    attention_fn: Callable[..., jax.Array] = attention_fn


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under Flax's shorter name, which is also its name in a parent."""
