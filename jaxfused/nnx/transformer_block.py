"""The Transformer block for Flax NNX: each residual sum runs in an adjacent kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
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
from jaxfused.nnx.fp8 import precision_of
from jaxfused.nnx.layer_norm import LayerNorm, RMSNorm
from jaxfused.nnx.linear import Linear, affine
from jaxfused.nnx.mlp import MLP, GatedMLP
from jaxfused.nnx.rope import RotaryEmbedding
from jaxfused.ops.attention.attention import AttentionImplementation
from jaxfused.ops.attention.masks.mask_class import AttentionMask
from jaxfused.ops.linear.hidden_layer import Save
from jaxfused.runtime.checks import python_numbers


class TransformerBlock(nnx.Module):
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

    Args:
      features: D.
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
      dtype: of the products; None for what x and the parameters promote to.
      param_dtype: of the parameters.
      precision: of the linear layers' products, as in Flax, or "fp8" or "fp8_delayed".
      kernel_init: initialises the kernels.
      bias_init: initialises the biases of the linear layers.
      save: what the perceptron keeps for its backward, as in `jaxfused.mlp`.
      rngs: gives the initialisers their keys, and dropout where it is used.
      implementation: of all but the attention: None, "pallas", "cuda", "xla".
      attention_implementation: the same, or "cudnn".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> block = jaxfused.nnx.TransformerBlock(
      ...     32, 4, num_kv_heads=2, norm="rms_norm", rope=jaxfused.nnx.RotaryEmbedding(),
      ...     is_causal=True, gated=True, use_bias=False, rngs=nnx.Rngs(0))
      >>> block(jnp.ones((2, 5, 32))).shape
      (2, 5, 32)

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
    https://arxiv.org/abs/2002.04745; dropping branches: Huang et al., "Deep Networks with Stochastic
    Depth", 2016, https://arxiv.org/abs/1603.09382
    """

    @python_numbers
    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden_features: int | None = None,
        norm: Norm = "layer_norm",
        epsilon: float = 1e-6,
        normalize_qk: bool | Norm = False,
        layer_scale: float | None = None,
        rope: RotaryEmbedding | None = None,
        is_causal: bool = False,
        gated: bool = False,
        activation: str | None = None,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        save: Save = "preactivation",
        rngs: nnx.Rngs,
        implementation: Implementation | None = None,
        attention_implementation: AttentionImplementation | None = None,
    ):
        check_norm(norm)
        check_rates(dropout_rate=dropout_rate, drop_path_rate=drop_path_rate)
        self.head_norm = head_norm(normalize_qk)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_size(features, num_heads, head_dim)
        hidden_features = 4 * features if hidden_features is None else hidden_features
        shared: dict[str, Any] = dict(
            dtype=dtype, param_dtype=param_dtype, rngs=rngs, implementation=implementation
        )
        if norm == "layer_norm":
            make_norm: Callable[..., Any] = functools.partial(
                LayerNorm, features, epsilon=epsilon, use_bias=use_bias, **shared
            )
        else:
            make_norm = functools.partial(RMSNorm, features, epsilon=epsilon, **shared)
        layer: dict[str, Any] = dict(
            use_bias=use_bias,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            **shared,
        )
        self.norm1 = make_norm()
        self.qkv = Linear(features, (num_heads + 2 * num_kv_heads) * head_dim, **layer)
        self._make_head_norms(head_dim, use_bias, param_dtype)
        self.layer_scale1 = self.layer_scale2 = nnx.data(None)
        if layer_scale is not None:
            self.layer_scale1 = nnx.Param(jnp.full(features, layer_scale, param_dtype))
            self.layer_scale2 = nnx.Param(jnp.full(features, layer_scale, param_dtype))
        self.project = Linear(num_heads * head_dim, features, **layer)
        self.norm2 = make_norm()
        make_mlp = GatedMLP if gated else MLP
        if activation is None:
            activation = "silu" if gated else "gelu_tanh"
        self.mlp = make_mlp(features, hidden_features, activation=activation, save=save, **layer)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if dropout_rate > 0 else None)
        # A dropped path is 0 for all tokens and features of an example.
        self.drop_path = nnx.Dropout(
            drop_path_rate, broadcast_dims=(-2, -1), rngs=rngs if drop_path_rate > 0 else None
        )
        self.rope = rope
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.epsilon = epsilon
        self.is_causal = is_causal
        self.precision = precision
        self.implementation = implementation
        self.attention_implementation = attention_implementation

    def _make_head_norms(self, head_dim: int, use_bias: bool, param_dtype: Dtype) -> None:
        self.query_scale = self.key_scale = nnx.data(None)
        self.query_bias = self.key_bias = nnx.data(None)
        if self.head_norm is not None:
            self.query_scale = nnx.Param(jnp.ones(head_dim, param_dtype))
            self.key_scale = nnx.Param(jnp.ones(head_dim, param_dtype))
        if self.head_norm == "layer_norm" and use_bias:
            self.query_bias = nnx.Param(jnp.zeros(head_dim, param_dtype))
            self.key_bias = nnx.Param(jnp.zeros(head_dim, param_dtype))

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
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Applies the block to x.

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
          deterministic: whether nothing is dropped; by default what `train` and `eval` set.
          rngs: gives dropout its keys, in place of what the constructor was given.

        Returns:
          [..., T, D] of x's dtype; with `residual`, (the last branch, the stream to add it to).

        Raises:
          ValueError: shapes do not fit, or a named implementation cannot run.
        """
        if deterministic is None:
            deterministic = self.dropout.deterministic
        drops = not deterministic and max(self.dropout.rate, self.drop_path.rate) > 0

        def drop(branch: jax.Array) -> jax.Array:
            branch = self.dropout(branch, deterministic=deterministic, rngs=rngs)
            return self.drop_path(branch, deterministic=deterministic, rngs=rngs)

        scale1, scale2 = (
            None if scale is None else scale[...]
            for scale in (self.layer_scale1, self.layer_scale2)
        )
        y, stream = normalise(self.norm1, x, residual)
        tables = tables_of(
            self.rope, positions, cos, sin, length=x.shape[-2], head_size=self.head_dim
        )
        kernel, bias = affine(self.qkv)
        attended = self_attention(
            y,
            kernel,
            bias,
            self._head_norms(),
            tables,
            interleaved=self.rope is not None and self.rope.interleaved,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            epsilon=self.epsilon,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=self.is_causal,
            precision=precision_of(self.qkv),
            implementation=self.implementation,
            attention_implementation=self.attention_implementation,
        )
        kernel, bias = affine(self.project)
        branch, pre_bias = project(
            attended,
            kernel,
            bias,
            drops=drops or scale1 is not None,
            dtype=self.project.dtype,
            precision=precision_of(self.project),
            implementation=self.implementation,
        )
        if drops:
            branch = drop(branch)
        y, stream = normalise(self.norm2, branch, stream, pre_bias, scale1)
        if residual is None and not drops and scale2 is None:
            return self.mlp(y, residual=stream)
        branch = scaled(self.mlp(y), scale2)
        if drops:
            branch = drop(branch)
        if residual is None:
            return stream + branch.astype(stream.dtype)
        return branch, stream

    def _head_norms(self) -> HeadNorms | None:
        if self.head_norm is None or self.query_scale is None or self.key_scale is None:
            return None
        biases = (None if b is None else b[...] for b in (self.query_bias, self.key_bias))
        return HeadNorms(self.head_norm, self.query_scale[...], self.key_scale[...], *biases)
