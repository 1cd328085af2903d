"""The Vision Transformer, in the sizes of its papers, on the fused layers of jaxfused.

Each block returns the residual stream, its last branch's product and that product's bias. The next norm
adds them: `y, stream = norm(delta, residual=stream, pre_bias=bias)`. The norm's backward kernel then
sums the bias's gradient from values that it has in registers.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, https://arxiv.org/abs/2010.11929
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfused.nnx
from examples.multi_gpu.layers import self_attention, split_tokens
from examples.multi_gpu.metadata import names

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Maps (query, key, value), all [B, T, heads, width / heads], to an output of the same shape."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""(delta, stream, bias): the product to be added next, the residual stream, and the product's bias."""


@dataclass(frozen=True)
class ViTSize:
    """The shape of a Vision Transformer, apart from its images and classes."""

    patch: int
    depth: int
    width: int
    heads: int
    hidden: int
    """Number of features inside the MLP."""


# "vit-digits" learns 8 x 8 pixels in a minute on two CPU cores. Sources of ti, s: DeiT
# (https://arxiv.org/abs/2012.12877); b, l, h: the paper above, table 1; g: Zhai et al., "Scaling Vision
# Transformers", 2022, table 2.
MODELS = {
    "vit-digits": ViTSize(patch=2, depth=4, width=48, heads=4, hidden=96),
    "vit-ti16": ViTSize(patch=16, depth=12, width=192, heads=3, hidden=768),
    "vit-s16": ViTSize(patch=16, depth=12, width=384, heads=6, hidden=1536),
    "vit-s32": ViTSize(patch=32, depth=12, width=384, heads=6, hidden=1536),
    "vit-b16": ViTSize(patch=16, depth=12, width=768, heads=12, hidden=3072),
    "vit-b32": ViTSize(patch=32, depth=12, width=768, heads=12, hidden=3072),
    "vit-l16": ViTSize(patch=16, depth=24, width=1024, heads=16, hidden=4096),
    "vit-l32": ViTSize(patch=32, depth=24, width=1024, heads=16, hidden=4096),
    "vit-h14": ViTSize(patch=14, depth=32, width=1280, heads=16, hidden=5120),
    "vit-g14": ViTSize(patch=14, depth=40, width=1408, heads=16, hidden=6144),
}


