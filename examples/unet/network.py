"""A segmentation network with its scaling and classes, from a training run or a weights file."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused.nnx
from examples.runs import Run
from examples.unet.torchvision_weights import load_deeplab
from examples.unet.train import create

# fmt: off
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat",
    "chair", "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant",
    "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
"""Classes of torchvision's published weights."""


@dataclass(frozen=True)
class Network:
    """A model, the scaling of its images, and the names of its classes."""

    model: nnx.Module
    """Maps pictures, floats [B, H, W, channels], to logits: [B, H, W] of the foreground, or
    [B, H, W, classes]."""
    name: str
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel, which is subtracted from pixels between 0 and 1."""
    deviation: tuple[float, ...]
    """Standard deviation of each channel, by which pixels are then divided."""
    dtype: str
    """Dtype of the computation."""

    def answer(self, model: nnx.Module, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the class of each pixel, and its probability.

        Args:
          model: this network's model, or an equivalent one.
          images: uint8 [B, H, W, channels].

        Returns:
          Class numbers, uint8 [B, H, W], and their probabilities in 255ths, uint8 [B, H, W].
        """
        logits = model(self.scaled(images))
        if logits.ndim == 3:
            found = logits >= 0
            sure = jax.nn.sigmoid(jnp.abs(logits))
        else:
            found = jnp.argmax(logits, axis=-1)
            sure = 1 / jnp.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1)
        return found.astype(jnp.uint8), jnp.round(sure * 255).astype(jnp.uint8)

    def scaled(self, images: jax.Array) -> jax.Array:
        """Maps uint8 pictures to the normalised floats that the model reads."""
        mean, deviation = (jnp.asarray(part, jnp.float32) for part in (self.mean, self.deviation))
        return ((images.astype(jnp.float32) / 255 - mean) / deviation).astype(self.dtype)


def of_run(run: Run, *, dtype: str) -> Network:
    """Returns the network of a run of examples.unet.train."""
    run.check_program("examples.unet.train", "levels")
    flags, channels = argparse.Namespace(**run.flags), run.config["channels"]
    flags.dtype = dtype
    graphdef, params = create(flags, channels=channels, size=flags.crop)
    model = nnx.merge(graphdef, run.restore(dict(params=params))["params"])
    return Network(
        model,
        name="U-Net",
        channels=channels,
        classes=("background", "foreground"),
        mean=(0.5,) * channels,
        deviation=(0.5,) * channels,
        dtype=dtype,
    )


def of_weights(path: Path, *, dtype: str) -> Network:
    """Returns the network of a file with torchvision's state dict; batch norms are folded."""
    model = load_deeplab(path, dtype=dtype)
    jaxfused.nnx.fold_batch_norms(model)
    count = model.head.out_features
    names = VOC if count == len(VOC) else tuple(f"class {i}" for i in range(count))
    return Network(
        model,
        name="DeepLabV3",
        channels=3,
        classes=names,
        mean=(0.485, 0.456, 0.406),
        deviation=(0.229, 0.224, 0.225),
        dtype=dtype,
    )


def narrowed(model: nnx.Module, dtype: Any) -> nnx.Module:
    """Returns the model with kernels of `dtype`; norms, biases and scales stay in float32."""

    def leaf(path: Any, array: jax.Array) -> jax.Array:
        # Scales of a quantised kernel have two axes too, but must stay in float32.
        is_kernel = array.ndim >= 2 and "scale" not in jax.tree_util.keystr(path)
        return array.astype(dtype) if is_kernel and array.dtype == jnp.float32 else array

    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(leaf, state))
