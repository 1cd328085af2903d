"""Multi-head attention for Flax NNX: Flax's own module around this package's operator."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import attention, dtypes
from flax.typing import Dtype, PrecisionLike, PromoteDtypeFn

from jaxfused.modules.attention import (
    QueryOffset,
    and_causal,
    append_to_cache,
    at_offset,
    attend,
    attention_weights,
    check_rate,
    of_attention,
    project_heads,
    run_flax,
    whole_mask,
    why_flax,
    why_three_projections,
)
from jaxfused.modules.fallback import (
    is_stock_product,
    resharded,
    why_complex,
    why_given,
    why_intercepted,
    why_sharded,
)
from jaxfused.modules.linear_general import linear_general
from jaxfused.nnx.linear_general import LinearGeneral
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.runtime.checks import python_numbers


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | AttentionMask | None = None,
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
    query_offset: QueryOffset = None,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    r"""`flax.nnx.dot_product_attention` in one kernel, as the `attention_fn` of Flax's own modules.

    .. math:: O = \text{dropout}(\text{softmax}(Q K^T / \sqrt{H} + \text{bias})) V

    over the keys that the mask allows. Differences from Flax:

    - The output of a query that may attend to nothing is 0, not the mean of the values, and so are
      its weights.
    - Which weights dropout drops depends on `dropout_rng` in another way. `broadcast_dropout`, which
      is Flax's default and drops the same weights in every head and batch element, runs Flax's code;
      pass False for the kernel's dropout.
    - A `precision` other than the default and complex numbers run Flax's code, and
      `jaxfused.explain` lists the call. Together with a named kernel such a call raises an error.
    - Weights that are sown (`module`) are computed in addition to the kernel, by XLA.

    Args:
      query: [..., T, N, H].
      key: [..., S, K, H]; N is a multiple of K.
      value: [..., S, K, V].
      bias: is added to the logits; broadcasts to [..., N, T, S].
      mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S]. Or an object
        of `jaxfused.masks`.
      broadcast_dropout: see above.
      dropout_rng: a key of `jax.random`, needed where weights are dropped.
      dropout_rate: the fraction of weights to drop.
      deterministic: whether nothing is dropped.
      dtype: of the computation; None for what query, key and value promote to.
      precision: as in Flax.
      module: the module to sow the weights into, as in Flax.
      promote_dtype: as in Flax.
      is_causal: whether query t attends to keys s <= t + query_offset alone.
      query_offset: where the first query stands among the keys, as in
        `jaxfused.dot_product_attention`: a number, integers [...], or "bottom_right".
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
    precision = of_attention(precision)
    drops = dropout_rate > 0.0 and not deterministic
    reason = why_flax(
        query.dtype,
        precision=precision,
        dropout_is_active=drops,
        broadcast_dropout=broadcast_dropout,
    )
    if module is not None and why_flax(query.dtype, precision=precision) is None:
        weights = attention_weights(
            query, key, bias, mask, is_causal=is_causal, query_offset=query_offset
        )
        module.sow(nnx.Intermediate, "attention_weights", weights)
        module = None
    if reason is not None:
        whole = whole_mask(mask)
        if is_causal and query_offset is not None:
            whole, is_causal = and_causal(mask, query, key, query_offset), False
        return run_flax(
            "jaxfused.nnx.attention_fn",
            reason,
            lambda: attention.dot_product_attention(
                query,
                key,
                value,
                bias,
                whole,
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
            whole,
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
        query_offset=query_offset,
        dropout_rate=dropout_rate if drops else 0.0,
        dropout_key=dropout_rng,
        implementation=implementation,
    )


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with one product for queries, keys and values.

    Its attention is `jaxfused.nnx.attention_fn` by default. Constructor and parameters are Flax's: a
    checkpoint of one loads into the other and gives the same output, except for the differences of
    `attention_fn`. To name an implementation of the attention, pass
    `attention_fn=functools.partial(jaxfused.nnx.attention_fn, implementation="cudnn")`.

    Queries, keys and values of one input are one product, and the output's bias is added in the kernel
    of its product. Attention to another input, replaced layers, products and promotions other than
    Flax's, a `qkv_sharding` or `out_sharding` where no mesh axis is Explicit, and complex numbers run
    Flax's own projections.

    With `decode` a call may have several new tokens, such as a whole prompt, and `cache_index` may have
    an entry of each sequence: `init_cache(shape, per_sequence=True)` makes such a cache. Its other names
    and shapes are Flax's.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> layer = jaxfused.nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 32)), is_causal=True).shape
      (2, 5, 32)

    Source: `jaxfused.qkv_projection`, `jaxfused.dot_product_attention`, `jaxfused.linear`.
    """

    __init__ = functools.partialmethod(
        python_numbers(nnx.MultiHeadAttention.__init__), attention_fn=attention_fn
    )

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | AttentionMask | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from inputs_q to inputs_k and inputs_v, by default to itself.

        Args:
          inputs_q: [..., T, D].
          inputs_k: [..., S, D]; None for inputs_q.
          inputs_v: [..., S, D]; None for inputs_k.
          mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S]. Or an
            object of `jaxfused.masks`.
          deterministic: whether nothing is dropped.
          rngs: give dropout its key, in place of those of the constructor.
          sow_weights: whether the weights are sown.
          decode: whether the T new tokens are added to the cache, and attend to all tokens in it up to
            themselves.
          is_causal: whether query t attends to keys s <= t alone.
          out_sharding: as in Flax.
          qkv_sharding: as in Flax.
          input_positions: is passed to the attention_fn, as in Flax.

        Returns:
          [..., T, out_features].
        """
        alone = all(a is None or a is inputs_q for a in (inputs_k, inputs_v))
        decodes = self.decode if decode is None else decode
        sharded = (qkv_sharding, out_sharding)
        decides = decodes is not None
        if not alone or not decides or self._why_flax(inputs_q, *sharded) is not None:
            # Flax's decoding requires the mask as an array; otherwise Flax passes it to the
            # attention_fn.
            flax_mask: Any = whole_mask(mask) if decodes is not False else mask
            return super().__call__(
                inputs_q,
                inputs_k,
                inputs_v,
                mask=flax_mask,
                deterministic=deterministic,
                rngs=rngs,
                sow_weights=sow_weights,
                decode=decode,
                is_causal=is_causal,
                out_sharding=out_sharding,
                qkv_sharding=qkv_sharding,
                input_positions=input_positions,
            )
        projected = project_heads(
            jnp.asarray(inputs_q),
            *(_affine(layer) for layer in (self.query, self.key, self.value)),
            dtype=self.dtype,
            precision=self.precision,
            implementation=None,
        )
        query, key, value = (resharded(heads, qkv_sharding) for heads in projected)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        options: dict[str, Any] = dict(mask=mask, is_causal=is_causal)
        if decodes:
            key, value, offset = self._append(key, value)
            options = at_offset(self.attention_fn, query, key, mask, offset)
        if input_positions is not None:
            options["input_positions"] = input_positions
        drops, dropout_rng = self._dropout(deterministic, rngs)
        attended = self.attention_fn(
            query,
            key,
            value,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=not drops,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            **options,
        )
        y = linear_general(
            attended,
            *_affine(self.out),
            contracted=2,
            dtype=self.dtype,
            precision=self.precision,
        )
        return resharded(y, out_sharding)

    def init_cache(
        self, input_shape: Sequence[int], dtype: Dtype = jnp.float32, *, per_sequence: bool = False
    ) -> None:
        """Makes an empty cache of S places, as Flax does.

        Args:
          input_shape: [..., S, D].
          dtype: of the keys and values.
          per_sequence: whether each sequence has a length of its own: `cache_index` is then [...].
        """
        super().init_cache(tuple(input_shape), dtype)
        if per_sequence:
            self.cache_index = nnx.Cache(jnp.zeros(tuple(input_shape[:-2]), jnp.int32))

    def _append(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds new tokens to the cache; returns keys, values and the index of the first new one."""
        kept_key, kept_value, index = self.cached_key, self.cached_value, self.cache_index
        if kept_key is None or kept_value is None or index is None:
            raise ValueError(
                "jaxfused.nnx.MultiHeadAttention: decode is True, but there is no cache to add the new"
                " tokens to; call init_cache first."
            )
        at = index[...]
        kept_key[...], kept_value[...] = append_to_cache(
            "jaxfused.nnx.MultiHeadAttention", kept_key[...], kept_value[...], at, key, value
        )
        index[...] = at + key.shape[-3]
        return kept_key[...], kept_value[...], at

    def _why_flax(self, inputs: jax.Array, *sharded: Any) -> str | None:
        """Returns why Flax's own projections run, or None."""
        layers = (self.query, self.key, self.value, self.out)
        if any(type(layer) not in (nnx.LinearGeneral, LinearGeneral) for layer in layers):
            return "a layer was replaced"
        intercepted = why_intercepted()
        if intercepted is not None:
            return intercepted
        stock = dtypes.promote_dtype
        kernels = [layer.kernel[...] for layer in layers]
        return (
            why_given(
                qkv_dot_general=not is_stock_product(self.qkv_dot_general),
                out_dot_general=not is_stock_product(self.out_dot_general),
                qkv_dot_general_cls=self.qkv_dot_general_cls is not None,
                out_dot_general_cls=self.out_dot_general_cls is not None,
                qkv_promote_dtype=self.qkv_promote_dtype is not stock,
                out_promote_dtype=self.out_promote_dtype is not stock,
                one_axis=jnp.ndim(inputs) < 2,
                # Sizes that do not fit run Flax's code, which raises its own error.
                features=jnp.shape(inputs)[-1:] != (self.in_features,)
                or self.in_kv_features != self.in_features,
            )
            or why_three_projections(*(_affine(layer) for layer in layers[:3]))
            or next(
                (why for s in sharded if (why := why_sharded(s, inputs, *kernels)) is not None),
                None,
            )
            or why_complex(jnp.result_type(inputs), self.dtype, *(k.dtype for k in kernels))
        )

    def _dropout(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> tuple[bool, jax.Array | None]:
        """Returns whether weights are dropped, and the dropout key."""
        if self.dropout_rate <= 0.0:
            return False, None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                "jaxfused.nnx.MultiHeadAttention: dropout_rate is"
                f" {self.dropout_rate}, but nothing says whether to drop; pass deterministic."
            )
        if deterministic:
            return False, None
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        stream = self.rngs if stream is None else stream
        if stream is None:
            raise ValueError(
                "jaxfused.nnx.MultiHeadAttention: 'rngs' must be provided, because the module was made"
                " with keep_rngs=False; pass rngs=nnx.Rngs(dropout=...)."
            )
        return True, stream()


def _affine(layer: nnx.LinearGeneral) -> tuple[jax.Array, jax.Array | None]:
    """Returns (kernel, bias) of a layer."""
    return layer.kernel[...], None if layer.bias is None else layer.bias[...]
