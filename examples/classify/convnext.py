"""The ConvNeXt, in the sizes of its paper, on the fused layers of jaxfused.

Source: Liu et al., "A ConvNet for the 2020s", 2022, https://arxiv.org/abs/2201.03545
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx


@dataclass(frozen=True)
class ConvNeXtSize:
    """The shape of a ConvNeXt, apart from its images and classes."""

    depths: tuple[int, ...]
    """Blocks of each stage; every stage but the first halves the image."""
    widths: tuple[int, ...]
    patch: int = 4
    """Height and width, in pixels, of the patches that the first layer embeds."""
    kernel: int = 7
    """Height and width of the depthwise convolutions' windows."""


# "convnext-digits" learns 8 x 8 digits in a minute or two on two CPU cores.
CONVNEXTS = {
    "convnext-digits": ConvNeXtSize((2, 2), (32, 64), patch=1, kernel=3),
    "convnext-t": ConvNeXtSize((3, 3, 9, 3), (96, 192, 384, 768)),
    "convnext-s": ConvNeXtSize((3, 3, 27, 3), (96, 192, 384, 768)),
    "convnext-b": ConvNeXtSize((3, 3, 27, 3), (128, 256, 512, 1024)),
    "convnext-l": ConvNeXtSize((3, 3, 27, 3), (192, 384, 768, 1536)),
}


class ConvNeXt(nnx.Module):
    """Maps images to logits.

    Args:
      size: one of `CONVNEXTS`.
      image_size: height and width of the square images.
      channels: of the images.
      classes: how many logits.
      drop_path: rate at which the last block is skipped, image by image; it grows linearly from 0 at
        the first block (stochastic depth).
      dtype: of the computation; parameters are float32.
      rngs: makes the parameters.

    Raises:
      ValueError: the image cannot be cut into patches and halved as often as there are stages.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from examples.classify.convnext import CONVNEXTS, ConvNeXt
      >>> model = ConvNeXt(
      ...     CONVNEXTS["convnext-digits"], image_size=8, channels=1, classes=10, rngs=nnx.Rngs(0)
      ... )
      >>> model(jnp.zeros((5, 8, 8, 1))).shape
      (5, 10)
    """

    def __init__(
        self,
        size: ConvNeXtSize,
        *,
        image_size: int,
        channels: int,
        classes: int,
        drop_path: float = 0.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        multiple = size.patch * 2 ** (len(size.depths) - 1)
        if image_size % multiple:
            raise ValueError(
                f"the image size must be a multiple of {multiple}, which the stages divide it by, but"
                f" is {image_size}; pass {max(image_size // multiple, 1) * multiple}."
            )
        normal = nnx.initializers.truncated_normal(0.02)
        self.patch = size.patch
        before = (channels * size.patch**2, *(4 * width for width in size.widths[:-1]))
        # A convolution whose windows do not overlap is a matrix product.
        self.downs = nnx.List(
            jaxfused.nnx.Linear(many, width, kernel_init=normal, dtype=dtype, rngs=rngs)
            for many, width in zip(before, size.widths, strict=True)
        )
        # norms[0] follows downs[0]; every other norms[i] precedes downs[i].
        norms = (size.widths[0], *size.widths[:-1])
        self.norms = nnx.List(
            jaxfused.nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for width in norms
        )
        count = sum(size.depths)
        rates = iter(drop_path * i / max(count - 1, 1) for i in range(count))
        self.stages = nnx.List(
            nnx.List(
                jaxfused.nnx.ConvNeXtBlock(
                    width,
                    kernel_size=(size.kernel, size.kernel),
                    kernel_init=normal,
                    save="hidden",
                    dtype=dtype,
                    rngs=rngs,
                )
                for _ in range(depth)
            )
            for depth, width in zip(size.depths, size.widths, strict=True)
        )
        for stage in self.stages:
            for block in stage:
                block.drop_path = nnx.Dropout(next(rates), broadcast_dims=(-3, -2, -1))
        self.norm = jaxfused.nnx.LayerNorm(size.widths[-1], dtype=dtype, rngs=rngs)
        self.head = jaxfused.nnx.Linear(
            size.widths[-1], classes, kernel_init=nnx.initializers.zeros, dtype=dtype, rngs=rngs
        )

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, [B, classes] in float32, of `images` [B, image_size, image_size, channels].

        A `key` turns on stochastic depth; without one the model is deterministic.
        """
        count = sum(len(stage) for stage in self.stages)
        keys = iter([None] * count if key is None else jax.random.split(key, count))
        x = self.norms[0](self.downs[0](space_to_depth(images, self.patch)))
        for index, stage in enumerate(self.stages):
            if index:
                x = self.downs[index](space_to_depth(self.norms[index](x), 2))
            for block in stage:
                x = block(x, deterministic=key is None, rngs=next(keys))
        return self.head(self.norm(x.mean(axis=(1, 2)))).astype(jnp.float32)


def space_to_depth(x: jax.Array, size: int) -> jax.Array:
    """Maps [B, H, W, C] to [B, H / size, W / size, size * size * C]: a square becomes one pixel."""
    batch, height, width, channels = x.shape
    shape = (batch, height // size, size, width // size, size, channels)
    return x.reshape(shape).transpose(0, 1, 3, 2, 4, 5).reshape(*shape[:2], shape[3], -1)
