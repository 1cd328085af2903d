"""Runs the passes of a chain over a batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.augment import plan
from jaxfused.augment.batch import Batch
from jaxfused.augment.composed import Frame, composed, moved_boxes, moved_mask
from jaxfused.augment.drawing import Draws
from jaxfused.augment.filters import GaussianNoise
from jaxfused.augment.geometry import RandomQuarterTurn
from jaxfused.augment.mixed import mixed
from jaxfused.augment.plan import FilterPass, ImagePass, MixPass
from jaxfused.augment.shards import over_batch
from jaxfused.augment.transform import (
    Blurring,
    Drawn,
    Geometric,
    Mixing,
    Part,
    Pointwise,
    public_name,
)
from jaxfused.ops.augment import image_pass_xla, steps_xla
from jaxfused.ops.augment.image_pass import image_pass, joins_blur
from jaxfused.ops.augment.resample_xla import Map
from jaxfused.ops.augment.steps_xla import COLOURED
from jaxfused.runtime.checks import as_arrays, as_int32, readable_values


@dataclass(frozen=True)
class Spec:
    """Parts, passes and options of a chain, which do not depend on the images."""

    parts: tuple[Part, ...]
    passes: tuple[plan.Pass, ...]
    dtype: Any
    mask_fill: float
    implementation: dispatch.Implementation | None


def checked(images: Any) -> Batch:
    """Returns a batch, after a check that its arrays fit each other.

    Raises:
      ValueError: the arrays do not fit.
    """
    if isinstance(images, Mapping):
        raise ValueError(
            f"Chain: images are a {type(images).__name__} with {sorted(map(str, images))}; pass an"
            " array, or jaxfused.augment.Batch(images=..., masks=...)."
        )
    batch = images if isinstance(images, Batch) else Batch(images)
    batch = Batch(*as_arrays(*batch))
    x = batch.images
    if x is None:
        raise ValueError("Chain: images are None; pass an array, or a Batch that has them.")
    if x.ndim not in (4, 5) or 0 in x.shape[1:]:
        raise ValueError(
            f"Chain: images have shape {x.shape}, but they are [B, H, W, C] or videos [B, T, H, W, C];"
            " pass these."
        )
    if x.dtype != jnp.uint8 and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"Chain: images have dtype {x.dtype}, but they are uint8 or floating with values of 0 to 1;"
            " convert them."
        )
    leading = x.shape[:-3]
    rules = dict(
        masks=(x.shape[:-1], x.ndim - 1, x.ndim),
        boxes=(leading, len(leading) + 2, len(leading) + 2),
        valid=(leading, len(leading) + 1, len(leading) + 1),
        labels=(x.shape[:1], 1, 2),
        sizes=(x.shape[:1], 2, 2),
    )
    for name, (start, least, most) in rules.items():
        array = getattr(batch, name)
        last = {"boxes": 4, "sizes": 2}.get(name)
        if array is not None and (
            not least <= array.ndim <= most
            or array.shape[: len(start)] != start
            or (last is not None and array.shape[-1] != last)
        ):
            raise ValueError(
                f"Chain: {name} have shape {array.shape}, which does not fit images of shape {x.shape};"
                " pass what jaxfused.augment.Batch says."
            )
    if batch.valid is not None and (
        batch.boxes is None or batch.valid.shape != batch.boxes.shape[:-1]
    ):
        boxes = "no boxes" if batch.boxes is None else f"boxes of shape {batch.boxes.shape}"
        raise ValueError(
            f"Chain: valid has shape {batch.valid.shape}, but it says of each box whether it counts, and"
            f" there are {boxes}; pass one value for each box."
        )
    if batch.sizes is not None:
        batch = batch._replace(sizes=_sizes(batch.sizes, x.shape[-3:-1]))
    return batch._replace(visible=None)


def _sizes(sizes: jax.Array, most: tuple[int, ...]) -> jax.Array:
    """Returns the images' sizes [B, 2], heights and widths.

    Traced ones are clipped to `most`, those of the array, so that no read is outside of it.
    """
    values = readable_values(sizes)
    if values is not None:
        wrong = ((values < 0) | (values > np.array(most))).any(-1)
        if wrong.any():
            raise ValueError(
                f"Chain: sizes hold {values[wrong][0].tolist()}, but images have shape {most}; pass"
                " heights and widths of 0 up to these."
            )
        return sizes
    if jnp.issubdtype(sizes.dtype, jnp.integer):
        sizes = as_int32(sizes)
    return jnp.clip(sizes, 0, jnp.array(most, sizes.dtype))


def check_draws(parts: Sequence[Part], draws: Draws, count: int) -> None:
    """Checks that draws are those of these parts and of `count` images.

    Raises:
      ValueError: they are not.
    """
    of_images = {a.shape[:1] for a in jax.tree.leaves(draws)}
    if len(draws) != len(parts) or of_images - {(count,)}:
        raise ValueError(
            f"Chain: draws are those of {len(draws)} parts and have shapes that begin with"
            f" {sorted(of_images)}, but the chain has {len(parts)} parts and there are {count} images;"
            " pass what this chain's sample returns for as many."
        )


def check_squares(parts: Sequence[Part], sizes: jax.Array | None) -> None:
    """Checks that images of known sizes are squares where they are turned by quarters.

    Raises:
      ValueError: one is not, and would lose what is turned out of it.
    """
    values = None if sizes is None else readable_values(sizes)
    for part in parts:
        if values is None or (isinstance(part, Geometric) and part.crops):
            return
        if isinstance(part, RandomQuarterTurn) and (wrong := values[:, 0] != values[:, 1]).any():
            height, width = values[wrong][0].tolist()
            part.result_shape((height, width))


def check_classes(part: Part, labels: jax.Array | None) -> None:
    """Checks that labels are classes, or weights of all classes, if MixUp or CutMix has `num_classes`.

    Raises:
      ValueError: a class is negative or too large, or the weights are of another number of classes.
    """
    count = part.num_classes if isinstance(part, Mixing) else None
    if count is None or labels is None:
        return
    op = type(part).__name__
    if labels.ndim == 2:
        if labels.shape[1] != count:
            raise ValueError(
                f"{op}: labels have shape {labels.shape}, but num_classes is {count}; pass weights of"
                " that many classes, or leave num_classes out."
            )
        return
    if jnp.issubdtype(labels.dtype, jnp.inexact):
        raise ValueError(
            f"{op}: labels [B] have dtype {labels.dtype}, but classes are whole numbers; pass integers,"
            " or weights [B, classes]."
        )
    values = readable_values(labels)
    if values is not None and (wrong := (values < 0) | (values >= count)).any():
        raise ValueError(
            f"{op}: labels hold {values[wrong][0]}, but num_classes is {count}; pass classes from 0 to"
            f" {count - 1}, or more num_classes."
        )


def check_channels(part: Part, channels: int) -> None:
    """Checks that a part can change images with this many channels.

    Raises:
      ValueError: the part mixes colours, and the images have no colour channels.
    """
    operations = part.operations() if isinstance(part, Pointwise) else ()
    if channels not in (1, 3, 4) and COLOURED & {op for ops in operations for op in ops}:
        raise ValueError(
            f"Chain: {public_name(part)} mixes colours, but images have {channels} channels; pass"
            " images of 1, 3 or 4."
        )


def applied(spec: Spec, draws: Draws, batch: Batch) -> Batch:
    """Returns a batch, already `checked`, after all passes."""

    def on_shard(split: Any, whole: Any, axis_names: Any) -> Batch:
        return _applied(spec, split[0], split[1], axis_names)

    return over_batch(on_shard, batch.images, (draws, batch))


def _applied(spec: Spec, draws: Draws, batch: Batch, axis_names: Any) -> Batch:
    """Returns one device's part of a batch after all passes.

    `axis_names` are the mesh axes that split the batch; None inside a caller's own `jax.shard_map`.
    """
    frames = batch.images.shape[1] if batch.images.ndim == 5 else None
    sizes = batch.sizes
    if sizes is None:
        sizes = jnp.broadcast_to(
            jnp.array(batch.images.shape[-3:-1], jnp.float32), (batch.images.shape[0], 2)
        )
    state = _State(
        spec,
        _merged(batch, frames),
        _repeated(sizes.astype(jnp.float32), frames),
        is_ragged=batch.sizes is not None,
        frames=frames,
        axis_names=axis_names,
    )
    draws = _repeated(draws, frames)
    if state.batch.boxes is not None:
        state.batch = state.batch._replace(boxes=state.batch.boxes.astype(jnp.float32))
    final = _final_dtype(spec, batch.images.dtype)
    if not spec.passes:
        state.batch = state.batch._replace(images=_converted(state.batch.images, final))
    number = 0
    while number < len(spec.passes):
        number += state.run(draws, number)
    return state.finished()


def _final_dtype(spec: Spec, given: Any) -> Any:
    if spec.dtype is not None:
        return spec.dtype
    is_float = jnp.issubdtype(given, jnp.floating)
    return given if is_float or not plan.is_normalized(spec.parts) else jnp.dtype(jnp.float32)


def _converted(images: jax.Array, dtype: Any) -> jax.Array:
    if images.dtype == dtype:
        return images
    return image_pass_xla.narrow(image_pass_xla.wide(images), dtype)


def _merged(tree: Any, frames: int | None) -> Any:
    """Returns a batch in which each frame of a video is an image."""
    if frames is None:
        return tree
    merged = {
        name: array.reshape(-1, *array.shape[2:])
        for name in ("images", "masks", "boxes", "valid")
        if (array := getattr(tree, name)) is not None
    }
    return tree._replace(**merged)


def _repeated(tree: Any, frames: int | None) -> Any:
    """Returns a tree of arrays [videos, ...], each entry repeated for every frame of its video."""
    if frames is None:
        return tree
    return jax.tree.map(lambda a: jnp.repeat(a, frames, axis=0), tree)


class _Joined(NamedTuple):
    """A blur in the kernel of the pass before it, perhaps with the pointwise pass that follows it."""

    spec: image_pass_xla.Pass
    rows: jax.Array
    """Operation and values of each step after the blur, [B, steps, 1 + width]."""
    weights: jax.Array
    """Weights [B, n] of the blur."""
    passes: int
    """Number of passes that run in the kernel of the first: the blur, and perhaps the pass after it."""


class _State:
    """The batch between the passes of a chain, and the methods that run a pass."""

    def __init__(
        self,
        spec: Spec,
        batch: Batch,
        sizes: jax.Array,
        *,
        is_ragged: bool,
        frames: int | None,
        axis_names: Any,
    ):
        self.spec, self.batch, self.sizes = spec, batch, sizes
        self.given = batch.images.dtype
        self.is_ragged, self.frames, self.axis_names = is_ragged, frames, axis_names

    def run(self, draws: Draws, number: int) -> int:
        """Runs the pass at index `number` and those that share its kernel; returns how many ran."""
        dtype = self.after(number)
        match self.spec.passes[number]:
            case ImagePass(geometric, pointwise):
                return 1 + self.image_pass(draws, geometric, pointwise, dtype, number + 1)
            case FilterPass(part):
                nothing = image_pass_xla.Pass(None, (), jnp.uint8)
                if self._joined(draws, number, nothing, None) is not None:
                    return self.image_pass(draws, (), (), dtype, number)
                self.filter_pass(draws[part], part, dtype)
            case MixPass(part):
                self.mix_pass(draws[part], part, dtype)
        return 1

    def after(self, number: int) -> Any:
        """Returns the dtype of the images after pass `number`."""
        final = _final_dtype(self.spec, self.given)
        indices = [i for p in self.spec.passes[: number + 1] for i in _parts_of(p)]
        is_normalized = plan.is_normalized([self.spec.parts[i] for i in indices])
        is_last = number + 1 == len(self.spec.passes)
        return final if is_last or (self.given == jnp.uint8 and is_normalized) else self.given

    def _joined(
        self, draws: Draws, number: int, first: image_pass_xla.Pass, shift: jax.Array | None
    ) -> _Joined | None:
        """Returns the blur of pass `number`, or None if it cannot run in the kernel of pass `first`."""
        at = self.spec.passes[number : number + 2]
        index = at[0].part if at and isinstance(at[0], FilterPass) else -1
        part: Any = self.spec.parts[index]
        images = self.batch.images
        if index < 0 or not isinstance(part, Blurring) or images.dtype != jnp.uint8:
            return None
        rows, steps = self._rows(draws, (), images.shape[-1])
        blur = image_pass_xla.Blur(part.reach, part.sharpens, self.is_ragged, steps)
        spec = replace(first, blur=blur, dtype=self.after(number))
        if first.dtype != jnp.uint8 or not joins_blur(images, shift, spec):
            return None
        weights, count = jax.vmap(part.weights)(draws[index]), 1
        if spec.dtype == jnp.uint8 and len(at) == 2 and isinstance(at[1], ImagePass):
            behind, steps = self._rows(draws, at[1].pointwise, images.shape[-1])
            longer = replace(spec, blur=replace(blur, steps=steps), dtype=self.after(number + 1))
            if not at[1].geometric and joins_blur(images, shift, longer):
                spec, rows, count = longer, behind, 2
        return _Joined(spec, rows, weights, count)

    def image_pass(
        self,
        draws: Draws,
        geometric: Sequence[int],
        pointwise: Sequence[int],
        dtype: Any,
        behind: int,
    ) -> int:
        """Runs an image pass; returns how many of the passes from `behind` on ran in its kernel too."""
        images = self.batch.images
        height, width, channels = images.shape[1:]
        frame = Frame(tuple(self.spec.parts[i] for i in geometric), (height, width))  # type: ignore[misc]
        reading = frame.reading(channels) if geometric else None
        drawn = tuple(draws[i] for i in geometric)

        def map_of(drawn: tuple[Drawn, ...], size: jax.Array) -> Map:
            return composed(frame, drawn, size)

        maps = jax.vmap(map_of)(drawn, self.sizes)
        rows, steps = self._rows(draws, pointwise, channels)
        self.is_ragged &= not any(part.crops for part in frame.parts)
        spec = image_pass_xla.Pass(reading, steps, dtype)
        weights, count = None, 0
        if joined := self._joined(draws, behind, spec, maps.shift):
            spec, weights, count = joined.spec, joined.weights, joined.passes
            rows = jnp.concatenate([rows, joined.rows], 1)
        moved = image_pass(
            images,
            jax.vmap(Map.packed)(maps),
            rows,
            maps.shift,
            maps.before,
            weights,
            spec=spec,
            implementation=self.spec.implementation,
        )
        self.batch = self.batch._replace(images=moved)
        if reading is None:
            return count
        self.sizes = maps.result
        masks, boxes = self.batch.masks, self.batch.boxes
        if masks is not None:
            _check_mask_fill(self.spec.mask_fill, masks.dtype)
            planes = masks.reshape(*masks.shape[:3], math.prod(masks.shape[3:]))
            move = jax.vmap(lambda mask, map: moved_mask(mask, reading, map, self.spec.mask_fill))
            planes = move(planes, maps)
            masks = planes.reshape(*planes.shape[:3], *masks.shape[3:])
        if boxes is not None:
            boxes = jax.vmap(moved_boxes)(boxes, maps)
        self.batch = self.batch._replace(masks=masks, boxes=boxes)
        return count

    def _rows(
        self, draws: Draws, pointwise: Sequence[int], channels: int
    ) -> tuple[jax.Array, steps_xla.Steps]:
        """Returns (operation, values) of each step, [B, steps, 1 + width], and possible operations."""
        wide = steps_xla.width(channels)
        is_uint8, steps = self.batch.images.dtype == jnp.uint8, []
        rows = []
        for i in pointwise:
            part: Any = self.spec.parts[i]
            steps += part.operations()

            def rows_of(drawn: Drawn, part=part, is_uint8=is_uint8) -> jax.Array:
                made = []
                for op, values in part.rows(drawn.values, channels, is_uint8):
                    number = jnp.where(drawn.on, jnp.asarray(op, jnp.float32), 0)[None]
                    padded = jnp.pad(values.astype(jnp.float32), (0, wide - len(values)))
                    made.append(jnp.concatenate([number, padded]))
                return jnp.stack(made) if made else jnp.zeros((0, 1 + wide), jnp.float32)

            rows.append(jax.vmap(rows_of)(draws[i]))
            # Values after `Normalize` are not whole numbers of 0 to 255, also if the images were uint8.
            is_uint8 = is_uint8 and not plan.is_normalized([part])
        empty = jnp.zeros((len(self.batch.images), 0, 1 + wide), jnp.float32)
        return jnp.concatenate([empty, *rows], 1), tuple(steps)

    def filter_pass(self, drawn: Drawn, index: int, dtype: Any) -> None:
        part: Any = self.spec.parts[index]
        sizes = self.sizes if self.is_ragged else None

        def one(image, drawn, size):
            x = image_pass_xla.wide(image)
            y = jnp.where(drawn.on, part.filtered(drawn.values, x, size), x)
            return image_pass_xla.narrow(y, dtype)

        at = (0, 0, None if sizes is None else 0)
        values = drawn
        if self.frames is not None and isinstance(part, GaussianNoise):
            places = jnp.arange(len(self.batch.images), dtype=jnp.uint32) % self.frames
            values = drawn._replace(values=jax.vmap(part.of_frame)(drawn.values, places))
        images = jax.vmap(one, in_axes=at)(self.batch.images, values, sizes)
        self.batch = self.batch._replace(images=images)

    def mix_pass(self, drawn: Drawn, index: int, dtype: Any) -> None:
        part: Any = self.spec.parts[index]
        if self.is_ragged:
            op = type(part).__name__
            raise ValueError(
                f"{op}: the batch has sizes, but a mixture of images of different sizes shows other"
                f" shares of them than its labels say; put a crop or Resize before {op}."
            )
        self.batch = mixed(
            part, drawn, self.batch, self.frames, self.axis_names or part.axis_name, dtype
        )

    def finished(self) -> Batch:
        """Returns the batch with boxes clipped to images, padding set to 0, and frames as videos."""
        batch = self.batch
        if self.is_ragged:
            rows, columns = (jnp.arange(n, dtype=jnp.float32) for n in batch.images.shape[1:3])
            inside = (rows < self.sizes[:, :1])[:, :, None] & (columns < self.sizes[:, 1:])[:, None]
            images = jnp.where(inside[..., None], batch.images, jnp.zeros((), batch.images.dtype))
            batch = batch._replace(images=images)
        if batch.boxes is not None:
            batch = _cut(batch, self.sizes)
        if batch.sizes is not None:
            sizes = self.sizes if self.frames is None else self.sizes[:: self.frames]
            # The sizes may become larger than the 8-bit dtype of the given sizes can hold.
            of_32_bits = np.int32 if jnp.issubdtype(batch.sizes.dtype, jnp.integer) else np.float32
            dtype = np.promote_types(batch.sizes.dtype, of_32_bits)
            batch = batch._replace(sizes=sizes.astype(dtype))
        if self.frames is None:
            return batch
        apart = {
            name: array.reshape(-1, self.frames, *array.shape[1:])
            for name in ("images", "masks", "boxes", "valid", "visible")
            if (array := getattr(batch, name)) is not None
        }
        return batch._replace(**apart)


def _parts_of(each: plan.Pass) -> tuple[int, ...]:
    return each.geometric + each.pointwise if isinstance(each, ImagePass) else (each.part,)


def _cut(batch: Batch, sizes: jax.Array) -> Batch:
    """Returns a batch whose boxes are clipped to its images."""
    boxes: Any = batch.boxes
    most = jnp.concatenate([sizes[:, ::-1]] * 2, 1)[:, None]
    cut = jnp.clip(boxes, 0, most)

    def area(of: jax.Array) -> jax.Array:
        return (of[..., 2] - of[..., 0]) * (of[..., 3] - of[..., 1])

    whole = area(boxes)
    visible = jnp.where(whole > 0, area(cut) / jnp.where(whole > 0, whole, 1), 0)
    valid = visible > 0
    if batch.valid is not None:
        valid &= batch.valid.astype(bool)
    return batch._replace(boxes=cut, visible=visible, valid=valid)


def _check_mask_fill(fill: float, dtype: Any) -> None:
    """Checks that masks of this dtype can hold `fill`; a conversion would wrap around."""
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        held = (0, 1) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        if fill != int(fill) or not held[0] <= fill <= held[1]:
            raise ValueError(
                f"Chain: mask_fill is {fill:g}, but masks have dtype {dtype}; pass a whole number from"
                f" {held[0]} to {held[1]}, or masks of another dtype."
            )
