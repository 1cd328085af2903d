"""A decoder-only language model, of any of the families in `config`, on the fused layers of jaxfused.

Each block returns the residual stream and what its last branch adds to it, so that the addition happens
inside the next norm: `y, stream = norm(branch, residual=stream)`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx
from examples.lm.config import Config
from examples.lm.experts import Experts
from examples.lm.pages import Pages, Rows
from examples.multi_gpu import layers as sharded
from examples.multi_gpu.metadata import names

Cache = tuple[jaxfused.KVCache | Pages, ...]
"""Keys and values of the tokens read so far, one entry a layer."""
Reduction = Literal["mean", "sum", "none"]
Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines of rope, each [tokens, rotary_dim / 2], or with a batch axis first."""


class LanguageModel(nnx.Module):
    """Maps tokens to the features from which the head computes the next token's logits.

    Args:
      config: the shape, as `read_config` returns it.
      dtype: of the computation.
      param_dtype: of the parameters.
      precision: "fp8" for the blocks' linear layers in float8.
      rngs: makes the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from examples.lm.config import read_config
      >>> from examples.lm.model import LanguageModel
      >>> config = read_config(dict(
      ...     model_type="qwen3", vocab_size=100, hidden_size=32, intermediate_size=64,
      ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
      ...     max_position_embeddings=64, rope_theta=1e4))
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> features, _ = model(jnp.zeros((3, 7), int))
      >>> model.logits(features).shape
      (3, 7, 100)
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: Literal["fp8"] | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = dtype
        self.precision = precision
        self.embed = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            embedding_metadata=names("vocab", "embed"),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        options = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, layer, precision=precision, **options) for layer in range(config.depth)]
        )
        self.norm = _norm(config, config.width, **options)
        if not config.is_tied:
            self.head = jaxfused.nnx.Linear(
                config.width,
                config.vocabulary,
                use_bias=False,
                kernel_init=nnx.initializers.normal(0.02),
                kernel_metadata=names("embed", "vocab"),
                **options,
            )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: Cache | None = None,
        counts: jax.Array | None = None,
        sequences: jax.Array | None = None,
        rows: Rows | None = None,
        balances: list[jax.Array] | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the features [B, T, width] of tokens [B, T], and the cache with their keys and values.

        Args:
          tokens: integers below the vocabulary's size.
          positions: place of each token in its text, [B, T]; by default they follow the cache's tokens.
          segments: number of each token's document, [B, T]: attention is within a document. Not with a
            cache.
          cache: keys and values of earlier tokens.
          counts: number of real tokens among the T, [B], before the padding; for a `KVCache`.
          sequences: index of each sequence in a `KVCache`, [B]; by default all in order.
          rows: the text of each of the T tokens and its pages, where the cache is `Pages`; B is then 1.
          balances: a list to which each layer's experts append the loss that balances their load.
        """
        if rows is not None:
            positions = rows.positions[None]
        elif positions is None and cache is None:
            positions = jnp.arange(tokens.shape[1])
        elif positions is None:
            lengths = cache[0].lengths if sequences is None else cache[0].lengths[sequences]
            positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        tables = {
            rope: jaxfused.rope_tables(
                positions, rope.rotary_dim, theta=rope.theta, scaling=rope.scaling
            )
            for rope in dict.fromkeys(self.config.ropes)
            if rope is not None
        }
        stream = sharded.split_tokens(self.embed(tokens))
        stream *= jnp.asarray(self.config.embedding_scale, stream.dtype)
        branch = jnp.zeros_like(stream)

        config = self.config
        gathers = cache is None and config.layers is not None
        batched = (True, True, jnp.ndim(positions) == 2, *(True,) * 5)

        # This jit is a cache: blocks of equal structure are traced and differentiated once.
        @functools.partial(jax.jit, static_argnums=0)
        def run(graphdef, state, *arguments):
            def call(state, *arguments):
                return nnx.merge(graphdef, state)(*arguments)

            if not gathers:
                return call(state, *arguments)
            # With "fp8" a layer rounds the stored parameters to float8, without a cast to `self.dtype`.
            dtype = self.dtype if self.precision is None else None
            return sharded.run_layer(call, state, *arguments, batched=batched, dtype=dtype)

        layers = []
        for i, block in enumerate(self.blocks):
            table = tables.get(self.config.ropes[i])
            layer = None if cache is None else cache[i]
            stream, branch, layer, balance = run(
                *nnx.split(block), stream, branch, table, segments, layer, counts, sequences, rows
            )
            if balances is not None and balance is not None:
                balances.append(balance)
            layers.append(layer)
        features, _ = self.norm(branch, residual=stream)
        return features, None if cache is None else tuple(layers)

    def empty_cache(self, *, batch: int, length: int, chunk: int) -> Cache:
        """Returns a cache for `length` tokens of each of `batch` sequences.

        A layer with a window stores only the window and a chunk: a call may read at most `chunk` tokens.
        """
        config = self.config
        return tuple(
            jaxfused.KVCache.zeros(
                batch=batch,
                length=length if window is None else min(length, window + chunk - 1),
                window=None if window is None else min(length, window),
                key_heads=config.key_heads,
                head_size=config.head_size,
                dtype=self.dtype,
            )
            for window in config.windows
        )

    def empty_pages(self, *, pages: int, page_size: int) -> tuple[Pages, ...]:
        """Returns a pool of pages of `page_size` tokens for each layer, in place of a cache."""
        config = self.config
        sizes = dict(key_heads=config.key_heads, head_size=config.head_size, dtype=self.dtype)
        return tuple(
            Pages.zeros(pages=pages, page_size=page_size, **sizes) for _ in range(config.depth)
        )

    def logits(self, features: jax.Array) -> jax.Array:
        """Returns the logits [..., vocabulary] in float32 of features [..., width]."""
        if self.config.is_tied:
            embedding = self.embed.embedding[...].astype(features.dtype)
            logits = jnp.einsum(
                "...d,vd->...v", features, embedding, preferred_element_type=jnp.float32
            )
        else:
            logits = self.head(features).astype(jnp.float32)
        cap = self.config.final_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def loss(
        self, features: jax.Array, labels: jax.Array, *, reduction: Reduction = "mean"
    ) -> jax.Array:
        """Returns the cross-entropy of labels [B, T] that are not -1, by features [B, T, width]."""
        head = self.embed.embedding[...].T if self.config.is_tied else self.head.kernel[...]
        return sharded.linear_cross_entropy(
            features,
            head,
            labels,
            ignore_index=-1,
            logits_soft_cap=self.config.final_cap,
            reduction=reduction,
        )


