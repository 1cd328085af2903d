"""Vision Transformers whose patches attend only to near patches, by a mask of `jaxfused.masks`.

The mask is never stored: kernels visit only the blocks of patches that it allows. The class is read from
the mean over the patches, because a class token would have no position in the grid of patches.

Source: Hassani et al., "Neighborhood Attention Transformer", 2023, https://arxiv.org/abs/2204.07143, for
the neighbourhoods
"""

import functools
from typing import NamedTuple

import jaxfused
from examples.vit.model import MODELS, Attention, ViTSize


class NeighborhoodSize(NamedTuple):
    """A Vision Transformer's shape; each patch attends to the nearest `window` x `window` patches."""

    vit: ViTSize
    window: int


# "near-digits" learns 8 x 8 digits in a minute on two CPU cores.
NEIGHBORHOODS = {
    "near-digits": NeighborhoodSize(MODELS["vit-digits"], window=3),
    "near-s16": NeighborhoodSize(MODELS["vit-s16"], window=7),
    "near-b16": NeighborhoodSize(MODELS["vit-b16"], window=7),
}


def attention_of(size: NeighborhoodSize, image_size: int) -> Attention:
    """Returns attention of each patch to the window of patches nearest to it."""
    side = image_size // size.vit.patch
    mask = jaxfused.masks.NeighborhoodMask((side, side), window=min(size.window, side))
    return functools.partial(jaxfused.dot_product_attention, mask=mask)
