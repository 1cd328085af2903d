"""Transforms that mix each image of a batch with the image before it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxfused.augment.transform import Mixing, transform, whole
from jaxfused.runtime.checks import check_count


class _Beta(Mixing):
    """A mixing part in which the weight of an image itself is drawn from Beta(alpha, alpha)."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        op = type(self).__name__
        if self.alpha <= 0:
            raise ValueError(
                f"{op}: alpha is {self.alpha}, but it is a parameter of the beta distribution; pass a"
                " positive number."
            )
        if self.num_classes is not None:
            check_count(op, "num_classes", self.num_classes)


@transform
class MixUp(_Beta):
    r"""Blends each image and its label with those before it in the batch; the first with the last.

    .. math:: x_i' = \lambda x_i + (1 - \lambda) x_{i-1}, \qquad
              \lambda \sim \mathrm{Beta}(\alpha, \alpha)

    Args:
      alpha: of the beta distribution.
      num_classes: of labels that are whole numbers, which become one-hot; None if labels are weights.
        Labels of num_classes or more have no weight where `jax.jit` traces them; else they are an error.
      per_image: whether each image has its own lambda, or the batch has one, as in torchvision.
      axis_name: of a `jax.shard_map` over the batch: the first image of a device has the last one of the
        device before it as its partner, as without shards.
      p: probability.

    Source: Zhang et al., "mixup: beyond empirical risk minimization", 2017,
    https://arxiv.org/abs/1710.09412; `torchvision.transforms.v2.MixUp`.
    """

    alpha: float = 1.0
    num_classes: int | None = None
    per_image: bool = False
    axis_name: str | Sequence[str] | None = None
    p: float = 1.0

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        return jax.random.beta(key, self.alpha, self.alpha, (), jnp.float32)

    def shares(self, values: Any, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        return values, values


@transform
class CutMix(_Beta):
    r"""Replaces a box of each image by that of the image before it; the first takes the last's.

    A box covers a share :math:`1 - \lambda` of the image before it is cut at the image's edges; a label
    is weighted by what is seen.

    Args:
      alpha: of the beta distribution.
      num_classes: of labels that are whole numbers, which become one-hot; None if labels are weights.
        Labels of num_classes or more have no weight where `jax.jit` traces them; else they are an error.
      per_image: whether each image has its own box, or the batch has one, as in torchvision.
      axis_name: of a `jax.shard_map` over the batch, as for `MixUp`.
      p: probability.

    Source: Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
    features", 2019, https://arxiv.org/abs/1905.04899; `torchvision.transforms.v2.CutMix`.
    """

    alpha: float = 1.0
    num_classes: int | None = None
    per_image: bool = False
    axis_name: str | Sequence[str] | None = None
    p: float = 1.0
    cuts: ClassVar[bool] = True

    def values(self, key: jax.Array, size: jax.Array) -> Any:
        """Draws a box [top, left, bottom, right] and the fraction of the image's area outside of it."""
        share, *middles = jax.random.split(key, 3)
        own = jax.random.beta(share, self.alpha, self.alpha, (), jnp.float32)
        reach = 0.5 * jnp.sqrt(1 - own)
        ends = []
        for k, n in zip(middles, size, strict=True):
            middle, half = whole(k, n), jnp.floor(reach * n)
            ends.append(jnp.stack([jnp.maximum(middle - half, 0), jnp.minimum(middle + half, n)]))
        (top, bottom), (left, right) = ends
        seen = 1 - (bottom - top) * (right - left) / (size[0] * size[1])
        return dict(box=jnp.stack([top, left, bottom, right]), own=seen)

    def shares(self, values: Any, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        rows, columns = (jnp.arange(n, dtype=jnp.float32) for n in shape)
        top, left, bottom, right = values["box"]
        within = (rows >= top)[:, None] & (rows < bottom)[:, None] & (columns >= left)
        return 1.0 - (within & (columns < right)), values["own"]
