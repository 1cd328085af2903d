"""Sizes of the convolutions of a ResNetBlock, for nnx and linen."""

from flax.typing import PaddingLike


def widths(
    features: int, strides: int, padding: PaddingLike, *, bottleneck: bool
) -> tuple[tuple[int, tuple[int, int], int, PaddingLike], ...]:
    """Returns (features, kernel size, strides, padding) of each convolution of a block."""
    if bottleneck:
        return (
            (features, (1, 1), 1, "SAME"),
            (features, (3, 3), strides, padding),
            (4 * features, (1, 1), 1, "SAME"),
        )
    return (features, (3, 3), strides, padding), (features, (3, 3), 1, padding)


def needs_shortcut(before: int, after: int, strides: int) -> bool:
    """Returns whether input and result differ in shape, so that the shortcut needs a convolution."""
    return before != after or strides > 1
