"""The passes of a chain: groups of transforms that share one read and one write of the images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from jaxfused.augment.colour import Normalize
from jaxfused.augment.geometry import ElasticTransform
from jaxfused.augment.transform import Filter, Geometric, Mixing, Part, Pointwise, public_name
from jaxfused.ops.augment.resample_xla import Interpolation
from jaxfused.ops.augment.steps_xla import STATISTICAL


@dataclass(frozen=True)
class ImagePass:
    """Indices of one pass's parts: geometric ones (one resampling in all), then pointwise ones."""

    geometric: tuple[int, ...] = ()
    pointwise: tuple[int, ...] = ()


@dataclass(frozen=True)
class FilterPass:
    """Index of a part that runs alone, because its pixels depend on the pixels around them."""

    part: int


@dataclass(frozen=True)
class MixPass:
    """Index of a part that mixes the images of a batch."""

    part: int


type Pass = ImagePass | FilterPass | MixPass


def passes(parts: Sequence[Part]) -> tuple[Pass, ...]:
    """Returns the passes of a chain, with the indices of their parts."""
    found: list[Pass] = []
    for i, part in enumerate(parts):
        last = found[-1] if found and isinstance(found[-1], ImagePass) else None
        if isinstance(part, Filter):
            found.append(FilterPass(i))
        elif isinstance(part, Mixing):
            found.append(MixPass(i))
        elif isinstance(part, Geometric):
            if last is not None and _joins([parts[j] for j in last.geometric], part, last):
                found[-1] = ImagePass((*last.geometric, i))
            else:
                found.append(ImagePass((i,)))
        elif last is not None and _follows([parts[j] for j in last.pointwise], part):
            found[-1] = ImagePass(last.geometric, (*last.pointwise, i))
        else:
            found.append(ImagePass((), (i,)))
    return tuple(found)


def _joins(before: Sequence[Any], part: Geometric, last: ImagePass) -> bool:
    """Returns whether a geometric part can share the resampling of the parts `before`."""
    if last.pointwise:
        return False
    shown = [p for p in (*before, part) if not p.any_interpolation]
    if (
        len({p.interpolation for p in shown}) > 1
        or len({_fill(p) for p in (*before, part)} - {None}) > 1
    ):
        return False
    if isinstance(part, ElasticTransform) and any(isinstance(p, ElasticTransform) for p in before):
        return False
    # A crop removes pixels, which a later part must not bring back. If all parts before the crop
    # are upright, its result is a rectangle of the image, which `Map.window` stores.
    crops = [i for i, p in enumerate(before) if p.crops]
    upright_until_crop = all(p.upright for p in before[: crops[-1]]) if crops else True
    return (part.upright and not part.crops) or upright_until_crop


def _fill(part: Any) -> Any:
    """Returns the value of pixels from outside of the image, or None if the part has none."""
    if (part.any_interpolation and not part.crops) or (part.crops and part.antialias):
        return None
    fill = part.fill
    return tuple(fill) if isinstance(fill, Sequence) else (fill,)


def _follows(before: Sequence[Any], part: Any) -> bool:
    """Returns whether a pointwise part can run in the pass of the pointwise parts `before`."""
    needs = [_is_statistical(p) for p in (*before, part)]
    return not (needs[-1] and any(needs[:-1]))


def _is_statistical(part: Pointwise) -> bool:
    return any(STATISTICAL & set(ops) for ops in part.operations())


def check(parts: Sequence[Part]) -> None:
    """Checks the order of a chain's parts.

    Raises:
      ValueError: a part that takes values of 0 to 1 comes after `Normalize`, or an interpolation is not
        known.
    """
    normalized = False
    for part in parts:
        known = get_args(Interpolation)
        if isinstance(part, Geometric) and part.interpolation not in known:
            raise ValueError(
                f"Chain: {public_name(part)} has interpolation={part.interpolation!r},"
                f" which is not known; pass one of {', '.join(map(repr, known))}."
            )
        if normalized and getattr(part, "bounded", False):
            raise ValueError(
                f"Chain: {type(part).__name__} takes values of 0 to 1, but comes after Normalize; put"
                " Normalize behind it."
            )
        normalized |= isinstance(part, Normalize)


def is_normalized(parts: Sequence[Part]) -> bool:
    """Returns whether the parts can leave values outside of 0 to 1."""
    return any(isinstance(part, Normalize) for part in parts)


def described(found: Sequence[Pass], parts: Sequence[Part]) -> str:
    """Returns the passes in words, one line for each."""
    lines = []
    for number, each in enumerate(found, 1):
        match each:
            case ImagePass(geometric, pointwise):
                names = [type(parts[i]).__name__.lstrip("_") for i in (*geometric, *pointwise)]
                what = "one resampling" if geometric else "pixel by pixel"
                if any(_is_statistical(parts[i]) for i in pointwise):  # type: ignore[arg-type]
                    what += ", read twice for statistics"
            case FilterPass(part):
                names, what = [type(parts[part]).__name__], "by itself"
            case MixPass(part):
                names, what = [type(parts[part]).__name__], "two images each"
        lines.append(f"pass {number}: {', '.join(names)} ({what})")
    return "\n".join(lines)
