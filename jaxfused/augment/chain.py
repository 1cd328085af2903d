"""A chain of transforms: draws the parameters of each for each image, and runs all in few passes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.augment import plan
from jaxfused.augment.batch import Batch
from jaxfused.augment.drawing import Draws, as_key, sampled
from jaxfused.augment.running import (
    Spec,
    applied,
    check_channels,
    check_classes,
    check_draws,
    check_squares,
    checked,
)
from jaxfused.augment.transform import Part, Transform, check_transform
from jaxfused.runtime.checks import as_dtype, check_finite
from jaxfused.runtime.lowering import jax_defaults


class Chain:
    """Random changes of images, one after the other, in as few passes over them as possible.

    Adjacent geometric transforms are composed to one map and one resampling; pointwise transforms that
    follow them run in the same pass, which reads the images once and writes them once. A statistic,
    such as the mean around which contrast is changed, reads the images once more. `describe`
    says which transforms share a pass. Within a pass, values are float32 (float64 for float64 images)
    and are rounded at its end only; what a geometric transform moves out of the image can come back in
    the same pass, except through a crop.

    The draws for an image depend on its key alone: they are the same on any number of devices, and for
    all frames of a video.

    Args:
      transforms: in their order.
      dtype: of the resulting images; None for that of the images, or float32 after `Normalize`. uint8
        images become floating ones of 0 to 1.
      mask_fill: value of masks where an image has the value `fill`.
      implementation: None for the fastest that can run, or "cuda", "xla", of the passes that resample
        or change pixels by themselves.

    Raises:
      ValueError: the transforms cannot be in this order, or an option does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfused import augment
      >>> chain = augment.Chain(
      ...     augment.RandomResizedCrop(4),
      ...     augment.RandomHorizontalFlip(),
      ...     augment.ColorJitter(brightness=0.4, hue=0.1),
      ...     augment.Normalize(0.5, 0.25),
      ...     dtype=jnp.bfloat16,
      ... )
      >>> images = jnp.zeros((2, 8, 8, 3), jnp.uint8)
      >>> jax.jit(chain)(jax.random.key(0), images).shape
      (2, 4, 4, 3)
      >>> print(chain.describe())
      pass 1: RandomResizedCrop, RandomHorizontalFlip, ColorJitter, Normalize (one resampling)
    """

    def __init__(
        self,
        *transforms: Any,
        dtype: Any = None,
        mask_fill: float = 0.0,
        implementation: dispatch.Implementation | None = None,
    ):
        for transform in transforms:
            check_transform("Chain", transform)
        as_dtype("Chain", "dtype", dtype)
        if dtype is not None and not (
            dtype == jnp.uint8 or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        ):
            raise ValueError(
                f"Chain: dtype is {jnp.dtype(dtype)}, but images are uint8 or floating; pass one of"
                " these."
            )
        check_finite("Chain", "mask_fill", mask_fill)
        self.transforms: tuple[Transform, ...] = transforms
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.mask_fill = mask_fill
        self.implementation = implementation
        self.parts: tuple[Part, ...] = tuple(part for t in transforms for part in t.parts)
        plan.check(self.parts)
        if plan.is_normalized(self.parts) and self.dtype == jnp.uint8:
            raise ValueError(
                "Chain: dtype is uint8, but Normalize makes floats; pass another dtype."
            )
        self._passes = plan.passes(self.parts)
        self._spec = Spec(self.parts, self._passes, self.dtype, mask_fill, implementation)

    def __repr__(self) -> str:
        options = [
            f"dtype={self.dtype}" if self.dtype is not None else "",
            f"mask_fill={self.mask_fill:g}" if self.mask_fill else "",
            f"implementation={self.implementation!r}" if self.implementation else "",
        ]
        lines = [repr(t) for t in self.transforms] + [option for option in options if option]
        return "\n".join(["Chain(", *(f"  {line}," for line in lines), ")"])

    def describe(self) -> str:
        """Returns the passes over the images, one line for each, with their transforms."""
        return plan.described(self._passes, self.parts)

    def __call__[T: (jax.Array, Batch)](self, key: jax.Array, images: T, index: Any = None) -> T:
        """Returns the images, or a `Batch`, after random changes.

        Args:
          key: one key, from which each image gets its own by `jax.random.fold_in` with its index; or
            keys [B], one for each image.
          images: [B, H, W, C], one image [H, W, C] with its own key, or a `Batch`; uint8 or floating of
            0 to 1. Videos [B, T, H, W, C] have the same draws for all frames.
          index: [B] of whole numbers, the index of each image; None for 0, 1, ... A device that has a
            part of a batch in a `jax.shard_map` passes that part's indices.

        Returns:
          What `images` is: an array of the chain's dtype, or a `Batch`.

        Raises:
          ValueError: shapes or dtypes do not fit.
        """
        if not isinstance(images, (Batch, Mapping, type(None))) and jnp.ndim(images) == 3:
            one = jnp.asarray(images)[None]
            return self.apply(self.sample(as_key(key)[None], one), one)[0]
        return self.apply(self.sample(key, images, index), images)

    def sample(self, key: jax.Array, images: jax.Array | Batch, index: Any = None) -> Draws:
        """Draws what the chain does with each image; only shapes and sizes of the images matter.

        Args:
          key: as in a call.
          images: as in a call, with a batch.
          index: as in a call.

        Returns:
          A tree of arrays [B, ...], which `apply` takes, for these images or for others.
        """
        batch = checked(images)
        with jax_defaults("xla"):
            return sampled(self.transforms, key, batch, index)

    def apply[T: (jax.Array, Batch)](self, draws: Draws, images: T) -> T:
        """Returns the images after the changes that `sample` drew, as a call does.

        Raises:
          ValueError: the draws are another chain's or another number of images', or as in a call.
        """
        batch = checked(images)
        check_draws(self.parts, draws, len(batch.images))
        check_squares(self.parts, batch.sizes)
        for part in self.parts:
            check_channels(part, batch.images.shape[-1])
            check_classes(part, batch.labels)
        with jax_defaults("xla"):
            result = applied(self._spec, draws, batch)
        return result if isinstance(images, Batch) else result.images
