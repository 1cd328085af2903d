"""Sizes of the convolutions of a ResNetBlock, for nnx and linen."""


def widths(
    features: int, strides: int, *, bottleneck: bool
) -> tuple[tuple[int, tuple[int, int], int], ...]:
    """Returns (features, kernel size, strides) of each convolution of a block."""
    if bottleneck:
        return (
            (features, (1, 1), 1),
            (features, (3, 3), strides),
            (4 * features, (1, 1), 1),
        )
    return (features, (3, 3), strides), (features, (3, 3), 1)


def needs_shortcut(before: int, after: int, strides: int) -> bool:
    """Returns whether input and result differ in shape, so that the shortcut needs a convolution."""
    return before != after or strides > 1
