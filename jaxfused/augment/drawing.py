"""Draws the random parameters of a chain from the keys of images."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.augment.batch import Batch
from jaxfused.augment.shards import over_batch
from jaxfused.augment.transform import Drawn, Mixing, Transform
from jaxfused.runtime.checks import said

Draws = tuple[Drawn, ...]
"""Random parameters of a chain: for each part a `Drawn`, whose arrays are [B, ...]."""

_OF_BATCH = 0x6D69780A
"""Number folded into a batch's key, for the draws that all images of the batch share."""


def as_key(key: Any) -> jax.Array:
    """Returns a typed key (`jax.random.key`), converted if it is one of `jax.random.PRNGKey`."""
    try:
        array = None if key is None else jnp.asarray(key)
    except (TypeError, ValueError):
        array = None
    if array is None:
        raise ValueError(f"Chain: key is {said(key)}; pass a key, as of jax.random.key(0).")
    key = array
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key and key.dtype != jnp.uint32:
        raise ValueError(
            f"Chain: key has dtype {key.dtype}, but it is a key; pass that of jax.random.key."
        )
    return key if is_key else jax.random.wrap_key_data(key)


def sampled(transforms: Sequence[Transform], key: Any, batch: Batch, index: Any) -> Draws:
    """Returns the draws for a batch of images, split over devices as the images are."""
    key, count = as_key(key), batch.images.shape[0]
    if index is None:
        index = jnp.arange(count, dtype=jnp.uint32)
    size = batch.images.shape[-3], batch.images.shape[-2]

    def draws(split: Any, whole: Any, axis_names: Any) -> Draws:
        keys, index, sizes = split
        return _sampled(transforms, whole if keys is None else keys, index, size, sizes)

    keys, whole = (None, key) if key.ndim == 0 else (key, None)
    _check(transforms, key, count, jnp.asarray(index))
    return over_batch(draws, batch.images, (keys, jnp.asarray(index), batch.sizes), whole)


def _check(transforms: Sequence[Transform], key: jax.Array, count: int, index: jax.Array) -> None:
    """Checks that there is one key for the batch, or one for each image."""
    mixes = [part for t in transforms for part in t.parts if isinstance(part, Mixing)]
    if key.ndim and key.shape != (count,):
        raise ValueError(
            f"Chain: key has shape {key.shape}, but there are {count} images; pass one key, or keys"
            f" [{count}]."
        )
    if key.ndim and any(not part.per_image for part in mixes):
        raise ValueError(
            f"Chain: {type(mixes[0]).__name__} draws once for the whole batch, and there are keys of"
            " images alone; pass one key and the index of each image, or per_image=True."
        )
    if index.shape != (count,) or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            f"Chain: index is {index.dtype}{list(index.shape)}, but there are {count} images; pass a"
            f" whole number for each, [{count}]."
        )


def _sampled(
    transforms: Sequence[Transform],
    key: jax.Array,
    index: jax.Array,
    of_arrays: tuple[int, int],
    of_images: jax.Array | None,
) -> Draws:
    """Returns the draws for images of size `of_arrays` or, if not None, sizes `of_images` [B, 2]."""
    shared, keys, count = None, key, len(index)
    if key.ndim == 0:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
        shared = jax.random.fold_in(key, _OF_BATCH)
    shape = jnp.array(of_arrays, jnp.float32)
    sizes = None if of_images is None else of_images.astype(jnp.float32)
    draws: list[Drawn] = []
    for i, t in enumerate(transforms):
        if shared is not None and isinstance(t, Mixing) and not t.per_image:
            drawn = t.draw(jax.random.fold_in(shared, i), shape)
            draws += jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), drawn)
        else:
            own = jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys)
            at = (0, None) if sizes is None else (0, 0)
            draws += jax.vmap(t.draw, in_axes=at)(own, shape if sizes is None else sizes)
        shape = t.result_size(shape)
        sizes = None if sizes is None else jax.vmap(t.result_size)(sizes)
    return tuple(draws)
