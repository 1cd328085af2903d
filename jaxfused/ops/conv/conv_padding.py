"""Padding of a convolution: widths, and zeros or the input's own values."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxfused.ops.conv.conv_xla import NUMPY_MODES, Around
from jaxfused.runtime.checks import for_each_axis

Pairs = tuple[tuple[int, int], ...]
Padding = str | int | Sequence[int | tuple[int, int]]

_NAMES = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "EDGE", "CAUSAL")
_MODES = ("zeros", *NUMPY_MODES)


def normalised(
    op: str,
    x: Any,
    kernel: tuple[int, ...],
    *,
    padding: Padding,
    padding_mode: str,
    strides: tuple[int, ...],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
) -> str | Pairs | Around:
    """Returns the padding: a name, (low, high) zeros of each axis, or `Around` for values of x."""
    mode = padding_mode.lower() if isinstance(padding_mode, str) else padding_mode
    if mode not in _MODES:
        raise ValueError(
            f"{op}: padding_mode={padding_mode!r} is not known; pass one of"
            f" {', '.join(map(repr, _MODES))}."
        )
    reach = [(k - 1) * d for k, d in zip(kernel, kernel_dilation, strict=True)]
    found = _zeros(op, padding, reach)
    is_dilated = set(input_dilation) != {1}
    if isinstance(found, str):
        if is_dilated:
            raise ValueError(
                f"{op}: padding is {padding!r} and input_dilation is {input_dilation}, but for a"
                " transposed convolution 'CAUSAL' is the only name defined; pass (low, high) pairs."
            )
        if found in ("CIRCULAR", "REFLECT", "EDGE"):
            if mode not in ("zeros", found.lower()):
                raise ValueError(
                    f"{op}: padding={padding!r} was passed with padding_mode={padding_mode!r}; pass"
                    " numbers, or leave out one of the two."
                )
            around = tuple((r // 2, r - r // 2) for r in reach)
            return Around("edge", around) if found == "EDGE" else found
        if mode == "zeros":
            return found
        sizes = [r + 1 for r in reach]
        found = tuple(jax.lax.padtype_to_pads(x.shape[1:-1], sizes, strides, found))
    if mode == "zeros":
        return found
    if is_dilated or min(min(pair) for pair in found) < 0:
        raise ValueError(
            f"{op}: padding_mode={padding_mode!r} was passed with padding {found} and input_dilation"
            f" {input_dilation}, but values are repeated outside of x alone; pass numbers of 0 or more,"
            " and no input_dilation."
        )
    return Around(mode, found)


def _zeros(op: str, padding: Padding, reach: Sequence[int]) -> str | Pairs:
    """Returns the padding's name in upper case, or its zeros (low, high) on each spatial axis.

    `reach` has, for each axis, the dilated window's size minus 1.
    """
    spatial = len(reach)
    if isinstance(padding, str):
        name = padding.upper()
        if name not in _NAMES:
            names = ", ".join(repr(n) for n in _NAMES)
            raise ValueError(
                f"{op}: padding={padding!r} is not known; pass one of {names}, or numbers."
            )
        if name != "CAUSAL":
            return name
        others = tuple((r // 2, r - r // 2) for r in reach[1:])
        return (reach[0], 0), *others
    sides = (padding,) * spatial if isinstance(padding, int) else tuple(padding)
    pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in sides]
    if len(pairs) != spatial or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{op}: padding is {padding!r}, but x has {spatial} spatial axes;"
            f" pass a name, one int, or {spatial} ints or (low, high) pairs."
        )
    return tuple((low, high) for low, high in pairs)


def geometry(
    op: str,
    x: Any,
    kernel: tuple[int, ...],
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    padding_mode: str = "zeros",
    input_dilation: int | Sequence[int] = 1,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
) -> dict[str, Any]:
    """Returns keywords of `conv_xla.conv`: strides and dilations by spatial axis, padding, groups."""
    spatial = x.ndim - 2
    steps = dict(
        strides=for_each_axis(op, "strides", strides, spatial),
        input_dilation=for_each_axis(op, "input_dilation", input_dilation, spatial),
        kernel_dilation=for_each_axis(op, "kernel_dilation", kernel_dilation, spatial),
    )
    found = normalised(op, x, kernel, padding=padding, padding_mode=padding_mode, **steps)
    if not isinstance(found, (str, Around)):
        dilated = [
            max((n - 1) * d + 1, 0)
            for n, d in zip(x.shape[1:-1], steps["input_dilation"], strict=True)
        ]
        if any(n + sum(pair) < 0 for n, pair in zip(dilated, found, strict=True)):
            raise ValueError(
                f"{op}: padding is {found}, which takes away more than the {dilated} values along the"
                " spatial axes; pass larger numbers."
            )
    return dict(padding=found, feature_group_count=feature_group_count, **steps)