class VisionTransformer(nnx.Module):
    """Maps images to logits.

    Args:
      size: one of `MODELS`.
      image_size: height and width of the square images, a multiple of `size.patch`.
      channels: of the images.
      classes: how many logits.
      pool: "token" reads the class from a learned token, "mean" from the mean over the patches.
      dropout: rate after each attention and MLP.
      drop_path: rate at which the last block is skipped, image by image; it grows linearly from 0
        at the first block (stochastic depth).
      dtype: of the computation; parameters are float32.
      precision: "fp8" for the blocks' linear layers in float8.
      attention: the attention function.
      unroll: number of blocks in each iteration of a loop over them; None for no loop. A loop compiles
        sooner and runs slower. It needs the blocks as one stack, with parameters [depth, ...]; without
        a loop each block has parameters of its own.
      rngs: makes the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from examples.vit.model import MODELS, VisionTransformer
      >>> model = VisionTransformer(
      ...     MODELS["vit-digits"], image_size=8, channels=1, classes=10, rngs=nnx.Rngs(0)
      ... )
      >>> model(jnp.zeros((5, 8, 8, 1))).shape
      (5, 10)
    """

    def __init__(
        self,
        size: ViTSize,
        *,
        image_size: int,
        channels: int,
        classes: int,
        pool: Literal["token", "mean"] = "token",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
        precision: Literal["fp8"] | None = None,
        attention: Attention = self_attention,
        unroll: int | None = None,
        rngs: nnx.Rngs,
    ):
        if image_size % size.patch:
            raise ValueError(
                f"the image size must be a multiple of the patch size, {size.patch}, but is"
                f" {image_size}; pass {max(image_size // size.patch, 1) * size.patch}."
            )
        self.patch = size.patch
        self.pool = pool
        self.dtype = dtype
        self.drop_path = drop_path
        self.depth = size.depth
        self.unroll = size.depth if unroll is None else min(unroll, size.depth)
        self.random = dropout > 0 or drop_path > 0
        self.embed = jaxfused.nnx.Linear(
            size.patch**2 * channels,
            size.width,
            kernel_init=nnx.initializers.lecun_normal(),
            kernel_metadata=names(None, "embed"),
            dtype=dtype,
            rngs=rngs,
        )
        patches = (image_size // size.patch) ** 2
        normal = nnx.initializers.normal(0.02)
        if pool == "token":
            self.class_token = nnx.Param(normal(rngs.params(), (1, 1, size.width)))
        tokens = patches + (pool == "token")
        self.positions = nnx.Param(normal(rngs.params(), (1, tokens, size.width)))

        # The blocks are initialised as a stack, so that one block is compiled. Unless a loop runs the
        # stack, it is then cut into separate blocks: from a stack, each step would copy the slices of
        # the parameters, and concatenate the blocks' gradients.
        @functools.partial(nnx.vmap, in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(
                size,
                dropout=dropout,
                dtype=dtype,
                precision=precision,
                attention=attention,
                rngs=rngs,
            )

        stacked = stack(rngs.split(size.depth))
        self.blocks = stacked if self.has_loop else nnx.List(_apart(stacked, size.depth))
        self.norm = jaxfused.nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = jaxfused.nnx.Linear(
            size.width,
            classes,
            kernel_init=nnx.initializers.zeros,
            kernel_metadata=names("embed", None),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, [B, classes] in float32, of `images` [B, image_size, image_size, channels].

        A `key` turns on dropout and stochastic depth; without one the model is deterministic.
        """
        patches, added = patchify(images, self.patch), self.positions[...]
        bias = self.embed.bias[...]
        if self.pool == "token":
            # The class token is a patch of zeros, whose position holds the token minus the bias that all
            # patches get later. So no array as large as the activations is concatenated.
            token = self.class_token[...] - bias
            added += jnp.pad(token, ((0, 0), (0, patches.shape[1]), (0, 0)))
            patches = jnp.pad(patches, ((0, 0), (1, 0), (0, 0)))
        if has_arrays(self.embed):
            delta = jaxfused.linear(patches.astype(self.dtype), self.embed.kernel[...])
        else:
            delta, bias = self.embed(patches), jnp.zeros_like(bias)
        delta, added = split_tokens(delta), added.astype(delta.dtype)
        stream = jnp.broadcast_to(added, delta.shape, out_sharding=sharding_of_batch(delta))

        keys = None if key is None or not self.random else jax.random.split(key, self.depth)
        drop_path = jnp.linspace(0, self.drop_path, self.depth)
        run = self._loop if self.has_loop else self._one_by_one
        delta, stream, bias = run((delta, stream, bias), keys, drop_path)

        if self.pool == "token":
            features, _ = self.norm(delta[:, 0], residual=stream[:, 0], pre_bias=bias)
        else:
            features, _ = self.norm(delta, residual=stream, pre_bias=bias)
            features = features.mean(axis=1)
        return self.head(features).astype(jnp.float32)

    @property
    def has_loop(self) -> bool:
        """True if a loop runs the blocks, which are then one stack."""
        return self.unroll < self.depth

    def _loop(self, carry: Carry, keys: jax.Array | None, drop_path: jax.Array) -> Carry:
        @functools.partial(
            nnx.scan, in_axes=(nnx.Carry, 0, 0, 0), out_axes=nnx.Carry, unroll=self.unroll
        )
        def run(carry, block, key, drop_path):
            return block(*carry, key=key, drop_path=drop_path)

        return run(carry, self.blocks, keys, drop_path)

    def _one_by_one(self, carry: Carry, keys: jax.Array | None, drop_path: jax.Array) -> Carry:
        # This jit is a cache: blocks of equal structure are traced and differentiated once.
        @functools.partial(jax.jit, static_argnums=0)
        def run(graphdef, state, carry, key, drop_path):
            return nnx.merge(graphdef, state)(*carry, key=key, drop_path=drop_path)

        for i, block in enumerate(self.blocks):
            key = None if keys is None else keys[i]
            carry = run(*nnx.split(block), carry, key, drop_path[i])
        return carry


class Block(nnx.Module):
    """Attention, then an MLP, each after a norm. The norm after each adds its output to the stream."""

    def __init__(
        self,
        size: ViTSize,
        *,
        dropout: float,
        dtype: jax.typing.DTypeLike,
        precision: Literal["fp8"] | None,
        attention: Attention,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            jaxfused.nnx.Linear,
            kernel_init=nnx.initializers.xavier_uniform(),
            dtype=dtype,
            precision=precision,
            rngs=rngs,
        )
        self.heads = size.heads
        self.precision = precision
        self.attention = attention
        self.norm1 = jaxfused.nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        self.qkv = linear(
            size.width,
            3 * size.width,
            kernel_metadata=names("embed", "heads"),
            bias_metadata=names("heads"),
        )
        self.project = linear(size.width, size.width, kernel_metadata=names("heads", "embed"))
        self.norm2 = jaxfused.nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        self.mlp = jaxfused.nnx.MLP(
            size.width,
            size.hidden,
            activation="gelu_erf",
            save="hidden",
            kernel_init=nnx.initializers.xavier_uniform(),
            kernel_metadata=names("embed", "mlp"),
            bias_metadata=names("mlp"),
            down_kernel_metadata=names("mlp", "embed"),
            down_bias_metadata=names(None),
            dtype=dtype,
            precision=precision,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(dropout)

    def __call__(
        self,
        delta: jax.Array,
        stream: jax.Array,
        bias: jax.Array,
        *,
        key: jax.Array | None,
        drop_path: jax.Array,
    ) -> Carry:
        """Returns the next `(delta, stream, bias)`."""
        keys = (None, None) if key is None else jax.random.split(key)
        y, stream = self.norm1(delta, residual=stream, pre_bias=bias)
        attended = self._attention(y)
        if key is None and has_arrays(self.project):
            kernel = self.project.kernel[...]
            delta = jaxfused.linear(attended, kernel, precision=self.precision)
            y, stream = self.norm2(delta, residual=stream, pre_bias=self.project.bias[...])
        else:
            delta = self._drop(self.project(attended), keys[0], drop_path)
            y, stream = self.norm2(delta, residual=stream)
        if key is None and self.precision is None and has_arrays(self.mlp.up, self.mlp.down):
            up, down = self.mlp.up, self.mlp.down
            weights = up.kernel[...], up.bias[...], down.kernel[...]
            delta = jaxfused.mlp(y, *weights, activation=self.mlp.activation, save=self.mlp.save)
            return delta, stream, down.bias[...]
        delta = self._drop(self.mlp(y), keys[1], drop_path)
        return delta, stream, jnp.zeros_like(bias)

    def _attention(self, y: jax.Array) -> jax.Array:
        batch, tokens, width = y.shape
        if isinstance(self.qkv, jaxfused.nnx.QuantizedLinear):
            query, key, value = (
                part.reshape(batch, tokens, self.heads, -1)
                for part in jnp.split(self.qkv(y), 3, axis=-1)
            )
        else:
            kernel, bias = self.qkv.kernel[...], self.qkv.bias[...]
            query, key, value = jaxfused.qkv_projection(
                y, kernel, bias, heads=self.heads, precision=self.precision
            )
        attended = self.attention(query, key, value)
        return attended.reshape(batch, tokens, width)

    def _drop(self, branch: jax.Array, key: jax.Array | None, drop_path: jax.Array) -> jax.Array:
        if key is None:
            return branch
        dropout_key, path_key = jax.random.split(key)
        branch = self.dropout(branch, deterministic=False, rngs=dropout_key)
        keep = jax.random.bernoulli(path_key, 1 - drop_path, (len(branch), 1, 1))
        # Division by the probability of `keep` gives the branch the same mean as without a key.
        return jnp.where(keep, branch / (1 - drop_path).astype(branch.dtype), 0)


def has_arrays(*layers: nnx.Module) -> bool:
    """Returns whether all kernels are plain arrays: none is quantised, or wrapped for calibration."""
    return all(
        isinstance(layer, jaxfused.nnx.Linear) and isinstance(layer.kernel.get_value(), jax.Array)
        for layer in layers
    )


def _apart(stack: Block, depth: int) -> list[Block]:
    """Returns the blocks of a stack, each with its own parameters."""
    graphdef, state = nnx.split(stack)
    return [nnx.merge(graphdef, jax.tree.map(lambda p: p[i], state)) for i in range(depth)]  # noqa: B023


def patchify(images: jax.Array, patch: int) -> jax.Array:
    """Maps [B, H, W, C] to [B, H/patch * W/patch, patch * patch * C], row by row."""
    batch, height, width, channels = images.shape
    kept = sharding_of_batch(images)
    shape = (batch, height // patch, patch, width // patch, patch, channels)
    grid = jnp.reshape(images, shape, out_sharding=kept).transpose(0, 1, 3, 2, 4, 5)
    return jnp.reshape(grid, (batch, -1, patch * patch * channels), out_sharding=kept)


def sharding_of_batch(x: jax.Array) -> NamedSharding | None:
    """Returns the sharding of the first axis under Explicit mesh axes, for reshapes of x; else None."""
    here = jax.typeof(x).sharding
    return NamedSharding(here.mesh, P(here.spec[0])) if here.mesh.explicit_axes else None
