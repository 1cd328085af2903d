"""The Transformer block for Flax Linen: each residual sum runs in an adjacent kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.fp8 import precision_of
from jaxfused.linen.layer_norm import LayerNorm, RMSNorm
from jaxfused.linen.linear import affine
from jaxfused.linen.mlp import MLP, GatedMLP
from jaxfused.linen.rope import RotaryEmbedding
from jaxfused.modules.transformer_block import (
    HeadNorms,
    Norm,
    check_norm,
    check_rates,
    head_norm,
    head_size,
    normalise,
    project,
    scaled,
    self_attention,
    tables_of,
)
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class TransformerBlock(linen.Module):
    r"""Attention, then perceptron, each behind a norm and added to the residual stream.

    .. math::
        h &= x + W_\text{project} \, \text{attention}(\text{norm}_1(x)) \\
        y &= h + \text{mlp}(\text{norm}_2(h))

    Called with `residual`, the block takes and returns the stream as this package's norms do: `x,
    residual = block(x, residual=residual)` leaves the last sum to the norm of the next block, or after
    the last block to `norm(x, residual=residual)`, so that each sum is computed where it is read.

    Parameters: `norm1` and `norm2`; `qkv` [D, (N + 2 K) H], the columns of the query heads, then
    those of the key heads, then those of the value heads; `project`; `mlp` with `up` and `down`, and
    `gate` if gated; `query_scale` and `key_scale` [H] with `normalize_qk`, `query_bias` and `key_bias`
    if that is a LayerNorm and there are biases; `layer_scale1` and `layer_scale2` [D], by which the
    branches are multiplied, with `layer_scale`.

    Attributes:
      num_heads: N.
      num_kv_heads: K, of which N is a multiple; by default N.
      head_dim: H, by default D / N.
      hidden_features: of the perceptron, by default 4 D.
      norm: "layer_norm" or "rms_norm".
      epsilon: of all norms.
      normalize_qk: the norm of queries and keys over each head: "rms_norm" or True, "layer_norm",
        or False for none.
      layer_scale: the first value of the scales of both branches, as DINOv2 and BEiT have them; None
        for no scale.
      rope: rotates queries and keys.
      is_causal: whether a position attends to none after it.
      gated: whether the perceptron is gated.
      activation: of the perceptron; by default "silu" if gated, else "gelu_tanh".
      use_bias: whether linear layers and LayerNorms have biases.
      dropout_rate: the fraction of either branch's values to drop in training.
      drop_path_rate: the fraction of examples whose branch to drop in training.
      deterministic: whether nothing is dropped; or say so in the call.
      dtype: of the products; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the linear layers' products, as in Flax, or "fp8" or "fp8_delayed".
      kernel_init: initialises the kernels.
      bias_init: initialises the biases of the linear layers.
      save: what the perceptron keeps for its backward, as in `jaxfused.mlp`.
      implementation: of all but the attention: None, "pallas", "cuda", "xla".
      attention_implementation: the same, or "cudnn".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> block = jaxfused.linen.TransformerBlock(
      ...     4, num_kv_heads=2, norm="rms_norm", rope=jaxfused.linen.RotaryEmbedding(),
      ...     is_causal=True, gated=True, use_bias=False)
      >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 32)))[0].shape
      (2, 5, 32)

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
    https://arxiv.org/abs/2002.04745; dropping branches: Huang et al., "Deep Networks with Stochastic
    Depth", 2016, https://arxiv.org/abs/1603.09382
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_features: int | None = None
    norm: Norm = "layer_norm"
    epsilon: float = 1e-6
    normalize_qk: bool | Norm = False
    rope: RotaryEmbedding | None = None
    is_causal: bool = False
    gated: bool = False
    activation: str | None = None
    use_bias: bool = True
    dropout_rate: float = 0.0
    drop_path_rate: float = 0.0
    deterministic: bool | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros
    save: Save = "preactivation"
    implementation: Implementation | None = None
    attention_implementation: AttentionImplementation | None = None
    layer_scale: float | None = None

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        mask: jax.Array | AttentionMask | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cos: jax.Array | None = None,
        sin: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Applies the block to x; dropping takes its keys from the stream "dropout".

        Args:
          x: [..., T, D].
          residual: like x, to be added to it first; see above.
          mask: bool, True where a query may attend to a key; broadcasts to [..., N, T, T]. Or an
            object of `jaxfused.masks`.
          segment_ids: [..., T] integers; a position attends to those of its own segment.
          positions: [T] or [..., T], for the rotation; by default 0, 1, 2, ...
          cos: with `sin` the rotation's tables, in place of positions, as `jaxfused.rope` takes them:
            for tokens of an image those of `jaxfused.axial_rope_tables`. Pairs are those of the
            block's `rope`, without one halves.
          sin: like `cos`.
          deterministic: whether nothing is dropped; by default what the attribute says.

        Returns:
          [..., T, D] of x's dtype; with `residual`, (the last branch, the stream to add it to).

        Raises:
          ValueError: shapes do not fit, or a named implementation cannot run.
        """
        check_norm(self.norm)
        check_rates(dropout_rate=self.dropout_rate, drop_path_rate=self.drop_path_rate)
        drops = max(self.dropout_rate, self.drop_path_rate) > 0 and not linen.merge_param(
            "deterministic", self.deterministic, deterministic
        )

        features = x.shape[-1]
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        head_dim = head_size(features, self.num_heads, self.head_dim)
        shared: dict[str, Any] = dict(
            dtype=self.dtype, param_dtype=self.param_dtype, implementation=self.implementation
        )
        norm: Callable[..., Any] = functools.partial(RMSNorm, epsilon=self.epsilon, **shared)
        if self.norm == "layer_norm":
            norm = functools.partial(
                LayerNorm, epsilon=self.epsilon, use_bias=self.use_bias, **shared
            )
        initialisers: dict[str, Any] = dict(
            use_bias=self.use_bias, kernel_init=self.kernel_init, bias_init=self.bias_init
        )

        y, stream = normalise(norm(name="norm1"), x, residual)
        layer: Callable[..., Any] = functools.partial(
            affine, precision=self.precision, param_dtype=self.param_dtype, **initialisers
        )
        kernel, bias = layer((self.num_heads + 2 * num_kv_heads) * head_dim, name="qkv")(features)
        norms = self._head_norms(head_dim)
        scale1, scale2 = self._layer_scales(features)
        tables = tables_of(self.rope, positions, cos, sin, length=x.shape[-2], head_size=head_dim)
        attended = self_attention(
            y,
            kernel,
            bias,
            norms,
            tables,
            interleaved=self.rope is not None and self.rope.interleaved,
            num_heads=self.num_heads,
            num_kv_heads=num_kv_heads,
            epsilon=self.epsilon,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=self.is_causal,
            precision=precision_of(self, "qkv_projection", "fp8_qkv"),
            implementation=self.implementation,
            attention_implementation=self.attention_implementation,
        )
        kernel, bias = layer(features, name="project")(attended.shape[-1])
        branch, pre_bias = project(
            attended,
            kernel,
            bias,
            drops=drops or scale1 is not None,
            dtype=self.dtype,
            precision=precision_of(self, "linear", "fp8_project"),
            implementation=self.implementation,
        )
        if drops:
            branch = self._drop(branch)
        y, stream = normalise(norm(name="norm2"), branch, stream, pre_bias, scale1)
        mlp = self._mlp(features, initialisers | shared)
        if residual is None and not drops and scale2 is None:
            return mlp(y, residual=stream)
        branch = scaled(mlp(y), scale2)
        if drops:
            branch = self._drop(branch)
        if residual is None:
            return stream + branch.astype(stream.dtype)
        return branch, stream

    def _drop(self, branch: jax.Array) -> jax.Array:
        """Applies dropout to a branch's values, and drop path to the branch of a whole example."""
        branch = linen.Dropout(self.dropout_rate)(branch, deterministic=False)
        drop_path = linen.Dropout(self.drop_path_rate, broadcast_dims=(-2, -1))
        return drop_path(branch, deterministic=False)

    def _mlp(self, features: int, options: dict[str, Any]) -> MLP | GatedMLP:
        make_mlp = GatedMLP if self.gated else MLP
        activation = self.activation
        if activation is None:
            activation = "silu" if self.gated else "gelu_tanh"
        return make_mlp(
            4 * features if self.hidden_features is None else self.hidden_features,
            activation=activation,
            save=self.save,
            precision=self.precision,
            **options,
            name="mlp",
        )

    def _layer_scales(self, features: int) -> tuple[jax.Array | None, jax.Array | None]:
        if self.layer_scale is None:
            return None, None
        first = linen.initializers.constant(self.layer_scale)
        return (
            self.param("layer_scale1", first, (features,), self.param_dtype),
            self.param("layer_scale2", first, (features,), self.param_dtype),
        )

    def _head_norms(self, head_dim: int) -> HeadNorms | None:
        kind = head_norm(self.normalize_qk)
        if kind is None:
            return None
        ones, zeros = linen.initializers.ones, linen.initializers.zeros
        query_scale = self.param("query_scale", ones, (head_dim,), self.param_dtype)
        key_scale = self.param("key_scale", ones, (head_dim,), self.param_dtype)
        query_bias = key_bias = None
        if kind == "layer_norm" and self.use_bias:
            query_bias = self.param("query_bias", zeros, (head_dim,), self.param_dtype)
            key_bias = self.param("key_bias", zeros, (head_dim,), self.param_dtype)
        return HeadNorms(kind, query_scale, key_scale, query_bias, key_bias)
