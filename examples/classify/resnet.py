"""The ResNet, in the sizes of its paper, on the fused layers of jaxfused.

By default it has group norm, whose statistics are those of one image: its function is the same in
training and after it, for batches of any size and on any number of devices. With norm="batch_norm" it
has the paper's batch norm, whose running averages are state next to the parameters.

Sources: He et al., "Deep Residual Learning for Image Recognition", 2015,
https://arxiv.org/abs/1512.03385; Wu and He, "Group Normalization", 2018, https://arxiv.org/abs/1803.08494
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx


@dataclass(frozen=True)
class ResNetSize:
    """The shape of a ResNet, apart from its images and classes."""

    depths: tuple[int, ...]
    """Blocks of each stage; every stage but the first halves the image and doubles the channels."""
    bottleneck: bool
    width: int = 64
    """Channels of the first stage."""
    groups: int = 32
    """Groups of channels in each norm."""
    is_small: bool = False
    """True for small images: the first convolution is 3 x 3 with stride 1, and no max pool follows."""


# "resnet-digits" learns 8 x 8 digits in a minute or two on two CPU cores.
RESNETS = {
    "resnet-digits": ResNetSize((1, 1), bottleneck=False, width=32, groups=8, is_small=True),
    "resnet-18": ResNetSize((2, 2, 2, 2), bottleneck=False),
    "resnet-34": ResNetSize((3, 4, 6, 3), bottleneck=False),
    "resnet-50": ResNetSize((3, 4, 6, 3), bottleneck=True),
    "resnet-101": ResNetSize((3, 4, 23, 3), bottleneck=True),
    "resnet-152": ResNetSize((3, 8, 36, 3), bottleneck=True),
}


class ResNet(nnx.Module):
    """Maps images of any size to logits.

    Args:
      size: one of `RESNETS`.
      channels: of the images.
      classes: how many logits.
      norm: "group_norm" or "batch_norm".
      dtype: of the computation; parameters are float32.
      rngs: makes the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from examples.classify.resnet import RESNETS, ResNet
      >>> model = ResNet(RESNETS["resnet-digits"], channels=1, classes=10, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((5, 8, 8, 1))).shape
      (5, 10)
    """

    def __init__(
        self,
        size: ResNetSize,
        *,
        channels: int,
        classes: int,
        norm: Literal["batch_norm", "group_norm"] = "group_norm",
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared = dict(
            norm=norm,
            num_groups=size.groups,
            momentum=0.9,
            kernel_init=nnx.initializers.he_normal(),
            dtype=dtype,
            rngs=rngs,
        )
        kernel, strides = ((3, 3), 1) if size.is_small else ((7, 7), 2)
        self.embed = jaxfused.nnx.ConvNormAct(channels, size.width, kernel, strides, **shared)
        self.pools = not size.is_small
        before = size.width
        blocks = []
        for stage, depth in enumerate(size.depths):
            features = size.width * 2**stage
            for index in range(depth):
                strides = 2 if stage and not index else 1
                block = functools.partial(jaxfused.nnx.ResNetBlock, bottleneck=size.bottleneck)
                blocks.append(block(before, features, strides=strides, **shared))
                before = features * (4 if size.bottleneck else 1)
        self.blocks = nnx.List(blocks)
        self.head = jaxfused.nnx.Linear(
            before, classes, kernel_init=nnx.initializers.zeros, dtype=dtype, rngs=rngs
        )

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns logits, [B, classes] in float32, of `images` [B, H, W, channels].

        The model is deterministic: `key` is an argument of all models of examples/classify.
        """
        del key
        x = self.embed(images)
        if self.pools:
            x = jaxfused.max_pool(x, 3, strides=2, padding="SAME")
        for block in self.blocks:
            x = block.rectified(x)
        return self.head(x.array().mean(axis=(1, 2))).astype(jnp.float32)
