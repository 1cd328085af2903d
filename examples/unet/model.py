"""The U-Net, with group norm and SiLU, on the fused layers of jaxfused.

Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015,
https://arxiv.org/abs/1505.04597
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx


class UNet(nnx.Module):
    """Maps images to each pixel's logit of being foreground.

    Each level halves the image and doubles the channels. On the way back up, the features of each level
    are concatenated with those that this level had before it was halved.

    Args:
      base: channels of the first level.
      levels: how many resolutions there are; 64 channels and 5 levels are the paper's 64 to 1024.
      groups: of the group norms; divides `base`.
      channels: of the images.
      dtype: of the computation; parameters are float32.
      rngs: makes the parameters.

    Raises:
      ValueError: `groups` does not divide `base`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from examples.unet.model import UNet
      >>> model = UNet(base=8, levels=3, groups=4, channels=1, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 32, 48, 1))).shape
      (2, 32, 48)
    """

    def __init__(
        self,
        *,
        base: int,
        levels: int,
        groups: int,
        channels: int,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if base % groups:
            raise ValueError(
                f"the groups of the norms must divide the channels, but there are {groups} groups"
                f" and {base} channels; pass a multiple of {groups} channels."
            )
        self.levels = levels
        block = functools.partial(Block, groups=groups, dtype=dtype, rngs=rngs)
        widths = [base * 2**level for level in range(levels)]
        self.down = nnx.List(
            block(before, width)
            for before, width in zip([channels, *widths[:-1]], widths, strict=True)
        )
        # The transposed convolution's windows do not overlap: a result's pixel reads one weight of four
        # for each input channel, so the variance is scaled by 4.
        of_one_weight = nnx.initializers.variance_scaling(4.0, "fan_in", "truncated_normal")
        enlarge = functools.partial(
            jaxfused.nnx.ConvTranspose,
            kernel_size=(2, 2),
            strides=(2, 2),
            kernel_init=of_one_weight,
            dtype=dtype,
            rngs=rngs,
        )
        self.enlarge = nnx.List(enlarge(2 * width, width) for width in widths[:-1])
        self.up = nnx.List(block(2 * width, width) for width in widths[:-1])
        self.head = jaxfused.nnx.Linear(base, 1, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits, [B, H, W] in float32, of `images`, [B, H, W, channels].

        Raises:
          ValueError: H or W cannot be halved `levels` - 1 times.
        """
        multiple = 2 ** (self.levels - 1)
        if images.shape[1] % multiple or images.shape[2] % multiple:
            raise ValueError(
                f"{self.levels} levels halve an image {self.levels - 1} times, but it has"
                f" {images.shape[1]} x {images.shape[2]} pixels; pass multiples of {multiple}."
            )
        seen = []
        x = images
        for level, block in enumerate(self.down):
            if level:
                x = jaxfused.max_pool(x, 2, strides=2)
            x = block(x)
            seen.append(x)
        ways_up = list(zip(seen[:-1], self.enlarge, self.up, strict=True))
        for skip, enlarge, block in reversed(ways_up):
            x = block(jaxfused.Concatenated(skip, enlarge(x)))
        return self.head(x)[..., 0].astype(jnp.float32)


class Block(nnx.Module):
    """Applies convolution, group norm and SiLU, twice."""

    def __init__(
        self,
        before: int,
        width: int,
        *,
        groups: int,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        layer = functools.partial(
            jaxfused.nnx.ConvNormAct,
            out_features=width,
            kernel_size=(3, 3),
            norm="group_norm",
            num_groups=groups,
            activation="silu",
            dtype=dtype,
            rngs=rngs,
        )
        self.first = layer(before)
        self.second = layer(width)

    def __call__(self, x: jax.Array | jaxfused.Concatenated) -> jax.Array:
        """Maps [B, H, W, before] to [B, H, W, width]."""
        return self.second(self.first(x))