class Block(nnx.Module):
    """Attention and a gated MLP, each after a norm. The norm after each adds its output to `stream`."""

    def __init__(
        self,
        config: Config,
        layer: int,
        *,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        precision: Literal["fp8"] | None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.key_heads = config.heads, config.key_heads
        self.head_size = config.head_size
        self.window = config.windows[layer]
        self.scale = config.scale
        self.cap = config.attention_cap
        self.precision = precision
        options = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = functools.partial(_norm, config, **options)
        linear = functools.partial(
            jaxfused.nnx.Linear,
            kernel_init=nnx.initializers.normal(0.02),
            precision=precision,
            **options,
        )
        self.norm1 = norm(config.width)
        columns = (config.heads + 2 * config.key_heads) * config.head_size
        self.qkv = linear(
            config.width,
            columns,
            use_bias=config.qkv_bias,
            kernel_metadata=names("embed", "heads"),
            bias_metadata=names("heads"),
        )
        self.q_norm, self.k_norm = (
            norm(config.head_size) if config.head_norms else nnx.data(None) for _ in "qk"
        )
        self.project = linear(
            config.heads * config.head_size,
            config.width,
            use_bias=config.project_bias,
            kernel_metadata=names("heads", "embed"),
        )
        self.sinks = nnx.data(None)
        if config.has_sinks:
            self.sinks = nnx.Param(jnp.zeros(config.heads, param_dtype))
        self.norm2 = norm(config.width)
        if config.mixture is not None:
            self.mlp = Experts(config.width, config.hidden, config.mixture, **options)
        elif config.routed is not None:
            self.mlp = jaxfused.nnx.MoE(
                config.width,
                config.hidden,
                config.routed.experts,
                router=functools.partial(
                    jaxfused.router, k=config.routed.experts_of_token, normalise="sum"
                ),
                kernel_init=nnx.initializers.normal(0.02),
                **options,
            )
        else:
            self.mlp = jaxfused.nnx.GatedMLP(
                config.width,
                config.hidden,
                activation=config.activation,
                use_bias=config.mlp_bias,
                kernel_init=nnx.initializers.normal(0.02),
                kernel_metadata=names("embed", "mlp"),
                bias_metadata=names("mlp"),
                down_kernel_metadata=names("mlp", "embed"),
                down_bias_metadata=names(None),
                precision=precision,
                **options,
            )
        self.norm_of_attention, self.norm_of_mlp = (
            norm(config.width) if config.branch_norms else nnx.data(None) for _ in range(2)
        )

    def __call__(
        self,
        stream: jax.Array,
        branch: jax.Array,
        tables: Tables | None,
        segments: jax.Array | None,
        cache: jaxfused.KVCache | Pages | None,
        counts: jax.Array | None,
        sequences: jax.Array | None,
        rows: Rows | None,
    ) -> tuple[jax.Array, jax.Array, jaxfused.KVCache | Pages | None, jax.Array | None]:
        """Returns the next (stream, branch), both [B, T, width], the cache with these tokens, a loss.

        The loss balances the experts of a `jaxfused.nnx.MoE`; None for other MLPs.
        """
        y, stream = self.norm1(branch, residual=stream)
        query, key, value = self._qkv(y, tables)
        sinks = None if self.sinks is None else self.sinks[...]
        options = dict(scale=self.scale, logits_soft_cap=self.cap, sinks=sinks)
        if cache is None:
            attended = sharded.self_attention(
                query,
                key,
                value,
                is_causal=True,
                local_window_size=None if self.window is None else (self.window - 1, 0),
                segment_ids=segments,
                **options,
            )
        elif isinstance(cache, Pages):
            assert rows is not None
            attended, cache = cache.attend(
                *(heads[0] for heads in (query, key, value)),
                rows,
                scale=self.scale,
                window=self.window,
                soft_cap=self.cap,
                sinks=sinks,
            )
        else:
            part = dict(counts=counts, batch_index=sequences)
            cache = cache.append(key, value, **part)
            attended = cache.attend(query, **part, **options)
            read = y.shape[1] if counts is None else counts
            cache = cache.advance(read, sequences)
        branch = self.project(attended.reshape(*y.shape[:-1], -1))
        if self.norm_of_attention is not None:
            branch = self.norm_of_attention(branch)
        y, stream = self.norm2(branch, residual=stream)
        balance = None
        if isinstance(self.mlp, jaxfused.nnx.MoE):
            branch, routing = self.mlp(y, return_routing=True)
            balance = jaxfused.load_balancing_loss(routing.logits, routing.indices)
        else:
            branch = self.mlp(y)
        if self.norm_of_mlp is not None:
            branch = self.norm_of_mlp(branch)
        return stream, branch, cache, balance

    def _qkv(self, y: jax.Array, tables: Tables | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        cos, sin = (None, None) if tables is None else tables
        if isinstance(self.qkv, jaxfused.nnx.QuantizedLinear):
            heads = self.qkv(y).reshape(*y.shape[:-1], -1, self.head_size)
            query, key, value = jnp.split(heads, [self.heads, self.heads + self.key_heads], axis=-2)
            if self.q_norm is not None:
                query, key = self.q_norm(query), self.k_norm(key)
            if tables is not None:
                query, key = jaxfused.rope(query, key, cos=cos, sin=sin)
            return query, key, value
        norms = {}
        if self.q_norm is not None:
            norms = dict(
                q_scale=self.q_norm.scale[...],
                k_scale=self.k_norm.scale[...],
                epsilon=self.q_norm.epsilon,
                scale_offset=self.q_norm.scale_offset,
            )
        return jaxfused.qkv_projection(
            y,
            self.qkv.kernel[...],
            None if self.qkv.bias is None else self.qkv.bias[...],
            heads=self.heads,
            key_heads=self.key_heads,
            cos=cos,
            sin=sin,
            precision=self.precision,
            **norms,
        )


def _norm(config: Config, features: int, **options) -> jaxfused.nnx.RMSNorm:
    return jaxfused.nnx.RMSNorm(
        features,
        epsilon=config.epsilon,
        scale_offset=config.scale_offset,
        scale_init=nnx.initializers.constant(1 - config.scale_offset),
        **options,
    )
