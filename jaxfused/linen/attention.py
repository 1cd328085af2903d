"""Multi-head attention for Flax Linen: Flax's own module around this package's operator."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import attention
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike

from jaxfused.linen.flax_code import flax_call, why_watched
from jaxfused.linen.layer_norm import LayerNorm
from jaxfused.linen.linear_general import GeneralAffine
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
)
from jaxfused.modules.fallback import is_stock_product, why_complex, why_given
from jaxfused.modules.linear_general import linear_general
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.runtime.checks import python_number_fields
from jaxfused.runtime.promotion import common_dtype


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
    module: linen.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    query_offset: QueryOffset = None,
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
      force_fp32_for_softmax: see above.
      einsum_dot_general: as in Flax.
      qk_attn_weights_einsum: as in Flax.
      attn_weights_value_einsum: as in Flax.
      is_causal: whether query t attends to keys s <= t + query_offset alone. Flax's module does not
        pass it, nor the next argument.
      query_offset: where the first query stands among the keys, as in
        `jaxfused.dot_product_attention`: a number, integers [...], or "bottom_right".
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
    precision = of_attention(precision)
    drops = dropout_rate > 0.0 and not deterministic
    has_own_product = einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum
    reason = "the caller's own product is given" if has_own_product else None
    reason = reason or why_flax(
        query.dtype,
        precision=precision,
        dropout_is_active=drops,
        broadcast_dropout=broadcast_dropout,
    )
    wide = common_dtype(query.dtype, jnp.float32) if force_fp32_for_softmax else query.dtype
    can_weigh = not has_own_product and why_flax(query.dtype, precision=precision) is None
    if module is not None and can_weigh:
        _sow_weights(module, wide, query, key, bias, mask, is_causal, query_offset)
        module = None
    if reason is not None:
        whole = whole_mask(mask)
        if is_causal:
            whole = and_causal(mask, query, key, query_offset)
        return run_flax(
            "jaxfused.linen.attention_fn",
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
                force_fp32_for_softmax,
                einsum_dot_general,
                qk_attn_weights_einsum,
                attn_weights_value_einsum,
            ),
            whole,
            is_causal=False,  # The mask includes causality.
            implementation=implementation,
        )
    output = attend(
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
    return output.astype(wide)


def _sow_weights(
    module: linen.Module,
    dtype: Dtype,
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | AttentionMask | None,
    is_causal: bool,
    query_offset: QueryOffset,
) -> None:
    weights = attention_weights(
        query, key, bias, mask, is_causal=is_causal, query_offset=query_offset
    )
    module.sow("intermediates", "attention_weights", weights.astype(dtype))


@python_number_fields
class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with one product for queries, keys and values.

    Its attention is `jaxfused.linen.attention_fn` by default. Attributes and parameters are Flax's: a
    checkpoint of one loads into the other and gives the same output, except for the differences of
    `attention_fn`. To name an implementation of the attention, pass
    `attention_fn=functools.partial(jaxfused.linen.attention_fn, implementation="cudnn")`.

    Queries, keys and values of one input are one product, and the output's bias is added in the kernel
    of its product. Attention to another input, products other than Flax's, and complex numbers run
    Flax's own projections.

    With `decode` a call may have several new tokens, such as a whole prompt, and the variable
    `cache_index` may be [...], with an entry of each sequence. Names and shapes are Flax's otherwise.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.MultiHeadDotProductAttention(4)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 32)

    Source: `jaxfused.qkv_projection`, `jaxfused.dot_product_attention`, `jaxfused.linear`.
    """

    attention_fn: Callable[..., jax.Array] = attention_fn

    @linen.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | AttentionMask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Attends from inputs_q to inputs_k and inputs_v, by default to itself.

        Args:
          inputs_q: [..., T, D].
          inputs_k: [..., S, D]; None for inputs_q.
          inputs_v: [..., S, D]; None for inputs_k.
          inputs_kv: in place of both; deprecated by Flax.
          mask: nonzero where a query may attend to a key; broadcasts to [..., N, T, S]. Or an
            object of `jaxfused.masks`.
          deterministic: whether nothing is dropped.
          dropout_rng: a key of `jax.random`; by default of the stream "dropout".
          sow_weights: whether the weights are sown into the collection "intermediates".

        Returns:
          [..., T, out_features].
        """
        alone = all(a is None or a is inputs_q for a in (inputs_k, inputs_v)) and inputs_kv is None
        reason = self._why_flax(inputs_q) if alone else "another input is attended to"
        if reason is not None:
            # Flax's decoding combines masks as arrays; otherwise Flax passes the mask to the
            # attention_fn.
            return flax_call(MultiHeadDotProductAttention)(
                self,
                inputs_q,
                inputs_k,
                inputs_v,
                inputs_kv=inputs_kv,
                mask=whole_mask(mask) if self.decode else mask,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
                sow_weights=sow_weights,
            )
        inputs = jnp.asarray(inputs_q)
        query, key, value = self._projections(inputs)
        at: dict[str, Any] = dict(mask=mask)
        if self.decode:
            key, value, offset = self._append(key, value)
            if offset is not None:
                at = at_offset(self.attention_fn, query, key, mask, offset)
        drops = self.dropout_rate > 0.0 and not linen.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        options = dict(
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=not drops,
            dtype=self.dtype,
            precision=self.precision,
            force_fp32_for_softmax=self.force_fp32_for_softmax,
            **at,
        )
        if sow_weights:
            options["module"] = self
        # Options that the caller's `attention_fn` does not take are left out, as in Flax.
        taken = inspect.signature(self.attention_fn).parameters
        options = {name: option for name, option in options.items() if name in taken}
        attended = self.attention_fn(query, key, value, **options)
        out_features = self.out_features or inputs.shape[-1]
        kernel, bias = GeneralAffine(
            (out_features,),
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        ).parameters(attended.shape[-2:])
        return linear_general(
            attended, kernel, bias, contracted=2, dtype=self.dtype, precision=self.precision
        )

    def _append(
        self, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Adds new tokens to the cache; returns its keys and values, and where the new ones begin.

        As in Flax, the call that creates the cache stores nothing in it, and returns (key, value, None).
        """
        is_made = self.has_variable("cache", "cached_key")
        kept_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        kept_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not is_made:
            return key, value, None
        at = jnp.asarray(index.value)
        kept_key.value, kept_value.value = append_to_cache(
            "jaxfused.linen.MultiHeadAttention", kept_key.value, kept_value.value, at, key, value
        )
        index.value = at + key.shape[-3]
        return kept_key.value, kept_value.value, at

    def _why_flax(self, inputs: jax.Array) -> str | None:
        """Returns why Flax's own projections run, or None."""
        return (
            why_watched(self.precision)
            or why_given(
                qkv_dot_general=not is_stock_product(self.qkv_dot_general),
                out_dot_general=not is_stock_product(self.out_dot_general),
                qkv_dot_general_cls=self.qkv_dot_general_cls is not None,
                out_dot_general_cls=self.out_dot_general_cls is not None,
                qk_attn_weights_einsum_cls=self.qk_attn_weights_einsum_cls is not None,
                attn_weights_value_einsum_cls=self.attn_weights_value_einsum_cls is not None,
                one_axis=jnp.ndim(inputs) < 2,
            )
            or why_complex(jnp.result_type(inputs), self.dtype, self.param_dtype)
        )

    def _projections(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values [..., T, N, H], normalised if the attribute says so."""
        features = self.qkv_features or inputs.shape[-1]
        if features % self.num_heads:
            raise ValueError(
                f"jaxfused.linen.MultiHeadAttention: {features} features are not shared evenly by"
                f" {self.num_heads} heads; pass a qkv_features that the heads divide."
            )
        affine = functools.partial(
            GeneralAffine,
            (self.num_heads, features // self.num_heads),
            use_bias=self.use_bias,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        query, key, value = project_heads(
            inputs,
            *(
                affine(name=name).parameters(inputs.shape[-1:])
                for name in ("query", "key", "value")
            ),
            dtype=self.dtype,
            precision=self.precision,
            implementation=None,
        )
        if self.normalize_qk:
            norm = functools.partial(
                LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            normed = [norm(name=f"{n}_ln")(heads) for n, heads in (("query", query), ("key", key))]
            query, key = (heads for heads in normed if isinstance(heads, jax.Array))
        return query, key, value


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under Flax's shorter name, which is also its name in a parent."""


class SelfAttention(MultiHeadDotProductAttention):
    """`flax.linen.SelfAttention`: `MultiHeadDotProductAttention` of one input alone."""

    @linen.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        mask: jax.Array | AttentionMask | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
    ) -> jax.Array:
        """Attends from the inputs to themselves; the arguments are those of the base class."""
        return super().__call__(
            inputs_q,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )


def __getattr__(name: str) -> Any:
    """Returns Flax's object, because `nn.attention` is a module of Flax too."""
    return getattr(linen.attention, name)
