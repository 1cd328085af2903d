"""DeepLabV3 over a ResNet, as in torchvision, on the fused layers of jaxfused.

Source: Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", 2017,
https://arxiv.org/abs/1706.05587
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx


@dataclass(frozen=True)
class DeepLabSize:
    """The shape of a DeepLabV3, apart from its images and classes."""

    depths: tuple[int, int, int, int]
    """Blocks of each stage; where a ResNet's last two stages halve the image, these dilate instead."""
    width: int = 64
    """Channels within the blocks of the first stage; each stage doubles them."""
    head: int = 256
    """Channels of each branch of the head."""
    rates: tuple[int, ...] = (12, 24, 36)
    """Dilations of the head's windows."""


DEEPLABS = {
    "deeplabv3-resnet50": DeepLabSize((3, 4, 6, 3)),
    "deeplabv3-resnet101": DeepLabSize((3, 4, 23, 3)),
}


class DeepLabV3(nnx.Module):
    """Maps images to a logit for each class at each pixel.

    The model is for inference only: batch norms use their running averages, and there is no dropout.
    `jaxfused.nnx.fold_batch_norms` makes the norms a part of the convolutions.

    Args:
      size: one of `DEEPLABS`.
      channels: of the images.
      classes: how many logits a pixel has.
      auxiliary: whether there is a second head, which reads the third stage.
      dtype: of the computation; parameters are float32.
      rngs: makes the parameters.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from examples.unet.deeplab import DeepLabSize, DeepLabV3
      >>> size = DeepLabSize((1, 1, 1, 1), width=4, head=4)
      >>> answer = lambda x: DeepLabV3(size, channels=3, classes=5, rngs=nnx.Rngs(0))(x)
      >>> jax.eval_shape(answer, jax.ShapeDtypeStruct((2, 33, 48, 3), "float32")).shape
      (2, 33, 48, 5)
    """

    def __init__(
        self,
        size: DeepLabSize,
        *,
        channels: int,
        classes: int,
        auxiliary: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shared = dict(dtype=dtype, rngs=rngs)
        self.stem = _layer(channels, size.width, 7, strides=2, **shared)
        before = size.width
        stages = []
        dilation = 1
        for index, depth in enumerate(size.depths):
            strides, first = (2 if index == 1 else 1), dilation
            if index >= 2:
                # The first block of a stage has the dilation of the stage before it.
                dilation *= 2
            blocks = []
            for j in range(depth):
                options = dict(strides=1 if j else strides, dilation=dilation if j else first)
                blocks.append(Bottleneck(before, size.width * 2**index, **options, **shared))
                before = 4 * size.width * 2**index
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.branches = nnx.List(
            [
                _layer(before, size.head, 1, **shared),
                *(_layer(before, size.head, 3, dilation=rate, **shared) for rate in size.rates),
            ]
        )
        self.pooled = _layer(before, size.head, 1, **shared)
        self.project = _layer(size.head * (len(size.rates) + 2), size.head, 1, **shared)
        self.last = _layer(size.head, size.head, 3, **shared)
        self.head = jaxfused.nnx.Linear(size.head, classes, **shared)
        self.auxiliary_last = self.auxiliary_head = nnx.data(None)
        if auxiliary:
            narrow = before // 8
            self.auxiliary_last = _layer(before // 2, narrow, 3, **shared)
            self.auxiliary_head = jaxfused.nnx.Linear(narrow, classes, **shared)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits, [B, H, W, classes] in float32, of `images` [B, H, W, channels]."""
        *_, features = self._features(images)
        return _enlarged(self.head(self.last(self._context(features))), images)

    def with_auxiliary(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logits, and those of the second head."""
        *_, third, features = self._features(images)
        logits = self.head(self.last(self._context(features)))
        return tuple(
            _enlarged(y, images) for y in (logits, self.auxiliary_head(self.auxiliary_last(third)))
        )

    def _features(self, images: jax.Array) -> list[jax.Array]:
        """Returns the result [B, h, w, C] of each stage, of its own size h x w."""
        x = jaxfused.max_pool(self.stem(images), 3, strides=2, padding=((1, 1), (1, 1)))
        seen = []
        for blocks in self.stages:
            for block in blocks:
                x = block(x)
            seen.append(x)
        return seen

    def _context(self, x: jax.Array) -> jax.Array:
        """Concatenates convolutions of several dilations and the image's mean, and projects them."""
        mean = self.pooled(jaxfused.global_avg_pool(x)[:, None, None])
        parts = [branch(x) for branch in self.branches]
        parts.append(jnp.broadcast_to(mean, (*x.shape[:-1], mean.shape[-1])))
        return self.project(jnp.concatenate(parts, axis=-1))


class Bottleneck(nnx.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with norms, added to the block's input."""

    def __init__(self, before: int, width: int, *, strides: int, dilation: int, **shared):
        self.first = _layer(before, width, 1, **shared)
        self.second = _layer(width, width, 3, strides=strides, dilation=dilation, **shared)
        self.third = _layer(width, 4 * width, 1, **shared)
        self.shortcut = nnx.data(None)
        if before != 4 * width or strides > 1:
            self.shortcut = _layer(before, 4 * width, 1, strides=strides, activation=None, **shared)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, H, W, before] to [B, H / strides, W / strides, 4 width]."""
        residual = x if self.shortcut is None else self.shortcut(x)
        return self.third(self.second(self.first(x)), residual=residual)


def _layer(
    before: int, width: int, window: int, *, strides: int = 1, dilation: int = 1, **shared
) -> jaxfused.nnx.ConvNormAct:
    """Returns a convolution with its norm and activation, padded symmetrically, as torch does."""
    around = dilation * (window - 1) // 2
    return jaxfused.nnx.ConvNormAct(
        before,
        width,
        (window, window),
        strides,
        padding=[(around, around)] * 2,
        kernel_dilation=dilation,
        use_running_average=True,
        **shared,
    )


def _enlarged(logits: jax.Array, images: jax.Array) -> jax.Array:
    """Resizes the logits bilinearly to the size of the images."""
    return jaxfused.resize(logits.astype(jnp.float32), images.shape[1:3])
