"""Multi-head attention for Flax NNX: Flax's own module around this package's operator."""

import functools

import jax
from flax import nnx
from flax.nnx.nn import attention, dtypes
from flax.typing import Dtype, PrecisionLike, PromoteDtypeFn

from jaxfused.modules.attention import attend, attention_weights, check_rate, run_flax, why_flax
from jaxfused.ops.attention import AttentionImplementation


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
    module: nnx.Module | None = None,
    promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    r"""`flax.nnx.dot_product_attention` in one kernel: for the hook of Flax's own modules.

    .. math:: O = \text{dropout}(\text{softmax}(Q K^T / \sqrt{H} + \text{bias})) V

    over the keys that the mask allows. Differences from Flax:

    - The output of a query that may attend to nothing is 0, not the mean of the values, and so are
      its weights.
    - Which weights dropout drops depends on `dropout_rng` in another way. `broadcast_dropout`, which
      is Flax's default and drops the same weights in every head and batch element, runs Flax's code;
      pass False for the kernel's dropout.
    - A `precision` other than the default and complex numbers run Flax's code, and
      `jaxfused.explain` lists the call. Together with a named kernel such a call raises an error.
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
      promote_dtype: as in Flax.
      is_causal: whether query t attends to keys s <= t alone.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla", "cudnn".

    Returns:
      [..., T, N, V].

    Raises:
      ValueError: shapes or dtypes do not fit, or a named kernel cannot serve the call.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jaxfused.nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     4, 32, attention_fn=jaxfused.nnx.attention_fn, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 32))).shape
      (2, 5, 32)

    Source: `jaxfused.dot_product_attention`.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    check_rate("jaxfused.nnx.attention_fn", dropout_rate)
    drops = dropout_rate > 0.0 and not deterministic
    reason = why_flax(
        query.dtype,
        precision=precision,
        dropout_is_active=drops,
        broadcast_dropout=broadcast_dropout,
    )
    if module is not None and why_flax(query.dtype, precision=precision) is None:
        weights = attention_weights(query, key, bias, mask, is_causal=is_causal)
        module.sow(nnx.Intermediate, "attention_weights", weights)
        module = None
    if reason is not None:
        return run_flax(
            "jaxfused.nnx.attention_fn",
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
                promote_dtype,
                is_causal,
            ),
            mask,
            is_causal=is_causal,
            implementation=implementation,
        )
    return attend(
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


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` whose `attention_fn` is `jaxfused.nnx.attention_fn` by default.

    Everything else is Flax's, including decoding with a cache. A checkpoint of one loads into the other
    and gives the same output, except for the differences of `attention_fn`. To name an implementation,
    pass `attention_fn=functools.partial(jaxfused.nnx.attention_fn, implementation="cudnn")`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
      (2, 5, 32)

    Source: `jaxfused.dot_product_attention`.
    """

    __init__ = functools.partialmethod(nnx.MultiHeadAttention.__init__, attention_fn=attention_fn)
